"""Means, spreads, percentiles, bootstrap intervals and drift checks over raw measurements.

Everything takes plain sequences of floats and a seed where it draws, so that a saved record
can be analysed again and gives the same figures.

Example:
    >>> s = summarize([40.0, 40.4, 39.8])
    >>> round(s.mean, 2), round(s.spread, 2)
    (40.07, 0.6)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one quantity over repeats. ``spread`` is max - min, in the quantity's unit."""

    mean: float
    spread: float
    n: int

    @property
    def relative_spread(self) -> float:
        """Spread over mean; 0 for a zero mean."""
        return self.spread / self.mean if self.mean else 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """A point estimate with its 95% interval (or what ``confidence`` asked for)."""

    mean: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Whether ``value`` lies outside the interval."""
        return value < self.low or value > self.high

    def covering(self, values: Sequence[float]) -> Interval:
        """The interval, widened where needed so that it holds all of ``values``."""
        return Interval(self.mean, min(self.low, *values), max(self.high, *values))


def summarize(values: Sequence[float]) -> Summary:
    """Mean and spread. Raises ValueError on an empty sequence."""
    if not values:
        raise ValueError("no values to summarize")
    return Summary(math.fsum(values) / len(values), max(values) - min(values), len(values))


def relative_error(values: Sequence[float]) -> float:
    """Standard error of the mean over the mean; infinite for fewer than two values."""
    if len(values) < 2:
        return math.inf
    mean = math.fsum(values) / len(values)
    if not mean:
        return 0.0
    return statistics.stdev(values) / math.sqrt(len(values)) / abs(mean)


def percentile(values: Sequence[float], q: float) -> float:
    """Linear-interpolation percentile, ``q`` in 0..100; NaN when empty."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), q)) if values else math.nan


def binomial_interval(hits: int, trials: int, *, z: float = 1.96) -> Interval:
    """Share of hits with the Wilson interval; (nan, 0, 1) without trials."""
    if trials == 0:
        return Interval(math.nan, 0.0, 1.0)
    p = hits / trials
    denom = 1 + z * z / trials
    centre = (p + z * z / (2 * trials)) / denom
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / denom
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


#: Two-sided 95% quantile of Student's t by degrees of freedom; 1.96 is near enough beyond.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def student_t(freedom: int) -> float:
    """How many standard errors of a mean make its two-sided 95% interval."""
    return _T95[freedom - 1] if freedom <= len(_T95) else 1.96


@dataclass(frozen=True, slots=True)
class Drift:
    """The same configuration measured before and after other work.

    ``change`` is after/before - 1; ``beyond_noise`` says that it exceeds both the floor and
    what the repeats' own spread explains.
    """

    change: float
    noise: float
    beyond_noise: bool


def drift(before: Sequence[float], after: Sequence[float], *, floor: float = 0.05) -> Drift:
    """Compare two series of repeats of one configuration.

    The noise is the larger of the two relative spreads. A change is reported only when it is
    larger than the noise and than ``floor`` (5%), under which a shared machine always moves.
    """
    first, second = summarize(before), summarize(after)
    change = second.mean / first.mean - 1 if first.mean else 0.0
    noise = max(first.relative_spread, second.relative_spread)
    return Drift(change, noise, abs(change) > max(noise, floor))


def mean_ratio_interval(
    arms: Sequence[tuple[Sequence[float], Sequence[float]]],
    *,
    seed: int = 0,
    draws: int = 4000,
    confidence: float = 0.95,
) -> Interval:
    """Geometric mean of several ratios of means, with a paired bootstrap interval.

    Each arm is (numerator, denominator) of equal length, element i of both belonging together;
    arms are drawn independently of each other. This is the speed-up over a mix of workloads
    with equal weights.
    """
    if not arms:
        raise ValueError("no arms to compare")
    rng = np.random.default_rng(seed)
    total = np.zeros(draws)
    point = 0.0
    single = False
    for numerator, denominator in arms:
        num = np.asarray(numerator, dtype=np.float64)
        den = np.asarray(denominator, dtype=np.float64)
        if num.size == 0 or num.size != den.size:
            raise ValueError(f"paired arms differ in length: {num.size} and {den.size}")
        single |= num.size < 2
        pick = rng.integers(0, num.size, (draws, num.size))
        total += np.log(num[pick].mean(axis=1)) - np.log(den[pick].mean(axis=1))
        point += math.log(num.mean() / den.mean())
    mean = math.exp(point / len(arms))
    if single:
        return Interval(mean, 0.0, math.inf)
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.exp(total / len(arms)), (tail, 1 - tail))
    return Interval(mean, float(low), float(high))
