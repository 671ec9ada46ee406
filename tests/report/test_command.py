"""``browndwarf report`` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest

from browndwarf import cli
from browndwarf.report import page
from report.made_runs import confirmed, make


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only run of a folder that we stand in; no charts, to be quick."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "altair", None)
    return make(Path("runs/one"), confirmed())


@pytest.mark.parametrize("name", [None, "last", "one", "runs/one"])
def test_the_page_goes_into_the_run_and_its_path_is_told(
    run: Path, name: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["report", *([name] if name else [])]) == 0
    said = capsys.readouterr()
    assert said.out == f"{run / 'report.html'}\n"
    assert "pip install 'browndwarf[report]'" in said.err
    assert (run / "report.html").read_text("utf-8").startswith("<!doctype html>")


def test_the_document_tells_what_the_page_is(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deeper" / "page.html"
    assert cli.run(["report", "one", "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "browndwarf/report/1"
    assert document["page"] == str(out)
    assert document["charts"] == 0
    assert document["finished"] is True
    assert document["winner"] == "Q4_0 + Q6_K n1"
    assert out.is_file()
    assert not (run / "report.html").exists()


def test_nothing_of_the_run_changes(run: Path) -> None:
    def content() -> dict[str, bytes]:
        kept = [p for p in run.rglob("*") if p.is_file() and p.suffix in (".sqlite", ".csv")]
        return {p.name: p.read_bytes() for p in kept}

    before = content()
    assert cli.run(["report"]) == 0
    assert content() == before


def test_a_page_is_replaced_whole_or_not_at_all(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.run(["report"]) == 0
    path = run / "report.html"
    first = path.stat().st_ino
    assert cli.run(["report"]) == 0
    assert path.stat().st_ino != first
    whole = path.read_bytes()

    def broken(_: object) -> str:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(page, "render", broken)
    assert cli.run(["report"]) == 3
    assert path.read_bytes() == whole
    assert not list(run.glob(".report.html.*"))


@pytest.mark.parametrize(
    ("argv", "code", "what"),
    [
        (["report", "no-such-run"], 2, "no-such-run is no run directory"),
        (["report", "one", "--out", "runs/one/cells.csv/page.html"], 3, "could not write"),
        (["report", "one", "--out", "runs"], 3, "could not write"),
        (["report", "one", "two"], 2, "two"),
    ],
)
def test_errors_say_what_why_and_next(
    run: Path, argv: list[str], code: int, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(argv) == code
    err = capsys.readouterr().err
    assert what in err
    assert "why:" in err
    assert "next:" in err
    assert "Traceback" not in err


def test_last_without_a_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["report", "--json"]) == 2
    assert "no run here yet" in json.loads(capsys.readouterr().out)["error"]["what"]


@pytest.mark.parametrize("works", [True, False])
def test_a_browser_is_asked_only_when_told(
    run: Path, works: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []

    def browse(url: str) -> bool:
        opened.append(url)
        return works

    monkeypatch.setattr(webbrowser, "open", browse)
    assert cli.run(["report", "--no-open"]) == 0
    assert opened == []
    assert cli.run(["report", "--open"]) == 0
    assert opened == [(run / "report.html").resolve().as_uri()]
    assert ("open the file yourself" in capsys.readouterr().err) is not works


def test_its_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from browndwarf import cli; cli.run(['report', '--help']); "
        "print(sorted({'altair', 'vl_convert', 'jinja2', 'numpy', 'msgspec'} & set(sys.modules)), "
        "file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
