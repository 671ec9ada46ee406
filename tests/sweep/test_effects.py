"""What a group costs is the sum of what its settings cost; only a star is measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from browndwarf.sweep.effects import Effects, changes, star
from browndwarf.sweep.space import Axes, Configuration

AXES = Axes(
    target_type=("Q4_0",),
    layers=(None, 44, 42),
    kv=("f16", "q8_0"),
    backend_sampling=(False, True),
)
GROUPS = AXES.groups()


@given(st.lists(st.floats(0.1, 30.0), min_size=4, max_size=4))
def test_costs_that_add_up_are_found_from_the_star(parts: list[float]) -> None:
    host44, host42, quantized, sampling = parts

    def cost(base: Configuration) -> float:
        layers = {None: 0.0, 44: host44, 42: host42}[base.layers]
        return 50.0 + layers + quantized * (base.kv == "q8_0") + sampling * base.backend_sampling

    near = star(GROUPS)
    assert len(near) == 1 + 2 + 1 + 1
    effects = Effects({g.baseline: (cost(g.baseline),) for g in near})
    for group in GROUPS:
        assert effects.of(group.baseline) == pytest.approx((cost(group.baseline),))
    assert sum(not effects.measured(g.baseline) for g in GROUPS) == 7


def test_a_missing_part_leaves_the_sum_unknown() -> None:
    first, *_, last = GROUPS
    assert Effects({first.baseline: (1.0,)}).of(last.baseline) is None
    assert Effects({}).of(first.baseline) is None


def test_a_sum_never_falls_to_nothing() -> None:
    near = star(GROUPS)
    known = {g.baseline: (1.0,) for g in near} | {GROUPS[0].baseline: (9.0,)}
    made = Effects(known).of(GROUPS[-1].baseline)
    assert made is not None
    assert made[0] > 0


def test_another_centre_has_its_own_star() -> None:
    near = star(GROUPS, centre=len(GROUPS) - 1)
    assert near[0] == GROUPS[-1]
    assert len(near) == 5


def test_extra_options_change_one_by_one() -> None:
    a = Configuration(target_type="x", extra=(("poll", "0"), ("prio", "0")))
    b = Configuration(target_type="x", extra=(("poll", "50"), ("prio", "2")))
    assert len(changes(a, b)) == 2


def test_differences_may_be_negative() -> None:
    a, b, c, d = [
        group.baseline
        for group in Axes(target_type=("Q4_0",), kv=("f16", "q8_0"), layers=(None, 40)).groups()
    ]
    effects = Effects({a: (-0.5, 0.1), b: (-1.0, -2.0), c: (0.25, 0.1)}, signed=True)
    assert effects.of(d) == pytest.approx((-0.25, -2.0))
