"""The bytes of a GGUF header, read with limits.

``read_header`` takes one file and returns its metadata and its tensor table. It never reads
tensor data, never trusts a size that the file states, and keeps no more of a long array than its
length and hash, which is all that a vocabulary of 262,144 tokens is needed for here.

The ``gguf`` package's ``GGUFReader`` is not used: it builds several array objects for every
element of every array (seconds and hundreds of MiB on a 262k vocabulary), maps the file, so that
one truncated meanwhile kills the process, and follows stated counts without limits.

Not covered: GGUF version 1 (2023, other string lengths), big-endian files, arrays of arrays;
each is refused by name.

Example:
    header = read_header(Path("model.gguf"))
    header.metadata["general.architecture"], header.tensors[0].shape
"""

from __future__ import annotations

import hashlib
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from browndwarf.errors import BadModelFile, ModelNotFound
from browndwarf.models.ggml_types import TYPE_BY_NUMBER, GgmlType
from browndwarf.models.gguf_faults import bad_version, broken, foreign, truncated

HEADER_LIMIT = 128 * 2**20
"""No header read is longer. The longest known (262k tokens, 514k merges) takes 17 MiB."""
MAX_ENTRIES = 100_000
"""Metadata keys, and tensors."""
MAX_TEXT = 16 * 2**20
KEEP_NUMBERS = 4096
KEEP_TEXTS = 64
MAX_KEPT = 1_000_000

_SCALARS: dict[int, tuple[str, str, int]] = {
    0: ("uint8", "B", 1),
    1: ("int8", "b", 1),
    2: ("uint16", "H", 2),
    3: ("int16", "h", 2),
    4: ("uint32", "I", 4),
    5: ("int32", "i", 4),
    6: ("float32", "f", 4),
    7: ("bool", "?", 1),
    10: ("uint64", "Q", 8),
    11: ("int64", "q", 8),
    12: ("float64", "d", 8),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True)
