"""Which run a user means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from browndwarf.cli.runs import find_run, run_directory
from browndwarf.errors import UsageError


def make(folder: Path, age_s: float, *, journal_age_s: float | None = None) -> Path:
    folder.mkdir(parents=True)
    for name, age in (("run.sqlite", age_s), ("run.sqlite-wal", journal_age_s)):
        if age is not None:
            (folder / name).write_bytes(b"")
            os.utime(folder / name, (2e9 - age, 2e9 - age))
    return folder


def test_a_run_is_found_by_path_by_name_and_as_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("runs/old"), 50)
    make(Path("runs/new"), 10)
    make(tmp_path / "elsewhere", 0)
    assert find_run("old") == Path("runs/old")
    assert find_run("elsewhere") == Path("elsewhere")
    assert find_run("last") == run_directory("last") == Path("runs/new")
    assert find_run("nothing") is None
    assert run_directory("nothing") == Path("nothing")


def test_a_run_that_is_being_written_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("runs/done"), 10)
    make(Path("runs/running"), 50, journal_age_s=1)
    assert run_directory("last") == Path("runs/running")


def test_no_last_run_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no run here yet"):
        run_directory("last")
