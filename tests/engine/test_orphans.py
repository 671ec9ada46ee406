"""No orphan, ever: however the parent ends, nothing of the engine is left."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from browndwarf.engine import spawn
from browndwarf.engine.locate import Build
from fakes import behave

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")

PARENT = """
import asyncio, json, os, subprocess, sys
from pathlib import Path
from browndwarf.engine import run
from browndwarf.engine.locate import build_at
from browndwarf.engine.options import ServerOptions
from browndwarf.engine.process import LlamaServer

folder, what = Path(sys.argv[1]), sys.argv[2]
build = build_at(folder / "fake0/engine/bin/llama-server", "fake", folder / "fake0/cache")
print("ready", flush=True)

async def serve():
    options = ServerOptions(model=str(folder / "model.gguf"))
    async with LlamaServer(build, options, log_path=folder / "log", grace_s=0.5) as server:
        print(json.dumps({"pid": server.pid, "pgid": server.pgid}), flush=True)
        await asyncio.sleep(600)

async def many():
    await asyncio.gather(serve(), serve(), serve())

if what == "tool":
    run.run([str(build.tools["llama-bench"])], env=dict(os.environ))
elif what == "with-sibling":  # a child of ours that lives on must not keep the pipe open
    sibling = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(sibling.pid, flush=True)
    asyncio.run(serve())
else:
    asyncio.run(many() if what == "many" else serve())
"""


def holders(folder: Path) -> list[psutil.Process]:
    """Living processes whose command line or environment names the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and (
                str(folder) in " ".join(process.cmdline())
                or str(folder) in process.environ().get("FAKE_LLAMA", "")
            ):
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.pid != os.getpid()]


def until_none(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while left := holders(folder):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(fake_build: Callable[..., Build], tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    fake_build()
    started: list[subprocess.Popen[str]] = []

    def go(what: str = "serve", **behaviour: object) -> subprocess.Popen[str]:
        # The grandchild's note also marks every process of this test by its environment.
        note = str(tmp_path / "grandchild")
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(tmp_path), what],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **behave(grandchild=note, **behaviour)},
        )
        started.append(parent)
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        return parent

    yield go
    for parent in started:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()


def told(parent: subprocess.Popen[str]) -> dict[str, int]:
    assert parent.stdout is not None
    answer = json.loads(parent.stdout.readline())
    assert isinstance(answer, dict)
    return answer


def group_is_gone(pgid: int) -> bool:
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pgid and process.status() != psutil.STATUS_ZOMBIE:
                return False
        except (OSError, psutil.Error):
            continue
    return True


def test_kill_9_of_the_parent_leaves_nothing(start: Start, tmp_path: Path) -> None:
    parent = start()
    server = told(parent)
    assert len(holders(tmp_path)) >= 3  # parent, server, grandchild
    parent.kill()
    until_none(tmp_path)
    assert group_is_gone(server["pgid"])


def test_kill_9_of_the_parents_whole_group_leaves_nothing(start: Start, tmp_path: Path) -> None:
    parent = start()
    server = told(parent)
    os.killpg(parent.pid, signal.SIGKILL)
    until_none(tmp_path)
    assert group_is_gone(server["pgid"])


def test_a_server_that_ignores_sigterm_does_not_outlive_the_parent(
    start: Start, tmp_path: Path
) -> None:
    parent = start(ignore_term=True)
    told(parent)
    parent.kill()
    until_none(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_ordinary_end_of_the_parent_leaves_nothing(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    parent = start()
    told(parent)
    os.kill(parent.pid, number)
    until_none(tmp_path)


def test_parent_and_guard_killed_together_leave_no_server(start: Start, tmp_path: Path) -> None:
    parent = start()
    server = told(parent)
    guard = psutil.Process(server["pid"]).ppid()
    if sys.platform != "linux":
        pytest.skip("the kernel ends the server with its guard on Linux only")
    os.kill(guard, signal.SIGSTOP)  # it can do nothing from here on
    parent.kill()
    os.kill(guard, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while server["pid"] in [process.pid for process in holders(tmp_path)]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for process in holders(tmp_path):  # the grandchild, which only a guard would have ended
        process.kill()


def test_three_servers_of_one_parent_all_end(start: Start, tmp_path: Path) -> None:
    parent = start("many")
    groups = [told(parent)["pgid"] for _ in range(3)]
    parent.kill()
    until_none(tmp_path)
    assert all(group_is_gone(group) for group in groups)


def test_a_sibling_process_does_not_keep_the_server_alive(start: Start, tmp_path: Path) -> None:
    parent = start("with-sibling")
    assert parent.stdout is not None
    sibling = int(parent.stdout.readline())
    told(parent)
    parent.kill()
    try:
        deadline = time.monotonic() + 30
        while [p for p in holders(tmp_path) if p.pid != sibling]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert psutil.pid_exists(sibling)
    finally:
        os.kill(sibling, signal.SIGKILL)


def test_kill_9_at_random_moments_leaves_nothing(start: Start, tmp_path: Path) -> None:
    for _ in range(6):
        parent = start(load_s=0.1)
        time.sleep(random.uniform(0, 0.4))
        parent.kill()
        until_none(tmp_path)


def test_a_tool_does_not_outlive_the_parent(start: Start, tmp_path: Path) -> None:
    parent = start("tool", tool="hang")
    note = tmp_path / "grandchild"
    deadline = time.monotonic() + 30
    while not note.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.kill()
    until_none(tmp_path)


async def test_a_forked_child_closes_its_copy_of_the_pipe(tmp_path: Path) -> None:
    child = await spawn.start(["sleep", "600"], log=tmp_path / "log", env=dict(os.environ))
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_end, b"%d" % sum(c.fd >= 0 for c in spawn._open_controls))
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read_end, 8) == b"0"
    os.close(read_end)
    os.close(write_end)
    assert child.exit is None
    child.kill()
    assert (await child.wait()).signal == signal.SIGKILL
