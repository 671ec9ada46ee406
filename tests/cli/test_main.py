"""Exit codes, errors and speed of the command line as a user meets them."""

from __future__ import annotations

import errno
import json
import shlex
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


@pytest.mark.parametrize(
    "argv",
    [
        ["--json"],
        ["inspect", "--json"],
        ["inspect", "--no-such", "--json"],
        ["plan", "demo", "--parallel", "x", "--json"],
        ["engine", "--json"],
    ],
)
def test_a_misread_command_line_is_a_document_too(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the text on stderr."""
    assert cli.run(argv) == 2
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["error"]["kind"] == "UsageError"
    assert document["exit_code"] == 2
    assert "next: browndwarf" in said.err
    assert document["error"]["what"].split("(")[0].strip() in said.err


def test_debug_shows_where_it_happened(capsys: pytest.CaptureFixture[str]) -> None:
    """And keeps the exit code, the error and the document."""
    assert cli.run(["recipe", "no-such-run", "--debug", "--json"]) == 2
    said = capsys.readouterr()
    assert "Traceback" in said.err
    assert "error: no-such-run" in said.err
    assert json.loads(said.out)["exit_code"] == 2


def test_ctrl_c_is_an_error_with_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_invoke", interrupted)
    assert cli.run(["doctor", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "Interrupted"


def test_what_the_system_refuses_is_no_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(argv: list[str]) -> int:
        raise OSError(errno.ENAMETOOLONG, "File name too long", "aaa")

    monkeypatch.setattr(cli, "_invoke", refused)
    assert cli.run(["doctor"]) == 3
    err = capsys.readouterr().err
    assert "aaa: File name too long" in err
    assert "fault of browndwarf" not in err


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("inspect demo >/dev/full", 3),
        ("inspect demo --json >/dev/full", 3),
        ("--help >/dev/full", 3),
        ("inspect demo --tensors >&-", 0),
        ("inspect no-such >&- 2>&- <&-", 3),
        ("inspect no-such 2>/dev/full", 3),
        ("inspect demo --tensors | :", 0),
        ("inspect demo --json | :", 0),
        ("--help | :", 0),
    ],
)
def test_a_stream_that_takes_nothing(line: str, code: int) -> None:
    """Full, closed, or its reader gone: our error or silence, also when the interpreter ends."""
    script = f"set -o pipefail; {shlex.quote(sys.executable)} -m browndwarf {line}"
    if "/dev/full" in line and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr
    assert ("no space left" in done.stderr) == (">/dev/full" in line and "2>" not in line)


def test_a_terminal_of_no_width_still_shows_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert cli.run(["inspect", "no-such"]) == 3
    assert "error: no model at no-such" in capsys.readouterr().err


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
