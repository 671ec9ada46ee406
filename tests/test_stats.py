"""Spreads, intervals and drift."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from browndwarf.stats import (
    binomial_interval,
    drift,
    mean_ratio_interval,
    percentile,
    relative_error,
    summarize,
)


def test_spread_is_max_minus_min() -> None:
    summary = summarize([40.0, 40.4, 39.8])
    assert summary.mean == pytest.approx(40.0667, abs=1e-4)
    assert summary.spread == pytest.approx(0.6)


def test_nothing_cannot_be_summarized() -> None:
    with pytest.raises(ValueError, match="no values"):
        summarize([])


def test_a_constant_ratio_has_no_width() -> None:
    interval = mean_ratio_interval([([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])])
    assert (interval.mean, interval.low, interval.high) == pytest.approx((2.0, 2.0, 2.0))


def test_pairing_removes_what_both_arms_share() -> None:
    rng = np.random.default_rng(3)
    prompt = rng.uniform(1, 10, 30)
    base, fast = prompt * rng.normal(1.5, 0.01, 30), prompt * rng.normal(1.0, 0.01, 30)
    interval = mean_ratio_interval([(list(base), list(fast))])
    assert 1.48 < interval.low < interval.mean < interval.high < 1.52


def test_workloads_weigh_the_same() -> None:
    arms = [([4.0, 4.0], [1.0, 1.0]), ([100.0, 100.0], [100.0, 100.0])]
    assert mean_ratio_interval(arms).mean == pytest.approx(2.0)


def test_one_sample_proves_nothing() -> None:
    interval = mean_ratio_interval([([2.0], [1.0])])
    assert not interval.excludes(1.0)
    assert interval.high == math.inf


def test_unequal_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        mean_ratio_interval([([1.0, 2.0], [1.0])])


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        base, fast = rng.normal(1.3, 0.1, 24), rng.normal(1.0, 0.1, 24)
        interval = mean_ratio_interval([(list(base), list(fast))], seed=trial, draws=500)
        hits += interval.low <= 1.3 <= interval.high
    assert 0.85 <= hits / 200 <= 0.99


@given(st.integers(0, 500), st.integers(0, 500))
def test_wilson_holds_the_share_inside(hits: int, extra: int) -> None:
    interval = binomial_interval(hits, hits + extra)
    if hits + extra:
        assert interval.low - 1e-9 <= interval.mean <= interval.high + 1e-9
    assert 0 <= interval.low <= interval.high <= 1


def test_drift_needs_more_than_noise_and_more_than_the_floor() -> None:
    assert not drift([100, 102, 98], [103, 101, 99]).beyond_noise
    assert not drift([100, 120, 80], [75, 80, 70]).beyond_noise, "the spread explains it"
    worse = drift([100, 101, 99], [80, 81, 79])
    assert worse.beyond_noise
    assert worse.change == pytest.approx(-0.2)


def test_percentiles_interpolate() -> None:
    assert percentile([1, 2, 3, 4], 50) == pytest.approx(2.5)
    assert math.isnan(percentile([], 50))


def test_the_error_of_a_mean_falls_with_the_root_of_their_number() -> None:
    values = [9.0, 11.0] * 8
    assert relative_error(values) == pytest.approx(0.1 / math.sqrt(15))
    assert relative_error(values * 4) == pytest.approx(0.1 / math.sqrt(63))
    assert relative_error([5.0]) == math.inf
    assert relative_error([0.0, 0.0]) == 0.0
