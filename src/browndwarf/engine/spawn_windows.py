"""Windows: a child in a job object that the system kills with our last handle.

Boundary: as ``spawn``, whose Windows half this is. Written to the documented Win32 interface
and type-checked; not run on Windows yet. Between creation of the process and its entry into
the job lie a few instructions in which our own death would leave it running.

Example:
    >>> child = await start(["llama-server.exe"], log=Path("log"), env={})  # doctest: +SKIP
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    import asyncio
    import contextlib
    import ctypes
    import signal
    import subprocess
    import time
    from collections.abc import Callable, Mapping, Sequence
    from ctypes import wintypes
    from pathlib import Path
    from typing import IO, TYPE_CHECKING

    if TYPE_CHECKING:
        from browndwarf.engine.run import Finished

    from browndwarf.engine.spawn import Child, Exit, SpawnFailure

    _EXTENDED_LIMIT_INFORMATION = 9
    _KILL_ON_JOB_CLOSE = 0x2000

    class _BasicLimits(ctypes.Structure):
        _fields_ = [
            ("PerProcessUserTimeLimit", ctypes.c_int64),
            ("PerJobUserTimeLimit", ctypes.c_int64),
            ("LimitFlags", wintypes.DWORD),
            ("MinimumWorkingSetSize", ctypes.c_size_t),
            ("MaximumWorkingSetSize", ctypes.c_size_t),
            ("ActiveProcessLimit", wintypes.DWORD),
            ("Affinity", ctypes.c_size_t),
            ("PriorityClass", wintypes.DWORD),
            ("SchedulingClass", wintypes.DWORD),
        ]

    class _ExtendedLimits(ctypes.Structure):
        _fields_ = [
            ("BasicLimitInformation", _BasicLimits),
            ("IoInfo", ctypes.c_uint64 * 6),
            ("ProcessMemoryLimit", ctypes.c_size_t),
            ("JobMemoryLimit", ctypes.c_size_t),
            ("PeakProcessMemoryUsed", ctypes.c_size_t),
            ("PeakJobMemoryUsed", ctypes.c_size_t),
        ]

    class _JobChild:
        """A child in its own job."""

        def __init__(self, process: subprocess.Popen[bytes], job: int, grace_s: float) -> None:
            self.pid = self.pgid = process.pid
            self._process = process
            self._job = job
            self._grace_s = grace_s
            self._asked = False
            self._exit: Exit | None = None
            self._task = asyncio.create_task(self._watch())

        @property
        def exit(self) -> Exit | None:
            return self._exit

        async def _watch(self) -> Exit:
            code = await asyncio.to_thread(self._process.wait)
            self._exit = Exit(code=code, asked=self._asked)
            _kernel32().CloseHandle(self._job)  # ends whatever is left in the job
            return self._exit

        async def wait(self) -> Exit:
            return await asyncio.shield(self._task)

        def terminate(self) -> None:
            if not self._asked:
                self._asked = True
                with contextlib.suppress(OSError):
                    self._process.send_signal(signal.CTRL_BREAK_EVENT)
                asyncio.get_running_loop().call_later(self._grace_s, self.kill)

        def kill(self) -> None:
            if self._exit is None:
                self._asked = True
                _kernel32().TerminateJobObject(self._job, 1)

    def _kernel32() -> ctypes.WinDLL:
        return ctypes.WinDLL("kernel32", use_last_error=True)

    def _make_job() -> int:
        kernel32 = _kernel32()
        kernel32.CreateJobObjectW.restype = wintypes.HANDLE
        job = kernel32.CreateJobObjectW(None, None)
        limits = _ExtendedLimits()
        limits.BasicLimitInformation.LimitFlags = _KILL_ON_JOB_CLOSE
        done = job and kernel32.SetInformationJobObject(
            wintypes.HANDLE(job),
            _EXTENDED_LIMIT_INFORMATION,
            ctypes.byref(limits),
            ctypes.sizeof(limits),
        )
        if not done:
            raise SpawnFailure(f"no job object: {ctypes.WinError(ctypes.get_last_error())}")
        return int(job)

    def _open(
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None,
        stdout: IO[bytes] | int,
        stderr: IO[bytes] | int,
    ) -> tuple[subprocess.Popen[bytes], int]:
        """A process in a fresh job: (process, job handle)."""
        job = _make_job()
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=dict(env),
                cwd=cwd,
                creationflags=subprocess.CREATE_NEW_PROCESS_GROUP,
            )
        except OSError as exc:
            _kernel32().CloseHandle(wintypes.HANDLE(job))
            raise SpawnFailure(str(exc)) from exc
        handle = wintypes.HANDLE(int(process._handle))  # type: ignore[attr-defined]
        if not _kernel32().AssignProcessToJobObject(wintypes.HANDLE(job), handle):
            process.kill()
            raise SpawnFailure("the process could not be put into a job object")
        return process, job

    def run(
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        timeout_s: float | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> Finished:
        """As ``run.run``; lines are handed over once the program has ended."""
        from browndwarf.engine.run import Finished

        started = time.monotonic()
        process, job = _open(argv, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        timed_out = False
        try:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                timed_out = True
                _kernel32().TerminateJobObject(wintypes.HANDLE(job), 1)
                out, err = process.communicate()
        finally:
            _kernel32().CloseHandle(wintypes.HANDLE(job))
        texts = [data.decode("utf-8", "replace") for data in (out, err)]
        for line in "\n".join(texts).splitlines():
            if on_line is not None and line.strip():
                on_line(line)
        return Finished(
            exit=Exit(code=process.returncode, asked=timed_out),
            stdout=texts[0],
            stderr=texts[1],
            seconds=time.monotonic() - started,
            timed_out=timed_out,
        )

    async def start(
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        cwd: Path | None = None,
        grace_s: float = 5.0,
    ) -> Child:
        """As ``spawn.start``."""
        with log.open("ab") as file:
            process, job = _open(argv, env=env, cwd=cwd, stdout=file, stderr=subprocess.STDOUT)
        return _JobChild(process, job, grace_s)
