"""Start a child that cannot outlive us, and learn how it ended.

Boundary: processes only; knows nothing of llama.cpp. On POSIX the child's parent is a guard
(see ``guard``) tied to us by a pipe; on Windows the child sits in a job object that dies with
our handle. The Windows path is written to the documented interface and type-checked, but has
not been run on Windows yet.

A process forked from this one without exec (``multiprocessing`` with fork) closes its copy of
the pipe, so it does not keep the child alive.

Example:
    >>> child = await start(["sleep", "60"], log=Path("log"), env={})  # doctest: +SKIP
    >>> child.terminate(); (await child.wait()).signal  # doctest: +SKIP
    15
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

GUARD = Path(__file__).with_name("guard.py")
GUARD_START_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Exit:
    """How a child ended: ``code`` or ``signal`` is set; ``asked`` when we told it to stop.

    ``guard_lost``: the guard itself was killed, so the status is unknown.
    """

    code: int | None = None
    signal: int | None = None
    asked: bool = False
    guard_lost: bool = False


class Child(Protocol):
    """A running child. ``pgid`` is its process group (its own pid)."""

    pid: int
    pgid: int

    @property
    def exit(self) -> Exit | None:
        """None while it runs."""

    async def wait(self) -> Exit:
        """Wait until the child and everything in its group has ended."""

    def terminate(self) -> None:
        """Ask it to stop; it is killed after the grace time."""

    def kill(self) -> None:
        """Kill the whole group now."""


class SpawnFailure(Exception):
    """The program could not be executed. Stays inside the engine floor."""


_open_controls: weakref.WeakSet[_Control] = weakref.WeakSet()


class _Control:
    """Write end of a guard's control pipe."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        _open_controls.add(self)

    def send(self, word: bytes) -> None:
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self.fd, word + b"\n")

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def _close_in_fork() -> None:
    for control in list(_open_controls):
        control.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_fork)


class _GuardedChild:
    """POSIX: a child below a guard process."""

    def __init__(
        self, pid: int, guard: subprocess.Popen[bytes], control: _Control, reports: _Reports
    ) -> None:
        self.pid = self.pgid = pid
        self.guard_pid = guard.pid
        self._guard = guard
        self._control = control
        self._reports = reports
        self._exit: Exit | None = None
        self._task = asyncio.create_task(self._watch())

    @property
    def exit(self) -> Exit | None:
        return self._exit

    async def _watch(self) -> Exit:
        report = await self._reports.next()
        if report is None:
            # The guard was killed. On Linux the kernel killed the child with it; elsewhere,
            # and for the rest of its group, that is left to us.
            self._kill_group()
            self._exit = Exit(guard_lost=True)
        else:
            code = os.waitstatus_to_exitcode(int(str(report["status"])))
            asked = bool(report.get("asked"))
            if code < 0:
                self._exit = Exit(signal=-code, asked=asked)
            else:
                self._exit = Exit(code=code, asked=asked)
        self._control.close()
        self._reports.close()
        await _reap(self._guard)
        return self._exit

    def _kill_group(self) -> None:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):
                os.killpg(self.pgid, signal.SIGKILL)

    async def wait(self) -> Exit:
        return await asyncio.shield(self._task)

    def terminate(self) -> None:
        self._control.send(b"term")

    def kill(self) -> None:
        self._control.send(b"kill")


class _Reports:
    """Reads the guard's report lines without a thread."""

    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "rb", buffering=0)
        self._reader = asyncio.StreamReader()
        self._transport: asyncio.ReadTransport | None = None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), self._file
        )

    async def next(self) -> dict[str, object] | None:
        line = await self._reader.readline()
        try:
            report = json.loads(line)
        except ValueError:
            return None
        return report if isinstance(report, dict) else None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        else:
            self._file.close()


async def _reap(guard: subprocess.Popen[bytes]) -> None:
    """Collect the guard, which is ending; kill it if it does not."""
    for _ in range(400):
        if guard.poll() is not None:
            return
        await asyncio.sleep(0.005)
    guard.kill()
    guard.wait()


async def start(
    argv: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str],
    cwd: Path | None = None,
    grace_s: float = 5.0,
    cleanup: Sequence[str] = (),
) -> Child:
    """Start ``argv`` with its output appended to ``log``.

    Args:
        env: its whole environment.
        grace_s: seconds between the request to stop and the kill.
        cleanup: command to run once the child has ended, whatever way.

    Raises:
        SpawnFailure: the program could not be executed.
    """
    if sys.platform == "win32":
        from browndwarf.engine import spawn_windows

        return await spawn_windows.start(argv, log=log, env=env, cwd=cwd, grace_s=grace_s)
    control_read, control_write = os.pipe()
    report_read, report_write = os.pipe()
    control = _Control(control_write)
    reports = _Reports(report_read)
    guard: subprocess.Popen[bytes] | None = None
    try:
        try:
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(control_read), str(report_write)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(control_read, report_write),
                start_new_session=True,
            )
        finally:
            os.close(control_read)
            os.close(report_write)
        spec = {
            "argv": list(argv),
            "env": dict(env),
            "cwd": str(cwd) if cwd is not None else None,
            "log": str(log.absolute()),
            "grace_s": grace_s,
            "cleanup": list(cleanup),
        }
        _write_all(control.fd, json.dumps(spec).encode() + b"\n")
        await reports.open()
        first = await asyncio.wait_for(reports.next(), GUARD_START_TIMEOUT_S)
        if first is None or "pid" not in first:
            text = str((first or {}).get("text", "the guard process ended"))
            raise SpawnFailure(text)
    except BaseException as exc:
        control.close()  # end of file: the guard stops the child, if there is one
        reports.close()
        if guard is not None:
            await _reap(guard)
        if isinstance(exc, OSError | TimeoutError):
            raise SpawnFailure(str(exc)) from exc
        raise
    return _GuardedChild(int(str(first["pid"])), guard, control, reports)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
