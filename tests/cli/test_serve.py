"""``browndwarf serve`` as a user meets it: the line that it prints, signals, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from browndwarf import cli
from browndwarf.decode.server_thread import listening
from browndwarf.engine.native import load_library
from browndwarf.engine.native_context import require_mtp
from browndwarf.errors import EngineError


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A server of the embedded pair on a free port."""
    try:
        require_mtp(load_library())
    except EngineError as exc:
        pytest.skip(f"NO LLAMA.CPP LIBRARY, so this test proves nothing here: {exc}")
    words = "serve demo --port 0 --threads 1 --ctx 2k --sessions".split()
    with subprocess.Popen(
        [sys.executable, "-m", "browndwarf", *words, str(tmp_path / "kept")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive", "BROWNDWARF_API_KEY": "sesame"},
    ) as started:
        yield started
        started.kill()


@pytest.mark.engine
@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM ends a process at once there")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_cleanly_in_mid_answer(
    process: subprocess.Popen[str], number: signal.Signals, tmp_path: Path
) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    url = line.rsplit(" ", 1)[1].strip()
    assert url.startswith("http://127.0.0.1:")
    body = {
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "temperature": 1.5,
        "stream": True,
        "session": "anna",
    }
    headers = {"Authorization": "Bearer sesame"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/chat/completions", json=body, headers=headers) as response,
    ):
        await response.content.readuntil(b"\n\n")
        await response.content.readuntil(b"\n\n")
        process.send_signal(number)
        rest = await response.read()
    said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert said == ("", "ended\n")
    ended = json.loads(rest.strip().split(b"\n\n")[-1].removeprefix(b"data: "))
    assert "shutting down" in ended["error"]["message"]
    assert (tmp_path / "kept" / "anna" / "manifest").exists()


def test_a_port_that_is_taken_ends_it_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with listening("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert cli.run(["serve", "no-such-model.gguf", "--port", port]) == 3
    err = capsys.readouterr().err
    assert f"another program listens on 127.0.0.1:{port}" in err
    assert "why:" in err
    assert "next: choose another --port" in err


@pytest.mark.parametrize("package", ["uvicorn", "starlette"])
def test_a_missing_package_is_told_with_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = ("browndwarf.decode.server", "browndwarf.decode.server_thread")
    for name in list(sys.modules):
        if name in (package, *ours) or name.startswith(f"{package}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.run(["serve", "demo"]) == 3
    err = capsys.readouterr().err
    assert package in err
    assert "pip install 'browndwarf[serve]'" in err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["serve"], 2),
        (["serve", "demo", "--port", "70000"], 2),
        (["serve", "demo", "--api-key", " "], 2),
        (["serve", "demo", "--host", "a" * 64], 2),
        (["serve", "demo", "--ctx", "many"], 2),
        (["serve", "demo", "--port", "0", "--n-max", "99"], 2),
        (["serve", "no-such.gguf", "--port", "0"], 3),
    ],
)
def test_exit_codes(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == code
    assert "Traceback" not in capsys.readouterr().err
