"""Run one of a build's command-line tools to its end, and tell why it failed.

Boundary: knows no tool in particular; ``tools`` and ``quantizer`` do.

Example:
    >>> run_tool(build, "llama-quantize", ["--help"]).seconds  # doctest: +SKIP
    0.01
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from browndwarf.engine import docker, probe
from browndwarf.engine import run as run_
from browndwarf.engine.diagnose import diagnose, relevant_lines
from browndwarf.engine.locate import INSTALL_HINT, Build
from browndwarf.engine.spawn import SpawnFailure
from browndwarf.errors import (
    EngineUnsupported,
    EnvironmentFault,
    Interrupted,
    ModelNotFound,
    ServerCrashed,
    ServerKilled,
    ToolFailed,
)

OnLine = Callable[[str], None]


@dataclass(frozen=True)
class ToolResult:
    """A tool that ended well: its command, what it wrote, and its run time in seconds."""

    command: tuple[str, ...]
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self) -> str:
        """Both streams, stderr last."""
        return f"{self.stdout}\n{self.stderr}"


def run_tool(
    build: Build,
    name: str,
    args: Sequence[str],
    *,
    timeout_s: float | None = None,
    on_line: OnLine | None = None,
    cancel: threading.Event | None = None,
    env: Mapping[str, str] | None = None,
    read_only: Sequence[Path] = (),
    writable: Sequence[Path] = (),
) -> ToolResult:
    """Run one of the build's tools to its end.

    Args:
        name: such as ``llama-quantize``.
        timeout_s: most seconds; None for no limit.
        on_line: called with each line of output as it comes.
        cancel: set it from another thread to end the tool.
        read_only, writable: paths that a tool in a container must see.

    Raises:
        EngineUnsupported: the build has no such tool, or it does not start.
        ToolFailed: it ended with an error or ran out of time; more telling errors
            (BadModelFile, ModelNotFound, ServerOutOfMemory, ...) where its output allows.
        Interrupted: ``cancel`` was set.
    """
    program = build.tools.get(name)
    if program is None:
        raise EngineUnsupported(
            f"this llama.cpp build has no {name}",
            why=f"{build.label} holds {', '.join(sorted(build.tools))}",
            fix=INSTALL_HINT,
        )
    command = [str(program), *args]
    cleanup: list[str] = []
    if build.docker_image is not None:
        container = f"browndwarf-{secrets.token_hex(6)}"
        command = docker.run_command(
            build.docker_image,
            command,
            name=container,
            read_only=[path.absolute() for path in read_only],
            writable=[path.absolute() for path in writable],
        )
        cleanup = docker.kill_command(container)
    ours = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_ARG_")}
    try:
        done = run_.run(
            command,
            env={**ours, "GGML_NO_BACKTRACE": "1", **build.env, **(env or {})},
            timeout_s=timeout_s,
            on_line=on_line,
            cancel=cancel,
            cleanup=cleanup,
        )
    except SpawnFailure as exc:
        raise EngineUnsupported(f"{name} does not start", why=str(exc), fix=INSTALL_HINT) from exc
    if done.cancelled:
        raise Interrupted(f"{name} was cancelled")
    if done.timed_out:
        raise ToolFailed(
            f"{name} did not end within {timeout_s:g} s",
            why=tail_of(done.stdout + "\n" + done.stderr),
            fix="raise the time limit, or give it less to do",
        )
    if done.exit.code != 0:
        raise _failure(name, done)
    return ToolResult(tuple(command), done.stdout, done.stderr, done.seconds)


@cache
def _flags(program: Path, env: tuple[tuple[str, str], ...]) -> frozenset[str]:
    try:
        done = run_.run([str(program), "--help"], env={**os.environ, **dict(env)}, timeout_s=20)
    except SpawnFailure:
        return frozenset()
    text = "\n".join(line.lstrip() for line in (done.stdout + "\n" + done.stderr).splitlines())
    return probe.parse_help(text).flags


def tool_flags(build: Build, name: str) -> frozenset[str]:
    """Flags that a tool's ``--help`` shows; empty where it cannot be asked."""
    program = build.tools.get(name)
    if program is None or build.docker_image is not None:
        return frozenset()
    return _flags(program, tuple(sorted(build.env.items())))


def _failure(name: str, done: run_.Finished) -> EnvironmentFault:
    text = f"{done.stdout}\n{done.stderr}"
    error = diagnose(done.exit, text, program=name)
    if isinstance(error, ServerCrashed | ServerKilled):
        return ToolFailed(error.what, why=error.why, fix="its output above tells more")
    return error


def tail_of(text: str) -> str:
    """The last telling lines of an output, as the reason of an error."""
    return "\n     ".join(relevant_lines([line for line in text.splitlines() if line.strip()]))


def need_file(path: Path) -> None:
    """Raises ModelNotFound unless ``path`` is a file."""
    if not path.is_file():
        raise ModelNotFound(
            f"there is no file at {path}", why="the path does not exist", fix="check the path"
        )
