"""Where the rows of single tokens lie in a saved state, so that a turn can be appended to it.

llama.cpp writes a sequence's cache as one piece: for each cache a list of cells with their
positions, then for every layer the rows of all cells. ``parse`` finds those rows. What it does not
recognize (recurrent states, transposed values, another version's form) stays raw, and is then
saved whole: a wrong guess can cost space, never content, because what is put together again is
compared with a digest of the original.

Example:
    layout = parse(decoder.save(seq))
    layout.blocks[0].positions, layout.blocks[0].arrays[0].row_bytes
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]

_PREFIX = 8
"""Magic and sequence number."""
_CELL_SIZES = (12, 24)
"""Bytes of one cell's entry: position, count, sequence; with or without 2D positions."""
_MAX_LAYERS, _MAX_ROW, _MAX_TYPE = 1024, 2**24, 64


@dataclass(frozen=True, slots=True)
class RowArray:
    """Rows of one layer's keys or values: ``offset`` in the state, bytes per row."""

    offset: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """One cache: the position of each of its cells, in order, and its arrays of rows."""

    positions: Ints
    arrays: tuple[RowArray, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A state of ``size`` bytes: rows in blocks, and ``raw`` ranges (start, end) of the rest."""

    size: int
    blocks: tuple[Block, ...]
    raw: tuple[tuple[int, int], ...]


def parse(state: Bytes) -> Layout:
    """The layout of a state; of an unknown one everything is raw."""
    reader = _Reader(state)
    blocks: list[Block] = []
    at = _PREFIX
    while at < state.nbytes:
        found = next((f for size in _CELL_SIZES if (f := reader.cache(at, size))), None)
        if found is None:
            break
        more, at = found
        blocks += more
    taken = sorted(
        (a.offset, a.offset + a.row_bytes * len(b.positions)) for b in blocks for a in b.arrays
    )
    raw: list[tuple[int, int]] = []
    start = 0
    for begin, end in taken:
        if begin > start:
            raw.append((start, begin))
        start = end
    if start < state.nbytes:
        raw.append((start, state.nbytes))
    return Layout(state.nbytes, tuple(blocks), tuple(raw))


class _Reader:
    def __init__(self, state: Bytes) -> None:
        self._view = state.data
        self._size = state.nbytes

    def cache(self, at: int, cell_bytes: int) -> tuple[list[Block], int] | None:
        """The streams of one cache from ``at`` on; None when this is no such thing."""
        try:
            (streams,) = struct.unpack_from("<I", self._view, at)
            if not 1 <= streams <= 256:
                return None
            at += 4
            blocks: list[Block] = []
            for _ in range(streams):
                (cells,) = struct.unpack_from("<I", self._view, at)
                at += 4
                if cells:
                    stream = self._stream(at, cells, cell_bytes)
                    if stream is None:
                        return None
                    block, at = stream
                    blocks.append(block)
        except struct.error:
            return None
        return blocks, at

    def _stream(self, at: int, cells: int, cell_bytes: int) -> tuple[Block, int] | None:
        end = at + cells * cell_bytes
        if end + 8 > self._size:
            return None
        entries = np.frombuffer(self._view[at:end], np.int32).reshape(cells, -1)
        transposed, layers = struct.unpack_from("<II", self._view, end)
        if transposed or not 1 <= layers <= _MAX_LAYERS or not (entries[:, 1] == 1).all():
            return None
        arrays: list[RowArray] = []
        at = end + 8
        for _ in range(2 * layers):
            kind, row = struct.unpack_from("<iQ", self._view, at)
            if not 0 <= kind < _MAX_TYPE or not 0 < row <= _MAX_ROW:
                return None
            arrays.append(RowArray(at + 12, row))
            at += 12 + row * cells
            if at > self._size:
                return None
        return Block(entries[:, 0].copy(), tuple(arrays)), at


def copied_rows(new: Block, old: Block | None, unchanged: int) -> Ints:
    """For each cell of ``new`` the row of ``old`` that holds the same, or -1. Rows of positions
    from ``unchanged`` on have changed."""
    source = np.full(len(new.positions), -1, np.int32)
    if old is None or [a.row_bytes for a in old.arrays] != [a.row_bytes for a in new.arrays]:
        return source
    order = np.argsort(old.positions, kind="stable")
    known = old.positions[order]
    place = np.minimum(np.searchsorted(known, new.positions), max(len(known) - 1, 0))
    if not len(known):
        return source
    same = (known[place] == new.positions) & (new.positions < unchanged)
    source[same] = order[place[same]]
    return source


def runs(source: Ints) -> list[tuple[int, int]]:
    """Consecutive sources as (first, count); -1 as first stands for new rows.

    Example:
        >>> runs(np.array([4, 5, 6, -1, -1, 0], np.int32))
        [(4, 3), (-1, 2), (0, 1)]
    """
    if not len(source):
        return []
    step = np.diff(source)
    same = np.where(source[:-1] < 0, step == 0, step == 1)
    starts = np.concatenate(([0], np.flatnonzero(~same) + 1))
    counts = np.diff(np.concatenate((starts, [len(source)])))
    return [(int(source[s]), int(n)) for s, n in zip(starts, counts, strict=True)]
