"""Start a server from a command line as the user wrote it, watch it, stop it. No orphan, ever.

Boundary: for raw commands (``--server``, a recipe's argv); the engine floor's ``LlamaServer``
is for typed options. The child is kept from outliving us by the engine floor's ``spawn``. Its
memory, power and heat are sampled while it runs, and its end is told from its log.

Example:
    >>> async with CommandServer("llama-server -m m.gguf", log=Path("server.log")) as server:
    ...     server.base_url                                        # doctest: +SKIP
    'http://127.0.0.1:42123'
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from browndwarf.bench.transport import Transport
from browndwarf.engine import spawn
from browndwarf.engine.diagnose import diagnose, relevant_lines
from browndwarf.engine.locate import Build
from browndwarf.errors import EngineUnsupported, PortTaken, ServerHung, UsageError
from browndwarf.hardware.watch import Watcher, WatchRecord

POLL_S = 0.1
LOG_TAIL_BYTES = 1 << 20


def split_command(text: str) -> list[str]:
    """argv of a command line.

    Raises:
        UsageError: a quote is not closed, or there is nothing in it.
    """
    try:
        argv = shlex.split(text, posix=os.name != "nt")
    except ValueError as exc:
        raise UsageError(
            f"the server's command cannot be read: {exc}",
            why=text,
            fix="check its quotes",
        ) from exc
    if not argv:
        raise UsageError("the server's command is empty", fix='--server "llama-server -m ..."')
    return argv


def recipe_argv(run: Path) -> list[str]:
    """The winning command of a run directory, from its ``recipe.json``.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    path = run if run.is_file() else run / "recipe.json"
    try:
        argv = json.loads(path.read_text(encoding="utf-8"))["argv"]
    except FileNotFoundError as exc:
        raise UsageError(
            f"{run} holds no recipe",
            why=f"there is no {path}",
            fix=f"browndwarf recipe {run} writes it",
        ) from exc
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise UsageError(f"{path} cannot be read", why=str(exc), fix="write it anew") from exc
    if not isinstance(argv, list) or not argv or not all(isinstance(w, str) for w in argv):
        raise UsageError(f"{path} holds no command", why="argv is not a list of words")
    return argv


def listening(argv: Sequence[str]) -> tuple[str, int | None]:
    """Host to ask and port of a command; None where it names no port."""
    host, port = "127.0.0.1", None
    for flag, value in _pairs(argv):
        if flag == "--port" and value.isdigit():
            port = int(value)
        elif flag == "--host" and value not in ("0.0.0.0", "::", ""):
            host = value
    return host, port


