"""A sweep that is killed at any moment loses nothing and leaves nothing behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from browndwarf.engine.locate import Build
from browndwarf.sweep.store import read_run

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="kill -9 is POSIX"),
]

KILLS = 20


def command(run: Path, build: Build) -> list[str]:
    head = [sys.executable, "-m", "browndwarf", "sweep"]
    if (run / "run.sqlite").exists():
        return [*head, "--resume", str(run), "--allow-busy"]
    return [
        *head,
        "demo",
        *["--target-types", "Q8_0,Q4_0", "--head-types", "Q8_0,Q4_K", "--n-max", "2,3"],
        *["--workload", "prose,code", "--prompts", "1", "--tokens", "24", "--ctx", "512"],
        *["--threads", "1"],
        *["--full", "--out", str(run), "--allow-busy", "--llama-dir", str(build.server.parent)],
    ]


def ours(marker: str) -> list[psutil.Process]:
    """Every process that names the marker on its command line, zombies left out."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if marker in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def wait_gone(marker: str, seconds: float) -> list[psutil.Process]:
    deadline = time.monotonic() + seconds
    while (left := ours(marker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_twenty_kills_lose_no_finished_cell_and_leave_no_server(
    tmp_path: Path, engine_build: Build
) -> None:
    run = tmp_path / "run"
    # The model files lie in this folder, so that it marks every server of this test.
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_COLOR": "1"}
    rng = random.Random(20261129)
    finished: dict[str, float] = {}
    kills = 0
    while True:
        log = (tmp_path / "log").open("ab")
        process = subprocess.Popen(
            command(run, engine_build), env=env, stdout=log, stderr=log, start_new_session=True
        )
        if kills < KILLS:
            time.sleep(rng.uniform(0.2, 1.8))
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait(timeout=240)
        log.close()
        left = wait_gone(str(tmp_path), 10)
        assert not left, f"still running after kill {kills}: {[p.cmdline() for p in left]}"
        if (run / "run.sqlite").exists():
            try:
                cells = read_run(run).cells
            except Exception:
                assert not finished, "the run became unreadable"
                raise
            now = {c.id: c.started_unix for c in cells}
            assert len(now) == len(cells), "a cell is there twice"
            assert now.items() >= finished.items(), "a finished cell was lost or measured again"
            finished = now
        if code == 0:
            break
        assert code == -signal.SIGKILL, (tmp_path / "log").read_text()[-3000:]
        kills += 1
    assert kills == KILLS or len(finished) >= 40
    assert {c.status for c in read_run(run).cells} == {"ok"}


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(
    tmp_path: Path, engine_build: Build
) -> None:
    run = tmp_path / "run"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_COLOR": "1"}
    with subprocess.Popen(
        command(run, engine_build),
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("[3/"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
        assert process.wait(timeout=30) == 130
    assert "--resume" in rest
    assert "Traceback" not in rest
    assert not wait_gone(str(tmp_path), 5)
    assert len(read_run(run).cells) >= 3
