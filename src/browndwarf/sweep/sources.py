"""Model files of every type a sweep asks for: found, or made once and kept.

A type that does not exist yet is made with llama-quantize into a cache, under a name that
holds the source's content fingerprint and the engine's commit: another source or another
quantizer never reuses it. The source's own type costs nothing. The cache is bounded: the least
recently used files go first.

Example:
    >>> files = await make_variants(maker, Path("m.gguf"), ["Q8_0", "Q4_0"])  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from browndwarf.errors import StorageError, UsageError
from browndwarf.files import cache_folder, check_writable
from browndwarf.units import GIB, parse_bytes

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

#: What a cache folder may hold unless the user says otherwise.
DEFAULT_CACHE_BYTES = 64 * GIB
#: A file that was used within so many seconds is never removed from the cache.
KEPT_S = 86_400.0


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A model file: where, what it holds, and its content's fingerprint.

    ``shape`` names the shape of a synthetic source: its other types lie beside it and are
    written like it, not quantized from it.
    """

    path: str
    type: str
    fingerprint: str
    shape: str | None = None
    role: Literal["target", "head"] = "target"


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


def variant_path(
    source: Source, type_name: str, engine_sha: str, cache: Path | None = None
) -> Path:
    """Where a type made from ``source`` by this engine is kept."""
    if type_name == AS_IS or _canonical(type_name) == _canonical(source.type):
        return Path(source.path)
    if source.shape is not None:
        return Path(source.path).with_name(f"{source.shape}-{source.role}-{type_name}.gguf")
    folder = cache or cache_folder("variants")
    digest = source.fingerprint.removeprefix("sha256:")[:16]
    return folder / f"{Path(source.path).stem}-{digest}-{engine_sha[:9] or 'x'}-{type_name}.gguf"


def check_place(variant: Path) -> None:
    """Make sure that a variant can be written where it belongs.

    Raises:
        StorageError, DiskFull: it cannot.
    """
    try:
        check_writable(variant.parent, "write quantized files")
    except StorageError as error:
        fix = "name a folder that may be written in the environment variable BROWNDWARF_CACHE"
        raise type(error)(error.what, why=error.why, fix=fix) from error


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
    touch(path)
    if not path.exists():
        on_make(type_name)
        check_place(path)
        make(Path(source.path), path, type_name)
        prune(path.parent)
    return path


def touch(path: Path) -> None:
    """Note that a cached file was used now; a missing or foreign one is left as it is."""
    with contextlib.suppress(OSError):
        os.utime(path)


def cache_limit() -> int:
    """Bytes that a cache folder may hold: ``BROWNDWARF_CACHE_SIZE``, or 64 GiB.

    Raises:
        UsageError: the variable holds no size.
    """
    text = os.environ.get("BROWNDWARF_CACHE_SIZE")
    return parse_bytes(text) if text else DEFAULT_CACHE_BYTES


def prune(folder: Path) -> list[Path]:
    """Remove the least recently used models until the folder is within ``cache_limit``.

    Files that were used within a day stay, so that a running sweep keeps what it will need.
    Returns what was removed.
    """
    found: list[tuple[float, int, Path]] = []
    for path in folder.glob("*.gguf"):
        with contextlib.suppress(OSError):  # another process removed it meanwhile
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    left = sum(size for _, size, _ in found) - cache_limit()
    removed = []
    for used, size, path in sorted(found):
        if left <= 0 or time.time() - used < KEPT_S:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append(path)
            left -= size
    return removed
