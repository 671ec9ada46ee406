"""Saved states in llama.cpp's form without llama.cpp, and a disk that fails on command."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from browndwarf.decode.session_file import Disk
from browndwarf.decode.session_records import Snapshot
from browndwarf.decode.state_layout import Bytes

FINGERPRINT = {"model": "sha256:m", "head": "sha256:h", "context": "4096 tokens x 1", "engine": "1"}


def cache(positions: list[int], rows: list[int], version: dict[int, int], *, wide: bool) -> bytes:
    """One cache: a row is a function of its position, its layer and the position's version."""
    out = [struct.pack("<II", 1, len(positions))]
    for position in positions:
        out.append(struct.pack("<iI", position, 1))
        out.append(struct.pack("<iii", 0, 0, 7) if wide else b"")
        out.append(struct.pack("<i", 0))
    out.append(struct.pack("<II", 0, len(rows)))
    for part in range(2):
        for layer, row in enumerate(rows):
            out.append(struct.pack("<iQ", 1, row))
            for position in positions:
                seed = position * 131 + layer * 7 + part + 100_003 * version.get(position, 0)
                out.append((seed.to_bytes(4, "little") * row)[:row])
    return b"".join(out)


def state(
    kept: int,
    *,
    window: int = 0,
    rows: tuple[int, ...] = (64, 64, 32),
    changed: dict[int, int] | None = None,
    tail: bytes = b"",
    wide: bool = False,
) -> Bytes:
    """A sequence's state with ``kept`` tokens; ``window`` adds a sliding cache that holds the
    last ones in ring order, ``tail`` what no row array holds."""
    version = changed or {}
    data = struct.pack("<Ii", 0x1234, 0)
    data += cache(list(range(kept)), list(rows), version, wide=wide)
    if window:
        last = range(max(0, kept - window), kept)
        ring = sorted(last, key=lambda p: p % (window + 5))
        data += cache(ring, list(rows), version, wide=wide)
    return np.frombuffer(data + tail, np.uint8).copy()


def snapshot(kept: int, turns: int = 1, **form: object) -> Snapshot:
    """A conversation of ``turns`` turns whose cache holds ``kept`` tokens."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"message {i}"} for i in range(2 * turns)
    ]
    return Snapshot(
        tokens=[(7 * i) % 1000 for i in range(kept + 1)],
        kept=kept,
        rows=np.full((1, 8), kept, np.float32),
        states={"target": state(kept, **form)},  # type: ignore[arg-type]
        messages=messages,
        sampler={"seed": turns},
    )


def same(one: Snapshot, other: Snapshot) -> bool:
    """Whether two snapshots hold the same conversation, byte for byte."""
    return (
        one.tokens == other.tokens
        and one.kept == other.kept
        and one.messages == other.messages
        and one.sampler == other.sampler
        and set(one.states) == set(other.states)
        and all(np.array_equal(one.states[k], other.states[k]) for k in one.states)
        and np.array_equal(one.rows, other.rows)
    )


def grown(first: Snapshot, kept: int, turns: int, **form: object) -> Snapshot:
    """What ``first`` has become after more turns, as the runtime hands it to the store."""
    later = snapshot(kept, turns, **form)
    later.layouts, later.unchanged = first.layouts, first.kept
    return later


class Killed(BaseException):
    """The process ends here."""


class FailingDisk(Disk):
    """Fails at step ``at``: a step is a quarter of a piece, a cut, a rename or a deletion.
    ``full`` makes the failure a full disk instead of the end of the process."""

    def __init__(self, at: int, *, full: bool = False) -> None:
        self.at = at
        self.full = full
        self.steps = 0

    def tick(self) -> None:
        self.steps += 1
        if self.steps == self.at:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            raise Killed

    def write(self, path: Path, offset: int, pieces: Iterable[Bytes]) -> None:
        self.tick()
        super().write(path, offset, [])
        for piece in pieces:
            size = max(1, piece.nbytes // 4)
            for start in range(0, piece.nbytes, size):
                part = piece[start : start + size]
                super().write(path, offset, [part])
                offset += part.nbytes
                self.tick()

    def replace(self, new: Path, old: Path) -> None:
        self.tick()
        super().replace(new, old)
        self.tick()

    def remove(self, path: Path) -> None:
        self.tick()
        super().remove(path)
