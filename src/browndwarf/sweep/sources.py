"""Model files of every type a sweep asks for: found, or made once and kept.

A type that does not exist yet is made with llama-quantize into a cache, under a name that
holds the source's content fingerprint and the engine's commit: another source or another
quantizer never reuses it. The source's own type costs nothing.

Example:
    >>> files = await make_variants(maker, Path("m.gguf"), ["Q8_0", "Q4_0"])  # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import platformdirs

from browndwarf.errors import UsageError
from browndwarf.files import storage_error

#: What llama-quantize accepts and what a sweep may therefore ask for.
KNOWN_TYPES = frozenset(
    "F32 F16 BF16 Q8_0 Q6_K Q5_K Q5_K_S Q5_K_M Q5_0 Q5_1 Q4_K Q4_K_S Q4_K_M Q4_0 Q4_1 Q3_K "
    "Q3_K_S Q3_K_M Q3_K_L Q2_K Q2_K_S IQ4_NL IQ4_XS IQ3_M IQ3_S IQ3_XS IQ3_XXS IQ2_M IQ2_S "
    "IQ2_XS IQ2_XXS IQ1_M IQ1_S TQ1_0 TQ2_0 MXFP4_MOE".split()
)

#: Short names that llama-quantize takes for the medium mix.
_SAME_AS = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

#: "Whatever the file is": the file is used as it stands.
AS_IS = "as-is"


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A model file: where, what it holds, and its content's fingerprint."""

    path: str
    type: str
    fingerprint: str


class Maker(Protocol):
    """Makes one type from a source; the engine floor behind it."""

    def __call__(self, source: Path, dest: Path, type_name: str, /) -> None: ...


def parse_type(text: str) -> str:
    """The canonical spelling of a type.

    Raises:
        UsageError: llama-quantize knows no such type.
    """
    if text.lower() == AS_IS:
        return AS_IS
    name = text.strip().upper()
    if name not in KNOWN_TYPES:
        raise UsageError(
            f"{text!r} is no quantization type",
            why=f"known are {', '.join(sorted(KNOWN_TYPES))}",
            fix=f"write one of these, or {AS_IS} for the file as it is",
        )
    return name


def _canonical(type_name: str) -> str:
    return _SAME_AS.get(type_name, type_name)


def cache_folder() -> Path:
    """Where quantized files are kept: ``BROWNDWARF_CACHE``, or the user's cache folder."""
    named = os.environ.get("BROWNDWARF_CACHE")
    return Path(named) if named else Path(platformdirs.user_cache_dir("browndwarf"))


def variant_path(
    source: Source, type_name: str, engine_sha: str, cache: Path | None = None
) -> Path:
    """Where a type made from ``source`` by this engine is kept."""
    if type_name == AS_IS or _canonical(type_name) == _canonical(source.type):
        return Path(source.path)
    folder = cache or cache_folder() / "variants"
    digest = source.fingerprint.removeprefix("sha256:")[:16]
    return folder / f"{Path(source.path).stem}-{digest}-{engine_sha[:9] or 'x'}-{type_name}.gguf"


def ensure_variant(
    source: Source,
    type_name: str,
    engine_sha: str,
    make: Maker,
    *,
    cache: Path | None = None,
    on_make: Callable[[str], None] = lambda _: None,
    intact: Callable[[Path], bool] = lambda _: True,
) -> Path:
    """The file of this type, made if it is missing or damaged. ``on_make`` is told the type first.

    Raises:
        ToolFailed, DiskFull: it could not be made; nothing half-written stays.
    """
    path = variant_path(source, type_name, engine_sha, cache)
    if path == Path(source.path):
        return path
    if path.exists() and not intact(path):
        path.unlink(missing_ok=True)
    if not path.exists():
        on_make(type_name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            error = storage_error(exc, path.parent, "make a folder for quantized files")
            fix = "name a folder that may be written in the environment variable BROWNDWARF_CACHE"
            raise type(error)(error.what, why=error.why, fix=fix) from exc
        make(Path(source.path), path, type_name)
    return path
