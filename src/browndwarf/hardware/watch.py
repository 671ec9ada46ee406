"""What a running server takes: sampled memory, spill, power, heat, and who else is busy.

A ``Watcher`` samples from a thread while a context is open and yields a ``WatchRecord``. Three
things are watched for because they ruin a measurement without an error: device memory that
spills into RAM (Windows pages it, ROCm uses GTT), throttling, and other programs on the same
device or processor.

Sources: NVML for memory per process, power, temperature and throttle reasons; psutil for the
process tree; on Linux amdgpu's ``mem_info_gtt_used``; on Windows the performance counter
``\\GPU Process Memory(pid*)\\Shared Usage``. Where a source is missing its fields are None.

Not covered: Metal and Vulkan memory per process (no interface tells).

Example:
    with Watcher(server.pid) as watcher:
        ...
    watcher.record.spill_mib, watcher.record.marks
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import psutil

from browndwarf.hardware.devices import ask, gpu_processes, nvml
from browndwarf.units import MIB

SAMPLE_S = 0.25
SPILL_MIB = 64.0
"""Growth of shared memory from which on a run counts as spilled; drivers keep a little there."""
SHARED_GPU_MIB = 64.0
THROTTLE_SHARE = 0.1
"""Share of samples under thermal or hardware slowdown from which on a run is throttled."""

_SLOWDOWN = 0x8 | 0x20 | 0x40 | 0x80
"""NVML's hardware slowdown, thermal slowdown (software, hardware) and power brake."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look. MiB, W, degrees C; None where unknown."""

    rss_mib: float = 0.0
    device_mib: float | None = None
    device_used_mib: float | None = None
    others_mib: float | None = None
    shared_mib: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: int | None = None


@dataclass(frozen=True, slots=True)
class WatchRecord:
    """The peaks over a watch, and what they mean. None: nobody could tell.

    ``peak_device_mib`` is the server's own device memory (NVML), ``peak_device_used_mib`` the
    whole device's; ``spill_mib`` is the growth of device data in RAM; ``other_cpu_share`` the
    share of all processors used by everybody else.
    """

    samples: int
    seconds: float
    peak_rss_mib: float
    peak_device_mib: float | None
    peak_device_used_mib: float | None
    spill_mib: float | None
    mean_power_w: float | None
    peak_temperature_c: float | None
    throttled: bool | None
    shared_gpu: bool | None
    other_cpu_share: float | None

    @property
    def spilled(self) -> bool:
        """Whether device memory went to RAM."""
        return self.spill_mib is not None and self.spill_mib >= SPILL_MIB

    @property
    def marks(self) -> tuple[str, ...]:
        """Words for a cell: ``spilled``, ``throttled``, ``shared-gpu``."""
        pairs = (
            ("spilled", self.spilled),
            ("throttled", bool(self.throttled)),
            ("shared-gpu", bool(self.shared_gpu)),
        )
        return tuple(name for name, holds in pairs if holds)


class Source(Protocol):
    """Takes samples of a process. ``close`` is called once."""

    def sample(self, pid: int) -> Sample: ...

    def close(self) -> None: ...


