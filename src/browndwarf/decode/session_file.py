"""One session on disk: a data file that grows, and a manifest that says what of it counts.

A record is a few sections (named bytes) appended to the data file; then the manifest, which lists
every section with its length and checksum, is replaced as a whole. Until that moment the last
state is untouched, and what a killed writer left behind the listed end is overwritten later. So a
session is always the last one that was saved, or is refused with the reason.

All access to the disk goes through ``Disk``, so that tests can fail any of it.

Example:
    file = SessionFile(Path("sessions/anna"), Disk())
    file.write({"tokens": [data]}, about=b"{}", append=True)
    file.read().sections("tokens")
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from browndwarf.decode.state_layout import Bytes
from browndwarf.errors import RunFormatError
from browndwarf.files import storage_errors

_MAGIC = b"browndwarf-session 1 "
_DIGEST = 32
_PART = 16 << 20
_MAX_MANIFEST = 64 << 20


class Section(msgspec.Struct, frozen=True):
    """A named piece of the data file. Parts of at most 16 MiB have a checksum each."""

    name: str
    record: int
    offset: int
    length: int
    checksums: list[str]
    codec: str = "none"
    stored: int = 0


class Manifest(msgspec.Struct, frozen=True):
    """What counts: the data file's name, its sections, and what the writer says ``about`` it."""

    data: str
    records: int
    end: int
    sections: list[Section]
    about: msgspec.Raw


