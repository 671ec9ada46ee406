"""What a user sees when something breaks under a sweep: each fault has its own clear outcome.

The whole command line runs, over a fake llama-server that misbehaves on request.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from browndwarf import cli
from browndwarf.engine.locate import Build
from browndwarf.models import demo
from browndwarf.records import CellRecord
from browndwarf.sweep.store import read_run
from fakes import behave


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Copies of the embedded pair, to be damaged."""
    target, head = tmp_path / "target.gguf", tmp_path / "head.gguf"
    shutil.copy(demo.TARGET, target)
    shutil.copy(demo.HEAD, head)
    return target, head


@pytest.fixture
def run_sweep(
    tmp_path: Path,
    files: tuple[Path, Path],
    fake_build: Callable[..., Build],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., int]:
    """Run a tiny sweep over a fake engine; returns the exit code. The run lies in ``run``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def go(*more: str, generation: str = "current", **behaviour: object) -> int:
        build = fake_build(generation)
        for name, value in behave(**behaviour).items():
            monkeypatch.setenv(name, value)
        argv = [
            *["sweep", str(files[0]), "--draft", str(files[1]), "--n-max", "1"],
            *["--workload", "prose", "--prompts", "1", "--repeats", "1", "--tokens", "8"],
            *["--out", str(tmp_path / "run"), "--allow-busy"],
            *["--llama-dir", str(build.server.parent), *more],
        ]
        return cli.run(argv)

    return go


def cells(tmp_path: Path) -> tuple[CellRecord, ...]:
    return read_run(tmp_path / "run").cells


def test_a_healthy_fake_is_measured(tmp_path: Path, run_sweep: Callable[..., int]) -> None:
    assert run_sweep() == 0
    assert {c.status for c in cells(tmp_path)} == {"ok"}


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        ({"load": "segv"}, "ServerCrashed"),
        (
            {"log": ["ggml_backend_cuda_buffer_type_alloc_buffer: allocating 900.00 MiB on "
                     "device 0: cudaMalloc failed: out of memory"], "exit": 1},
            "ServerOutOfMemory",
        ),
        (
            {"log": ["error loading model: unknown model architecture: 'gemma9'"], "exit": 1},
            "ModelUnsupported",
        ),
        ({"request": "crash"}, "ServerCrashed"),
        ({"request": "error"}, "RequestFailed"),
        ({"request": "stream-error"}, "RequestFailed"),
        ({"request": "cut"}, "RequestFailed"),
        ({"request": "not-json"}, "RequestFailed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)  # fmt: skip
def test_a_server_fault_is_named_in_its_cells(
    tmp_path: Path,
    run_sweep: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    behaviour: dict[str, object],
    kind: str,
) -> None:
    code = run_sweep("--n-max", "0", **behaviour)
    failed = cells(tmp_path)
    assert {c.status for c in failed} == {"failed"}
    assert {c.error["kind"] for c in failed if c.error} == {kind}
    assert all(c.error and c.error["why"] for c in failed)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert failed[0].error is not None
    assert failed[0].error["what"][:40] in captured.out
    assert code == 1, "a sweep without a winner has found a problem"


def test_a_truncated_model_is_refused_before_anything_runs(
    tmp_path: Path, files: tuple[Path, Path], run_sweep: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with files[0].open("r+b") as stream:
        stream.truncate(files[0].stat().st_size // 2)
    assert run_sweep() == 3
    assert "truncated" in capsys.readouterr().err.lower()
    assert not (tmp_path / "run").exists()


def test_a_missing_drafter_is_refused(
    files: tuple[Path, Path], run_sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    files[1].unlink()
    assert run_sweep() == 3
    assert "head.gguf" in capsys.readouterr().err


def test_an_unknown_flag_is_refused_with_a_guess(
    run_sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sweep("--axis", "cache-rem=1") == 2
    assert "--cache-ram" in capsys.readouterr().err


@pytest.mark.parametrize("generation", ["pre-mtp"])
def test_a_build_without_mtp_is_refused_with_the_way_out(
    run_sweep: Callable[..., int], capsys: pytest.CaptureFixture[str], generation: str
) -> None:
    assert run_sweep(generation=generation) == 3
    err = capsys.readouterr().err
    assert "lacks" in err
    assert "engine install" in err


def test_a_model_that_changed_stops_the_resume(
    tmp_path: Path, files: tuple[Path, Path], run_sweep: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run_sweep() == 0
    before = cells(tmp_path)
    with files[0].open("r+b") as stream:
        stream.seek(-1000, 2)
        stream.write(b"\x01\x02\x03\x04")
    assert cli.run(["sweep", "--resume", str(tmp_path / "run"), "--allow-busy"]) == 3
    assert "target changed" in capsys.readouterr().err
    assert cells(tmp_path) == before


def test_json_is_one_document(
    tmp_path: Path, run_sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sweep("--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "browndwarf/sweep/1"
    assert document["winner"]["id"] in {c["id"] for c in document["cells"]}
    assert set(document["speedup"]) == {"mean", "low", "high"}
    assert 0 <= document["overhead_share"] <= 1
    assert document["synthetic"] is False


def test_a_users_run_is_never_overwritten(
    run_sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sweep() == 0
    assert run_sweep() == 2
    assert "--resume" in capsys.readouterr().err
