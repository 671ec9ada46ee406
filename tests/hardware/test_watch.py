"""The watcher's peaks and marks, with a fake source and with the real system."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from browndwarf.hardware import watch
from browndwarf.hardware.watch import BusyClock, Sample, SystemSource, Watcher, summarize


class Script:
    """A source that plays samples, the last one for ever."""

    def __init__(self, *samples: Sample) -> None:
        self.samples = list(samples)
        self.closed = False

    def sample(self, pid: int) -> Sample:
        return self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]

    def close(self) -> None:
        self.closed = True


def test_the_record_holds_peaks_and_the_growth_of_spilled_memory() -> None:
    """What was shared before the run is not the run's spill."""
    record = summarize(
        (
            Sample(rss_mib=100, device_mib=5000, shared_mib=80, power_w=50, temperature_c=40),
            Sample(rss_mib=300, device_mib=7900, shared_mib=900, power_w=150, temperature_c=70),
            Sample(rss_mib=200, device_mib=7000, shared_mib=500, power_w=100, temperature_c=65),
        ),
        3.0,
        0.1,
    )
    assert (record.peak_rss_mib, record.peak_device_mib, record.spill_mib) == (300, 7900, 820)
    assert (record.mean_power_w, record.peak_temperature_c) == (100, 70)
    assert record.marks == ("spilled",)


def test_unknown_is_not_zero() -> None:
    """Without a source nothing is claimed."""
    record = summarize((Sample(rss_mib=1), Sample(rss_mib=2)), 1.0, None)
    assert record.spill_mib is None
    assert record.throttled is None
    assert record.shared_gpu is None
    assert record.marks == ()


@pytest.mark.parametrize(
    ("reasons", "throttled"),
    [
        ([0x4] * 10, False),  # the power cap is the normal state of a busy card
        ([0x1] * 10, False),  # idle
        ([0x40] * 2 + [0] * 8, True),  # too hot for a fifth of the time
        ([0x8] + [0] * 99, False),  # one moment
    ],
)
def test_only_lasting_slowdown_is_throttling(reasons: list[int], throttled: bool) -> None:
    """By NVML's reasons for the clocks."""
    record = summarize(tuple(Sample(throttle=r) for r in reasons), 1.0, None)
    assert record.throttled is throttled


def test_memory_held_by_others_marks_the_device_as_shared() -> None:
    """A few MiB of a desktop do not."""
    busy = summarize((Sample(others_mib=1200.0),), 1.0, None)
    calm = summarize((Sample(others_mib=20.0),), 1.0, None)
    assert busy.marks == ("shared-gpu",)
    assert calm.shared_gpu is False


def test_a_watch_takes_a_sample_at_both_ends_and_closes_its_source() -> None:
    """Even when nothing happens between them."""
    source = Script(Sample(rss_mib=5), Sample(rss_mib=9))
    with Watcher(os.getpid(), source=source, interval_s=3600) as watcher:
        pass
    assert watcher.record.samples == 2
    assert watcher.record.peak_rss_mib == 9
    assert source.closed


def test_the_process_tree_is_watched_not_the_process_alone() -> None:
    """A child's memory counts, and a process that is gone counts nothing."""
    code = "import subprocess,sys;subprocess.run([sys.executable,'-c','input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 20
        while len(watch.process_tree(process.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        source = SystemSource()
        alone = watch._rss_mib(process.pid)
        assert source.sample(process.pid).rss_mib > alone
        source.close()
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    assert watch.process_tree(process.pid) == set()


def test_others_share_leaves_out_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of two processors busy, of which ours used half: a quarter is others'."""
    clock = iter([0.0, 10.0])
    total = iter([(100.0, 1000.0), (110.0, 1010.0)])
    own = iter([50.0, 55.0])

    def times() -> Any:
        user, idle = next(total)
        return _Times((user, idle))

    monkeypatch.setattr(watch.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(watch.psutil, "cpu_times", times)
    monkeypatch.setattr(watch.psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(watch, "process_tree", lambda pid: {pid})
    fake = SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=next(own), system=0.0))
    monkeypatch.setattr(watch.psutil, "Process", lambda pid: fake)
    busy = BusyClock((1,))
    assert busy.look() == pytest.approx(0.25)


class _Times(tuple[float, ...]):
    @property
    def idle(self) -> float:
        return self[1]


class FakeNvml:
    """Two devices: our process on the first, another's on both."""

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        other = SimpleNamespace(pid=8, usedGpuMemory=3 * 2**20)
        ours = SimpleNamespace(pid=7, usedGpuMemory=100 * 2**20)
        return [ours, other] if handle == 0 else [other]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=(150 + handle) * 2**20)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x40 if handle else 0x4


def test_only_the_devices_that_the_server_uses_are_summed() -> None:
    """The second card's heat is not this run's."""
    found = watch._nvml_sample(FakeNvml(), [0, 1], {7})
    assert (found["device_mib"], found["others_mib"]) == (100, 3)
    assert found["device_used_mib"] == 150
    assert found["throttle"] == 0x4
    assert found["power_w"] is None
