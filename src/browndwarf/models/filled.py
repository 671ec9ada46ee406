"""Random weights of any size, written as quantized blocks without computing one weight.

Speed depends on types and shapes and not on values, so a model for timing needs blocks that are
valid and not all zero. A hollow file (``hollow``) or another file's header gives the layout; one
random tile per type, a few MiB, is written over and over. Memory stays constant, a 12B takes as
long as the disk needs.

Boundary: files in, files out; which types and shapes are wanted is decided elsewhere. A file
appears whole or not at all.

Not covered: types without a scale to set (MXFP4, IQ1, IQ2, IQ3); text worth reading.

Example:
    write_shape(Path("t.gguf"), "gemma4-12b", "Q4_K", role="target")
    write_shape(Path("h.gguf"), "gemma4-12b", "Q8_0", role="head")
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from browndwarf.errors import UsageError
from browndwarf.files import storage_errors
from browndwarf.models.ggml_types import GGML_TYPES
from browndwarf.models.gguf_read import Header, Tensor, read_header
from browndwarf.models.hollow import SHAPES, HollowShape, write_hollow, write_hollow_head

Role = Literal["target", "head"]

#: Standard deviation of the weights, as of a freshly initialised model.
SPREAD = 0.02
#: Bytes of a tile, about. Its number of blocks is odd, so that rows of a matrix differ.
TILE_BYTES = 4 * 2**20

#: Where a block of each type has its half-precision scales (and minimums), and values that give
#: about SPREAD with random bytes everywhere else.
_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 4.3e-3),),
    "Q4_1": ((0, 4.3e-3), (2, -3.2e-2)),
    "Q5_0": ((0, 2.2e-3),),
    "Q5_1": ((0, 2.2e-3), (2, -3.4e-2)),
    "Q8_0": ((0, 2.7e-4),),
    "IQ4_NL": ((0, 3.0e-4),),
    "Q2_K": ((80, 2.0e-3), (82, 3.0e-3)),
    "Q3_K": ((108, 4.8e-4),),
    "Q4_K": ((0, 1.4e-4), (2, 1.05e-3)),
    "Q5_K": ((0, 7.0e-5), (2, 1.1e-3)),
    "Q6_K": ((208, 1.5e-5),),
    "IQ4_XS": ((0, 1.7e-5),),
}
_PLAIN = ("F32", "F16", "BF16")

#: What a mix's name means for the matrices; the embedding is then Q6_K, as llama-quantize has it.
_MAIN = {f"Q{n}_K_{size}": f"Q{n}_K" for n in (2, 3, 4, 5) for size in "SML"}
_SMALL = frozenset({"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL",
                    "IQ4_XS"})  # fmt: skip


def shape_named(name: str) -> HollowShape:
    """A shape by name.

    Raises:
        UsageError: there is none; lists them.
    """
    shape = SHAPES.get(name.strip().lower())
    if shape is None:
        raise UsageError(
            f"there is no shape {name!r}",
            why=f"known are {', '.join(SHAPES)}",
            fix="name one of these, or give the path of a GGUF file whose header is the shape",
        )
    return shape


def main_type(type_name: str) -> str:
    """The type of the matrices in a file of this type.

    Raises:
        UsageError: random blocks of it cannot be made.
    """
    main = _MAIN.get(type_name.upper(), type_name.upper())
    if main not in _SCALES and main not in _PLAIN:
        raise UsageError(
            f"random weights cannot be written as {type_name}",
            why="only types with a plain scale per block can be filled at random",
            fix=f"choose one of {', '.join([*_SCALES, *_PLAIN])}",
        )
    return main


def write_shape(
    path: Path, name: str, type_name: str, *, role: Role = "target", seed: int = 0
) -> None:
    """Write a target of a named shape, or the drafter that belongs to it.

    Raises:
        UsageError: no such shape, no such type, or a shape without a separate drafter.
        DiskFull, StorageError: nothing is left behind.
    """
    shape = shape_named(name)
    main = main_type(type_name)
    if role == "head" and not has_drafter(shape):
        raise UsageError(f"the shape {name} has no separate drafter", fix="leave --draft out")
    with _whole(path) as partial:
        if role == "head":
            write_hollow_head(partial, shape, main=main)
        else:
            write_hollow(partial, shape, main=main, embed=_embedding(main))
        with partial.open("r+b") as out:
            _fill(out, read_header(partial, complete=False), seed)


def headers(folder: Path, name: str, type_name: str) -> tuple[Path, Path | None]:
    """Target and Q8_0 drafter of a shape as sparse files without weights, made where missing.

    Sizes and types are all that a plan reads.

    Raises:
        UsageError, DiskFull, StorageError: nothing is left behind.
    """
    shape, main = shape_named(name), main_type(type_name)
    target, head = folder / f"{name.lower()}-{main}.gguf", folder / f"{name.lower()}-head.gguf"
    if not target.exists():
        with _whole(target) as partial:
            write_hollow(partial, shape, main=main, embed=_embedding(main))
    if not has_drafter(shape):
        return target, None
    if not head.exists():
        with _whole(head) as partial:
            write_hollow_head(partial, shape)
    return target, head


def write_copy(source: Path, path: Path, *, seed: int = 0) -> None:
    """Write a file with the header of ``source`` and random weights; norms are copied.

    Of ``source`` only the header must be there: where its data is cut off, norms are ones.

    Raises:
        BadModelFile, UsageError, DiskFull, StorageError: nothing is left behind.
    """
    header = read_header(source, complete=False)
    for tensor in header.tensors:
        if not _is_vector(tensor):
            main_type(tensor.type)
    with _whole(path) as partial, source.open("rb") as old, partial.open("w+b") as out:
        out.write(old.read(header.data_offset))
        end = max((t.offset + t.bytes for t in header.tensors), default=0)
        out.truncate(header.data_offset + -(-end // 32) * 32)
        for tensor in header.tensors:
            if _is_vector(tensor):
                old.seek(header.data_offset + tensor.offset)
                data = old.read(tensor.bytes)
                out.seek(header.data_offset + tensor.offset)
                whole = len(data) == tensor.bytes
                out.write(data if whole else np.ones(tensor.elements, np.float32).tobytes())
        _fill(out, header, seed)


def _embedding(main: str) -> str:
    return "Q6_K" if main in _SMALL else main


def has_drafter(shape: HollowShape) -> bool:
    """Whether models of this shape draft with a file of its own."""
    return shape.arch == "gemma4"


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A name beside ``path`` that becomes it at the end, or vanishes."""
    partial = path.with_name(f".{secrets.token_hex(4)}.partial.{path.name}")
    try:
        with storage_errors(path, f"write {path.name}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _is_vector(tensor: Tensor) -> bool:
    return tensor.type == "F32" and sum(size > 1 for size in tensor.shape) <= 1


def _fill(out: BinaryIO, header: Header, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tiles: dict[str, memoryview] = {}
    for tensor in header.tensors:
        if _is_vector(tensor):
            continue
        if tensor.type not in tiles:
            tiles[tensor.type] = memoryview(_tile(tensor.type, rng))
        tile, block = tiles[tensor.type], GGML_TYPES[tensor.type].bytes
        # Every tensor begins elsewhere in the tile, so that no two layers are the same.
        at = int(rng.integers(0, len(tile) // block)) * block
        left = tensor.bytes
        out.seek(header.data_offset + tensor.offset)
        while left:
            piece = tile[at : at + left]
            out.write(piece)
            left -= len(piece)
            at = 0


def _tile(type_name: str, rng: np.random.Generator) -> bytes:
    """A few MiB of valid blocks."""
    kind = GGML_TYPES[type_name]
    count = (TILE_BYTES // kind.bytes) | 1
    if type_name in _PLAIN:
        values = (rng.standard_normal(count, dtype=np.float32) * SPREAD).astype(np.float32)
        if type_name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return values.astype(np.float16 if type_name == "F16" else np.float32).tobytes()
    blocks = rng.integers(0, 256, (count, kind.bytes), dtype=np.uint8)
    for offset, value in _SCALES[main_type(type_name)]:
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    return blocks.tobytes()
