"""The run directory: what was asked, every finished cell, a CSV of it.

``run.sqlite`` is the truth. A cell is written in one transaction with full synchronisation, so
that a process killed at any moment has each cell either whole or not at all; a resumed run
measures what is missing. ``cells.csv`` is made anew after each cell. One process at a time
holds a run directory.

    runs/NAME/
      run.sqlite    meta (format, plan, identity) and one row a cell
      cells.csv     flat view of the cells
      logs/         one llama-server log a configuration
      run.lock      held while a sweep works here

Example:
    >>> with RunStore.create(Path("runs/x"), plan={}, identity={}) as store:  # doctest: +SKIP
    ...     store.save(cell)
"""

from __future__ import annotations

import csv
import io
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from filelock import FileLock, Timeout

from browndwarf.errors import DiskFull, RunChanged, RunFormatError, StorageError, UsageError
from browndwarf.files import atomic_write, check_writable, storage_errors
from browndwarf.records import RECORD_VERSION, CellRecord, decode, encode

FORMAT = f"browndwarf/run/{RECORD_VERSION}"

_SCHEMA = (
    "create table if not exists meta (key text primary key, value text not null)",
    "create table if not exists cell (id text primary key, seq integer not null, "
    "status text not null, finished_unix real not null, record blob not null)",
)

CSV_COLUMNS = (
    "id", "status", "role", "target_type", "head_type", "n_max", "workload", "ctx", "parallel",
    "kv", "layers", "threads", "ubatch", "p_min", "backend_sampling", "decode_tok_s",
    "decode_spread", "prefill_tok_s", "ttft_ms", "end_to_end_s", "acceptance", "per_position",
    "accepted_length", "cycle_ms", "memory_mib", "predicted_tok_s", "synthetic", "marks", "error",
)  # fmt: skip


