"""The solver against brute force, against its own bound, and on impossible input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from browndwarf.plan.allocate import Allocation, NothingFits, allocate

Item = tuple[list[int], list[float]]


@st.composite
def items(draw: st.DrawFn) -> Item:
    size = draw(st.integers(1, 5))
    costs = draw(st.lists(st.integers(0, 40), min_size=size, max_size=size))
    losses = draw(st.lists(st.integers(0, 60), min_size=size, max_size=size))
    return costs, [float(value) for value in losses]


def brute(problem: list[Item], budget: int) -> float:
    """The least loss within the budget, by trying everything."""
    best = float("inf")
    for choice in itertools.product(*(range(len(costs)) for costs, _ in problem)):
        cost = sum(costs[at] for (costs, _), at in zip(problem, choice, strict=True))
        if cost <= budget:
            loss = sum(losses[at] for (_, losses), at in zip(problem, choice, strict=True))
            best = min(best, loss)
    return best


def solve(problem: list[Item], budget: int, tolerance: float = 0.0) -> Allocation:
    return allocate([c for c, _ in problem], [v for _, v in problem], budget, tolerance=tolerance)


@given(st.lists(items(), min_size=1, max_size=5), st.integers(0, 160))
def test_the_search_finds_the_optimum_of_small_instances(problem: list[Item], budget: int) -> None:
    best = brute(problem, budget)
    if best == float("inf"):
        with pytest.raises(NothingFits) as caught:
            solve(problem, budget)
        assert caught.value.smallest == sum(min(costs) for costs, _ in problem) > budget
        return
    found = solve(problem, budget)
    assert found.loss == pytest.approx(best)
    assert found.proven
    assert found.bound <= best + 1e-9
    assert found.cost <= budget
    chosen = [costs[at] for (costs, _), at in zip(problem, found.choice, strict=True)]
    assert sum(chosen) == found.cost


def realistic(rng: np.random.Generator, tensors: int) -> list[Item]:
    """Tensors of a few sizes, errors that fall fourfold a bit, as quantization's do."""
    bits = np.array([2.56, 2.63, 3.06, 3.44, 3.45, 4.25, 4.5, 5.5, 5.51, 6.56, 8.5])
    problem = []
    for size in rng.choice([1 << 20, 3 << 20, 15 << 20], tensors):
        scale = rng.lognormal(0, 1)
        losses = scale * 4.0**-bits * rng.lognormal(0, 0.2, bits.size)
        problem.append(([int(size * b / 8) for b in bits], losses.tolist()))
    return problem


@given(st.integers(0, 2**32 - 1), st.floats(0.02, 0.98))
def test_hundreds_of_tensors_come_within_a_thousandth_of_the_bound(seed: int, at: float) -> None:
    problem = realistic(np.random.default_rng(seed), 300)
    low, high = (sum(pick(costs) for costs, _ in problem) for pick in (min, max))
    found = solve(problem, int(low + at * (high - low)), tolerance=1e-3)
    # A gap above the tolerance is only left where a search proved that nothing is better.
    assert found.gap <= 1e-3 or found.proven
    assert found.gap < 0.01


def test_all_the_best_when_there_is_room_for_it() -> None:
    problem: list[Item] = [([10, 20, 15], [3.0, 1.0, 0.5]), ([5, 6], [2.0, 2.5])]
    found = solve(problem, 1000)
    assert found.choice == (2, 0)
    assert (found.cost, found.loss, found.gap, found.price) == (20, 2.5, 0.0, 0.0)


def test_the_price_is_what_the_next_byte_would_save() -> None:
    problem: list[Item] = [([0, 10], [8.0, 3.0]), ([0, 10], [4.0, 2.0])]
    assert solve(problem, 15).price == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("costs", "losses"),
    [([[]], [[]]), ([[1]], [[1.0, 2.0]]), ([[-1]], [[1.0]]), ([[1]], [[float("nan")]])],
)
def test_nonsense_is_refused(costs: list[list[int]], losses: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"option|number"):
        allocate(costs, losses, 10)
