"""One option per item, least loss in all, within a budget: the multiple-choice knapsack.

Items are tensors, options their types, costs bytes on the device. ``allocate`` goes three steps:

1. Each item's options are reduced to the lower convex hull of loss over cost. All hulls' steps,
   sorted by loss saved per byte, applied until the budget breaks one of them in the middle, give
   the optimum of the linear relaxation: a bound that no choice beats.
2. Greedy: the same steps in the same order, each whole and only where it still fits.
3. If greedy is more than ``tolerance`` above the bound, a search around it: items are freed one by
   one, those whose steps are nearest the broken one first, and partial choices are kept as a list
   of (cost, loss) pairs, of which the dominated and those that the bound rules out are dropped
   (the core idea of Pisinger's exact algorithm, 1995). All options take part, not only the hull.

What is guaranteed: the cost is within the budget; ``bound`` is a true lower bound, so ``gap`` is an
upper limit of what was missed; ``proven`` says that the search ended by itself, and the choice is
then the optimum. With a handful of items the optimum itself can be far above the bound, because
no type costs what the bound would like to spend; with hundreds it is not.

Not covered: further constraints. A weight on time belongs into the losses (``speed``).

Example:
    found = allocate([[10, 20], [10, 30]], [[4.0, 1.0], [9.0, 0.0]], budget=45)
    found.choice, found.loss, found.gap
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 1e-3
MAX_STATES = 20_000
"""Partial choices that are kept; more than that, and the search stops being exact."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Allocation:
    """The chosen option of each item, by its place in the item's own list.

    Attributes:
        bound: optimum of the linear relaxation; no choice within the budget has less loss.
        price: loss that one more byte would save at the margin, from the relaxation.
        proven: whether ``choice`` was shown to be the optimum.
    """

    choice: tuple[int, ...]
    cost: int
    loss: float
    bound: float
    price: float
    proven: bool

    @property
    def gap(self) -> float:
        """How far the loss is above the bound, as a share of the bound."""
        if self.loss <= self.bound:
            return 0.0
        return (self.loss - self.bound) / self.bound if self.bound > 0 else float("inf")


class NothingFits(ValueError):
    """Even the cheapest options exceed the budget; ``smallest`` is what they cost."""

    def __init__(self, smallest: int) -> None:
        super().__init__(f"the cheapest options cost {smallest}")
        self.smallest = smallest


def allocate(
    costs: Sequence[Sequence[int]],
    losses: Sequence[Sequence[float]],
    budget: int,
    *,
    tolerance: float = TOLERANCE,
) -> Allocation:
    """Choose one option per item.

    Args:
        costs, losses: for each item, one figure per option; costs are not negative.
        tolerance: a gap that needs no search; 0 searches for the optimum.

    Raises:
        NothingFits: no choice is within the budget.
        ValueError: an item without options, or lists that do not match.
    """
    items = [_Item.of(c, v) for c, v in zip(costs, losses, strict=True)]
    start = np.array([item.hull[0] for item in items], np.int64)
    smallest = sum(int(item.costs[at]) for item, at in zip(items, start, strict=True))
    if smallest > budget:
        raise NothingFits(smallest)
    steps = _steps(items)
    bound, price = _relaxed(items, start, steps, budget - smallest)
    choice, left = _greedy(start, steps, budget - smallest)
    loss = _loss(items, choice)
    proven = loss <= bound
    if not proven and loss - bound > tolerance * abs(bound):
        better, proven = _search(items, choice, steps, left, price, bound)
        choice = better if _loss(items, better) < loss else choice
    return Allocation(
        choice=tuple(int(item.origin[at]) for item, at in zip(items, choice, strict=True)),
        cost=sum(int(item.costs[at]) for item, at in zip(items, choice, strict=True)),
        loss=_loss(items, choice),
        bound=bound,
        price=price,
        proven=proven,
    )


@dataclass(frozen=True)
class _Item:
    """One item's options that are worth a look, by rising cost and falling loss."""

    costs: Ints
    losses: Floats
    origin: Ints
    hull: Ints

    @classmethod
    def of(cls, costs: Sequence[int], losses: Sequence[float]) -> _Item:
        cost, loss = np.asarray(costs, np.int64), np.asarray(losses, np.float64)
        if not cost.size or cost.shape != loss.shape or (cost < 0).any():
            raise ValueError("an item needs options with a cost and a loss each")
        if not np.isfinite(loss).all():
            raise ValueError("a loss is no number")
        order = np.lexsort((loss, cost))
        lowest = np.minimum.accumulate(loss[order])
        keep = np.r_[True, loss[order][1:] < lowest[:-1]]
        order = order[keep]
        return cls(cost[order], loss[order], order, _hull(cost[order], loss[order]))


