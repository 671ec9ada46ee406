"""A saved state as records: the first holds all of it, each further one what has changed since.

A record is a description (``StateRecord``, JSON) and a payload: the new ranges of the state, in
the order in which they lie there. ``Assembly`` follows each row through the records to where it
was written, so that a piece of any payload goes straight to its place, in any order and from
several threads: resuming costs one pass over the data after one turn as after twenty.

Example:
    first, payload = describe(state, parse(state), None, 0)
    assembly = Assembly([first])
    assembly.place(0, 0, np.concatenate(payload))
    again = assembly.finish()
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from browndwarf.decode.session_parts import by_threads, checksum, cut
from browndwarf.decode.state_layout import Bytes, Ints, Layout, copied_rows, runs

Ranges = list[tuple[int, int]]
"""(first byte, bytes) each, ascending."""


class BlockRecord(msgspec.Struct, frozen=True):
    """One cache: (offset, row bytes) of its arrays, and where each row comes from."""

    arrays: list[tuple[int, int]]
    source: list[tuple[int, int]]


class StateRecord(msgspec.Struct, frozen=True):
    """How to put a state of ``size`` bytes together; ``digest`` is that of the whole."""

    size: int
    raw: list[tuple[int, int]]
    blocks: list[BlockRecord]
    digest: str


def digest(data: Bytes) -> str:
    """A checksum over parts that several threads work on; equal data, equal text."""
    sums = " ".join(by_threads(checksum, cut([data])))
    return f"{data.nbytes:x}-{checksum(np.frombuffer(sums.encode(), np.uint8))}"


def describe(
    state: Bytes, layout: Layout, before: Layout | None, unchanged: int
) -> tuple[StateRecord, list[Bytes]]:
    """A state's record against the last one's layout, and its payload's pieces, which are views.
    ``before`` None makes a record that stands alone."""
    blocks: list[BlockRecord] = []
    for i, block in enumerate(layout.blocks):
        old = before.blocks[i] if before is not None and i < len(before.blocks) else None
        arrays = [(a.offset, a.row_bytes) for a in block.arrays]
        blocks.append(BlockRecord(arrays, runs(copied_rows(block, old, unchanged))))
    record = StateRecord(layout.size, list(layout.raw), blocks, digest(state))
    return record, [state[at : at + size] for at, size in fresh_ranges(record)]


def fresh_ranges(record: StateRecord) -> Ranges:
    """The ranges of its state that a record carries itself, neighbours joined.

    Raises:
        ValueError: they overlap or lie outside of the state.
    """
    ranges = [(start, end - start) for start, end in record.raw]
    for block in record.blocks:
        row = 0
        for first, count in block.source:
            if first < 0:
                ranges += [(at + row * width, count * width) for at, width in block.arrays]
            row += count
    ranges.sort()
    joined: Ranges = []
    end = 0
    for at, size in ranges:
        if at < end or size < 0:
            raise ValueError("ranges of a record overlap")
        if joined and at == end:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((at, size))
        end = at + size
    if end > record.size:
        raise ValueError("rows outside of the state")
    return joined


class Assembly:
    """The state that the last of ``records`` describes, filled from their payloads.

    ``lengths`` are those of the payloads. ``place`` may be called from several threads with
    pieces that do not overlap; ``finish`` then checks and returns the state.

    Raises:
        ValueError: the records contradict each other, or the result is not what was saved.
    """

    def __init__(self, records: Sequence[StateRecord]) -> None:
        self._last = records[-1]
        self._payloads = [_Payload(record) for record in records]
        self.lengths = [payload.length for payload in self._payloads]
        whole = [(0, self._last.size)]
        # Such a payload is the state itself, which its own checksums cover.
        self._direct = fresh_ranges(self._last) == whole
        moves: list[list[tuple[int, int, int]]] = [[] for _ in records]
        own = self._payloads[-1]
        if self._direct:
            moves[-1].append((0, 0, self._last.size))
        else:
            for start, end in self._last.raw:
                moves[-1].append((own.place_of(start, end - start), start, end - start))
            for i in range(len(self._last.blocks)):
                self._trace(records, i, moves)
        self._moves = [_joined(found) for found in moves]
        self._starts = [[at for at, _, _ in found] for found in self._moves]
        self.state: Bytes = np.empty(self._last.size, np.uint8)

    def _trace(
        self, records: Sequence[StateRecord], index: int, moves: list[list[tuple[int, int, int]]]
    ) -> None:
        """Where the rows of one block come from, in runs."""
        owner, row = _origins(records, index)
        if not len(owner):
            return
        breaks = (np.diff(owner) != 0) | (np.diff(row) != 1)
        starts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(owner)]
        arrays = self._last.blocks[index].arrays
        for first, end in pairwise(starts):
            number, source, count = int(owner[first]), int(row[first]), end - first
            theirs = records[number].blocks[index].arrays
            if [width for _, width in theirs] != [width for _, width in arrays]:
                raise ValueError("rows of another width")
            for (to, width), (at, _) in zip(arrays, theirs, strict=True):
                place = self._payloads[number].place_of(at + source * width, count * width)
                moves[number].append((place, to + first * width, count * width))
                if to < 0 or to + end * width > self._last.size:
                    raise ValueError("rows outside of the state")

    def place(self, record: int, at: int, piece: Bytes) -> None:
        """Put a piece that begins ``at`` bytes into a record's payload where it belongs."""
        moves = self._moves[record]
        end = at + piece.nbytes
        for place, to, size in moves[max(0, bisect_right(self._starts[record], at) - 1) :]:
            if place >= end:
                return
            first, last = max(place, at), min(place + size, end)
            if first < last:
                to += first - place
                self.state[to : to + last - first] = piece[first - at : last - at]

    def finish(self) -> Bytes:
        """The state, compared with what was saved."""
        if not self._direct and digest(self.state) != self._last.digest:
            raise ValueError("the state put together is not the one that was saved")
        return self.state


