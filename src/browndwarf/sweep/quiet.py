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
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from browndwarf.errors import MachineBusy
from browndwarf.hardware.watch import BusyClock, Watcher, WatchRecord
from browndwarf.sweep.served import Observation, Observer, Served
from browndwarf.units import format_duration

#: More than this share of all cores in others' hands is no quiet machine. Threads that spin at
#: barriers all wait for the one that was interrupted, so little is much.
QUIET_SHARE = 0.05
#: Beyond this share during a cell its figure is not counted.
DISTURBED_SHARE = 0.08

SAMPLE_S = 0.25


class MachineQuiet:
    """Waits for quiet before a cell and watches during it.

    ``patience_s`` is how long to wait; None measures whatever comes, and disturbed cells are
    marked all the same. ``on_wait`` is told the share of the others while waiting.
    """

    def __init__(
        self, *, patience_s: float | None, on_wait: Callable[[float], None] = lambda _: None
    ) -> None:
        self._patience_s = patience_s
        self._on_wait = on_wait

    async def settle(self) -> None:
        """Wait until others use next to nothing of the machine.

        Raises:
            MachineBusy: they did not within the patience; names the busiest processes.
        """
        if self._patience_s is None:
            return
        waited = 0.0
        while True:
            clock = BusyClock((psutil.Process().pid,))
            await asyncio.sleep(SAMPLE_S)
            share = clock.look()
            waited += SAMPLE_S
            if share <= QUIET_SHARE:
                return
            if waited >= self._patience_s:
                raise MachineBusy(
                    f"the machine is busy: others use {share:.0%} of its processors",
                    why=f"waited {format_duration(waited)} for quiet. {await _busiest()}",
                    fix="stop the other work, or wait longer with --patience 10m; --allow-busy "
                    "measures all the same, and marks what was disturbed",
                )
            self._on_wait(share)

    @contextmanager
    def watch(self, served: Served) -> Iterator[Observer]:
        """Watch beside a server: memory, heat, other programs. See ``sweep.run.Quiet``."""
        watch = _Watch(served.pid)
        try:
            yield watch.take
        finally:
            watch.stop()


class _Watch:
    """One watcher after the other, so that each cell has figures of its own."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._watcher = Watcher(pid)
        self._watcher.__enter__()

    def take(self) -> Observation:
        """What was seen since the last time, and begin anew."""
        self.stop()
        record = self._watcher.record
        self._watcher = Watcher(self._pid)
        self._watcher.__enter__()
        return _observation(record)

    def stop(self) -> None:
        self._watcher.__exit__(None, None, None)


def _observation(record: WatchRecord) -> Observation:
    marks = list(record.marks)
    if record.other_cpu_share is not None and record.other_cpu_share > DISTURBED_SHARE:
        marks.insert(0, "busy")
    known = {
        "rss": record.peak_rss_mib or None,
        "device_peak": record.peak_device_mib,
        "device_used_peak": record.peak_device_used_mib,
        "spill": record.spill_mib,
    }
    memory = {name: float(mib) for name, mib in known.items() if mib is not None}
    figures = {
        "other_cpu_share": record.other_cpu_share,
        "mean_power_w": record.mean_power_w,
        "peak_temperature_c": record.peak_temperature_c,
    }
    watch = {name: float(value) for name, value in figures.items() if value is not None}
    return Observation(tuple(marks), memory, watch)


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