def _hull(costs: Ints, losses: Floats) -> Ints:
    """Places of the lower convex hull; costs rise and losses fall."""
    kept: list[int] = []
    for at in range(len(costs)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            along = (losses[a] - losses[b]) * float(costs[at] - costs[b])
            if along > (losses[b] - losses[at]) * float(costs[b] - costs[a]):
                break
            kept.pop()
        kept.append(at)
    return np.array(kept, np.int64)


@dataclass(frozen=True)
class _Steps:
    """All hulls' steps, best loss per byte first: item, the place it leads to, cost, gain."""

    item: Ints
    to: Ints
    cost: Ints
    gain: Floats

    @property
    def rate(self) -> Floats:
        return self.gain / self.cost


def _steps(items: list[_Item]) -> _Steps:
    item = np.concatenate([np.full(len(i.hull) - 1, n) for n, i in enumerate(items)])
    to = np.concatenate([i.hull[1:] for i in items])
    cost = np.concatenate([np.diff(i.costs[i.hull]) for i in items])
    gain = np.concatenate([-np.diff(i.losses[i.hull]) for i in items])
    order = np.argsort(-gain / cost, kind="stable")
    # Rounding can swap an item's own steps of equal rate; its places must come in order.
    found = _Steps(item[order].astype(np.int64), to[order], cost[order], gain[order])
    for number in range(len(items)):
        mine = np.flatnonzero(found.item == number)
        if (np.diff(found.to[mine]) < 0).any():
            right = mine[np.argsort(found.to[mine])]
            for column in (found.to, found.cost, found.gain):
                column[mine] = column[right]
    return found


def _relaxed(items: list[_Item], start: Ints, steps: _Steps, room: int) -> tuple[float, float]:
    """The bound, and the loss saved per byte at the step that the budget breaks."""
    loss = _loss(items, start)
    whole = int(np.searchsorted(np.cumsum(steps.cost), room, side="right"))
    loss -= float(steps.gain[:whole].sum())
    if whole == len(steps.cost):
        return loss, 0.0
    price = float(steps.rate[whole])
    # A hair lower, so that rounding never lifts the bound above the optimum.
    loss -= price * (room - int(steps.cost[:whole].sum()))
    return loss - 1e-12 * abs(loss), price


def _greedy(start: Ints, steps: _Steps, room: int) -> tuple[Ints, int]:
    choice, stopped = start.copy(), set[int]()
    columns = (steps.item.tolist(), steps.to.tolist(), steps.cost.tolist())
    for item, to, cost in zip(*columns, strict=True):
        if item in stopped:
            continue
        if cost > room:
            stopped.add(item)
            continue
        choice[item], room = to, room - cost
    return choice, room


def _search(
    items: list[_Item], choice: Ints, steps: _Steps, left: int, price: float, bound: float
) -> tuple[Ints, bool]:
    """The best choice found by freeing items one after another, and whether it is the optimum.

    A state is a change against ``choice``: its extra cost, its extra loss, and the way to it. With
    the Lagrangian price p, freeing the remaining items can save at most their best reduced loss,
    so a state with (loss + p * (cost - left)) - savings at or above the best found is hopeless.
    """
    reduced = [(item.losses - item.losses[at]) + price * (item.costs - item.costs[at])
               for item, at in zip(items, choice, strict=True)]  # fmt: skip
    savings = np.array([-float(r.min()) for r in reduced])
    near = np.array([
        np.partition(np.abs(r - r.min()), 1)[1] if len(r) > 1 else np.inf for r in reduced
    ])  # fmt: skip
    order = np.lexsort((near, -savings))
    rest = float(savings.sum())
    cost, loss = np.zeros(1, np.int64), np.zeros(1)
    best, best_way = 0.0, (-1, 0)
    history: list[tuple[int, Ints, Ints]] = []
    exact = True
    slack = 1e-13 * abs(_loss(items, choice))
    for item in order.tolist():
        rest -= float(savings[item])
        options = items[item]
        at = int(choice[item])
        more = options.costs - options.costs[at]
        gain = options.losses - options.losses[at]
        wide_cost = (cost[:, None] + more[None, :]).ravel()
        wide_loss = (loss[:, None] + gain[None, :]).ravel()
        lowest = wide_loss + price * (wide_cost - left) - max(rest, 0.0)
        keep = np.flatnonzero(lowest < best - slack)
        if not keep.size:
            return _follow(history, best_way, choice), exact
        keep = keep[np.lexsort((wide_loss[keep], wide_cost[keep]))]
        falling = np.minimum.accumulate(wide_loss[keep])
        keep = keep[np.r_[True, wide_loss[keep][1:] < falling[:-1]]]
        if keep.size > MAX_STATES:
            exact = False
            keep = np.sort(keep[np.argpartition(lowest[keep], MAX_STATES)[:MAX_STATES]])
        cost, loss = wide_cost[keep], wide_loss[keep]
        history.append((item, keep // len(more), keep % len(more)))
        fitting = np.flatnonzero(cost <= left)
        if fitting.size:
            top = int(fitting[np.argmin(loss[fitting])])
            if loss[top] < best:
                best, best_way = float(loss[top]), (len(history) - 1, top)
    return _follow(history, best_way, choice), exact


def _follow(history: list[tuple[int, Ints, Ints]], way: tuple[int, int], choice: Ints) -> Ints:
    found = choice.copy()
    level, state = way
    while level >= 0:
        item, parents, options = history[level]
        found[item] = options[state]
        state, level = int(parents[state]), level - 1
    return found


def _loss(items: list[_Item], choice: Ints) -> float:
    return float(sum(float(item.losses[at]) for item, at in zip(items, choice, strict=True)))
