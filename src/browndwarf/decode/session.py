"""Conversations on disk: what a cache holds, so that a conversation goes on without reading again.

A session keeps the target's state and the head's, the tokens, the sampler and the messages, and
the fingerprint of everything that the states depend on. Saving appends what has changed since the
last save; a session that has grown in too many pieces is written anew. A session that does not fit
the loaded models, or that is damaged, is refused with the reason and never half used.

When the rows that a turn adds would cost more than a twentieth of the whole (wide sliding-window
layers and a short turn), and the turn is short, only its tokens are saved: they are decoded again
when the session goes on. ``Snapshot.kept`` says how many tokens the states hold.

Boundary: no model is touched here. ``store.save`` and ``store.load`` may run in any process; two
writers of one session are kept apart by a lock.

Example:
    store = SessionStore(Path("sessions"), cap_bytes=8 * GIB)
    store.save("anna", snapshot, fingerprint)
    store.load("anna", fingerprint).tokens
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import msgspec
import numpy as np

from browndwarf.decode.session_file import Contents, Disk, Section, SessionFile, Sink, damaged
from browndwarf.decode.session_parts import require_zstd
from browndwarf.decode.session_records import About, Note, Saved, SessionInfo, Snapshot
from browndwarf.decode.state_delta import Assembly, describe
from browndwarf.decode.state_layout import Bytes, parse
from browndwarf.errors import RunChanged, RunFormatError, StorageError, UsageError
from browndwarf.files import storage_errors

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
_MAX_RECORDS = 24
_REPLAY_TOKENS = 256
_SMALL_SHARE = 0.05


class SessionStore:
    """All sessions of a folder; together they stay under ``cap_bytes`` (0 is no limit)."""

    def __init__(
        self,
        folder: Path,
        *,
        cap_bytes: int = 0,
        disk: Disk | None = None,
        compress: bool = False,
    ) -> None:
        if compress:
            require_zstd()
        self.folder = folder
        self.cap_bytes = cap_bytes
        self._disk = disk or Disk()
        self._compress = compress

    # -- saving ----------------------------------------------------------------------------

    def save(self, name: str, snapshot: Snapshot, fingerprint: Mapping[str, str]) -> Saved:
        """Save a conversation; the last saved state stays if anything fails.

        Afterwards ``snapshot.layouts`` and ``unchanged`` describe what the disk holds.

        Raises:
            UsageError: the name is not safe.
            DiskFull, StorageError: the disk refused, or another process is saving it.
        """
        file = self._file(name)
        with storage_errors(self.folder, "save a session"):
            file.folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(file.folder / "lock", timeout=10)
        try:
            with lock:
                saved = self._save(file, snapshot, fingerprint)
        except filelock.Timeout as exc:
            raise StorageError(
                f"the session {name!r} is being saved by another process", fix="try again"
            ) from exc
        self._evict(keep=name)
        return saved

    def _save(self, file: SessionFile, snapshot: Snapshot, fingerprint: Mapping[str, str]) -> Saved:
        before = self._appendable(file, snapshot, fingerprint)
        layouts = {key: parse(state) for key, state in snapshot.states.items()}
        whole = sum(state.nbytes for state in snapshot.states.values())
        kept, states, replay = snapshot.kept, {}, 0
        payloads: dict[str, list[Bytes]] = {}
        for key, state in snapshot.states.items():
            old = snapshot.layouts.get(key) if before is not None else None
            record, pieces = describe(state, layouts[key], old, snapshot.unchanged)
            states[key], payloads[f"state:{key}"] = record, pieces
        added = sum(piece.nbytes for pieces in payloads.values() for piece in pieces)
        if before is not None:
            last = before[1]
            ahead = snapshot.kept - last.kept
            if (
                added > _SMALL_SHARE * whole
                and 0 < ahead <= _REPLAY_TOKENS
                and snapshot.unchanged >= last.kept
            ):
                kept, states, payloads, replay = last.kept, {}, {}, ahead
        tokens = np.asarray(snapshot.tokens, np.int32)
        tokens_from = min(snapshot.unchanged, before[0].tokens) if before is not None else 0
        messages_from = _same(before[2], snapshot.messages) if before is not None else 0
        note = Note(
            kept=kept,
            rows=(snapshot.rows.shape[0], snapshot.rows.shape[1]),
            tokens_from=tokens_from,
            messages_from=messages_from,
            messages=snapshot.messages[messages_from:],
            sampler=snapshot.sampler,
            states=states,
        )
        about = About(
            fingerprint=dict(fingerprint),
            tokens=len(tokens),
            messages=len(snapshot.messages),
            saved_unix=time.time(),
            full_bytes=whole,
            title=_title(snapshot.messages),
        )
        sections = {
            "note": [np.frombuffer(msgspec.json.encode(note), np.uint8)],
            "tokens": [tokens[tokens_from:].view(np.uint8)],
            "rows": [np.ascontiguousarray(snapshot.rows).reshape(-1).view(np.uint8)],
            **payloads,
        }
        written = file.write(sections, msgspec.json.encode(about), append=before is not None)
        if not replay:
            snapshot.layouts = layouts
            snapshot.unchanged = snapshot.kept
        return Saved(written, whole, before is not None, replay)

    def _appendable(
        self, file: SessionFile, snapshot: Snapshot, fingerprint: Mapping[str, str]
    ) -> tuple[About, Note, list[dict[str, Any]]] | None:
        """The last saved state's small things, where this save may continue it."""
        if not snapshot.layouts or snapshot.unchanged <= 0:
            return None
        try:
            contents = file.read()
            about = _about(file.folder, contents)
            notes = _notes(file.folder, contents)
        except (FileNotFoundError, RunFormatError):
            return None
        grown = contents.manifest.end > 2 * about.full_bytes + (1 << 20)
        fits = about.fingerprint == dict(fingerprint) and snapshot.unchanged <= about.tokens
        if len(notes) >= _MAX_RECORDS or grown or not fits:
            return None
        held = [n for n in notes if n.states]
        if not held or set(held[-1].states) != set(snapshot.states):
            return None
        return about, held[-1], _messages(notes)

    # -- loading ---------------------------------------------------------------------------

    def load(self, name: str, fingerprint: Mapping[str, str], *, states: bool = True) -> Snapshot:
        """The conversation as it was last saved. ``states`` False skips the caches' contents, so
        that a conversation can be read again by models that do not fit.

        Raises:
            UsageError: there is no such session, or the name is not safe.
            RunChanged: it was made with other models, settings or another engine.
            RunFormatError: it is damaged.
        """
        file = self._file(name)
        try:
            contents = file.read()
        except FileNotFoundError as exc:
            raise _unknown(name) from exc
        about = _about(file.folder, contents)
        if states:
            _compare(name, about.fingerprint, fingerprint)
        notes = _notes(file.folder, contents)
        try:
            snapshot = _replay(contents, notes, states)
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as exc:
            raise damaged(file.folder, str(exc)) from exc
        if len(snapshot.tokens) != about.tokens:
            raise damaged(file.folder, "its tokens are not complete")
        with storage_errors(file.folder, "note a session's use"):
            (file.folder / "manifest").touch()
        return snapshot

    # -- keeping house ---------------------------------------------------------------------

    def list(self) -> list[SessionInfo]:
        """All sessions, the last used first."""
        if not self.folder.is_dir():
            return []
        folders = [p for p in self.folder.iterdir() if (p / "manifest").is_file()]
        folders.sort(key=lambda p: -(p / "manifest").stat().st_mtime)
        return [self._info(folder) for folder in folders]

    def has(self, name: str) -> bool:
        """Whether there is a session of that name, sound or not.

        Raises:
            UsageError: the name is not safe.
        """
        return (self._file(name).folder / "manifest").is_file()

    def delete(self, name: str) -> None:
        """Remove a session.

        Raises:
            UsageError: there is none of that name.
            StorageError: the disk refused.
        """
        folder = self._file(name).folder
        if not folder.is_dir():
            raise _unknown(name)
        with storage_errors(folder, "delete a session"):
            # Without its manifest a session is gone, whatever happens to the rest.
            (folder / "manifest").unlink(missing_ok=True)
            shutil.rmtree(folder)

    def _info(self, folder: Path) -> SessionInfo:
        size = sum(p.stat().st_size for p in folder.iterdir() if p.is_file())
        file = SessionFile(folder, self._disk)
        try:
            manifest = file.manifest()
            about = msgspec.json.decode(manifest.about, type=About)
        except (RunFormatError, msgspec.DecodeError) as exc:
            why = exc.why if isinstance(exc, RunFormatError) else str(exc)
            return SessionInfo(folder.name, bytes=size, problem=why)
        return SessionInfo(
            folder.name, about.tokens, about.messages, size, about.saved_unix, about.title
        )

    def _evict(self, keep: str) -> None:
        """Delete the least recently used until all fit; never the one that was just saved."""
        if not self.cap_bytes:
            return
        sessions = self.list()
        total = sum(info.bytes for info in sessions)
        for info in reversed(sessions):
            if total <= self.cap_bytes:
                return
            if info.name != keep:
                self.delete(info.name)
                total -= info.bytes

    def _file(self, name: str) -> SessionFile:
        if not _NAME.fullmatch(name) or _RESERVED.fullmatch(name) or name.endswith((".", " ")):
            raise UsageError(
                f"{name!r} cannot be a session's name",
                why="a name is up to 64 letters, digits, spaces, dots, dashes and underscores, "
                "and begins with a letter or digit",
                fix="choose another name",
            )
        return SessionFile(self.folder / name, self._disk, compress=self._compress)


