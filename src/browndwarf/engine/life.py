"""Whether a process that is loading a model still does something.

Boundary: reads the log's size and the operating system's counters; judges nothing.

Example:
    >>> life = SignsOfLife(pid, Path("server.log"))  # doctest: +SKIP
    >>> life.look(); life.last_change  # doctest: +SKIP
    1234.5
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil


class SignsOfLife:
    """Whether a loading server still does something: log, memory, file reads or CPU time."""

    def __init__(self, pid: int, log_path: Path) -> None:
        self.log_bytes = 0
        self.rss_bytes = 0
        self.last_change = time.monotonic()
        self._log_path = log_path
        self._cpu_s = 0.0
        self._read = 0
        try:
            self._process: psutil.Process | None = psutil.Process(pid)
        except psutil.Error:
            self._process = None

    def look(self) -> None:
        """Take a reading; moves ``last_change`` if anything grew."""
        changed = False
        try:
            size = self._log_path.stat().st_size
        except OSError:
            size = self.log_bytes
        if size != self.log_bytes:
            self.log_bytes, changed = size, True
        if self._process is not None:
            try:
                changed = self._look_at(self._process) or changed
            except psutil.Error:
                self._process = None
        if changed:
            self.last_change = time.monotonic()

    def _look_at(self, process: psutil.Process) -> bool:
        times = process.cpu_times()
        cpu_s = times.user + times.system
        rss = process.memory_info().rss
        counters = getattr(process, "io_counters", None)
        read = self._read
        if counters is not None:
            values = counters()
            read = getattr(values, "read_chars", values.read_bytes)
        # Waiting threads wake now and then: less than this much is not work.
        grown = (
            cpu_s - self._cpu_s > 0.02
            or abs(rss - self.rss_bytes) > 1 << 16
            or read - self._read > 1 << 16
        )
        if grown:
            self._cpu_s, self._read = cpu_s, read
            self.rss_bytes = rss
        return grown
