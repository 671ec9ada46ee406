"""A busy machine is noticed, waited for, and said; a disturbed cell is marked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from browndwarf.errors import MachineBusy
from browndwarf.hardware.watch import WatchRecord
from browndwarf.sweep import quiet


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock will say, one figure a look; the last one for ever."""
    coming: list[float] = []

    class Clock:
        def __init__(self, pids: tuple[int, ...]) -> None:
            pass

        def look(self) -> float:
            return coming.pop(0) if len(coming) > 1 else coming[0]

    monkeypatch.setattr(quiet, "BusyClock", Clock)
    monkeypatch.setattr(quiet, "SAMPLE_S", 0.001)
    return coming


def settle(patience_s: float | None, waits: list[float]) -> None:
    watcher = quiet.MachineQuiet(patience_s=patience_s, on_wait=waits.append)
    asyncio.run(watcher.settle())


def test_a_quiet_machine_is_not_waited_for(shares: list[float]) -> None:
    shares.append(0.01)
    waits: list[float] = []
    settle(1.0, waits)
    assert waits == []


def test_a_busy_machine_is_waited_for_until_it_is_quiet(shares: list[float]) -> None:
    shares.extend([0.8, 0.5, 0.02])
    waits: list[float] = []
    settle(1.0, waits)
    assert waits == [0.8, 0.5]


def test_patience_ends_with_the_share_and_the_way_out(shares: list[float]) -> None:
    shares.append(0.42)
    with pytest.raises(MachineBusy, match="42%") as caught:
        settle(0.01, [])
    assert "--allow-busy" in caught.value.fix
    assert "--patience" in caught.value.fix


def test_without_patience_nothing_is_asked(shares: list[float]) -> None:
    settle(None, [])


def record(**more: object) -> WatchRecord:
    fields: dict[str, object] = {
        "samples": 4, "seconds": 1.0, "peak_rss_mib": 100.0, "peak_device_mib": None,
        "peak_device_used_mib": None, "spill_mib": None, "mean_power_w": None,
        "peak_temperature_c": None, "throttled": None, "shared_gpu": None,
        "other_cpu_share": 0.0,
    }  # fmt: skip
    return WatchRecord(**{**fields, **more})  # type: ignore[arg-type]


def marks() -> Iterator[tuple[WatchRecord, tuple[str, ...]]]:
    yield record(), ()
    yield record(other_cpu_share=0.5), ("busy",)
    yield record(other_cpu_share=quiet.DISTURBED_SHARE), ()
    yield record(spill_mib=900.0), ("spilled",)
    yield record(throttled=True, shared_gpu=True), ("throttled", "shared-gpu")


@pytest.mark.parametrize(("seen", "expected"), list(marks()))
def test_what_was_seen_becomes_marks(seen: WatchRecord, expected: tuple[str, ...]) -> None:
    assert quiet._observation(seen).marks == expected


def test_only_what_is_known_is_recorded() -> None:
    made = quiet._observation(record(peak_device_mib=8000.0, mean_power_w=90.0))
    assert made.memory == {"rss": 100.0, "device_peak": 8000.0}
    assert made.watch == {"other_cpu_share": 0.0, "mean_power_w": 90.0}
