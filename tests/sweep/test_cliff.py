"""A full device and a collapsed speed together mean a spill; either alone does not."""

from __future__ import annotations

import pytest

from browndwarf.records import CellRecord
from browndwarf.sweep.cliff import spilled

CURVE = (24.0, 26.0, 29.0)


def cell(cycle_ms: float, used_mib: float | None, *, n_max: int = 0) -> CellRecord:
    return CellRecord(
        id="a",
        status="ok",
        options={},
        target_type="Q4_K_M",
        head_type="Q6_K" if n_max else None,
        n_max=n_max,
        workload="prose",
        cycle_ms=cycle_ms,
        memory={} if used_mib is None else {"device_used_peak": used_mib},
    )


@pytest.mark.parametrize(
    ("cycle_ms", "used_mib", "n_max", "expected"),
    [
        (36.0, 8150, 0, True),  # full, and a third of the speed gone
        (27.0, 8150, 0, False),  # full, at full speed
        (36.0, 6000, 0, False),  # slow for another reason
        (45.0, 8150, 2, False),  # a cycle drafts too
        (90.0, 8150, 2, True),
        (90.0, 8150, 5, False),  # no reference for this batch
        (36.0, None, 0, False),  # nobody tells how full it is
    ],
)
def test_both_signs_are_needed(
    cycle_ms: float, used_mib: float | None, n_max: int, expected: bool
) -> None:
    made = cell(cycle_ms, used_mib, n_max=n_max)
    assert spilled(made, device_mib=8192, curve=CURVE) is expected


def test_without_a_device_nothing_spills() -> None:
    assert not spilled(cell(90.0, 8150), device_mib=None, curve=CURVE)
