"""A tiny parent for one llama.cpp process: it makes sure that the process ends when we do.

Run as ``python -I -S guard.py CONTROL_FD REPORT_FD`` (POSIX only; standard library only, to
start within a few tens of milliseconds). It lives in a session of its own, so a signal to the
caller's process group does not reach it.

Control pipe, one line each: first a JSON object (``argv``, ``env``, ``cwd``, ``log``,
``grace_s``, ``cleanup``; instead of ``log``, inherited descriptors ``stdout_fd`` and
``stderr_fd``), then ``term`` or ``kill``. End of file means that the caller is gone,
however it died: the child is asked to stop, then killed with its whole process group.

Report pipe, one JSON object a line: ``{"pid": ...}`` or ``{"error": errno}``, and at the end
``{"status": wait status, "asked": bool}``; ``asked`` is true when the guard was told to stop
the child.

On Linux the child is also killed by the kernel if the guard itself is killed, and processes
that left the child's group come back to the guard (subreaper), which ends them too.

Example:
    $ python -I -S guard.py 5 6      # with 5 and 6 inherited from the caller
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time

assert sys.platform != "win32"

TICK_S = 0.05
ORPHAN_GRACE_S = 1.0
"""Patience with the child of a caller that died: llama-server at times ignores SIGTERM."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _outputs(spec: dict[str, object]) -> tuple[int, int]:
    """Descriptors for the child's stdout and stderr: one log file, or two inherited pipes."""
    if spec.get("log"):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        log = os.open(str(spec["log"]), flags, 0o644)
        return log, log
    fds = int(str(spec["stdout_fd"])), int(str(spec["stderr_fd"]))
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds


def _start(spec: dict[str, object], guard_pid: int) -> int:
    """Fork and execute; returns the pid.

    Raises:
        OSError: the program could not be executed, or the log could not be opened.
    """
    argv = [str(part) for part in spec["argv"]]  # type: ignore[attr-defined]
    env = {str(k): str(v) for k, v in spec["env"].items()}  # type: ignore[attr-defined]
    out, err = _outputs(spec)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard_pid:  # the guard died before prctl took effect
                os._exit(127)
            os.dup2(null, 0)
            os.dup2(out, 1)
            os.dup2(err, 2)
            for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            if spec.get("cwd"):
                os.chdir(str(spec["cwd"]))
            os.execvpe(argv[0], argv, env)
        except OSError as exc:
            os.write(write_end, str(exc.errno).encode())
        finally:
            os._exit(127)
    os.close(write_end)
    for fd in {out, err, null}:  # ours: the reader of a pipe must see its end
        os.close(fd)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # whoever comes first, child or guard
    failure = os.read(read_end, 32)
    os.close(read_end)
    if failure:
        os.waitpid(pid, 0)
        code = int(failure)
        raise OSError(code, os.strerror(code))
    return pid


def _signal_group(pgid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pgid, number)


def _ended(pid: int) -> bool:
    """Whether the child has ended; leaves it unreaped, so that its group id stays its own."""
    if hasattr(os, "waitid"):
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, pid, flags) is not None
    return False


def _end_strays() -> None:
    """Kill and reap processes that came back to this subreaper."""
    me = os.getpid()
    for _ in range(100):
        try:
            with open(f"/proc/{me}/task/{me}/children") as file:  # noqa: PTH123
                strays = [int(word) for word in file.read().split()]
        except OSError:
            return
        if not strays:
            return
        for pid in strays:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.waitpid(-1, 0)


def _run_cleanup(command: object) -> None:
    """Run the clean-up command, such as ``docker rm -f NAME``, and wait for it."""
    if not isinstance(command, list) or not command:
        return
    with contextlib.suppress(OSError):
        pid = os.posix_spawnp(command[0], command, os.environ)
        os.waitpid(pid, 0)


class _Guard:
    """State of one supervised child: when it was asked to stop and when patience ends."""

    def __init__(self, control: int, report: int) -> None:
        self.control = control
        self.report_fd = report
        self.pid = 0
        self.asked = False
        self.deadline: float | None = None
        self.grace_s = 5.0
        self.buffer = b""

    def report(self, **values: object) -> None:
        with contextlib.suppress(OSError):  # the caller may be gone
            os.write(self.report_fd, json.dumps(values).encode() + b"\n")

    def read_spec(self) -> dict[str, object] | None:
        while b"\n" not in self.buffer:
            chunk = os.read(self.control, 1 << 16)
            if not chunk:
                return None
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        spec = json.loads(line)
        return spec if isinstance(spec, dict) else None

    def ask(self, number: int = signal.SIGTERM) -> None:
        """Ask the child to stop; a second request kills its group."""
        if self.asked or number == signal.SIGKILL:
            _signal_group(self.pid, signal.SIGKILL)
            return
        self.asked = True
        self.deadline = time.monotonic() + self.grace_s
        with contextlib.suppress(OSError):
            os.kill(self.pid, number)

    def supervise(self, wake: int) -> int:
        """Serve the control pipe until the child ends; returns its wait status."""
        watched = [self.control, wake]
        while True:
            ready, _, _ = select.select(watched, [], [], TICK_S if self.deadline else None)
            if wake in ready:
                for number in os.read(wake, 256):
                    if number in (signal.SIGTERM, signal.SIGHUP):
                        self.ask()
            if self.control in ready:
                chunk = os.read(self.control, 1 << 12)
                if not chunk:
                    watched.remove(self.control)
                    if not self.asked:
                        self.ask()
                    # Nobody is left to whom an orderly end would matter.
                    soon = time.monotonic() + ORPHAN_GRACE_S
                    self.deadline = min(self.deadline or soon, soon)
                for word in chunk.split():
                    if word == b"kill":
                        self.asked = True
                        self.ask(signal.SIGKILL)
                    elif word == b"term" and not self.asked:
                        self.ask()
            if self.deadline is not None and time.monotonic() > self.deadline:
                _signal_group(self.pid, signal.SIGKILL)
            if _ended(self.pid):
                _signal_group(self.pid, signal.SIGKILL)  # whoever is left in the group
                return os.waitpid(self.pid, 0)[1]
            if not hasattr(os, "waitid"):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    _signal_group(self.pid, signal.SIGKILL)
                    return status


def main(control: int, report: int) -> int:
    """Supervise one child from start to end."""
    os.set_inheritable(control, False)
    os.set_inheritable(report, False)
    guard = _Guard(control, report)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    spec = guard.read_spec()
    if spec is None:
        return 0
    grace = spec.get("grace_s")
    guard.grace_s = float(grace) if isinstance(grace, int | float) else 5.0
    try:
        guard.pid = _start(spec, os.getpid())
    except OSError as exc:
        guard.report(error=exc.errno, text=str(exc))
        return 1
    guard.report(pid=guard.pid)
    status = guard.supervise(wake_read)
    _end_strays()
    _run_cleanup(spec.get("cleanup"))
    guard.report(status=status, asked=guard.asked)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
