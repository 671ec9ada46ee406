"""Exit codes, errors and speed of the command line as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from browndwarf import cli
from browndwarf.cli.reference import reference

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["sweep", "--help"], 0),
        ([], 2),
        (["nonsense"], 2),
        (["sweep", "--n-max", "x", "m.gguf"], 2),
        (["sweep"], 2),
        (["recipe", "no-such-run"], 2),
        (["sweep", "no-such-model.gguf", "--n-max", "0"], 3),
        (["sweep", "--resume", "x", "--out", "y"], 2),
    ],
)
def test_exit_codes(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(argv) == code
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_says_what_why_and_next(capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["recipe", "no-such-run"])
    err = capsys.readouterr().err
    assert "error: no-such-run" in err
    assert "why:" in err
    assert "next:" in err


def test_json_errors_are_documents_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["recipe", "no-such-run", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "browndwarf/error/1"
    assert document["error"]["kind"] == "UsageError"
    assert document["exit_code"] == 2


def test_debug_shows_where_it_happened() -> None:
    with pytest.raises(Exception, match="no-such-run"):
        cli.run(["recipe", "no-such-run", "--debug"])


def test_a_fault_of_ours_is_said_to_be_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(argv: list[str]) -> int:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(cli, "_invoke", broken)
    assert cli.run(["doctor"]) == 3
    err = capsys.readouterr().err
    assert "ZeroDivisionError: oops" in err
    assert "--debug" in err


def test_help_loads_nothing_heavy() -> None:
    """What makes `browndwarf --help` quick is that these stay out."""
    code = (
        "import sys; from browndwarf import cli; cli.run(['--help']); "
        "print(sorted({'numpy', 'aiohttp', 'msgspec', 'gguf', 'pydantic', 'psutil'} "
        "& set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_the_command_reference_is_fresh() -> None:
    written = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert written == reference(), "run `make docs`"


def test_the_seeds_name_for_sweep_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bd-mtpquant", "--help"])
    with pytest.raises(SystemExit) as caught:
        cli.mtpquant()
    assert caught.value.code == 0
    assert "--head-types" in capsys.readouterr().out
