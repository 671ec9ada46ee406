"""Run a short-lived program to its end, line by line, and never leave it behind.

Boundary: the synchronous sibling of ``spawn``, used for llama.cpp's command-line tools. The
child sits below the same guard: Ctrl-C, an exception, a time limit or our own death end it
with its whole process group.

Example:
    >>> run(["sh", "-c", "echo hello"], env={"PATH": "/bin:/usr/bin"}).stdout  # doctest: +SKIP
    'hello\\n'
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from browndwarf.engine.spawn import GUARD, Exit, SpawnFailure

_GRACE_S = 2.0


@dataclass(frozen=True)
class Finished:
    """A program that has ended: how, what it said, and how long it took in seconds."""

    exit: Exit
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    cancelled: bool = False


class _Lines:
    """Splits a byte stream into lines and keeps all of it; ``\\r`` ends a line as well."""

    def __init__(self, on_line: Callable[[str], None] | None) -> None:
        self._on_line = on_line
        self._pending = b""
        self._all: list[bytes] = []

    def feed(self, data: bytes) -> None:
        self._all.append(data)
        if self._on_line is None:
            return
        *lines, self._pending = (self._pending + data).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            if line.strip():
                self._on_line(line.decode("utf-8", "replace"))

    def finish(self) -> str:
        if self._on_line is not None and self._pending.strip():
            self._on_line(self._pending.decode("utf-8", "replace"))
        return b"".join(self._all).decode("utf-8", "replace")


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    timeout_s: float | None = None,
    on_line: Callable[[str], None] | None = None,
    cancel: threading.Event | None = None,
    cleanup: Sequence[str] = (),
) -> Finished:
    """Run ``argv`` to its end.

    Args:
        env: its whole environment.
        timeout_s: it is ended after this long, and ``timed_out`` is set.
        on_line: called with each line of stdout and stderr as it comes.
        cancel: when set by another thread, it is ended, and ``cancelled`` is set.
        cleanup: command to run once the program has ended.

    Raises:
        SpawnFailure: the program could not be executed.
    """
    if sys.platform == "win32":
        from browndwarf.engine import spawn_windows

        return spawn_windows.run(argv, env=env, cwd=cwd, timeout_s=timeout_s, on_line=on_line)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        pipes = [os.pipe() for _ in range(4)]
        (control_r, control_w), (report_r, report_w), (out_r, out_w), (err_r, err_w) = pipes
        for fd in (report_r, out_r, err_r):
            stack.enter_context(_Descriptor(fd))
        control = stack.enter_context(_Descriptor(control_w))
        theirs = (control_r, report_w, out_w, err_w)
        try:
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(control_r), str(report_w)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=theirs,
                start_new_session=True,
            )
        except OSError as exc:
            raise SpawnFailure(str(exc)) from exc
        finally:
            for fd in theirs:
                os.close(fd)
        # Closing the control pipe, on whatever way out, tells the guard to end the child.
        stack.callback(guard.wait)
        stack.callback(control.close)
        spec = {
            "argv": list(argv),
            "env": dict(env),
            "cwd": str(cwd) if cwd is not None else None,
            "stdout_fd": out_w,
            "stderr_fd": err_w,
            "grace_s": _GRACE_S,
            "cleanup": list(cleanup),
        }
        control.write(json.dumps(spec).encode() + b"\n")
        watch = _Watch(control, started, timeout_s, cancel)
        stdout, stderr = _Lines(on_line), _Lines(on_line)
        reports = _pump({out_r: stdout, err_r: stderr}, report_r, watch)
        return Finished(
            exit=_exit_of(reports),
            stdout=stdout.finish(),
            stderr=stderr.finish(),
            seconds=time.monotonic() - started,
            timed_out=watch.timed_out,
            cancelled=watch.cancelled,
        )


class _Descriptor(contextlib.AbstractContextManager["_Descriptor"]):
    """An owned file descriptor; closing it twice is harmless."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            view = memoryview(data)
            while view:
                view = view[os.write(self.fd, view) :]


class _Watch:
    """Time limit and cancellation of one run."""

    def __init__(
        self,
        control: _Descriptor,
        started: float,
        timeout_s: float | None,
        cancel: threading.Event | None,
    ) -> None:
        self._control = control
        self._deadline = started + timeout_s if timeout_s is not None else None
        self._cancel = cancel
        self.timed_out = False
        self.cancelled = False

    @property
    def tick_s(self) -> float | None:
        """Longest time to sleep between two looks; None for ever."""
        return None if self._deadline is None and self._cancel is None else 0.1

    def look(self) -> None:
        if self.timed_out or self.cancelled:
            return
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.timed_out = True
        elif self._cancel is not None and self._cancel.is_set():
            self.cancelled = True
        else:
            return
        self._control.write(b"term\n")


def _pump(outputs: Mapping[int, _Lines], report: int, watch: _Watch) -> bytes:
    """Move bytes until the guard has closed its report; returns the report."""
    reports = b""
    with selectors.DefaultSelector() as selector:
        for fd in (*outputs, report):
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(watch.tick_s):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fd)
                elif key.fd == report:
                    reports += data
                else:
                    outputs[key.fd].feed(data)
            watch.look()
    return reports


def _exit_of(reports: bytes) -> Exit:
    lines = [json.loads(line) for line in reports.splitlines()]
    for line in lines:
        if "error" in line:
            raise SpawnFailure(str(line.get("text", line["error"])))
    last = lines[-1] if lines else {}
    if "status" not in last:
        return Exit(guard_lost=True)
    code = os.waitstatus_to_exitcode(int(last["status"]))
    asked = bool(last.get("asked"))
    return Exit(signal=-code, asked=asked) if code < 0 else Exit(code=code, asked=asked)
