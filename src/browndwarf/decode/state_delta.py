"""A saved state as records: the first holds all rows, each further one what has changed since.

A record is a description (``StateRecord``, JSON) and a payload of bytes: the raw ranges, then per
block and array the new rows. ``assemble`` follows each row through the records to where it was
written and copies it once, so resuming costs the same after one turn and after twenty.

Example:
    first, payload = describe(state, parse(state), None, 0)
    again = assemble([first], [payload])
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from browndwarf.decode.state_layout import Bytes, Ints, Layout, copied_rows, runs

_PART = 8 << 20
Indices = npt.NDArray[np.integer[Any]]


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
    view = data.data.cast("B")
    edges = [*range(0, len(view), _PART), len(view)]
    if len(edges) <= 2:
        return f"{len(view):x}-{zlib.crc32(view):08x}"
    with ThreadPoolExecutor() as pool:
        sums = list(pool.map(lambda e: zlib.crc32(view[e[0] : e[1]]), pairwise(edges)))
    return f"{len(view):x}-{zlib.crc32(repr(sums).encode()):08x}"


def describe(
    state: Bytes, layout: Layout, before: Layout | None, unchanged: int
) -> tuple[StateRecord, list[Bytes]]:
    """A state's record against the last one's layout, and its payload's pieces: views, or copies
    of new rows. ``before`` None makes a record that stands alone."""
    pieces: list[Bytes] = [state[start:end] for start, end in layout.raw]
    blocks: list[BlockRecord] = []
    for i, block in enumerate(layout.blocks):
        old = before.blocks[i] if before is not None and i < len(before.blocks) else None
        source = copied_rows(block, old, unchanged)
        new = np.flatnonzero(source < 0)
        contiguous = len(new) > 0 and int(new[-1]) - int(new[0]) + 1 == len(new)
        for array in block.arrays:
            rows = _rows(state, array.offset, array.row_bytes, len(source))
            part = rows[new[0] : new[-1] + 1] if contiguous else rows[new]
            pieces.append(part.reshape(-1))
        arrays = [(a.offset, a.row_bytes) for a in block.arrays]
        blocks.append(BlockRecord(arrays, runs(source)))
    return StateRecord(layout.size, list(layout.raw), blocks, digest(state)), pieces


def assemble(records: Sequence[StateRecord], payloads: Sequence[Bytes]) -> Bytes:
    """The state that the last record describes.

    Raises:
        ValueError: the records contradict each other, or the result is not what was saved.
    """
    literals = [_literals(r, p) for r, p in zip(records, payloads, strict=True)]
    last = records[-1]
    state: Bytes = np.empty(last.size, np.uint8)
    at = 0
    for start, end in last.raw:
        state[start:end] = payloads[-1][at : at + end - start]
        at += end - start
    for i, block in enumerate(last.blocks):
        record, row = _origins(records, i)
        for k, (offset, row_bytes) in enumerate(block.arrays):
            out = _rows(state, offset, row_bytes, len(row))
            for number in np.unique(record):
                chosen = np.flatnonzero(record == number)
                _copy(out, chosen, literals[number][i][k], row[chosen])
    if digest(state) != last.digest:
        raise ValueError("the state put together is not the one that was saved")
    return state


def _copy(out: Bytes, to: Indices, rows: Bytes, of: Ints) -> None:
    """``out[to] = rows[of]``, as slices where both are without gaps."""
    if len(of) and int(of.max(initial=0)) >= len(rows):
        raise ValueError("a row that no record holds")
    if _gapless(to) and _gapless(of):
        out[to[0] : to[-1] + 1] = rows[of[0] : of[-1] + 1]
    else:
        out[to] = rows[of]


def _gapless(indices: Indices) -> bool:
    return len(indices) > 0 and bool((np.diff(indices) == 1).all())


def _rows(state: Bytes, offset: int, row_bytes: int, count: int) -> Bytes:
    end = offset + row_bytes * count
    if offset < 0 or row_bytes < 1 or end > state.nbytes:
        raise ValueError("rows outside of the state")
    return state[offset:end].reshape(count, row_bytes)


def _literals(record: StateRecord, payload: Bytes) -> list[list[Bytes]]:
    """Per block and array, the new rows that a record carries."""
    at = sum(end - start for start, end in record.raw)
    found: list[list[Bytes]] = []
    for block in record.blocks:
        count = sum(n for first, n in block.source if first < 0)
        arrays: list[Bytes] = []
        for _, row_bytes in block.arrays:
            arrays.append(_rows(payload, at, row_bytes, count))
            at += row_bytes * count
        found.append(arrays)
    if at != payload.nbytes:
        raise ValueError("a record's length does not agree with its description")
    return found


def _origins(records: Sequence[StateRecord], block: int) -> tuple[Ints, Ints]:
    """For each row of the last record's block: the record that wrote it, and its place there."""
    record = np.empty(0, np.int32)
    row = np.empty(0, np.int32)
    for number, described in enumerate(records):
        if block >= len(described.blocks):
            record, row = np.empty(0, np.int32), np.empty(0, np.int32)
            continue
        owners: list[Ints] = []
        places: list[Ints] = []
        fresh = 0
        for first, count in described.blocks[block].source:
            if first < 0:
                owners.append(np.full(count, number, np.int32))
                places.append(np.arange(fresh, fresh + count, dtype=np.int32))
                fresh += count
            else:
                if first + count > len(record):
                    raise ValueError("a row that no record holds")
                owners.append(record[first : first + count])
                places.append(row[first : first + count])
        record = np.concatenate(owners) if owners else np.empty(0, np.int32)
        row = np.concatenate(places) if places else np.empty(0, np.int32)
    return record, row
