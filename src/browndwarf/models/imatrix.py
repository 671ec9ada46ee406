"""Importance matrices: how strongly a model's inputs excite each column of each tensor.

``read_imatrix`` reads the GGUF that llama-imatrix writes: per tensor the sums of squared inputs
and how many tokens they were summed over, one row per expert. ``check_imatrix`` says whether one
belongs to a model. The whole file is read, tens of MiB for a large model; the model's own data
never is.

Not covered: making one (``plan.importance``), and the older binary format, which is recognised
and refused with the command that converts it.

Example:
    imatrix = read_imatrix(Path("gemma.imatrix.gguf"))
    imatrix.weights("blk.0.ffn_down.weight")        # (experts, columns): mean squared inputs
    check_imatrix(imatrix, read_model("gemma.gguf")).missing
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from browndwarf.errors import BadModelFile, ModelNotFound
from browndwarf.models.gguf_faults import broken, truncated
from browndwarf.models.gguf_read import ArrayValue, Header, Tensor, header_bytes, read_header
from browndwarf.models.info import ModelInfo

SUMS, COUNTS = ".in_sum2", ".counts"
_DATASETS = "imatrix.datasets"
_STATED = (_DATASETS, "imatrix.chunk_count", "imatrix.chunk_size")

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ImatrixEntry:
    """One tensor's statistics.

    Attributes:
        values: sums of squared inputs, (experts, columns).
        counts: tokens behind each row of ``values``; 0 for an expert that was never chosen.
    """

    values: Floats
    counts: Floats

    @property
    def covered(self) -> bool:
        """Whether any token was seen."""
        return bool((self.counts > 0).any())


@dataclass(frozen=True, slots=True)
class Imatrix:
    """A whole file. ``chunk_count`` and ``chunk_size`` (tokens) are as llama-imatrix states."""

    path: Path
    entries: Mapping[str, ImatrixEntry]
    datasets: tuple[str, ...]
    chunk_count: int
    chunk_size: int

    def weights(self, name: str, columns: int | None = None) -> Floats | None:
        """Mean squared input of each column, (experts, columns); None where there is no data.

        An expert that was never chosen gets 1 in every column, as in llama-quantize.

        Args:
            columns: the tensor's row length. Needed for 3-D tensors that are no experts, whose
                matrices share one count and lie behind each other in one row.
        """
        entry = self.entries.get(name)
        if entry is None or not entry.covered:
            return None
        seen = entry.counts[:, None] > 0
        means = np.ones_like(entry.values)
        np.divide(entry.values, entry.counts[:, None], out=means, where=seen)
        return means if columns is None else means.reshape(-1, columns)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How an imatrix covers a model's matrices (names in the file's order).

    Attributes:
        covered: matrices with data.
        missing: matrices without: mostly embeddings, and those of an MTP head.
        thin_experts: tensor -> numbers of the experts seen in fewer than ``FEW_TOKENS`` tokens.
    """

    covered: tuple[str, ...]
    missing: tuple[str, ...]
    thin_experts: Mapping[str, tuple[int, ...]]


_NEVER = (
    "_norm.weight", "ffn_gate_inp.weight", "per_layer_model_proj", "ssm_conv1d", "shortconv.conv",
    "altup", "laurel", "time_mix_",
)  # fmt: skip
"""Parts of names that llama-quantize passes over."""
FEW_TOKENS = 64
"""An expert seen less often says little about its inputs."""


def read_imatrix(path: Path) -> Imatrix:
    """Read an importance matrix.

    Raises:
        ModelNotFound: nothing there, or it cannot be opened.
        BadModelFile: a model, the older binary format, empty, truncated, or inconsistent.
    """
    if not path.exists():
        raise ModelNotFound(
            f"there is no importance matrix at {path}",
            why="the file does not exist",
            fix="check the path, or make one with `browndwarf imatrix`",
        )
    refuse_legacy(path)
    header = read_header(path)
    if header.metadata.get("general.type") != "imatrix":
        raise BadModelFile(
            f"{path} is no importance matrix",
            why=f"it says that it is {header.metadata.get('general.type', 'a model')!r}",
            fix="give a file that `browndwarf imatrix` or llama-imatrix wrote",
        )
    lacking = [key for key in _STATED if key not in header.metadata]
    if lacking:
        raise broken(path, f"it does not state {', '.join(lacking)}")
    sums = {t.name.removesuffix(SUMS): t for t in header.tensors if t.name.endswith(SUMS)}
    counts = {t.name.removesuffix(COUNTS): t for t in header.tensors if t.name.endswith(COUNTS)}
    if alone := sorted(sums.keys() ^ counts.keys()):
        raise broken(path, f"{alone[0]!r} has sums or counts, not both")
    try:
        raw = path.read_bytes()
    except OSError as exc:
        raise truncated(path, exc.strerror or str(exc)) from exc
    entries = {
        name: _entry(path, name, _floats(raw, header, sums[name]), _floats(raw, header, count))
        for name, count in counts.items()
    }
    if not any(entry.covered for entry in entries.values()):
        raise _empty(path)
    return Imatrix(
        path=path,
        entries=entries,
        datasets=tuple(dict.fromkeys(_datasets(path))),
        chunk_count=_whole(header, "imatrix.chunk_count"),
        chunk_size=_whole(header, "imatrix.chunk_size"),
    )


