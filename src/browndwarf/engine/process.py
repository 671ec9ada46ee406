"""Start a llama-server, wait for it, know why it ended, stop it. No orphan, ever.

Boundary: one server from start to end; requests are ``client``'s business, and how the child
is kept from outliving us is ``spawn``'s.

Example:
    >>> async with LlamaServer(build, options, log_path=Path("server.log")) as server:
    ...     async with LlamaClient(server.base_url) as client:  # doctest: +SKIP
    ...         await client.completion("Hello", n_predict=8)
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from browndwarf.engine import docker, logparse, spawn
from browndwarf.engine.client import LlamaClient
from browndwarf.engine.diagnose import diagnose, out_of_memory_line, relevant_lines
from browndwarf.engine.life import SignsOfLife
from browndwarf.engine.locate import Build
from browndwarf.engine.logparse import LogFacts
from browndwarf.engine.options import ServerOptions, server_argv, server_files
from browndwarf.engine.spawn import Exit
from browndwarf.errors import (
    EngineUnsupported,
    EnvironmentFault,
    ModelNotFound,
    PortTaken,
    RequestFailed,
    ServerHung,
)

POLL_S = 0.05
PROGRESS_EVERY_S = 0.25
EXPLAIN_S = 3.0
LOG_TAIL_BYTES = 1 << 20


@dataclass(frozen=True)
class LoadProgress:
    """How far loading is. ``share`` is known only where the build prints its row of dots."""

    phase: str
    elapsed_s: float
    last_line: str
    log_bytes: int
    rss_bytes: int
    share: float | None = None


class LlamaServer:
    """One llama-server, as an async context manager.

    Args:
        build: which engine.
        options: its configuration.
        log_path: its output is appended here; the folder must exist.
        load_timeout_s: most seconds until it is healthy.
        stall_timeout_s: most seconds of loading without any sign of life: no log line, no
            memory or file read, no processor time.
        on_progress: called several times a second while loading.
        env: variables to add to the server's environment. ``LLAMA_ARG_*`` of our own
            environment is not passed on, since it would change the configuration silently.
        port: a port to insist on; by default a free one is chosen.
        grace_s: seconds between the request to stop and the kill.

    Raises (from ``async with``):
        ServerCrashed, ServerOutOfMemory, ModelUnsupported, ServerHung, PortTaken,
        ServerKilled, ModelNotFound, BadModelFile, EngineUnsupported, UsageError.
    """

    def __init__(
        self,
        build: Build,
        options: ServerOptions,
        *,
        log_path: Path,
        load_timeout_s: float = 600.0,
        stall_timeout_s: float = 120.0,
        on_progress: Callable[[LoadProgress], None] | None = None,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        grace_s: float = 5.0,
    ) -> None:
        self.build = build
        self.options = options
        self.log_path = log_path
        self.port = port or 0
        self.pid = 0
        self.pgid = 0
        self.command: list[str] = []
        self.load_s = 0.0
        self._load_timeout_s = load_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._on_progress = on_progress
        self._extra_env = dict(env or {})
        self._wanted_port = port
        self._grace_s = grace_s
        self._child: spawn.Child | None = None
        self._log_start = 0
        self._stopped = False

    @property
    def base_url(self) -> str:
        """Where the server listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._child is not None and self._child.exit is None

    @property
    def exit(self) -> Exit | None:
        """How it ended; None while it runs."""
        return self._child.exit if self._child is not None else None

    @property
    def log(self) -> LogFacts:
        """What the log tells so far: buffers, layers, acceptance, warnings."""
        return logparse.parse_log(self.log_text())

    def log_text(self, limit: int | None = None) -> str:
        """This server's part of the log; with ``limit``, its last bytes only."""
        try:
            with self.log_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = self._log_start if limit is None else max(self._log_start, size - limit)
                file.seek(start)
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            # A server that is loading may not hear SIGTERM, and has nothing to finish.
            if self._child is not None:
                self._child.kill()
            await asyncio.shield(asyncio.ensure_future(self.stop()))
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.shield(asyncio.ensure_future(self.stop()))

    def failure(self) -> EnvironmentFault | None:
        """Why the server ended by itself; None while it runs or after ``stop``.

        Mostly a ServerError; a file that is missing or damaged is a ModelError.
        """
        exit_ = self.exit
        if exit_ is None or self._stopped:
            return None
        return diagnose(exit_, self.log_text(LOG_TAIL_BYTES))

    async def explain(self, error: RequestFailed) -> EnvironmentFault:
        """The better error for a failed request: why the server ended, if it did.

        A cut connection is seen a moment before the process is reaped, so this looks for the
        end until the server either is gone or proves that it lives.
        """
        deadline = time.monotonic() + EXPLAIN_S
        async with LlamaClient(self.base_url) as client:
            while self.running and time.monotonic() < deadline:
                if await client.health(timeout_s=EXPLAIN_S):
                    break
                await asyncio.sleep(POLL_S)
        if self.running:
            memory = out_of_memory_line(self.log_text(1 << 14))
            return error if memory is None else diagnose(Exit(code=0), memory)
        return self.failure() or error

    async def stop(self) -> None:
        """Stop the server, and reap it and whatever it started. Safe to call again."""
        child = self._child
        if child is None:
            return
        if child.exit is None:
            self._stopped = True
            child.terminate()
        await child.wait()

    async def wait_exit(self) -> Exit:
        """Wait until the server has ended by itself or by ``stop``."""
        if self._child is None:
            raise RuntimeError("the server was not started")
        return await self._child.wait()

    async def _start(self) -> None:
        draft = Path(self.options.draft).expanduser().absolute() if self.options.draft else None
        for path in server_files(self.options):
            if not path.exists():
                raise ModelNotFound(
                    f"there is no {'drafter' if path == draft else 'model'} file at {path}",
                    why="the path does not exist",
                    fix="check the path",
                )
        attempts = 1 if self._wanted_port is not None else 3
        for attempt in range(1, attempts + 1):
            try:
                await self._start_once()
                return
            except PortTaken:
                # Between our choice and the server's bind another program took the port.
                await self._forget()
                if attempt == attempts:
                    raise

    async def _forget(self) -> None:
        if self._child is not None:
            self._child.kill()
            await self._child.wait()
            self._child = None

    async def _start_once(self) -> None:
        self.port = _free_port(self._wanted_port)
        host = "0.0.0.0" if self.build.docker_image else "127.0.0.1"
        argv = server_argv(self.build, self.options, host=host, port=self.port)
        cleanup: list[str] = []
        env = self._environment()
        if self.build.docker_image is not None:
            name = f"browndwarf-{secrets.token_hex(6)}"
            argv = docker.run_command(
                self.build.docker_image,
                argv,
                name=name,
                port=self.port,
                read_only=server_files(self.options),
                env=self._extra_env,
            )
            cleanup = docker.kill_command(name)
        self.command = argv
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        started = time.monotonic()
        try:
            self._child = await spawn.start(
                argv, log=self.log_path, env=env, grace_s=self._grace_s, cleanup=cleanup
            )
        except spawn.SpawnFailure as exc:
            raise EngineUnsupported(
                f"{argv[0]} could not be started",
                why=str(exc),
                fix="check the build (`browndwarf doctor`), or run `browndwarf engine install`",
            ) from exc
        self.pid = self._child.pid
        self.pgid = self._child.pgid
        await self._until_healthy(self._child, started)
        self.load_s = time.monotonic() - started

    def _environment(self) -> dict[str, str]:
        ours = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_ARG_")}
        # A debugger started by a dying server would outlast our patience.
        return {**ours, "GGML_NO_BACKTRACE": "1", **self.build.env, **self._extra_env}

    async def _until_healthy(self, child: spawn.Child, started: float) -> None:
        life = SignsOfLife(child.pid, self.log_path)
        told = 0.0
        phase = "starting"
        async with LlamaClient(self.base_url) as client:
            while True:
                if child.exit is not None:
                    error = self.failure()
                    assert error is not None
                    raise error
                if await client.health(timeout_s=2.0):
                    await self._check_identity(client)
                    return
                now = time.monotonic()
                if now - told >= PROGRESS_EVERY_S:
                    told = now
                    life.look()
                    text = self.log_text(1 << 14)
                    lines = [line for line in text.splitlines() if line.strip()]
                    phase = logparse.phase_of(lines, phase)
                    self._tell(
                        LoadProgress(
                            phase=phase,
                            elapsed_s=now - started,
                            last_line=logparse.strip_prefix(lines[-1]) if lines else "",
                            log_bytes=life.log_bytes,
                            rss_bytes=life.rss_bytes,
                            share=logparse.dots_share(text),
                        )
                    )
                if now - started > self._load_timeout_s:
                    raise self._hung(
                        f"llama-server was not ready after {self._load_timeout_s:g} s", phase
                    )
                if now - life.last_change > self._stall_timeout_s:
                    raise self._hung(
                        f"llama-server showed no sign of life for {self._stall_timeout_s:g} s",
                        phase,
                    )
                await asyncio.sleep(POLL_S)

    def _tell(self, progress: LoadProgress) -> None:
        if self._on_progress is not None:
            self._on_progress(progress)

    def _hung(self, what: str, phase: str) -> ServerHung:
        lines = [line for line in self.log_text(1 << 14).splitlines() if line.strip()]
        tail = "\n     ".join(relevant_lines(lines))
        return ServerHung(
            what,
            why=f"it got as far as: {phase}" + (f"\n     {tail}" if tail else ""),
            fix="raise the load timeout for slow disks or large models; else try another build",
        )

    async def _check_identity(self, client: LlamaClient) -> None:
        """Another server may answer on our port: some builds share ports silently."""
        try:
            path = (await client.props()).model_path
        except RequestFailed:
            return  # a server with its own API key, or without /props
        if path and Path(path).name != Path(self.options.model).name:
            raise PortTaken(
                f"another llama-server answers on port {self.port}",
                why=f"it serves {path}",
                fix="leave the port out, so that a free one is chosen",
            )


def _free_port(wanted: int | None) -> int:
    """A port that is free now; ``wanted`` itself if one is wanted.

    Raises:
        PortTaken: ``wanted`` is in use.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if os.name == "posix":  # on Windows this option would allow to steal a port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except OSError as exc:
            raise PortTaken(
                f"port {wanted} is taken",
                why=str(exc.strerror or exc),
                fix="choose another port, or leave it out so that a free one is chosen",
            ) from exc
        return int(probe.getsockname()[1])
