"""Is anybody else working on this machine? Ask before measuring, and while measuring.

A speed that was measured beside a compiler is worth nothing, and a spinning llama.cpp suffers
many times over: on two cores one busy neighbour made it 60 times slower. So a sweep waits for
quiet, says so when it does not come, and marks cells that were disturbed.

The share is of all cores: what everything but the server and ourselves used, steal included.

Example:
    >>> quiet = MachineQuiet(patience_s=60)                        # doctest: +SKIP
    >>> await quiet.settle()                                       # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import psutil

from browndwarf.errors import MachineBusy

#: More than this share of all cores in others' hands is no quiet machine.
QUIET_SHARE = 0.10
#: Beyond this share during a cell its figure is not counted.
DISTURBED_SHARE = 0.15

SAMPLE_S = 0.25


class HasPid(Protocol):
    """Anything with the process id of a running server."""

    @property
    def pid(self) -> int: ...


class OthersClock:
    """CPU seconds that processes other than the given ones have used, since it was last asked."""

    def __init__(self, pids: tuple[int, ...]) -> None:
        self._pids = pids
        self._cores = psutil.cpu_count() or 1
        self._last = self._read()

    def share(self) -> float:
        """Others' share of all cores (0 to 1) since the last call or the start."""
        now = self._read()
        wall = now[0] - self._last[0]
        used = (now[1] - self._last[1]) - (now[2] - self._last[2])
        self._last = now
        return max(0.0, min(1.0, used / (wall * self._cores))) if wall > 0 else 0.0

    def _read(self) -> tuple[float, float, float]:
        """(clock, CPU seconds of everybody, CPU seconds of ours)."""
        times = psutil.cpu_times()
        waiting = times.idle + getattr(times, "iowait", 0.0)
        # Guest time is part of user time already.
        counted = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return time.perf_counter(), counted - waiting, sum(map(_cpu_seconds, self._pids))


def _cpu_seconds(pid: int) -> float:
    try:
        own = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(own.user + own.system)


class MachineQuiet:
    """Waits for quiet before a cell and watches during it.

    ``patience_s`` is how long to wait; ``on_wait`` is told the share while waiting.
    """

    def __init__(
        self, *, patience_s: float = 60.0, on_wait: Callable[[float], None] = lambda _: None
    ) -> None:
        self._patience_s = patience_s
        self._on_wait = on_wait

    async def settle(self) -> None:
        """Wait until others use less than a tenth of the machine.

        Raises:
            MachineBusy: they did not within the patience; names the busiest processes.
        """
        clock = OthersClock((psutil.Process().pid,))
        deadline = time.monotonic() + self._patience_s
        while True:
            await asyncio.sleep(SAMPLE_S)
            share = clock.share()
            if share <= QUIET_SHARE:
                return
            if time.monotonic() >= deadline:
                raise MachineBusy(
                    f"the machine is busy: others use {share:.0%} of its processors",
                    why=f"waited {self._patience_s:.0f} s for quiet. {await _busiest()}",
                    fix="stop the other work and go on with --resume; --allow-busy measures all "
                    "the same and marks nothing as trustworthy",
                )
            self._on_wait(share)

    def watch(self, served: HasPid) -> Callable[[], bool]:
        """See ``sweep.run.Quiet``: whether others disturbed since the last question."""
        clock = OthersClock((psutil.Process().pid, served.pid))
        return lambda: clock.share() > DISTURBED_SHARE


class NoWatch:
    """Measures whatever comes: for ``--allow-busy`` runs; still marks disturbed cells."""

    async def settle(self) -> None:
        """Return at once."""

    def watch(self, served: HasPid) -> Callable[[], bool]:
        """The same as the watchful one: a disturbed cell is marked in any case."""
        return MachineQuiet().watch(served)


async def _busiest(count: int = 3) -> str:
    """Names of the processes that use most CPU right now."""
    own = psutil.Process().pid
    found = [p for p in psutil.process_iter(["name"]) if p.pid != own]
    for process in found:
        _percent(process)
    await asyncio.sleep(SAMPLE_S)
    ranked = sorted(((_percent(p), p) for p in found), key=lambda pair: -pair[0])[:count]
    names = [f"{p.info['name']} (pid {p.pid}, {share:.0f}%)" for share, p in ranked if share > 1]
    return f"Busiest: {', '.join(names)}." if names else "No single process stands out."


def _percent(process: psutil.Process) -> float:
    try:
        return float(process.cpu_percent())
    except psutil.Error:
        return 0.0