def _about(folder: Path, contents: Contents) -> About:
    try:
        return msgspec.json.decode(contents.manifest.about, type=About)
    except msgspec.DecodeError as exc:
        raise damaged(folder, f"its description is of another form: {exc}") from exc


def _notes(folder: Path, contents: Contents) -> list[Note]:
    try:
        return [msgspec.json.decode(bytes(s), type=Note) for s in contents.sections("note")]
    except msgspec.DecodeError as exc:
        raise damaged(folder, f"a record's notes are of another form: {exc}") from exc


def _messages(notes: list[Note]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for note in notes:
        del messages[note.messages_from :]
        messages += note.messages
    return messages


def _replay(contents: Contents, notes: list[Note], states: bool) -> Snapshot:
    """Put records together, in order."""
    tokens: list[int] = []
    for note, part in zip(notes, contents.sections("tokens"), strict=True):
        if not 0 <= note.tokens_from <= len(tokens):
            raise ValueError("a record continues tokens that are not there")
        tokens[note.tokens_from :] = part.view(np.int32).tolist()
    last = notes[-1]
    # Hidden rows go with the states, which a record of mere tokens does not have.
    place = max(i for i, note in enumerate(notes) if note.states)
    rows = contents.sections("rows")[place].view(np.float32).reshape(notes[place].rows).copy()
    snapshot = Snapshot(tokens, last.kept, rows, {}, _messages(notes), last.sampler)
    if not 0 <= snapshot.kept <= len(tokens):
        raise ValueError("more tokens are decoded than there are")
    if not states:
        snapshot.kept = 0
        return snapshot
    holding = [note for note in notes if note.states]
    parts: list[tuple[Section, Sink]] = []
    assemblies: dict[str, Assembly] = {}
    for key in holding[-1].states:
        made = assemblies[key] = Assembly([note.states[key] for note in holding])
        sections = contents.named(f"state:{key}")
        if [section.length for section in sections] != made.lengths:
            raise ValueError("a record's length does not agree with its description")
        parts += [(section, partial(made.place, i)) for i, section in enumerate(sections)]
    contents.spread(parts)
    for key, made in assemblies.items():
        snapshot.states[key] = made.finish()
        snapshot.layouts[key] = parse(snapshot.states[key])
    snapshot.kept = holding[-1].kept
    snapshot.unchanged = snapshot.kept
    return snapshot


def _compare(name: str, saved: Mapping[str, str], loaded: Mapping[str, str]) -> None:
    keys = sorted({*saved, *loaded})
    different = [
        f"{key} is {loaded.get(key, 'none')}, it was {saved.get(key, 'none')}"
        for key in keys
        if saved.get(key) != loaded.get(key)
    ]
    if different:
        raise RunChanged(
            f"the session {name!r} does not fit what is loaded",
            why="; ".join(different),
            fix="load it as it was, or ask for a resume that reads the conversation again",
        )


def _same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> int:
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def _title(messages: list[dict[str, Any]]) -> str:
    for message in messages:
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            return " ".join(message["content"].split())[:60]
    return ""


def _unknown(name: str) -> UsageError:
    return UsageError(
        f"there is no session {name!r}", fix="`browndwarf chat MODEL --sessions` lists them"
    )