class Disk:
    """The operating system's files; a test's fake fails where it is told to."""

    def write(self, path: Path, offset: int, pieces: Iterable[Bytes]) -> None:
        """Write pieces one after the other from ``offset`` on, cut the file there, and wait
        until the disk has it."""
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        handle = os.open(path, flags, 0o600)
        with os.fdopen(handle, "r+b") as stream:
            stream.truncate(offset)
            stream.seek(offset)
            for piece in pieces:
                stream.write(piece.data.cast("B"))
            stream.flush()
            os.fsync(stream.fileno())

    def replace(self, new: Path, old: Path) -> None:
        """Put ``new`` in the place of ``old``, at once."""
        new.replace(old)
        with contextlib.suppress(OSError):
            handle = os.open(old.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def remove(self, path: Path) -> None:
        """Delete a file that may be gone already."""
        path.unlink(missing_ok=True)

    def read(self, path: Path) -> Bytes:
        """A whole file."""
        return np.fromfile(path, np.uint8)


class Contents:
    """A session's manifest and data, checked section by section as they are asked for."""

    def __init__(self, path: Path, manifest: Manifest, data: Bytes | Path) -> None:
        """``data`` is the data file's content, or its path, to read only what is asked for."""
        self.manifest = manifest
        self._path = path
        self._data = data

    def sections(self, name: str) -> list[Bytes]:
        """All sections of a name in the order of records, checked.

        Raises:
            RunFormatError: one is damaged.
        """
        found = [s for s in self.manifest.sections if s.name == name]
        return [self._checked(section) for section in found]

    def _checked(self, section: Section) -> Bytes:
        stored = self._stored(section)
        parts = [stored[i : i + _PART] for i in range(0, max(len(stored), 1), _PART)]
        if len(stored) != section.stored or _checksums(parts) != section.checksums:
            raise damaged(
                self._path, f"section {section.name!r} of record {section.record} is damaged"
            )
        if section.codec == "none":
            return stored
        return _expand(self._path, section, stored)

    def _stored(self, section: Section) -> Bytes:
        if isinstance(self._data, Path):
            with storage_errors(self._data, "read a session"):
                return np.fromfile(self._data, np.uint8, section.stored, offset=section.offset)
        return self._data[section.offset : section.offset + section.stored]


class SessionFile:
    """The files of one session in ``folder``. One writer at a time."""

    def __init__(self, folder: Path, disk: Disk, *, compress: bool = False) -> None:
        self.folder = folder
        self._disk = disk
        self._compress = compress
        self._manifest_path = folder / "manifest"

    def manifest(self) -> Manifest:
        """The manifest alone.

        Raises:
            FileNotFoundError: there is no such session.
            RunFormatError: it is damaged.
        """
        path = self._manifest_path
        if not path.is_file():
            raise FileNotFoundError(path)
        with storage_errors(path, "read a session"):
            if path.stat().st_size > _MAX_MANIFEST:
                raise damaged(self.folder, "its manifest is too long")
            text = self._disk.read(path).tobytes()
        head = len(_MAGIC) + _DIGEST + 1
        body = text[head:]
        if not text.startswith(_MAGIC) or text[:head] != _head(body):
            raise damaged(self.folder, "its manifest is damaged")
        try:
            manifest = msgspec.json.decode(body, type=Manifest)
        except msgspec.DecodeError as exc:
            raise damaged(self.folder, f"its manifest is of another form: {exc}") from exc
        if "/" in manifest.data or "\\" in manifest.data or not manifest.data.startswith("data-"):
            raise damaged(self.folder, "its manifest names a file outside")
        return manifest

    def read(self) -> Contents:
        """Manifest and data. Raises as ``manifest`` does, and where the data is missing."""
        small = self.read_small()
        path = self.folder / small.manifest.data
        with storage_errors(path, "read a session"):
            data = self._disk.read(path)
        return Contents(self.folder, small.manifest, data)

    def read_small(self) -> Contents:
        """As ``read``, but of the data only the sections that are asked for."""
        manifest = self.manifest()
        path = self.folder / manifest.data
        if not path.is_file():
            raise damaged(self.folder, "its data file is missing")
        return Contents(self.folder, manifest, path)

    def write(self, sections: Mapping[str, Sequence[Bytes]], about: bytes, *, append: bool) -> int:
        """Add a record, or begin anew with it; returns the bytes written.

        Raises:
            DiskFull, StorageError: the disk refused; the last state is untouched.
            RunFormatError: there is a last state and it is damaged (with ``append``).
        """
        old: Manifest | None = None
        with contextlib.suppress(FileNotFoundError):
            try:
                old = self.manifest()
            except RunFormatError:
                if append:
                    raise
        if append and old is not None:
            name, record, start, listed = old.data, old.records, old.end, list(old.sections)
        else:
            name, record, start, listed = self._next_name(), 0, 0, []
        pieces: list[Bytes] = []
        end = start
        for section, content in sections.items():
            made, stored = self._section(section, record, end, content)
            listed.append(made)
            pieces += stored
            end += made.stored
        manifest = Manifest(name, record + 1, end, listed, msgspec.Raw(about))
        body = msgspec.json.encode(manifest)
        text = np.frombuffer(_head(body) + body, np.uint8)
        temporary = self.folder / "manifest.new"
        with storage_errors(self.folder, "save a session"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._disk.write(self.folder / name, start, pieces)
            self._disk.write(temporary, 0, [text])
            self._disk.replace(temporary, self._manifest_path)
        # The new state counts from here on; what cannot be tidied now is tidied next time.
        with contextlib.suppress(OSError):
            for path in self.folder.glob("data-*"):
                if path.name != name:
                    self._disk.remove(path)
        return end - start + len(text)

    def _next_name(self) -> str:
        taken = [int(p.name[5:]) for p in self.folder.glob("data-*") if p.name[5:].isdigit()]
        return f"data-{max(taken, default=0) + 1}"

    def _section(
        self, name: str, record: int, offset: int, content: Sequence[Bytes]
    ) -> tuple[Section, list[Bytes]]:
        length = sum(piece.nbytes for piece in content)
        codec, stored = "none", list(content)
        if self._compress and length > 4096:
            codec, stored = "zstd", [_shrink(content)]
        size = sum(piece.nbytes for piece in stored)
        checksums = _checksums(_parts(stored))
        return Section(name, record, offset, length, checksums, codec, size), stored


def damaged(folder: Path, why: str) -> RunFormatError:
    """The refusal of a session that cannot be trusted."""
    return RunFormatError(
        f"the session {folder.name!r} cannot be resumed",
        why=why,
        fix="delete it, or ask for a resume that reads the conversation again",
    )


def _head(body: bytes) -> bytes:
    return _MAGIC + hashlib.blake2b(body, digest_size=_DIGEST // 2).hexdigest().encode() + b"\n"


def _parts(pieces: Sequence[Bytes]) -> list[Bytes]:
    """The pieces as one stream, cut every 16 MiB; copies only where a part spans pieces."""
    parts: list[Bytes] = []
    pending: list[Bytes] = []
    room = _PART
    for piece in pieces:
        at = 0
        while at < piece.nbytes:
            taken = piece[at : at + room]
            pending.append(taken)
            at += taken.nbytes
            room -= taken.nbytes
            if not room:
                parts.append(pending[0] if len(pending) == 1 else np.concatenate(pending))
                pending, room = [], _PART
    if pending or not parts:
        parts.append(np.concatenate(pending) if pending else np.empty(0, np.uint8))
    return parts


def _checksums(parts: Sequence[Bytes]) -> list[str]:
    """Of each part; threads share the work, because hashing lets others run."""
    if len(parts) == 1:
        return [_checksum(parts[0])]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_checksum, parts))


def _checksum(part: Bytes) -> str:
    return hashlib.blake2b(part.data, digest_size=12).hexdigest()


def _shrink(content: Sequence[Bytes]) -> Bytes:
    zstandard = importlib.import_module("zstandard")
    data = np.concatenate(content) if content else np.empty(0, np.uint8)
    packed = zstandard.ZstdCompressor(level=1, threads=-1).compress(data.data)
    return np.frombuffer(packed, np.uint8)


def _expand(path: Path, section: Section, stored: Bytes) -> Bytes:
    try:
        zstandard = importlib.import_module("zstandard")
        data = zstandard.ZstdDecompressor().decompress(stored.data, max_output_size=section.length)
    except ImportError as exc:
        raise damaged(path, "it is compressed, and zstandard is not installed") from exc
    except Exception as exc:
        raise damaged(path, f"section {section.name!r} does not unpack: {exc}") from exc
    return np.frombuffer(data, np.uint8)