class _Payload:
    """Where a range of its record's state lies in a payload."""

    def __init__(self, record: StateRecord) -> None:
        ranges = fresh_ranges(record)
        self._starts = [at for at, _ in ranges]
        self._ends = [at + size for at, size in ranges]
        self._places = np.cumsum([0, *(size for _, size in ranges)], dtype=np.int64).tolist()
        self.length: int = self._places[-1]

    def place_of(self, at: int, size: int) -> int:
        i = bisect_right(self._starts, at) - 1
        if i < 0 or at + size > self._ends[i]:
            raise ValueError("a row that no record holds")
        return int(self._places[i]) + at - self._starts[i]


def _joined(moves: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Moves (from, to, bytes) in the order of the payload, neighbours as one."""
    found: list[tuple[int, int, int]] = []
    for at, to, size in sorted(moves):
        if found and (at, to) == (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]):
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + size)
        else:
            found.append((at, to, size))
    return found


def _origins(records: Sequence[StateRecord], block: int) -> tuple[Ints, Ints]:
    """For each row of the last record's block: the record that wrote it, and its row there."""
    record = np.empty(0, np.int32)
    row = np.empty(0, np.int32)
    for number, described in enumerate(records):
        owners: list[Ints] = []
        rows: list[Ints] = []
        at = 0
        for first, count in described.blocks[block].source if block < len(described.blocks) else []:
            if first < 0:
                owners.append(np.full(count, number, np.int32))
                rows.append(np.arange(at, at + count, dtype=np.int32))
            else:
                if first + count > len(record):
                    raise ValueError("a row that no record holds")
                owners.append(record[first : first + count])
                rows.append(row[first : first + count])
            at += count
        record = np.concatenate(owners) if owners else np.empty(0, np.int32)
        row = np.concatenate(rows) if rows else np.empty(0, np.int32)
    return record, row