class RunStore:
    """An open run directory. Use as a context manager; holds the directory's lock."""

    def __init__(self, directory: Path, connection: sqlite3.Connection, lock: FileLock) -> None:
        self.directory = directory
        self._db = connection
        self._lock = lock
        self._known: dict[str, CellRecord] | None = None

    @classmethod
    def create(cls, directory: Path, *, plan: dict[str, Any], identity: dict[str, str]) -> Self:
        """Start a run directory.

        ``plan`` is all that a resume needs to go on; ``identity`` names what must not change
        between start and resume (fingerprints of models and texts, engine, seeds).

        Raises:
            UsageError: the directory already holds a run.
            StorageError: it cannot be written, or another process holds it.
        """
        if (directory / "run.sqlite").exists():
            raise UsageError(
                f"{directory} already holds a run",
                why="a run is never overwritten",
                fix=f"continue it with --resume {directory}, or choose another --out",
            )
        with storage_errors(directory, "make the run directory"):
            (directory / "logs").mkdir(parents=True, exist_ok=True)
        store = cls._open(directory)
        with store._transaction() as db:
            for statement in _SCHEMA:
                db.execute(statement)
            values = {
                "format": FORMAT,
                "created_unix": repr(time.time()),
                "plan": msgspec.json.encode(plan).decode(),
                "identity": msgspec.json.encode(identity).decode(),
            }
            db.executemany("insert into meta values (?, ?)", values.items())
        return store

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open an existing run directory for going on.

        Raises:
            UsageError: there is no run.
            RunFormatError: it belongs to another version, or is damaged.
            StorageError: another process holds it.
        """
        _require_run(directory)
        store = cls._open(directory)
        try:
            _check_format(directory, store._db)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def _open(cls, directory: Path) -> Self:
        lock = FileLock(directory / "run.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as exc:
            raise StorageError(
                f"another process works in {directory}",
                why="run.lock is held",
                fix="wait for it, stop it, or choose another --out",
            ) from exc
        except OSError as exc:
            raise StorageError(
                f"cannot lock {directory}", why=str(exc), fix="check that it may be written"
            ) from exc
        try:
            db = sqlite3.connect(directory / "run.sqlite", isolation_level=None)
            # WAL with full synchronisation: a commit survives kill -9 and power loss.
            db.execute("pragma journal_mode=wal")
            db.execute("pragma synchronous=full")
        except sqlite3.Error as exc:
            lock.release()
            raise _sqlite_fault(exc, directory) from exc
        return cls(directory, db, lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the database and give the directory free."""
        self._db.close()
        self._lock.release()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            self._db.execute("begin immediate")
            yield self._db
            if self._db.in_transaction:
                self._db.execute("commit")
        except sqlite3.Error as exc:
            if self._db.in_transaction:
                self._db.rollback()
            raise _sqlite_fault(exc, self.directory) from exc

    def meta(self, key: str) -> Any:
        """A JSON value saved at creation or by ``set_meta``; None when absent."""
        row = self._db.execute("select value from meta where key = ?", (key,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0])

    def set_meta(self, key: str, value: Any) -> None:
        """Save a JSON value beside the cells, e.g. a measured overhead."""
        self.set_metas({key: value})

    def set_metas(self, values: dict[str, Any]) -> None:
        """Save several such values at once."""
        rows = [(key, msgspec.json.encode(value).decode()) for key, value in values.items()]
        with self._transaction() as db:
            db.executemany("insert or replace into meta values (?, ?)", rows)

    def check_identity(self, identity: dict[str, str]) -> None:
        """Refuse to go on when something that must not change has changed.

        Raises:
            RunChanged: names each difference.
        """
        saved: dict[str, str] = self.meta("identity")
        changed = sorted(
            name for name in saved.keys() | identity.keys() if saved.get(name) != identity.get(name)
        )
        if changed:
            lines = [f"{n}: was {saved.get(n, '-')}, is {identity.get(n, '-')}" for n in changed]
            raise RunChanged(
                f"{self.directory} cannot be continued: {', '.join(changed)} changed",
                why="; ".join(lines),
                fix="restore what changed, or start a new run with another --out: cells of "
                "both would not be comparable",
            )

    def save(self, cell: CellRecord, *, flush: bool = True) -> None:
        """Write one finished cell durably, then the CSV. Saving an id again replaces it.

        ``flush`` False leaves the CSV for a later call, where many are saved at once.

        Raises:
            DiskFull, StorageError: nothing of this cell was written; earlier ones are intact.
        """
        with self._transaction() as db:
            db.execute(
                "insert into cell (id, seq, status, finished_unix, record) values "
                "(?, (select coalesce(max(seq), 0) + 1 from cell), ?, ?, ?) "
                "on conflict (id) do update set status = excluded.status, "
                "finished_unix = excluded.finished_unix, record = excluded.record",
                (cell.id, cell.status, time.time(), encode(cell)),
            )
        self._by_id()[cell.id] = cell
        if flush:
            self.write_csv()

    def cells(self) -> tuple[CellRecord, ...]:
        """All finished cells in the order in which they were first saved."""
        return tuple(self._by_id().values())

    def _by_id(self) -> dict[str, CellRecord]:
        """What the table holds; we are its only writer, so it is read once."""
        if self._known is None:
            self._known = {c.id: c for c in _read_cells(self._db, self.directory)}
        return self._known

    def write_csv(self) -> None:
        """Make ``cells.csv`` anew, whole or not at all."""
        atomic_write(self.directory / "cells.csv", csv_bytes(self.cells()))


class RunView(msgspec.Struct, frozen=True):
    """A run read without holding it: plan, identity and cells."""

    directory: Path
    plan: dict[str, Any]
    cells: tuple[CellRecord, ...]
    meta: dict[str, Any]


def read_run(directory: Path) -> RunView:
    """Read a run, finished or in progress, without disturbing the process that holds it.

    Raises:
        UsageError, RunFormatError: there is no run, or it cannot be read.
    """
    _require_run(directory)
    try:
        db = sqlite3.connect(f"{(directory / 'run.sqlite').resolve().as_uri()}?mode=ro", uri=True)
    except sqlite3.Error as exc:
        raise _sqlite_fault(exc, directory) from exc
    try:
        _check_format(directory, db)
        rows = db.execute("select key, value from meta").fetchall()
        meta = {key: _json_or_text(value) for key, value in rows}
        return RunView(directory, meta["plan"], _read_cells(db, directory), meta)
    except sqlite3.Error as exc:
        raise _sqlite_fault(exc, directory) from exc
    finally:
        db.close()


