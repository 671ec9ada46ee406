"""The run directory loses nothing."""

from __future__ import annotations

import csv
import errno
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from browndwarf.errors import (
    DiskFull,
    RunChanged,
    RunFormatError,
    StorageError,
    UsageError,
)
from browndwarf.records import CellRecord, Rate
from browndwarf.sweep.store import RunStore, read_run


def cell(name: str, **more: object) -> CellRecord:
    base = {"status": "ok", "options": {}, "target_type": "Q4_0", "head_type": None, "n_max": 0}
    return CellRecord(id=name, workload="prose", **{**base, **more})  # type: ignore[arg-type]


def make(path: Path) -> RunStore:
    return RunStore.create(path, plan={"a": 1}, identity={"model": "x", "engine": "y"})


def test_cells_come_back_as_they_were_saved(tmp_path: Path) -> None:
    saved = cell("a", decode_tok_s=Rate(mean=2.0, spread=0.1, runs=(1.9, 2.0, 2.1)))
    with make(tmp_path / "r") as store:
        store.save(saved)
    with RunStore.open(tmp_path / "r") as store:
        assert store.cells() == (saved,)
        assert store.meta("plan") == {"a": 1}


def test_saving_an_id_again_replaces_it_in_place(tmp_path: Path) -> None:
    with make(tmp_path / "r") as store:
        store.save(cell("a", status="failed"))
        store.save(cell("b"))
        store.save(cell("a"))
        assert [(c.id, c.status) for c in store.cells()] == [("a", "ok"), ("b", "ok")]


def test_the_csv_has_one_line_a_cell(tmp_path: Path) -> None:
    with make(tmp_path / "r") as store:
        for name in "abc":
            store.save(cell(name))
    with (tmp_path / "r" / "cells.csv").open(newline="") as stream:
        assert [row["id"] for row in csv.DictReader(stream)] == ["a", "b", "c"]


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    make(tmp_path / "r").close()
    with pytest.raises(UsageError, match="already holds a run"):
        make(tmp_path / "r")


def test_two_processes_cannot_share_a_run(tmp_path: Path) -> None:
    with make(tmp_path / "r"), pytest.raises(StorageError, match="another process"):
        RunStore.open(tmp_path / "r")


def test_a_run_in_progress_can_be_read(tmp_path: Path) -> None:
    with make(tmp_path / "r") as store:
        store.save(cell("a"))
        assert [c.id for c in read_run(tmp_path / "r").cells] == ["a"]


def test_a_changed_model_is_named(tmp_path: Path) -> None:
    with make(tmp_path / "r") as store:
        store.check_identity({"model": "x", "engine": "y"})
        with pytest.raises(RunChanged, match="model changed") as caught:
            store.check_identity({"model": "z", "engine": "y"})
    assert "was x, is z" in caught.value.why


def test_a_run_of_another_version_is_refused_and_kept(tmp_path: Path) -> None:
    make(tmp_path / "r").close()
    path = tmp_path / "r" / "run.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("update meta set value = 'browndwarf/run/99' where key = 'format'")
    db.close()
    for opener in (RunStore.open, read_run):
        with pytest.raises(RunFormatError, match="another version"):
            opener(tmp_path / "r")


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 100])
def test_a_damaged_database_is_said_to_be_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.sqlite").write_bytes(content)
    with pytest.raises((RunFormatError, StorageError)):
        read_run(tmp_path / "r")
    with pytest.raises((RunFormatError, StorageError)):
        RunStore.open(tmp_path / "r")


def test_no_run_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run directory"):
        read_run(tmp_path)


FILL = """
import resource, sys
from pathlib import Path
from browndwarf.errors import DiskFull, StorageError
from browndwarf.records import CellRecord
from browndwarf.sweep.store import RunStore
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def cell(name):
    return CellRecord(id=name, status="ok", options={"x": "y" * 40000}, target_type="q",
                      head_type=None, n_max=0, workload="w")
with RunStore.create(Path(sys.argv[1]), plan={}, identity={}) as store:
    store.save(cell("first"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
    try:
        for i in range(50):
            store.save(cell(f"more-{i}"))
    except StorageError as error:
        sys.exit(42)
sys.exit(1)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="uses a POSIX file-size limit")
def test_a_disk_that_refuses_loses_no_finished_cell(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FILL, str(tmp_path / "r")], check=False)
    assert done.returncode == 42, "the refusal is one of our errors"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    names = [c.id for c in read_run(tmp_path / "r").cells]
    assert names[0] == "first"
    assert names == ["first", *[f"more-{i}" for i in range(len(names) - 1)]]
    with RunStore.open(tmp_path / "r") as store:
        store.save(cell("later"))


def test_a_full_disk_is_called_so(tmp_path: Path) -> None:
    """sqlite's own limit on pages gives the very error of a full disk."""
    with make(tmp_path / "r") as store:
        store.save(cell("a"))
        store._db.execute("pragma max_page_count = 12")
        with pytest.raises(DiskFull, match="no space left") as caught:
            store.save(cell("b", options={"x": "y" * 200_000}))
        assert "--resume" in caught.value.fix
        assert store.cells()[0].id == "a"


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.ENOSPC, DiskFull, "no space left"),
        (errno.EROFS, StorageError, "could not save in"),
    ],
)
def test_an_io_error_of_sqlite_is_told_by_its_cause(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[StorageError],
    said: str,
) -> None:
    """SQLite itself says "disk I/O error" to all of them."""

    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    class Broken:
        in_transaction = False

        def execute(self, *_: object) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        def close(self) -> None:
            pass

    with make(tmp_path / "r") as store:
        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
        monkeypatch.setattr(store, "_db", Broken())
        with pytest.raises(kind, match=said) as caught:
            store.save(cell("a"))
        assert type(caught.value) is kind
        assert "--resume" in caught.value.fix
