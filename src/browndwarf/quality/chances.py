"""Exact and asymptotic tests that the quality gates rest on, without a statistics library.

Chi-squared tails come from the regularized incomplete gamma function (series below ``a + 1``,
Lentz's continued fraction above it; Abramowitz and Stegun 6.5.29 and 6.5.31), the non-central
distribution from its Poisson mixture of central ones. They agree with scipy to nine digits,
which a test checks where scipy is installed: two functions do not justify so large a dependency.

Not covered: small-sample corrections. Callers pool cells until the approximation holds.

Example:
    >>> round(chi2_tail(3.841458820694124, 1), 6), mcnemar(1, 9)
    (0.05, 0.021484375)
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_EPSILON = 1e-15
_TINY = 1e-300


def gamma_tail(a: float, x: float) -> float:
    """Regularized upper incomplete gamma function Q(a, x), for a > 0 and x >= 0."""
    if x <= 0:
        return 1.0
    scale = math.exp(-x + a * math.log(x) - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while abs(term) > abs(total) * _EPSILON:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1 - total * scale)
    b = x + 1 - a
    c = 1 / _TINY
    d = 1 / b
    fraction = d
    for i in range(1, 100_000):
        factor = -i * (i - a)
        b += 2
        d = 1 / (factor * d + b or _TINY)
        c = b + factor / c or _TINY
        step = d * c
        fraction *= step
        if abs(step - 1) < _EPSILON:
            break
    return scale * fraction


def chi2_tail(x: float, df: int) -> float:
    """P(X >= x) of a chi-squared variable with ``df`` degrees of freedom."""
    return gamma_tail(df / 2, x / 2)


def chi2_critical(alpha: float, df: int) -> float:
    """The value that a chi-squared variable exceeds with probability ``alpha``; by bisection."""
    low, high = 0.0, 10.0 + 10 * df
    while chi2_tail(high, df) > alpha:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if chi2_tail(middle, df) > alpha else (low, middle)
    return (low + high) / 2


def noncentral_chi2_tail(x: float, df: int, noncentrality: float) -> float:
    """P(X >= x) with a non-centrality: the Poisson(noncentrality / 2) mixture of df + 2j."""
    half = noncentrality / 2
    if half <= 0:
        return chi2_tail(x, df)
    # Weights outside of twelve standard deviations add nothing.
    spread = 12 * math.sqrt(half) + 12
    first = max(0, int(half - spread))
    total = 0.0
    for j in range(first, int(half + spread) + 1):
        weight = math.exp(-half + j * math.log(half) - math.lgamma(j + 1))
        total += weight * chi2_tail(x, df + 2 * j)
    return min(1.0, total)


def chi2_power(df: int, noncentrality: float, alpha: float) -> float:
    """Chance that a chi-squared test at ``alpha`` notices an effect of this non-centrality."""
    if df < 1:
        return 0.0
    return noncentral_chi2_tail(chi2_critical(alpha, df), df, noncentrality)


def quadratic_form(
    difference: npt.NDArray[np.float64], covariance: npt.NDArray[np.float64]
) -> float:
    """``d' V^-1 d``: the chi-squared statistic of a difference with a known covariance."""
    return float(difference @ np.linalg.solve(covariance, difference))


def mcnemar(lost: int, won: int) -> float:
    """Two-sided exact p-value of McNemar's test.

    Args:
        lost, won: items that only the first, or only the second, of two setups got right. Under
            equality each discordant item is a fair coin (McNemar 1947; exact binomial form).
    """
    n = lost + won
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(min(lost, won) + 1)) / (1 << n)
    return min(1.0, 2 * tail)
