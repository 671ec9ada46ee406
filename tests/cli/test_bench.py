"""``browndwarf bench`` as a user meets it: documents, exit codes, Ctrl-C, no server left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from browndwarf import cli
from browndwarf.bench.mock import Script
from browndwarf.bench.saved import read_run
from browndwarf.bench.traces import read_traces
from browndwarf.engine.locate import Build

MOCK = [sys.executable, "-m", "browndwarf.bench.mock"]


def mock_command(**script: Any) -> str:
    """A command line that serves a script; a port is added to it."""
    quoted = json.dumps(script).replace('"', '\\"')
    return f'{sys.executable} -m browndwarf.bench.mock "{quoted}"'


@pytest.fixture
def mock_url() -> Iterator[str]:
    script = json.dumps({"tokens": 12, "burst": 3, "ttft_s": 0.01, "step_s": 0.005})
    process = subprocess.Popen(
        [*MOCK, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.communicate()


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_run_prints_one_document_with_the_stable_names(
    mock_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    argv = ["bench", "run", "--base-url", mock_url, "--concurrency", "1,4", "--num-prompts", "8"]
    argv += ["--slo", "ttft=10s", "--out", str(out), "--json"]
    assert cli.run(argv) == 0
    found = document(capsys)
    assert found["schema"] == "browndwarf/bench-run/1"
    assert [p["concurrency"] for p in found["points"]] == [1, 4]
    point = found["points"][0]
    for name in ("completed", "errors", "truncated", "duration_s", "prefill_tok_s"):
        assert name in point
    for name in ("ttft_ms", "tpot_ms", "step_gap_ms"):
        assert set(point[name]) >= {"p50", "p90", "p95", "p99"}
    assert point["tokens_per_step"] > 1
    assert set(point["client"]) >= {"cpu_us_per_event", "loop_lag_ms"}
    assert point["acceptance"]["drafts"] == 8 * 4
    assert point["goodput"]["share"] == 1.0
    assert read_run(out).points[1].completed == 8
    assert (out / "points.csv").read_text().startswith("concurrency,")
    assert sum(not t.warmup for t in read_traces(out / "traces.jsonl")) == 16
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_summary_has_the_form_of_a_report(
    mock_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "run", "--base-url", mock_url, "--num-prompts", "4", "--label", "Tiny"]
    assert cli.run([*argv, "--out", str(tmp_path / "r")]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("Tiny"))
    for part in ("4/4, 0 errors", "prefill", "decode", "TTFT median", "TPOT median", "Acceptance"):
        assert part in line


def test_too_many_errors_end_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = mock_command(tokens=6, fault="error-in-stream")
    argv = ["bench", "run", "--server", command, "--num-prompts", "4", "--out", str(tmp_path / "r")]
    assert cli.run([*argv, "--json"]) == 1
    assert document(capsys)["points"][0]["errors"] == {"error-in-stream": 4}


def test_errors_below_the_limit_are_fine(tmp_path: Path) -> None:
    command = mock_command(tokens=6, fault="error-in-stream")
    argv = ["bench", "run", "--server", command, "--num-prompts", "4", "--out", str(tmp_path / "r")]
    assert cli.run([*argv, "--max-error-rate", "1.0"]) == 0


def test_an_open_loop_is_one_point_with_its_rate(
    mock_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "run", "--base-url", mock_url, "--rate", "50", "--burstiness", "inf"]
    argv += ["--num-prompts", "10", "--out", str(tmp_path / "r"), "--json"]
    assert cli.run(argv) == 0
    (point,) = document(capsys)["points"]
    assert (point["rate"], point["concurrency"], point["completed"]) == (50.0, None, 10)


@pytest.mark.parametrize(
    "argv",
    [
        ["run"],
        ["run", "--base-url", "http://127.0.0.1:1", "--server", "x"],
        ["run", "--base-url", "http://127.0.0.1:1", "--dataset", "no-such-file"],
        ["run", "--base-url", "http://127.0.0.1:1", "--concurrency", "0"],
        ["run", "--base-url", "http://127.0.0.1:1", "--slo", "fast"],
        ["run", "--base-url", "http://127.0.0.1:1", "--api", "telepathy"],
        ["run", "--base-url", "http://127.0.0.1:1", "--rate", "-1"],
        ["run", "--server", "no-such-program-anywhere"],
        ["run", "--server", '"open quote'],
        ["run", "--recipe", "no-such-run"],
        ["compare", "a", "b"],
        ["compare", "a", "--", "b"],
    ],
)
def test_usage_errors_end_with_2(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["bench", *argv]) == 2


def test_nothing_answering_is_an_environment_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["bench", "run", "--base-url", "http://127.0.0.1:1"]) == 3


def test_a_server_that_does_not_start_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f'{sys.executable} -c "raise SystemExit(7)"'
    out = tmp_path / "r"
    assert cli.run(["bench", "run", "--server", command, "--out", str(out)]) == 3
    assert "status 7" in capsys.readouterr().err


def test_results_are_never_overwritten(mock_url: str, tmp_path: Path) -> None:
    argv = ["bench", "run", "--base-url", mock_url, "--num-prompts", "1", "--out", str(tmp_path)]
    assert cli.run(argv) == 0
    assert cli.run(argv) == 2


def test_a_recipe_is_a_server_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = json.dumps({"tokens": 6, "step_s": 0.001})
    recipe = {"argv": [*MOCK, script]}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    argv = ["bench", "run", "--recipe", str(tmp_path), "--num-prompts", "2", "--json"]
    assert cli.run([*argv, "--out", str(tmp_path / "r")]) == 0
    found = document(capsys)
    assert found["points"][0]["completed"] == 2
    assert found["points"][0]["memory_mib"] > 0


def test_ab_alternates_and_compare_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mock whose steps carry three tokens is faster than one whose steps carry one."""
    base = mock_command(tokens=31, ttft_s=0.02, step_s=0.01, first=1, burst=1)
    mtp = mock_command(tokens=31, ttft_s=0.02, step_s=0.01, first=1, burst=3)
    argv = ["bench", "ab", "--base", base, "--mtp", mtp, "--repeats", "2", "--concurrency", "1,2"]
    argv += ["--num-prompts", "4", "--warmup", "0", "--out", str(tmp_path), "--json"]
    assert cli.run(argv) == 0
    found = document(capsys)
    assert found["schema"] == "browndwarf/bench-compare/1"
    assert [p["verdict"] for p in found["points"]] == ["faster", "faster"]
    assert set(found["points"][0]["ratio"]) >= {"mean", "low", "high"}
    assert set(found["crossover"]) >= {"concurrency", "low", "high"}
    made = [read_run(tmp_path / n).created for n in ("base-1", "mtp-1", "mtp-2", "base-2")]
    assert made == sorted(made)
    runs = [str(tmp_path / n) for n in ("base-1", "base-2", "mtp-1", "mtp-2")]
    assert cli.run(["bench", "compare", *runs[:2], "--", *runs[2:], "--json"]) == 0
    again = document(capsys)
    assert again["points"] == found["points"]


