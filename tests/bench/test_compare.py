"""Verdicts: when an interval excludes one, how repeats and prompts make it, where gains end."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from browndwarf.bench.compare import (
    DRAWS,
    PointData,
    RunData,
    Sample,
    compare_runs,
    crossover,
    falling,
)
from browndwarf.errors import UsageError


def run(gains: dict[int, float], *, noise: float, seed: int, prompts: int = 40) -> RunData:
    """A run whose speed at each concurrency is 100 tok/s times a gain, give or take noise.

    Prompts differ by a factor of three in speed, in the same way in every run.
    """
    rng, shape = random.Random(seed), random.Random(0)
    lengths = [shape.randint(50, 200) for _ in range(prompts)]
    speeds = [100 * shape.uniform(0.5, 1.5) for _ in range(prompts)]
    points = {}
    for level, gain in gains.items():
        drift = math.exp(rng.gauss(0, noise))
        samples = {}
        for i, (n, speed) in enumerate(zip(lengths, speeds, strict=True)):
            each = gain * drift * math.exp(rng.gauss(0, noise))
            seconds = n / (speed * each)
            samples[f"p{i}"] = Sample(n, seconds, seconds * 0.1, 0.9 * seconds / (n - 1))
        total = sum(s.n for s in samples.values()) / sum(s.total_s for s in samples.values())
        points[level] = PointData(total * level, samples, prompts)
    return points


def arms(gains: dict[int, float], *, noise: float = 0.01, repeats: int = 3, seed: int = 0):  # type: ignore[no-untyped-def]
    base = [
        run(dict.fromkeys(gains, 1.0), noise=noise, seed=seed * 100 + i) for i in range(repeats)
    ]
    mtp = [run(gains, noise=noise, seed=seed * 100 + 50 + i) for i in range(repeats)]
    return base, mtp


def test_clear_gains_and_losses_get_their_verdict() -> None:
    found = compare_runs(*arms({1: 1.5, 8: 1.2, 32: 0.8}))
    assert [p.verdict for p in found.points] == ["faster", "faster", "slower"]
    assert found.points[0].ratio.mean == pytest.approx(1.5, rel=0.05)
    assert found.points[0].tpot is not None
    assert found.points[0].tpot.mean == pytest.approx(1 / 1.5, rel=0.05)
    assert found.points[0].tpot.verdict == "faster"


def test_no_difference_is_inconclusive_and_its_interval_holds_one() -> None:
    found = compare_runs(*arms({4: 1.0}, noise=0.03, seed=5))
    assert found.points[0].verdict == "inconclusive"
    assert found.points[0].ratio.low < 1 < found.points[0].ratio.high


def test_a_gain_smaller_than_the_noise_is_not_claimed() -> None:
    found = compare_runs(*arms({4: 1.03}, noise=0.08, seed=3))
    assert found.points[0].verdict == "inconclusive"


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """With three repeats; a plain bootstrap of three would cover about 75%."""
    hits = 0
    for seed in range(60):
        base, mtp = arms({4: 1.1}, noise=0.02, seed=seed, repeats=3)
        ratio = compare_runs(base, mtp).points[0].ratio
        hits += ratio.low <= 1.1 <= ratio.high
    assert hits >= 53


def test_the_same_runs_give_the_same_interval() -> None:
    first, again = (compare_runs(*arms({1: 1.2})) for _ in range(2))
    assert first == again


def test_one_repeat_is_compared_with_a_warning() -> None:
    found = compare_runs(*arms({1: 1.5}, repeats=1))
    assert found.points[0].verdict == "inconclusive"
    assert "drift" in found.notes[0]


def test_prompts_that_one_arm_failed_are_left_out() -> None:
    base, mtp = arms({1: 1.5}, repeats=1)
    lost = dict(list(mtp[0][1].samples.items())[:30])
    mtp = [{1: PointData(mtp[0][1].decode_tok_s, lost, 30, failed=10)}]
    found = compare_runs(base, mtp)
    assert found.points[0].pairs == 30
    assert any("10 requests failed" in note for note in found.notes)


@pytest.mark.parametrize(("base", "mtp"), [(2, 3), (0, 0)])
def test_arms_must_pair(base: int, mtp: int) -> None:
    runs = arms({1: 1.0}, repeats=3)
    with pytest.raises(UsageError):
        compare_runs(runs[0][:base], runs[1][:mtp])


def test_arms_must_share_a_concurrency() -> None:
    base, _ = arms({1: 1.0})
    _, mtp = arms({2: 1.0})
    with pytest.raises(UsageError):
        compare_runs(base, mtp)


def test_a_run_without_tokens_is_no_run() -> None:
    base, _ = arms({1: 1.0}, repeats=1)
    with pytest.raises(UsageError, match="no tokens"):
        compare_runs(base, [{1: PointData(0.0)}])


def test_the_crossover_lies_between_the_levels_around_it() -> None:
    found = compare_runs(*arms({1: 1.5, 8: 1.1, 16: 0.9, 32: 0.8}))
    assert found.crossover.where == "inside"
    assert found.crossover.concurrency == pytest.approx(8 * 2 ** (0.0953 / 0.2007), rel=0.1)
    assert found.crossover.low is not None
    assert found.crossover.high is not None
    assert 8 < found.crossover.low < found.crossover.high < 16


def test_a_gain_everywhere_or_nowhere_has_no_crossover() -> None:
    always = compare_runs(*arms({1: 1.5, 8: 1.3})).crossover
    never = compare_runs(*arms({1: 0.8, 8: 0.7})).crossover
    assert (always.where, always.concurrency, always.high) == ("above", None, None)
    assert (never.where, never.concurrency, never.low) == ("below", None, None)


def test_one_noisy_level_makes_no_second_crossover() -> None:
    draws = np.zeros((4, DRAWS))
    found = crossover([1, 2, 4, 8], [0.3, -0.01, 0.1, -0.2], draws)
    assert found.concurrency is not None
    assert 4 < found.concurrency < 8


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([3, 2, 1], [3, 2, 1]), ([1, 2, 3], [2, 2, 2]), ([3, 1, 2], [3, 1.5, 1.5]), ([1], [1])],
)
def test_falling_is_the_closest_sequence_that_never_rises(
    values: list[float], wanted: list[float]
) -> None:
    assert falling(values) == pytest.approx(wanted)
