"""The main job on the real llama.cpp and the embedded pair."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from browndwarf import cli
from browndwarf.engine.locate import Build
from browndwarf.records import CellRecord
from browndwarf.sweep.store import read_run

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def sweep(run: Path, build: Build, *more: str) -> tuple[CellRecord, ...]:
    code = cli.run(
        [
            *["sweep", "demo", "--target-types", "Q4_0", "--head-types", "Q6_K", "--n-max", "3"],
            *["--workload", "prose,code", "--prompts", "2", "--tokens", "48", "--ctx", "1024"],
            *[
                "--full",
                "--out",
                str(run),
                "--allow-busy",
                "--llama-dir",
                str(build.server.parent),
                *more,
            ],
        ]
    )
    assert code == 0
    return read_run(run).cells


def counts(cells: tuple[CellRecord, ...]) -> list[tuple[str, int, int, tuple[float, ...]]]:
    return [
        (c.id, c.acceptance.drafted, c.acceptance.accepted, c.acceptance.per_position)
        for c in cells
        if c.acceptance is not None
    ]


def test_the_same_seed_gives_the_same_drafts(
    tmp_path: Path, engine_build: Build, cache: Path
) -> None:
    first = sweep(tmp_path / "a", engine_build)
    second = sweep(tmp_path / "b", engine_build)
    assert counts(first) == counts(second)
    assert all(drafted > 0 for _, drafted, _, _ in counts(first))
    texts = [[t.text_sha for t in c.traces] for c in first]
    assert texts == [[t.text_sha for t in c.traces] for c in second]


def test_every_cell_is_complete(tmp_path: Path, engine_build: Build, cache: Path) -> None:
    cells = sweep(tmp_path / "a", engine_build)
    assert {c.role for c in cells} == {
        "baseline",
        "mtp",
        "baseline-again",
        "confirm-a",
        "confirm-b",
    }
    for cell in cells:
        assert cell.status == "ok", cell.error
        assert cell.decode_tok_s is not None
        assert len(cell.decode_tok_s.runs) == 3
        assert cell.prefill_tok_s
        assert cell.ttft_ms
        assert cell.end_to_end_s
        assert cell.cycle_ms
        # 9.7 MiB of weights, and about as much again where the engine repacks Q4_0.
        assert 9.0 < cell.memory["target_model"] < 21.0
        assert len(cell.traces) == 6
        assert all(t.cache_n == 0 for t in cell.traces)
        if cell.head_type:
            assert cell.acceptance is not None
            assert len(cell.acceptance.per_position) == 3
            assert "counters-disagree" not in cell.marks
            assert sum(cell.acceptance.per_position) == pytest.approx(
                cell.acceptance.accepted / cell.acceptance.drafts
            )


def test_speculation_changes_no_text(tmp_path: Path, engine_build: Build, cache: Path) -> None:
    """Q4_0 targets round alike in batches of one and of four (see docs/results)."""
    cells = sweep(tmp_path / "a", engine_build)
    by_role = {(c.role, c.workload): {t.prompt_id: t.text_sha for t in c.traces} for c in cells}
    for workload in ("prose", "code"):
        assert by_role["baseline", workload] == by_role["mtp", workload]


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
def test_the_recipe_pasted_into_a_shell_serves_and_drafts(
    tmp_path: Path, engine_build: Build, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(tmp_path / "a", engine_build)
    capsys.readouterr()
    assert cli.run(["recipe", str(tmp_path / "a")]) == 0
    text = capsys.readouterr().out
    assert "checked: this very command served" in text
    for flag in ("-np", "-fit off", "--jinja", "-c 1024"):
        assert flag in text
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    server = subprocess.Popen(
        ["/bin/sh", "-c", text.replace("--port 8080", f"--port {port}")],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        answer = _ask(f"http://127.0.0.1:{port}", server)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert answer["choices"][0]["message"]["content"].strip()
    if "--spec-type" in text:
        assert answer["timings"]["draft_n"] > 0


def _ask(base: str, server: subprocess.Popen[bytes]) -> dict[str, object]:
    body = {
        "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
        "max_tokens": 40,
        "temperature": 0,
    }
    deadline = time.monotonic() + 60
    while True:
        assert server.poll() is None, "the server ended"
        assert time.monotonic() < deadline
        request = urllib.request.Request(
            base + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                decoded: dict[str, object] = json.load(answer)
                return decoded
        except OSError:
            time.sleep(0.1)
