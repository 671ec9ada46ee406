"""What an interrupted importance matrix leaves behind, and whether it may be gone on with.

Boundary: files and identity; ``importance`` does the work. ``OUT.parts`` beside the result holds
the text as it was at the start, one imatrix of everything so far, ``state.json``, which is written
after each segment, and a lock. A kill at any moment leaves a state that names a whole file; what
else it leaves is removed by the next run. The folder goes when the result has its name.

Example:
    with work_folder(parts):
        found = State.load(parts)
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from browndwarf.errors import BadModelFile, RunChanged, RunFormatError, StorageError
from browndwarf.files import atomic_write, storage_error, storage_errors
from browndwarf.models.imatrix import read_imatrix
from browndwarf.records import Record, decode, encode

_LOCK, _STATE = "lock", "state.json"
_OURS = re.compile(r"lock|state\.json|chunks-\d+\.gguf|.*\.txt|\..*")
_WORDS = {
    "model": "the model's content",
    "text": "the text",
    "engine": "the build of llama.cpp",
    "ctx": "--ctx",
    "chunks": "--chunks",
    "output_tensor": "--output-tensor",
}


class Identity(Record, frozen=True, kw_only=True):
    """What must not change between start and resume. ``chunks`` is None for the whole text."""

    model: str
    text: str
    engine: str
    ctx: int
    chunks: int | None
    output_tensor: bool

    def differences(self, other: Identity) -> list[str]:
        """What differs, in words for people."""
        return [w for name, w in _WORDS.items() if getattr(self, name) != getattr(other, name)]


class State(Record, frozen=True, kw_only=True):
    """How far a run has come.

    Attributes:
        tokens: in the whole text.
        total, done: chunks.
        file: the imatrix of everything so far, by its name in the folder; empty before the first.
        log_ppl: sum of the mean losses of ``ppl_chunks`` chunks, in nats.
    """

    identity: Identity
    tokens: int
    total: int
    done: int = 0
    file: str = ""
    log_ppl: float = 0.0
    ppl_chunks: int = 0
    seconds: float = 0.0

    @property
    def ppl(self) -> float | None:
        """Perplexity over what is done."""
        return math.exp(self.log_ppl / self.ppl_chunks) if self.ppl_chunks else None

    @classmethod
    def load(cls, parts: Path) -> Self:
        """The state as it was saved last.

        Raises:
            StorageError, RunFormatError: it cannot be read.
        """
        with storage_errors(parts, "read the state of an interrupted run"):
            return decode(cls, (parts / _STATE).read_bytes())

    def save(self, parts: Path) -> None:
        """Write it whole, then remove what it no longer needs."""
        atomic_write(parts / _STATE, encode(self))
        for old in parts.glob("chunks-*.gguf"):
            if old.name != self.file:
                old.unlink(missing_ok=True)


def interrupted_run(parts: Path, identity: Identity, *, force: bool) -> State | None:
    """The state to go on from; None where there is none, or ``force`` discards another run's.

    Raises:
        RunChanged: there is one, of another identity.
        RunFormatError: there is one, and it is damaged.
    """
    if not (parts / _STATE).exists():
        return None
    try:
        state = State.load(parts)
        if state.file:
            read_imatrix(parts / state.file)
    except (RunFormatError, BadModelFile, StorageError) as exc:
        if force:
            return None
        raise RunFormatError(
            f"the interrupted run in {parts} is damaged",
            why=exc.why or exc.what,
            fix="add --force to begin anew",
        ) from exc
    if changed := state.identity.differences(identity):
        if force:
            return None
        raise RunChanged(
            f"{parts} holds an interrupted run that was another one",
            why=f"since then changed: {', '.join(changed)}",
            fix="run it as it was begun, or add --force to begin anew",
        )
    return state


def clear(parts: Path, state: State | None) -> None:
    """Remove everything that ``state`` does not name."""
    keep = {_LOCK} if state is None else {_LOCK, _STATE, state.file}
    with storage_errors(parts, f"write into {parts.name}"):
        for old in parts.iterdir():
            if old.name not in keep:
                old.unlink()


@contextlib.contextmanager
def work_folder(parts: Path) -> Iterator[None]:
    """The folder, made if need be, for this process alone; it goes again if nothing was done.

    Raises:
        StorageError: another process works in it, it holds other files, or it cannot be made.
    """
    with storage_errors(parts, f"make the folder {parts.name}"):
        parts.mkdir(parents=True, exist_ok=True)
        foreign = [old.name for old in parts.iterdir() if not _OURS.fullmatch(old.name)]
    if foreign:
        raise StorageError(
            f"{parts} holds files that are none of ours",
            why=f"for example {foreign[0]}",
            fix="move them elsewhere, or choose another --output",
        )
    lock = FileLock(parts / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as exc:  # an OSError too
        raise StorageError(
            f"another process works in {parts}",
            why="its lock is held",
            fix="wait for it, stop it, or choose another --output",
        ) from exc
    except OSError as exc:
        raise storage_error(exc, parts, "lock the folder") from exc
    try:
        yield
    except BaseException:
        if not any(parts.glob("chunks-*.gguf")):
            shutil.rmtree(parts, ignore_errors=True)
        raise
    finally:
        lock.release()
