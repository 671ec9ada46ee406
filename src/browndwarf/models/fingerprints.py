"""A name for a model's content, so that a run can tell whether its files changed.

``fingerprint`` is ``sha256:`` and 64 hex digits. Below 1 GiB it is the hash of the whole content.
Above, it covers the size, the first 32 MiB (which hold the header), the last 1 MiB and 256 blocks
of 256 KiB at even distances: files that differ in a header, a tensor type or a requantization
differ in it; one flipped byte between two blocks goes unnoticed. All parts of a split file count.
Results are remembered by path, size and time of change in the user's cache folder; a cache that
cannot be read or written is ignored.

Example:
    fingerprint(Path("model.gguf"))     # 'sha256:9f86d0…'
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

from browndwarf.errors import ModelNotFound
from browndwarf.files import cache_folder
from browndwarf.models.info import model_parts
from browndwarf.units import GIB, KIB, MIB

WHOLE_BELOW = GIB
HEAD_BYTES = 32 * MIB
TAIL_BYTES = MIB
SAMPLES, SAMPLE_BYTES = 256, 256 * KIB
_CACHE_ENTRIES = 500


def fingerprint(path: Path | str) -> str:
    """The content's name; of all parts when ``path`` is one of a split file.

    Raises:
        ModelNotFound: the file is not there or not readable.
        BadModelFile: a part of a split file is missing.
    """
    parts = model_parts(Path(path))
    try:
        key = _key(parts)
        known = _load()
        if key in known:
            return known[key]
        value = _compute(parts)
    except OSError as exc:
        raise ModelNotFound(
            f"cannot read {path}", why=exc.strerror or str(exc), fix="check the path"
        ) from exc
    _store(key, value)
    return value


def _compute(parts: list[Path]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        size = part.stat().st_size
        with part.open("rb") as handle:
            if size < WHOLE_BELOW:
                while chunk := handle.read(MIB):
                    digest.update(chunk)
                continue
            digest.update(f"sampled:{size}:".encode())
            spans = [(0, HEAD_BYTES), (size - TAIL_BYTES, TAIL_BYTES)]
            step = size // SAMPLES
            spans += [(index * step, SAMPLE_BYTES) for index in range(SAMPLES)]
            for start, length in spans:
                handle.seek(start)
                digest.update(handle.read(length))
    return f"sha256:{digest.hexdigest()}"


def _key(parts: list[Path]) -> str:
    stats = [(str(part.resolve()), part.stat()) for part in parts]
    return "|".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)


def _cache_file() -> Path:
    return cache_folder("fingerprints") / "known.json"


def _load() -> dict[str, str]:
    try:
        found = json.loads(_cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, str) and v.startswith("sha256:")}


def _store(key: str, value: str) -> None:
    """Remember one result; another process may write at the same time, the last one wins."""
    target = _cache_file()
    entries = {**_load(), key: value}
    for old in list(entries)[:-_CACHE_ENTRIES]:
        del entries[old]
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix="fingerprints-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                json.dump(entries, out)
            Path(name).replace(target)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
