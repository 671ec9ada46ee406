"""What a plain step costs in each group, and how it grows with the context behind it.

A step reads the weights, which is the same work anywhere, and the KV cache of everything before
it, which grows: T0(D) = T0(D0) + g (D - D0), with D the tokens in the cache, on average, while a
workload's answers are made. ``g`` is known where a group's baseline was measured at depths that
differ enough; other groups take what their settings add up to, or the mean.

Pure: from cells to numbers.

Example:
    >>> steps = Steps(cells, pace)                                  # doctest: +SKIP
    >>> steps.ms(base), steps.ms(base, depth=16000.0)               # doctest: +SKIP
    (36.5, 43.1)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from browndwarf.records import CellRecord
from browndwarf.sweep.analysis import configuration_of
from browndwarf.sweep.cell import cycle_error
from browndwarf.sweep.effects import Effects
from browndwarf.sweep.pace import Pace
from browndwarf.sweep.space import Configuration

#: Depths that lie closer together than this say nothing about growth: noise would.
TELLING_TOKENS = 512.0


def depth_of(cell: CellRecord) -> float:
    """Tokens in the cache, on average, while the cell's answers were made."""
    if not cell.traces:
        return 0.0
    return statistics.fmean(t.prompt_n + t.cache_n + t.predicted_n / 2 for t in cell.traces)


class Steps:
    """Plain steps of the groups whose baseline is among these cells, evened out by ``pace``."""

    def __init__(self, cells: Sequence[CellRecord], pace: Pace) -> None:
        self._pace = pace
        self._by_workload = _mean_depths(cells)
        plain: dict[Configuration, list[tuple[float, float]]] = {}
        errors: dict[Configuration, list[float]] = {}
        for cell in cells:
            cycle = pace.cycle_ms(cell)
            if cell.head_type is None and cycle:
                base = configuration_of(cell)
                plain.setdefault(base, []).append((depth_of(cell), cycle))
                made = cycle_error(cell.traces)
                errors.setdefault(base, []).append(made if math.isfinite(made) else 0.0)
        #: The depth that ``ms`` is for unless it is told another one.
        self.depth = next((depth for points in plain.values() for depth, _ in points), 0.0)
        self._counts = {base: len(points) for base, points in plain.items()}
        self._wobbles = {base: statistics.fmean(values) for base, values in errors.items()}
        growths = {b: g for b, points in plain.items() if (g := _growth(points)) is not None}
        self._growths = Effects({b: (g,) for b, g in growths.items()}, signed=True)
        self._mean_growth = statistics.fmean(growths.values()) if growths else 0.0
        self._steps = Effects(
            {
                base: (statistics.fmean(ms - self._further(base, d) for d, ms in points),)
                for base, points in plain.items()
            }
        )

    def ms(self, base: Configuration, *, depth: float | None = None) -> float | None:
        """Milliseconds of a step; None where a part is missing."""
        step = self._steps.of(base)
        if step is None:
            return None
        return step[0] + (self._further(base, depth) if depth is not None else 0.0)

    def depth_on(self, workload: str) -> float:
        """A workload's depth; that of the first baseline where it was never measured."""
        return self._by_workload.get(workload, self.depth)

    def growth(self, base: Configuration) -> float:
        """Milliseconds that each token in the cache adds to a step."""
        own = self._growths.of(base)
        return max(own[0] if own is not None else self._mean_growth, 0.0)

    def measured(self, base: Configuration) -> bool:
        """Whether the group's baseline was measured."""
        return self._steps.measured(base)

    def error(self, base: Configuration) -> float:
        """Relative standard error: each cell has the noise of a measurement and its own. A group
        that was not measured has that of the worst."""
        wobble = self._wobbles.get(base, max(self._wobbles.values(), default=0.0))
        return math.hypot(self._pace.noise, wobble) / math.sqrt(self._counts.get(base, 1))

    def _further(self, base: Configuration, depth: float) -> float:
        return self.growth(base) * (depth - self.depth)


def _mean_depths(cells: Iterable[CellRecord]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for cell in cells:
        if cell.traces:
            found.setdefault(cell.workload, []).append(depth_of(cell))
    return {workload: statistics.fmean(depths) for workload, depths in found.items()}


def _growth(points: Sequence[tuple[float, float]]) -> float | None:
    """The slope through (depth, ms); None where the depths are too much alike."""
    depths = [depth for depth, _ in points]
    if max(depths) - min(depths) < TELLING_TOKENS:
        return None
    return float(np.polyfit(depths, [ms for _, ms in points], 1)[0])