def contained(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command, and what removes its container: killing ``docker run`` does not stop one.

    Raises:
        UsageError: a container without a port, which could not be reached.
    """
    words = list(argv)
    if Path(words[0]).stem not in ("docker", "podman") or words[1:2] != ["run"]:
        return words, []
    if listening(words)[1] is None:
        raise UsageError(
            "the container's server has no port",
            why="a port must be published with -p and given to the server",
            fix='--server "docker run -p 8081:8081 IMAGE --server ... --port 8081"',
        )
    names = [value for flag, value in _pairs(words) if flag == "--name"]
    if names:
        return words, [words[0], "rm", "-f", names[0]]
    name = f"browndwarf-{secrets.token_hex(6)}"
    return [*words[:2], "--name", name, *words[2:]], [words[0], "rm", "-f", name]


def _pairs(argv: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        pairs.append((flag, value) if equals else (word, following))
    return pairs


class CommandServer:
    """A server started from argv, as an async context manager.

    Args:
        command: a command line, or argv. Without ``--port`` a free one is added.
        log: its output goes here, after what is there already.
        build: used for a bare ``llama-server`` that is not on PATH, and for its environment.
        load_timeout_s: most seconds until it answers.
        on_wait: told, now and then, how long loading has taken and the log's last line.

    Raises (from ``async with``):
        UsageError, PortTaken, EngineUnsupported, ServerHung, or what the log tells.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        log: Path,
        build: Build | None = None,
        load_timeout_s: float = 900.0,
        on_wait: Callable[[float, str], None] = lambda seconds, line: None,
    ) -> None:
        argv = split_command(command) if isinstance(command, str) else list(command)
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_ARG_")}
        self.argv = self._resolve(argv, build)
        self.log = log
        self.argv, self._cleanup = contained(self.argv)
        self.host, port = listening(self.argv)
        self.port = _free_port(self.host, port)
        if port is None:
            self.argv += ["--port", str(self.port)]
        self._timeout_s = load_timeout_s
        self._on_wait = on_wait
        self._child: spawn.Child | None = None
        self._watcher: Watcher | None = None
        self._log_start = 0
        self.load_s = 0.0

    @property
    def base_url(self) -> str:
        """Where it listens."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """Its process."""
        return self._child.pid if self._child is not None else 0

    def fault(self) -> str:
        """Why it cannot go on, in one line; empty while it runs."""
        if self._child is None or self._child.exit is None:
            return ""
        return "the server died: " + diagnose(self._child.exit, self._tail()).what

    def watched(self) -> dict[str, float]:
        """Peaks since the last call, and what marks they earn; then sampling starts anew."""
        if self._watcher is None:
            return {}
        self._watcher.__exit__(None, None, None)
        figures = watch_figures(self._watcher.record)
        self._watcher = self._watch()
        return figures

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self.stop()))
            raise
        self._watcher = self._watch()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.shield(asyncio.ensure_future(self.stop()))

    async def stop(self) -> None:
        """Stop it and whatever it started. Safe to call again."""
        if self._watcher is not None:
            self._watcher.__exit__(None, None, None)
            self._watcher = None
        if self._child is not None:
            if self._child.exit is None:
                self._child.terminate()
            await self._child.wait()

    def _watch(self) -> Watcher:
        watcher = Watcher(self.pid)
        watcher.__enter__()
        return watcher

    def _resolve(self, argv: list[str], build: Build | None) -> list[str]:
        """argv with the program found; a bare ``llama-server`` may be the chosen build's."""
        name = Path(argv[0]).name.removesuffix(".exe")
        found = shutil.which(argv[0])
        if build is not None and name == "llama-server" and build.docker_image is None:
            server = build.server.resolve()
            if found is None or Path(found).resolve() == server or argv[0] == name:
                self._env |= build.env
                return [str(build.server), *argv[1:]]
        if found is None:
            raise UsageError(
                f"there is no program {argv[0]}",
                why="it is neither a path nor on PATH",
                fix="give its path, or point --llama-dir at a llama.cpp build",
            )
        return [found, *argv[1:]]

    async def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        started = time.monotonic()
        # A debugger started by a dying server would outlast our patience.
        env = {**self._env, "GGML_NO_BACKTRACE": "1"}
        try:
            self._child = await spawn.start(
                self.argv, log=self.log, env=env, grace_s=10.0, cleanup=self._cleanup
            )
        except spawn.SpawnFailure as exc:
            raise EngineUnsupported(
                f"{self.argv[0]} could not be started", why=str(exc), fix="check the command"
            ) from exc
        told = 0.0
        async with Transport(self.base_url, timeout_s=5.0) as transport:
            while not await self._answers(transport):
                if self._child.exit is not None:
                    raise diagnose(self._child.exit, self._tail())
                waited = time.monotonic() - started
                if waited > self._timeout_s:
                    tail = relevant_lines([x for x in self._tail().splitlines() if x.strip()])
                    raise ServerHung(
                        f"the server did not answer within {self._timeout_s:g} s",
                        why="\n     ".join(tail),
                        fix="raise --load-timeout for slow disks, or look into its log",
                    )
                if waited - told > 1.0:
                    told = waited
                    lines = self._tail(4096).splitlines() or [""]
                    self._on_wait(waited, lines[-1][:100])
                await asyncio.sleep(POLL_S)
        self.load_s = time.monotonic() - started

    async def _answers(self, transport: Transport) -> bool:
        """Healthy by ``/health``; servers without it must list their models."""
        health = await transport.get("/health")
        if health.status == 404:
            return (await transport.get("/v1/models")).status == 200
        return health.status == 200

    def _tail(self, limit: int = LOG_TAIL_BYTES) -> str:
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - limit))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""


def watch_figures(record: WatchRecord) -> dict[str, float]:
    """A watch as plain numbers; ``memory_mib`` is device memory where it is known, else RSS."""
    device = record.peak_device_mib
    known = {
        "memory_mib": device if device else record.peak_rss_mib,
        "rss_mib": record.peak_rss_mib,
        "device_mib": device,
        "device_used_mib": record.peak_device_used_mib,
        "spill_mib": record.spill_mib,
        "power_w": record.mean_power_w,
        "temperature_c": record.peak_temperature_c,
        "other_cpu_share": record.other_cpu_share,
        **{name.replace("-", "_"): 1.0 for name in record.marks},
    }
    return {name: float(value) for name, value in known.items() if value is not None}


def _free_port(host: str, wanted: int | None) -> int:
    """A port that is free now; ``wanted`` itself if one is wanted.

    Raises:
        PortTaken: it is in use, so another server would be measured.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if os.name == "posix":  # on Windows this option would allow to steal a port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted or 0))
        except OSError as exc:
            raise PortTaken(
                f"port {wanted} on {host} is taken",
                why=str(exc.strerror or exc),
                fix="leave --port out of the command, so that a free one is chosen",
            ) from exc
        return int(probe.getsockname()[1])
