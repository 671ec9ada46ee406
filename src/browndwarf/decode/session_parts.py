"""Sections of a session in parts: cut, checked by checksums, packed with zstd, by several threads.

A part is small enough to stay in a core's cache while it is read, hashed and unpacked. Hashing,
packing and copying let other threads run, so plain threads are enough.

Boundary: bytes in memory; ``session_file`` knows where they lie.

Example:
    stored = by_threads(shrink, cut([data]))
    checksums = by_threads(checksum, stored)
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import xxhash

from browndwarf.decode.state_layout import Bytes
from browndwarf.errors import EnvironmentFault

PART = 4 << 20
THREADS = min(16, os.cpu_count() or 1)
T = TypeVar("T")
U = TypeVar("U")


def cut(pieces: Sequence[Bytes]) -> list[Bytes]:
    """The pieces as one stream, cut every 4 MiB; copies only where a part spans pieces."""
    parts: list[Bytes] = []
    pending: list[Bytes] = []
    room = PART
    for piece in pieces:
        at = 0
        while at < piece.nbytes:
            taken = piece[at : at + room]
            pending.append(taken)
            at += taken.nbytes
            room -= taken.nbytes
            if not room:
                parts.append(pending[0] if len(pending) == 1 else np.concatenate(pending))
                pending, room = [], PART
    if pending:
        parts.append(np.concatenate(pending))
    return parts


def by_threads(work: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """``work`` on each item, at once."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(THREADS, len(items))) as pool:
        return list(pool.map(work, items))


def checksum(part: Bytes) -> str:
    """128 bits against damage; no protection against a forger."""
    return xxhash.xxh3_128_hexdigest(part.data)


def require_zstd() -> Any:
    """The package that compresses.

    Raises:
        EnvironmentFault: it is missing.
    """
    try:
        return importlib.import_module("zstandard")
    except ImportError as exc:
        raise EnvironmentFault(
            "the package zstandard is missing",
            why="sessions are compressed with it",
            fix="pip install 'browndwarf[zstd]', or load without compress to save new sessions",
        ) from exc


def shrink(part: Bytes) -> Bytes:
    """A frame of zstd at its fastest level: higher ones gain next to nothing on caches."""
    packed = require_zstd().ZstdCompressor(level=1).compress(part.data)
    return np.frombuffer(packed, np.uint8)


def expand(frame: Bytes) -> Bytes:
    """What ``shrink`` was given.

    Raises:
        ValueError: this is no such frame, or one of more than a part.
        EnvironmentFault: zstandard is missing.
    """
    zstandard = require_zstd()
    try:
        if not 0 <= zstandard.frame_content_size(frame.data) <= PART:
            raise ValueError("it holds more than a part")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(frame.data), np.uint8)
    except zstandard.ZstdError as exc:
        raise ValueError(str(exc)) from exc
