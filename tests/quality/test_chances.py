"""The tests' tests: known values, limits and agreement with scipy where it is installed."""

from __future__ import annotations

import math

import pytest

from browndwarf.quality.chances import (
    chi2_critical,
    chi2_power,
    chi2_tail,
    mcnemar,
    noncentral_chi2_tail,
)


@pytest.mark.parametrize(
    ("x", "df", "tail"),
    [(3.841458821, 1, 0.05), (13.276704136, 4, 0.01), (20.515005652, 5, 0.001), (0.0, 3, 1.0)],
)
def test_chi_squared_tails_are_the_tabled_ones(x: float, df: int, tail: float) -> None:
    assert chi2_tail(x, df) == pytest.approx(tail, rel=1e-8)


@pytest.mark.parametrize("df", [1, 2, 5, 40])
@pytest.mark.parametrize("alpha", [0.05, 0.001])
def test_the_critical_value_inverts_the_tail(df: int, alpha: float) -> None:
    assert chi2_tail(chi2_critical(alpha, df), df) == pytest.approx(alpha, rel=1e-9)


@pytest.mark.parametrize("x", [0.5, 3.0, 10.0])
def test_two_degrees_of_freedom_are_an_exponential(x: float) -> None:
    assert chi2_tail(x, 2) == pytest.approx(math.exp(-x / 2), rel=1e-12)


def test_power_grows_from_alpha_to_one() -> None:
    powers = [chi2_power(3, effect, 0.001) for effect in (0.0, 5.0, 20.0, 60.0)]
    assert powers == sorted(powers)
    assert powers[0] == pytest.approx(0.001)
    assert powers[-1] > 0.99


def test_all_agree_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for df in (1, 3, 10, 100):
        for x in (0.1, 2.0, 30.0, 200.0):
            assert chi2_tail(x, df) == pytest.approx(stats.chi2.sf(x, df), rel=1e-9, abs=1e-13)
            for effect in (0.5, 10.0, 300.0):
                ours = noncentral_chi2_tail(x, df, effect)
                assert ours == pytest.approx(stats.ncx2.sf(x, df, effect), rel=1e-9, abs=1e-12)
    for lost, won in ((0, 5), (1, 9), (12, 30), (4, 4)):
        exact = stats.binomtest(lost, lost + won, 0.5).pvalue
        assert mcnemar(lost, won) == pytest.approx(exact)


@pytest.mark.parametrize(
    ("lost", "won", "p"), [(0, 0, 1.0), (5, 0, 0.0625), (6, 0, 0.03125), (3, 3, 1.0)]
)
def test_mcnemar_is_exact(lost: int, won: int, p: float) -> None:
    assert mcnemar(lost, won) == mcnemar(won, lost) == p