class Watcher:
    """Samples in a thread between ``__enter__`` and ``__exit__``; ``record`` sums up so far."""

    def __init__(
        self, pid: int, *, source: Source | None = None, interval_s: float = SAMPLE_S
    ) -> None:
        self._pid = pid
        self._source = source
        self._interval_s = interval_s
        self._samples: list[Sample] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._started = 0.0
        self._busy: BusyClock | None = None

    @property
    def record(self) -> WatchRecord:
        """Everything seen until now."""
        share = self._busy.share if self._busy is not None else None
        return summarize(tuple(self._samples), time.monotonic() - self._started, share)

    def __enter__(self) -> Self:
        self._source = self._source or SystemSource()
        self._started = time.monotonic()
        self._busy = BusyClock((self._pid, psutil.Process().pid))
        self._samples.append(self._source.sample(self._pid))
        self._thread = threading.Thread(target=self._run, name="browndwarf-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
        if self._busy is not None:
            self._busy.look()
        if self._source is not None:
            self._samples.append(self._source.sample(self._pid))
            self._source.close()

    def _run(self) -> None:
        assert self._source is not None
        while not self._stop.wait(self._interval_s):
            self._samples.append(self._source.sample(self._pid))
            if self._busy is not None:
                self._busy.look()


def summarize(
    samples: tuple[Sample, ...], seconds: float, other_cpu_share: float | None
) -> WatchRecord:
    """A record from raw samples."""
    shared = _known(s.shared_mib for s in samples)
    power = _known(s.power_w for s in samples)
    throttle = _known(s.throttle for s in samples)
    slow = sum(bool(int(t) & _SLOWDOWN) for t in throttle)
    others = _known(s.others_mib for s in samples)
    return WatchRecord(
        samples=len(samples),
        seconds=seconds,
        peak_rss_mib=max((s.rss_mib for s in samples), default=0.0),
        peak_device_mib=max(_known(s.device_mib for s in samples), default=None),
        peak_device_used_mib=max(_known(s.device_used_mib for s in samples), default=None),
        spill_mib=max(shared) - shared[0] if shared else None,
        mean_power_w=sum(power) / len(power) if power else None,
        peak_temperature_c=max(_known(s.temperature_c for s in samples), default=None),
        throttled=slow / len(throttle) >= THROTTLE_SHARE if throttle else None,
        shared_gpu=max(others) >= SHARED_GPU_MIB if others else None,
        other_cpu_share=other_cpu_share,
    )


class SystemSource:
    """Samples from psutil, NVML, amdgpu and the Windows counters, whichever are there."""

    def __init__(self) -> None:
        self._nvml_context = nvml()
        self._nvml = self._nvml_context.__enter__()
        self._handles = _nvml_handles(self._nvml)
        self._gtt = sorted(Path("/sys/class/drm").glob("card*/device/mem_info_gtt_used"))
        self._counter: Any = None
        if sys.platform == "win32":
            from browndwarf.hardware.pdh import SharedUsage

            self._counter = SharedUsage()

    def sample(self, pid: int) -> Sample:
        """See ``Source``."""
        pids = process_tree(pid)
        values: dict[str, Any] = {"rss_mib": sum(_rss_mib(p) for p in pids)}
        values["shared_mib"] = self._shared_mib(pids)
        if self._handles:
            values |= _nvml_sample(self._nvml, self._handles, pids)
        return Sample(**values)

    def close(self) -> None:
        """See ``Source``."""
        self._nvml_context.__exit__(None, None, None)
        if self._counter is not None:
            self._counter.close()

    def _shared_mib(self, pids: set[int]) -> float | None:
        if self._counter is not None:
            value: float | None = self._counter.mib(pids)
            return value
        used = [_number(path) for path in self._gtt]
        return sum(used) / MIB if used else None


@dataclass
class BusyClock:
    """Share of all processors that processes other than ``pids`` and their children used.

    ``share`` covers the time from creation to the last ``look``.
    """

    pids: tuple[int, ...]
    _first: tuple[float, float, float] = field(init=False)
    _last: tuple[float, float, float] = field(init=False)
    _ours: dict[int, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._first = self._last = self._read()

    @property
    def share(self) -> float:
        """0 to 1; 0 before the first look."""
        wall = self._last[0] - self._first[0]
        cores = psutil.cpu_count() or 1
        everybody, ours = (self._last[i] - self._first[i] for i in (1, 2))
        return max(0.0, min(1.0, (everybody - ours) / (wall * cores))) if wall > 0 else 0.0

    def look(self) -> float:
        """Update and return the share."""
        self._last = self._read()
        return self.share

    def _read(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Linux counts guest time as user time too.
        guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        for pid in {p for root in self.pids for p in process_tree(root)}:
            try:
                own = psutil.Process(pid).cpu_times()
            except psutil.Error:
                continue
            # A process that has ended keeps the last figure, so that ours never decreases.
            self._ours[pid] = float(own.user + own.system)
        return time.monotonic(), float(sum(times) - guest - idle), sum(self._ours.values())


def busy_share(seconds: float = 0.5, pids: Iterable[int] = ()) -> float:
    """Share of all processors (0 to 1) that others use, over a short wait.

    ``pids`` and their children, and this process, do not count as others.
    """
    clock = BusyClock((*pids, psutil.Process().pid))
    time.sleep(seconds)
    return clock.look()


def process_tree(pid: int) -> set[int]:
    """A process and its descendants; empty when it is gone."""
    try:
        root = psutil.Process(pid)
        return {pid, *(child.pid for child in root.children(recursive=True))}
    except psutil.Error:
        return set()


def _nvml_handles(lib: Any) -> list[Any]:
    if lib is None:
        return []
    count = ask(lib, "nvmlDeviceGetCount") or 0
    return [ask(lib, "nvmlDeviceGetHandleByIndex", index) for index in range(count)]


def _nvml_sample(lib: Any, handles: list[Any], pids: set[int]) -> dict[str, Any]:
    """Sums over the devices that the process uses, or over all when it uses none."""
    tables = [(handle, gpu_processes(lib, handle)) for handle in handles]
    ours = [(h, t) for h, t in tables if any(p.pid in pids for p in t)] or tables
    own = [p.mib for _, t in ours for p in t if p.pid in pids and p.mib is not None]
    others = [p.mib for _, t in ours for p in t if p.pid not in pids and p.mib is not None]
    found: dict[str, Any] = {
        "device_mib": sum(own) if own else None,
        "others_mib": sum(others) if own or others else None,
    }
    memory = [ask(lib, "nvmlDeviceGetMemoryInfo", h) for h, _ in ours]
    found["device_used_mib"] = sum(m.used for m in memory if m is not None) / MIB
    power = _known(ask(lib, "nvmlDeviceGetPowerUsage", h) for h, _ in ours)
    found["power_w"] = sum(power) / 1000 if power else None
    heat = _known(ask(lib, "nvmlDeviceGetTemperature", h, 0) for h, _ in ours)
    found["temperature_c"] = max(heat, default=None)
    reasons = _known(_slowdown(lib, h) for h, _ in ours)
    found["throttle"] = _or(int(r) for r in reasons) if reasons else None
    return found


def _slowdown(lib: Any, handle: Any) -> Any:
    """Why the clocks are low, as bits; the question was renamed in newer bindings."""
    for name in ("EventReasons", "ThrottleReasons"):
        bits = ask(lib, f"nvmlDeviceGetCurrentClocks{name}", handle)
        if bits is not None:
            return bits
    return None


def _or(values: Iterable[int]) -> int:
    total = 0
    for value in values:
        total |= value
    return total


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _rss_mib(pid: int) -> float:
    try:
        return float(psutil.Process(pid).memory_info().rss) / MIB
    except psutil.Error:
        return 0.0


def _number(path: Path) -> float:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0.0
