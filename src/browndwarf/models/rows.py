"""A few rows of a tensor, straight from the file: an even sample, in memory that stays small.

``locate_tensors`` says where every tensor's data lies; ``sample_rows`` reads the bytes of rows at
even distances, matrix by matrix for the 3-D tensors that hold experts. Bytes are returned as they
are stored: turning them into numbers takes llama.cpp's library (``engine.native_quant``).

A place is a small frozen value, so that it can be sent to another process. Nothing is mapped: a
file that shrinks meanwhile gives an error and not a dead process.

Example:
    place = locate_tensors(read_model(path))["blk.0.ffn_down.weight"]
    for expert, rows in sample_rows(place, per_tensor=256): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from browndwarf.errors import BadModelFile, ModelNotFound
from browndwarf.models.ggml_types import GGML_TYPES, row_bytes
from browndwarf.models.gguf_read import read_header
from browndwarf.models.info import ModelInfo

MIN_PER_MATRIX = 8
"""Rows of each expert, however many experts there are."""
MAX_ELEMENTS = 2**22
"""Of one yielded block: 16 MiB as f32."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's data is: ``matrices`` (experts) times ``rows`` rows of ``columns``."""

    name: str
    path: Path
    offset: int
    type: str
    columns: int
    rows: int
    matrices: int

    @property
    def number(self) -> int:
        """ggml's number of the type."""
        return GGML_TYPES[self.type].number

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return row_bytes(self.type, self.columns)

    def sampled_rows(self, per_tensor: int) -> int:
        """How many rows of each matrix a sample of about ``per_tensor`` rows takes."""
        wanted = max(MIN_PER_MATRIX, -(-per_tensor // self.matrices))
        return min(self.rows, wanted)


def locate_tensors(model: ModelInfo) -> dict[str, Place]:
    """Every tensor's place, by name.

    Raises:
        ModelNotFound, BadModelFile: as when reading the header.
    """
    starts = [(path, read_header(path).data_offset) for path in model.files]
    found = {}
    for tensor in model.tensors:
        path, start = starts[tensor.part]
        columns, rows, *more = (*tensor.shape, 1)[: max(2, len(tensor.shape))]
        matrices = 1
        for size in more:
            matrices *= size
        found[tensor.name] = Place(
            tensor.name, path, start + tensor.offset, tensor.type, columns, rows, matrices
        )
    return found


def sample_rows(place: Place, *, per_tensor: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Blocks of sampled rows: the number of the matrix, and (rows, bytes of a row).

    Rows lie at even distances, the first half a distance from the start; a matrix that is no
    longer than the sample is read whole.

    Raises:
        BadModelFile: the file ends before the tensor does.
        ModelNotFound: it cannot be read.
    """
    count = place.sampled_rows(per_tensor)
    # Whole-number arithmetic, so that the sample is the same on every machine.
    picks = [(2 * i + 1) * place.rows // (2 * count) for i in range(count)]
    block = max(1, MAX_ELEMENTS // place.columns)
    try:
        with place.path.open("rb", buffering=0) as handle:
            for matrix in range(place.matrices):
                for start in range(0, count, block):
                    yield matrix, _read(handle, place, matrix, picks[start : start + block])
    except OSError as exc:
        raise ModelNotFound(
            f"cannot read {place.path}", why=exc.strerror or str(exc), fix="check the file"
        ) from exc


def _read(handle: BinaryIO, place: Place, matrix: int, picks: list[int]) -> NDArray[np.uint8]:
    size = place.row_bytes
    out = np.empty((len(picks), size), np.uint8)
    start = place.offset + matrix * place.rows * size
    at = 0
    while at < len(picks):
        run = 1  # neighbours are read in one go
        while at + run < len(picks) and picks[at + run] == picks[at] + run:
            run += 1
        handle.seek(start + picks[at] * size)
        view = out[at : at + run].reshape(-1).data
        got = 0
        while got < len(view):
            more = handle.readinto(view[got:])  # type: ignore[attr-defined]
            if not more:
                raise BadModelFile(
                    f"{place.path} ends inside of {place.name}",
                    why=f"{got} of {len(view)} bytes could be read",
                    fix="the file changed or is incomplete; download it again",
                )
            got += more
        at += run
    return out
