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
from collections.abc import Iterator
from pathlib import Path

import pytest

from browndwarf import cli
from browndwarf.engine.locate import Build
from browndwarf.records import CellRecord
from browndwarf.sweep.store import read_run

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def sweep(run: Path, build: Build, *more: str) -> tuple[CellRecord, ...]:
    words = ["sweep", "demo", "--target-types", "Q4_0", "--head-types", "Q6_K", "--n-max", "3"]
    words += ["--workload", "prose,code", "--prompts", "2", "--tokens", "48", "--ctx", "1024"]
    # One thread: two that wait for each other crawl while anything else computes.
    words += ["--threads", "1", "--full", "--allow-busy", "--precision", "0", "--out", str(run)]
    words += ["--llama-dir", str(build.server.parent), *more]
    assert cli.run(words) == 0
    return read_run(run).cells


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two runs of one sweep, ``a`` and ``b``, and the cache of files they made."""
    made = tmp_path_factory.mktemp("sweeps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(made / "cache"))
        yield made


@pytest.fixture(scope="module")
def cells(folder: Path, engine_build: Build) -> tuple[CellRecord, ...]:
    return sweep(folder / "a", engine_build)


def counts(cells: tuple[CellRecord, ...]) -> list[tuple[str, int, int, tuple[float, ...]]]:
    return [
        (c.id, c.acceptance.drafted, c.acceptance.accepted, c.acceptance.per_position)
        for c in cells
        if c.acceptance is not None
    ]


def test_the_same_seed_gives_the_same_drafts(
    folder: Path, engine_build: Build, cells: tuple[CellRecord, ...]
) -> None:
    second = {c.id: c for c in sweep(folder / "b", engine_build)}
    # What is confirmed after the grid depends on the speeds: compare what both have.
    first = tuple(c for c in cells if c.id in second)
    assert {"baseline", "mtp"} <= {c.role for c in first}
    other = tuple(second[c.id] for c in first)
    assert counts(first) == counts(other)
    assert all(drafted > 0 for _, drafted, _, _ in counts(first))
    texts = [[t.text_sha for t in c.traces] for c in first]
    assert texts == [[t.text_sha for t in c.traces] for c in other]


def test_every_cell_is_complete(cells: tuple[CellRecord, ...]) -> None:
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
        # The processor computes here, so its pace is probed beside every request.
        assert all(t.probe_ms > 0 for t in cell.traces)
        assert all(t.cache_n == 0 for t in cell.traces)
        if cell.head_type:
            assert cell.acceptance is not None
            assert len(cell.acceptance.per_position) == 3
            assert "counters-disagree" not in cell.marks
            assert sum(cell.acceptance.per_position) == pytest.approx(
                cell.acceptance.accepted / cell.acceptance.drafts
            )


def test_speculation_changes_no_text(cells: tuple[CellRecord, ...]) -> None:
    """Q4_0 targets round alike in batches of one and of four (see docs/results)."""
    by_role = {(c.role, c.workload): {t.prompt_id: t.text_sha for t in c.traces} for c in cells}
    for workload in ("prose", "code"):
        assert by_role["baseline", workload] == by_role["mtp", workload]


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
def test_the_recipe_pasted_into_a_shell_serves_and_drafts(
    folder: Path, cells: tuple[CellRecord, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cli.run(["recipe", str(folder / "a")]) == 0
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