def csv_bytes(cells: tuple[CellRecord, ...]) -> bytes:
    """The flat view of the cells, one line each, with a header."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for cell in cells:
        row = {**cell.options, **msgspec.structs.asdict(cell)}
        rate, acceptance, error = cell.decode_tok_s, cell.acceptance, cell.error or {}
        row |= {
            "decode_tok_s": round(rate.mean, 3) if rate else "",
            "decode_spread": round(rate.spread, 3) if rate else "",
            "acceptance": round(acceptance.rate, 4) if acceptance else "",
            "per_position": " ".join(f"{p:.4f}" for p in acceptance.per_position)
            if acceptance
            else "",
            "predicted_tok_s": round(cell.predicted.decode_tok_s, 3) if cell.predicted else "",
            "marks": " ".join(cell.marks),
            "error": error.get("what", ""),
        }
        writer.writerow({key: "" if value is None else value for key, value in row.items()})
    return out.getvalue().encode()


def _require_run(directory: Path) -> None:
    if not (directory / "run.sqlite").is_file():
        raise UsageError(
            f"{directory} is no run directory",
            why="it holds no run.sqlite",
            fix="name a folder that `browndwarf sweep` made (they lie in runs/ by default)",
        )


def _check_format(directory: Path, db: sqlite3.Connection) -> None:
    try:
        row = db.execute("select value from meta where key = 'format'").fetchone()
    except sqlite3.DatabaseError as exc:
        raise RunFormatError(
            f"{directory / 'run.sqlite'} cannot be read",
            why=str(exc),
            fix="it is damaged or no browndwarf run; start a new one with another --out",
        ) from exc
    found = row[0] if row else "no format"
    if found != FORMAT:
        raise RunFormatError(
            f"{directory} was written by another version of browndwarf",
            why=f"its format is {found}, this version reads {FORMAT}",
            fix="start a new run with another --out; the old cells.csv stays readable",
        )


def _read_cells(db: sqlite3.Connection, directory: Path) -> tuple[CellRecord, ...]:
    try:
        rows = db.execute("select record from cell order by seq").fetchall()
    except sqlite3.Error as exc:
        raise _sqlite_fault(exc, directory) from exc
    return tuple(decode(CellRecord, row[0]) for row in rows)


def _json_or_text(value: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value


def _refusal(directory: Path) -> StorageError | None:
    """What the operating system says against writing there; None when nothing."""
    try:
        check_writable(directory, "save")
    except StorageError as error:
        return error
    return None


def _sqlite_fault(exc: sqlite3.Error, directory: Path) -> StorageError:
    text = str(exc)
    kept = f"go on with --resume {directory}; finished cells are kept"
    # SQLite says "disk I/O error" of a full disk and of a read-only one: the system knows better.
    reason = _refusal(directory) if isinstance(exc, sqlite3.OperationalError) else None
    if "full" in text or isinstance(reason, DiskFull):
        return DiskFull(
            "could not save: no space left",
            why=f"{directory / 'run.sqlite'}: {text}",
            fix=f"free some space, then {kept}",
        )
    if reason is not None:
        return StorageError(
            f"could not save in {directory}", why=reason.why, fix=f"make it writable, then {kept}"
        )
    if isinstance(exc, sqlite3.DatabaseError) and not isinstance(exc, sqlite3.OperationalError):
        return RunFormatError(
            f"{directory / 'run.sqlite'} is damaged",
            why=text,
            fix="start a new run with another --out; cells.csv may still be readable",
        )
    return StorageError(
        f"could not use {directory / 'run.sqlite'}", why=text, fix="check the disk and permissions"
    )