def test_several_models_make_a_table(
    mock_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for number, name in enumerate(("12B", "31B", "12B", "31B")):
        out = str(tmp_path / f"r{number}")
        argv = ["bench", "run", "--base-url", mock_url, "--num-prompts", "2", "--label", name]
        assert cli.run([*argv, "--out", out]) == 0
        runs.append(out)
    capsys.readouterr()
    assert cli.run(["bench", "compare", *runs[:2], "--", *runs[2:]]) == 0
    text = capsys.readouterr().out
    assert "with MTP" in text
    assert "31B" in text


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_ctrl_c_gives_a_valid_partial_report_and_leaves_no_server(tmp_path: Path) -> None:
    quick, long = '{"tokens": 5}', '{"tokens": 2000, "step_s": 0.1}'
    lines = [{"messages": [{"role": "user", "content": f"mock:{x}"}]} for x in (quick, *[long] * 4)]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    argv = [sys.executable, "-m", "browndwarf", "bench", "run", "--server", mock_command()]
    argv += ["--warmup", "0", "--concurrency", "4", "--num-prompts", "5"]
    argv += ["--dataset", str(prompts), "--out", str(tmp_path / "r"), "--json"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    server = None
    try:
        deadline = time.monotonic() + 60
        while server is None and time.monotonic() < deadline:
            time.sleep(0.1)
            for child in psutil.Process(process.pid).children(recursive=True):
                if "browndwarf.bench.mock" in " ".join(child.cmdline()):
                    server = child
        assert server is not None
        traces = tmp_path / "r" / "traces.jsonl"
        while not (traces.exists() and traces.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    found = json.loads(out)
    assert found["stopped"] == "interrupted"
    assert found["points"][0]["completed"] == 1
    assert 3 <= found["points"][0]["truncated"] <= 4
    assert found["points"][0]["output_tokens"] >= 5
    assert read_run(tmp_path / "r").stopped == "interrupted"
    assert not server.is_running()


def test_a_server_that_dies_ends_the_run_with_1_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import sys,threading,os,time;"
        "threading.Timer(2.5, lambda: os._exit(9)).start();"
        "sys.argv=['mock', '{\\\"tokens\\\": 2000, \\\"step_s\\\": 0.01}', *sys.argv[1:]];"
        "import runpy; runpy.run_module('browndwarf.bench.mock', run_name='__main__')"
    )
    command = f'{sys.executable} -c "{code}"'
    argv = ["bench", "run", "--server", command, "--num-prompts", "4", "--warmup", "0"]
    assert cli.run([*argv, "--out", str(tmp_path / "r"), "--json"]) == 1
    assert "the server died" in document(capsys)["stopped"]


def test_the_selftest_tells_the_clients_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from browndwarf.bench import selftest

    monkeypatch.setattr(selftest, "PACED", Script(ttft_s=0.01, step_s=0.002))
    monkeypatch.setattr(selftest, "STREAMS", 4)
    assert cli.run(["bench", "run", "--selftest", "--json"]) == 0
    client = document(capsys)["client"]
    assert client["cpu_us_per_event"] > 0
    assert client["max_events_s"] > 0


@pytest.mark.engine
def test_a_real_server_agrees_with_its_own_timings(
    engine_build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's clock and ours differ by what lies between, not by what is counted."""
    from browndwarf.models import demo

    command = (
        f"llama-server -m {demo.TARGET} -md {demo.HEAD} --spec-type draft-mtp "
        "--spec-draft-n-max 2 -c 4096 -np 2 --metrics --jinja -t 1 -tb 1"
    )
    argv = ["bench", "run", "--server", command, "--llama-dir", str(engine_build.server.parent)]
    argv += ["--num-prompts", "6", "--max-tokens", "64", "--concurrency", "1,2"]
    assert cli.run([*argv, "--out", str(tmp_path / "r"), "--json"]) == 0
    found = document(capsys)
    for point in found["points"]:
        assert point["completed"] == 6
        assert point["tokens_from"] == {"usage": 6}
        assert point["marks"] == {}
        assert point["acceptance"]["per_position"]
        assert point["tokens_per_step"] == pytest.approx(point["accepted_length"], rel=0.15)
    (first, _) = found["points"]
    assert first["tpot_ms"]["p50"] == pytest.approx(first["server_tpot_ms"]["p50"], rel=0.5)