def check_imatrix(imatrix: Imatrix, target: ModelInfo) -> Coverage:
    """How far an importance matrix covers a model.

    Raises:
        BadModelFile: it was made with another model: tensors that the model lacks, or other
            row lengths or numbers of experts.
    """
    known = target.by_name
    foreign = [name for name in imatrix.entries if name not in known]
    if foreign:
        raise _other_model(
            imatrix, target, f"{len(foreign)} of its tensors are not in it, such as {foreign[0]}"
        )
    for name, entry in imatrix.entries.items():
        shape = known[name].shape
        columns, matrices = shape[0], known[name].elements // (shape[0] * _at(shape, 1))
        if entry.values.size != columns * matrices:
            raise _other_model(
                imatrix,
                target,
                f"{name} has {entry.values.size} columns in it and {columns * matrices} there",
            )
        if len(entry.counts) not in (1, matrices):
            raise _other_model(
                imatrix,
                target,
                f"{name} has {len(entry.counts)} experts in it and {matrices} there",
            )
    wanted = [t.name for t in target.tensors if is_matrix(t)]
    covered = {name for name, entry in imatrix.entries.items() if entry.covered}
    thin = {
        name: tuple(int(i) for i in np.flatnonzero(entry.counts < FEW_TOKENS))
        for name, entry in imatrix.entries.items()
        if len(entry.counts) > 1 and (entry.counts < FEW_TOKENS).any()
    }
    return Coverage(
        covered=tuple(name for name in wanted if name in covered),
        missing=tuple(name for name in wanted if name not in covered),
        thin_experts=thin,
    )


def is_matrix(tensor: Tensor) -> bool:
    """Whether a tensor is of the kind that is quantized at all: no norm, router or small filter."""
    name = tensor.name
    return (
        len([n for n in tensor.shape if n > 1]) > 1
        and name.endswith("weight")
        and not any(part in name for part in _NEVER)
    )


def refuse_legacy(path: Path) -> None:
    """Tell the older binary format by its first bytes: a count, a length, a tensor's name.

    Raises:
        BadModelFile: it is one, or there are no bytes at all.
    """
    try:
        if not path.is_file():
            return  # read_header says why
        with path.open("rb") as handle:
            head = handle.read(8 + 64)
    except OSError:
        return
    if not head:
        raise _empty(path)
    if head[:4] == b"GGUF" or len(head) < 9:
        return
    entries, length = struct.unpack_from("<ii", head)
    name = head[8 : 8 + max(length, 0)]
    if 0 < entries < 10**6 and 0 < length < 256 and name.isascii() and name.decode().isprintable():
        raise BadModelFile(
            f"{path} is an importance matrix of the older format (.dat)",
            why="only the GGUF form states how many tokens lie behind each expert",
            fix="convert it: llama-imatrix -m MODEL.gguf --in-file OLD.dat --output-format gguf "
            "-o NEW.gguf; or make it anew with `browndwarf imatrix`",
        )


def _entry(path: Path, name: str, values: Floats, counts: Floats) -> ImatrixEntry:
    if values.size % counts.size:
        raise broken(path, f"{name!r} has {values.size} sums for {counts.size} counts")
    for what, numbers in (("sums", values), ("counts", counts)):
        if not np.isfinite(numbers).all() or (numbers < 0).any():
            raise broken(path, f"the {what} of {name!r} hold negative or non-finite numbers")
    return ImatrixEntry(values.reshape(counts.size, -1), counts)


def _floats(raw: bytes, header: Header, tensor: Tensor) -> Floats:
    if tensor.type != "F32":
        raise broken(header.path, f"{tensor.name!r} is of type {tensor.type}, not F32")
    start = header.data_offset + tensor.offset
    if start + tensor.bytes > len(raw):
        raise truncated(header.path, f"{tensor.name!r} ends behind the file's end")
    return np.frombuffer(raw, "<f4", count=tensor.elements, offset=start).astype(np.float32)


def _datasets(path: Path) -> list[str]:
    """All names; ``read_header`` keeps short arrays only, and a file may be combined of many."""
    kept = read_header(path).metadata[_DATASETS]
    if not isinstance(kept, ArrayValue) or kept.kind != "string":
        return []
    entry = header_bytes(path).keys[_DATASETS]
    at = 8 + len(_DATASETS) + 4 + 4 + 8
    names = []
    for _ in range(kept.count):
        (length,) = struct.unpack_from("<Q", entry, at)
        names.append(entry[at + 8 : at + 8 + length].decode("utf-8", errors="replace"))
        at += 8 + length
    return names


def _whole(header: Header, key: str) -> int:
    value = header.metadata[key]
    if not isinstance(value, int):
        raise broken(header.path, f"{key} is {value!r}, no number")
    return value


def _at(shape: tuple[int, ...], index: int) -> int:
    return shape[index] if index < len(shape) else 1


def _empty(path: Path) -> BadModelFile:
    return BadModelFile(
        f"the importance matrix {path} is empty",
        why="it holds no statistics of any tensor",
        fix="make it anew with `browndwarf imatrix`, and let it run to its end",
    )


def _other_model(imatrix: Imatrix, target: ModelInfo, why: str) -> BadModelFile:
    return BadModelFile(
        f"the importance matrix {imatrix.path.name} was made with another model than "
        f"{target.path.name}",
        why=why,
        fix="make one for this model with `browndwarf imatrix`",
    )
