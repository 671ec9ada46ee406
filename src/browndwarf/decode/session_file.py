"""One session on disk: a data file that grows, and a manifest that says what of it counts.

A record is a few sections (named bytes) appended to the data file; then the manifest, which lists
every section with its length and checksum, is replaced as a whole. Until that moment the last
state is untouched, and what a killed writer left behind the listed end is overwritten later. So a
session is always the last one that was saved, or is refused with the reason.

Sections are stored in parts, each with a checksum and compressed by itself, so that several threads
can read them at once: a part is read, checked and handed on while it is in a core's cache.

All access to the disk goes through ``Disk``, so that tests can fail any of it.

Example:
    file = SessionFile(Path("sessions/anna"), Disk())
    file.write({"tokens": [data]}, about=b"{}", append=True)
    file.read().sections("tokens")
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from browndwarf.decode.session_parts import PART, by_threads, checksum, cut, expand, shrink
from browndwarf.decode.state_layout import Bytes
from browndwarf.errors import RunFormatError
from browndwarf.files import storage_errors

_FAMILY = b"browndwarf-session "
_MAGIC = _FAMILY + b"2 "
_DIGEST = 32
_MAX_MANIFEST = 64 << 20

Sink = Callable[[int, Bytes], None]
"""Takes a piece of a section and where it begins; the piece is valid until the call returns."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """At most 4 MiB of a section: bytes in the file and their checksum."""

    stored: int
    checksum: str


class Section(msgspec.Struct, frozen=True):
    """A named piece of the data file; its parts lie one after the other from ``offset`` on."""

    name: str
    record: int
    offset: int
    length: int
    parts: list[Part]
    codec: str = "none"

    @property
    def stored(self) -> int:
        """Bytes in the file."""
        return sum(part.stored for part in self.parts)


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

    def read(self, path: Path, offset: int, out: Bytes) -> int:
        """Fill ``out`` from ``offset`` on; the bytes that were there."""
        with path.open("rb", buffering=0) as stream:
            stream.seek(offset)
            got = 0
            while got < out.nbytes and (more := stream.readinto(out[got:].data)):
                got += more
            return got


class Contents:
    """A session's manifest, and its data section by section as they are asked for."""

    def __init__(self, folder: Path, manifest: Manifest, disk: Disk) -> None:
        self.manifest = manifest
        self._folder = folder
        self._path = folder / manifest.data
        self._disk = disk

    def named(self, name: str) -> list[Section]:
        """The sections of a name in the order of records."""
        return [s for s in self.manifest.sections if s.name == name]

    def sections(self, name: str) -> list[Bytes]:
        """Their contents, checked.

        Raises:
            RunFormatError: one is damaged.
        """
        return [self._content(section) for section in self.named(name)]

    def _content(self, section: Section) -> Bytes:
        if section.length > len(section.parts) * PART:
            raise self._wrong(section)
        content: Bytes = np.empty(section.length, np.uint8)

        def keep(at: int, piece: Bytes) -> None:
            content[at : at + piece.nbytes] = piece

        self.spread([(section, keep)])
        return content

    def spread(self, wanted: Sequence[tuple[Section, Sink]]) -> None:
        """Read sections in parts, in no order and by several threads, and hand each part to its
        section's sink when it was found sound.

        Raises:
            RunFormatError: one is damaged; its sink has had only what is sound.
        """
        jobs: list[tuple[Section, Sink, int, int]] = []
        for section, sink in wanted:
            place = section.offset
            for i, part in enumerate(section.parts):
                jobs.append((section, sink, i, place))
                place += part.stored
        local = threading.local()
        largest = max((part.stored for section, _ in wanted for part in section.parts), default=0)

        def work(job: tuple[Section, Sink, int, int]) -> None:
            if not hasattr(local, "buffer"):
                # Not from the heap, whose holes would keep the process large.
                memory = mmap.mmap(-1, max(1, min(largest, PART)))
                local.buffer = np.frombuffer(memory, np.uint8)
            section, sink, i, place = job
            sink(i * PART, self._part(section, i, place, local.buffer))

        with storage_errors(self._path, "read a session"):
            by_threads(work, jobs)

    def _part(self, section: Section, number: int, place: int, buffer: Bytes) -> Bytes:
        """One part's content, checked; in ``buffer`` where it fits."""
        part = section.parts[number]
        length = min(PART, section.length - number * PART)
        if (
            length < 0
            or not 0 <= part.stored <= 2 * PART
            or place + part.stored > self.manifest.end
        ):
            raise self._wrong(section)
        stored = buffer[: part.stored] if part.stored <= PART else np.empty(part.stored, np.uint8)
        got = self._disk.read(self._path, place, stored)
        if got != part.stored or checksum(stored) != part.checksum:
            raise self._wrong(section)
        if section.codec == "none":
            content = stored
        else:
            try:
                content = expand(stored)
            except ValueError as exc:
                raise self._wrong(section) from exc
        if content.nbytes != length:
            raise self._wrong(section)
        return content

    def _wrong(self, section: Section) -> RunFormatError:
        why = f"section {section.name!r} of record {section.record} is damaged"
        return damaged(self._folder, why)


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
            content: Bytes = np.empty(path.stat().st_size, np.uint8)
            text = content[: self._disk.read(path, 0, content)].tobytes()
        if text.startswith(_FAMILY) and not text.startswith(_MAGIC):
            raise damaged(self.folder, "another version of browndwarf saved it, or it is damaged")
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
        """The manifest, and the data for reading. Raises as ``manifest`` does, and where the data
        is missing."""
        manifest = self.manifest()
        if not (self.folder / manifest.data).is_file():
            raise damaged(self.folder, "its data file is missing")
        return Contents(self.folder, manifest, self._disk)

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
        codec, stored = "none", cut(content)
        if self._compress and length > 4096:
            codec, stored = "zstd", by_threads(shrink, stored)
        sums = by_threads(checksum, stored)
        parts = [Part(p.nbytes, text) for p, text in zip(stored, sums, strict=True)]
        return Section(name, record, offset, length, parts, codec), stored


def damaged(folder: Path, why: str) -> RunFormatError:
    """The refusal of a session that cannot be trusted."""
    return RunFormatError(
        f"the session {folder.name!r} cannot be resumed",
        why=why,
        fix="delete it, or ask for a resume that reads the conversation again",
    )


def _head(body: bytes) -> bytes:
    return _MAGIC + hashlib.blake2b(body, digest_size=_DIGEST // 2).hexdigest().encode() + b"\n"