class ArrayValue:
    """A metadata array: ``values`` only when it is short, ``sha256`` of its bytes always."""

    kind: str
    count: int
    sha256: str
    values: tuple[Scalar, ...] | None


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as the header states it. ``shape`` is ggml's order: row length first."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    part: int = 0

    @property
    def elements(self) -> int:
        """Number of stored numbers."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True)
class Header:
    """What one GGUF file says about itself. ``data_offset`` is where tensor data begins."""

    path: Path
    version: int
    metadata: Mapping[str, Scalar | ArrayValue]
    tensors: tuple[Tensor, ...]
    data_offset: int
    file_bytes: int


def read_header(path: Path, *, complete: bool = True) -> Header:
    """Read and check one file's header.

    Checked: every stated length lies inside the file, names are unique, types are known, and
    each tensor's bytes lie inside the file; the last not when ``complete`` is False, for a file
    whose data is still to come.

    Raises:
        ModelNotFound: nothing there, or it cannot be opened.
        BadModelFile: a directory, another format, truncated, or inconsistent.
    """
    return _open(path, complete=complete)[0]


@dataclass(frozen=True, slots=True)
class HeaderBytes:
    """A header as raw bytes: each key's entry, and the tensor table. ``data_bytes`` is where the
    last tensor ends, counted from the start of the data."""

    version: int
    architecture: str
    alignment: int
    n_tensors: int
    keys: Mapping[str, bytes]
    tensor_table: bytes
    data_bytes: int


def header_bytes(path: Path) -> HeaderBytes:
    """One file's header as raw bytes, after the same checks as ``read_header``.

    Raises:
        ModelNotFound, BadModelFile: as ``read_header``.
    """
    header, cursor = _open(path, complete=True)
    keys = {key: bytes(cursor.buffer[start:end]) for key, (start, end) in cursor.marks.items()}
    table = bytes(cursor.buffer[slice(*cursor.table)])
    alignment = header.metadata.get("general.alignment", 32)
    return HeaderBytes(
        version=header.version,
        architecture=str(header.metadata.get("general.architecture", "")),
        alignment=alignment if isinstance(alignment, int) else 32,
        n_tensors=len(header.tensors),
        keys=keys,
        tensor_table=table,
        data_bytes=max((t.offset + t.bytes for t in header.tensors), default=0),
    )


def _open(path: Path, *, complete: bool) -> tuple[Header, _Cursor]:
    try:
        _check_regular(path)
        with path.open("rb") as handle:
            size = handle.seek(0, 2)
            handle.seek(0)
            cursor = _Cursor(handle, size, path)
            return _parse(cursor, path, size, complete), cursor
    except FileNotFoundError as exc:
        raise ModelNotFound(
            f"no model at {path}", why="the file does not exist", fix="check the path"
        ) from exc
    except OSError as exc:
        raise ModelNotFound(
            f"cannot read {path}", why=exc.strerror or str(exc), fix="check the permissions"
        ) from exc


def _check_regular(path: Path) -> None:
    """Reading a pipe could wait for ever, and a device has no end."""
    if path.is_dir():
        raise BadModelFile(
            f"{path} is a directory",
            why="a model is one GGUF file, or the first part of a split one",
            fix="name the .gguf file inside it",
        )
    if not stat.S_ISREG(path.stat().st_mode):
        raise BadModelFile(
            f"{path} is no regular file",
            why="a model is read at any place of it, which a pipe, socket or device does not allow",
            fix="save the model into a file and name that",
        )


class _Cursor:
    """Reads forward through the header, buffering no more than the file or the limit holds."""

    def __init__(self, handle: BinaryIO, size: int, path: Path) -> None:
        self.handle = handle
        self.size = size
        self.path = path
        self.buffer = bytearray()
        self.at = 0
        self.kept = 0
        self.marks: dict[str, tuple[int, int]] = {}
        self.table = (0, 0)

    def need(self, count: int, what: str) -> None:
        """Make ``count`` bytes from here on available."""
        end = self.at + count
        if end <= len(self.buffer):
            return
        if end > self.size:
            raise truncated(self.path, f"{what} ends at byte {end} of {self.size}")
        if end > HEADER_LIMIT:
            raise broken(self.path, f"its header is longer than {HEADER_LIMIT >> 20} MiB")
        goal = min(max(end, 2 * len(self.buffer), 2**18), self.size, HEADER_LIMIT)
        self.buffer += self.handle.read(goal - len(self.buffer))
        if len(self.buffer) < end:
            raise truncated(self.path, f"{what} could not be read to its end")

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = _U32.unpack_from(self.buffer, self.at)
        self.at += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = _U64.unpack_from(self.buffer, self.at)
        self.at += 8
        return int(value)

    def text(self, what: str) -> str:
        length = self.u64(what)
        if length > MAX_TEXT:
            raise broken(self.path, f"{what} claims {length} bytes of text")
        self.need(length, what)
        raw = bytes(self.buffer[self.at : self.at + length])
        self.at += length
        return raw.decode("utf-8", errors="replace")

    def scalar(self, kind: int, what: str) -> Scalar:
        if kind == _STRING:
            return self.text(what)
        if kind not in _SCALARS:
            raise broken(self.path, f"{what} has the unknown value type {kind}")
        _, code, width = _SCALARS[kind]
        self.need(width, what)
        value: Scalar
        (value,) = struct.unpack_from("<" + code, self.buffer, self.at)
        self.at += width
        return value

    def array(self, what: str) -> ArrayValue:
        kind, count = self.u32(what), self.u64(what)
        if kind == _STRING:
            return self._texts(count, what)
        if kind == _ARRAY:
            raise broken(self.path, f"{what} is an array of arrays")
        if kind not in _SCALARS:
            raise broken(self.path, f"{what} has the unknown element type {kind}")
        name, code, width = _SCALARS[kind]
        if count > self.size:
            raise truncated(self.path, f"{what} claims {count} elements")
        self.need(count * width, what)
        values: tuple[Scalar, ...] | None = None
        if count <= KEEP_NUMBERS and self._keep(count):
            values = struct.unpack_from(f"<{count}{code}", self.buffer, self.at)
        digest = self._digest(self.at, self.at + count * width)
        self.at += count * width
        return ArrayValue(name, count, digest, values)

    def _texts(self, count: int, what: str) -> ArrayValue:
        if count > self.size // 8:
            raise truncated(self.path, f"{what} claims {count} strings")
        start = self.at
        if count <= KEEP_TEXTS and self._keep(count):
            values = tuple(self.text(what) for _ in range(count))
            return ArrayValue("string", count, self._digest(start, self.at), values)
        at, have, unpack = self.at, len(self.buffer), _U64.unpack_from
        for _ in range(count):
            if at + 8 > have:
                self.at = at
                self.need(8, what)
                have = len(self.buffer)
            at += 8 + unpack(self.buffer, at)[0]
            if at > have:
                self.at = at
                self.need(0, what)
                have = len(self.buffer)
        self.at = at
        return ArrayValue("string", count, self._digest(start, at), None)

    def _keep(self, count: int) -> bool:
        self.kept += count
        return self.kept <= MAX_KEPT

    def _digest(self, start: int, end: int) -> str:
        with memoryview(self.buffer) as view, view[start:end] as part:
            return hashlib.sha256(part).hexdigest()


def _parse(cursor: _Cursor, path: Path, size: int, complete: bool) -> Header:
    _check_magic(cursor, path, size)
    version = _check_version(cursor, path)
    n_tensors, n_keys = cursor.u64("the tensor count"), cursor.u64("the key count")
    for count, what in ((n_tensors, "tensors"), (n_keys, "metadata keys")):
        if count > MAX_ENTRIES:
            raise broken(path, f"it claims {count} {what}")
    metadata: dict[str, Scalar | ArrayValue] = {}
    for index in range(n_keys):
        start = cursor.at
        key = cursor.text(f"metadata key {index}")
        if key in metadata:
            raise broken(path, f"the key {key[:80]!r} appears twice")
        what = f"the value of {key[:80]!r}"
        kind = cursor.u32(what)
        metadata[key] = cursor.array(what) if kind == _ARRAY else cursor.scalar(kind, what)
        cursor.marks[key] = (start, cursor.at)
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or not 1 <= align <= 2**20 or align & (align - 1):
        raise broken(path, f"its alignment is {align!r}, not a power of two")
    start = cursor.at
    found = _tensor_table(cursor, path, n_tensors)
    cursor.table = (start, cursor.at)
    data_offset = -(-cursor.at // align) * align
    last = max((t.offset + t.bytes for t in found), default=0)
    if complete and found and data_offset + last > size:
        raise truncated(path, f"tensor data needs {data_offset + last} bytes, it has {size}")
    return Header(path, version, metadata, found, data_offset, size)


def _tensor_table(cursor: _Cursor, path: Path, count: int) -> tuple[Tensor, ...]:
    found: dict[str, Tensor] = {}
    for index in range(count):
        name = cursor.text(f"the name of tensor {index}")
        what = f"the entry of tensor {name[:80]!r}"
        n_dims = cursor.u32(what)
        if not 1 <= n_dims <= 4:
            raise broken(path, f"{what} has {n_dims} dimensions")
        shape = tuple(cursor.u64(what) for _ in range(n_dims))
        number, offset = cursor.u32(what), cursor.u64(what)
        if name in found:
            raise broken(path, f"the tensor {name[:80]!r} appears twice")
        kind = TYPE_BY_NUMBER.get(number)
        if kind is None:
            raise BadModelFile(
                f"{path} holds a tensor of a type this version does not know",
                why=f"{name[:80]!r} has ggml type {number}",
                fix="update browndwarf, or requantize the model to a common type",
            )
        found[name] = Tensor(name, kind.name, shape, offset, _sized(shape, kind, path, what))
    return tuple(found.values())


def _sized(shape: tuple[int, ...], kind: GgmlType, path: Path, what: str) -> int:
    total = 1
    for size in shape:
        total *= size
        if total >= 2**63 or size < 1:
            raise broken(path, f"{what} has the impossible shape {list(shape)}")
    if shape[0] % kind.block:
        raise broken(path, f"{what} has rows of {shape[0]}, no whole {kind.name} blocks")
    return total // kind.block * kind.bytes


def _check_magic(cursor: _Cursor, path: Path, size: int) -> None:
    start = min(size, 32)
    cursor.need(start, "the magic")
    head = bytes(cursor.buffer[:start])
    if head[:4] != b"GGUF":
        raise foreign(path, head, size)
    cursor.at = 4


def _check_version(cursor: _Cursor, path: Path) -> int:
    version = cursor.u32("the version")
    if version not in (2, 3):
        raise bad_version(path, version)
    return version
