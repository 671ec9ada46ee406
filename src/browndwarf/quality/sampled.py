"""Losslessness under sampling: are the tokens draws from the plain model's distribution?

Equality proves nothing here: a correct decoder may use its random numbers in another order. But
the plain model tells the distribution of every token given the prefix, and a lossless decoder's
token is a draw from it, whatever came before. So count, over many seeds, how often the emitted
token was the model's first choice, its second, third or fourth, and so on, and compare with the
sum of what the model says. The counts' covariance is known, sum over positions of
``diag(p) - p p'``, so the statistic ``d' V^-1 d`` is chi-squared (a martingale central limit: the
positions of one answer may depend on each other). Bands with few expected counts are pooled.

A second test looks at the first token where an answer parts from the plain decoder's with the same
seed. Both tokens are draws from one distribution, so either is the more probable one equally
often (exact sign test), whether or not both decoders use their random numbers alike. llama.cpp's
do: there a correct verifier parts nowhere, and each wrong token shows. Either test at half of
``ALPHA`` condemns.

The power of the first is stated for two verifiers that accept one wrong token in 50: one whose
wrong token is the model's first choice in the place of another that was drawn (hard to see), one
whose wrong token is no plausible candidate.

Example:
    >>> tally = Tally()
    >>> tally.add(Step(5, ((5, -0.105), (2, -2.303))), token=5)
    >>> tally.n
    1
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from browndwarf.quality.chances import chi2_power, chi2_tail, mcnemar, quadratic_form
from browndwarf.quality.partings import Judge, Step
from browndwarf.records import Record

#: Ranks (from 1) at which a band ends; the last band is everything beyond.
BAND_ENDS = (1, 2, 4, 8, 16)
#: Candidates that the judge must name.
TOP = BAND_ENDS[-1]
LEAST_EXPECTED = 5.0
#: A correct decoder fails one run in a thousand.
ALPHA = 0.001
#: Under this power a run that finds nothing has not looked closely enough.
LEAST_POWER = 0.8
WRONG_SHARE = 1 / 50
#: Tokens asked of the judge at once after a parting; what goes beyond the next one is wasted.
AFTER_PARTING = 8

Array = npt.NDArray[np.float64]

_BAND_OF_RANK = tuple(
    next(i for i, end in enumerate(BAND_ENDS) if rank <= end) for rank in range(1, TOP + 1)
)


class Band(Record, frozen=True, kw_only=True):
    """Ranks ``first`` to ``last`` (None: to the end) of the plain model's candidates."""

    first: int
    last: int | None
    observed: int
    expected: float


class SampledTest(Record, frozen=True, kw_only=True):
    """The outcome. ``power_*`` are chances to notice one wrong token in 50 at ``alpha``.

    Attributes:
        tokens: that were judged; ``identical`` of ``answers`` equal the plain decoder's with
            the same seed, which is not required.
        higher, lower: answers whose first parting token was more, or less, probable than the
            plain decoder's; ``sign_p`` tests that they are equally many.
        verdict: ``lossless``, ``lossy``, or ``inconclusive`` when too few tokens were judged.
            Answers that are all identical need no test.
    """

    tokens: int
    answers: int
    identical: int
    temperature: float
    bands: tuple[Band, ...]
    chi2: float
    df: int
    p: float
    alpha: float
    power_plausible: float
    power_implausible: float
    impossible: int
    higher: int
    lower: int
    sign_p: float
    verdict: str


class Tally:
    """Observed and expected counts per band, with their covariance."""

    def __init__(self) -> None:
        size = len(BAND_ENDS) + 1
        self.n = 0
        self.answers = 0
        self.identical = 0
        self.impossible = 0
        self.higher = 0
        self.lower = 0
        self._observed = [0] * size
        self._rows: list[list[float]] = []

    def add(self, step: Step, token: int) -> None:
        """Count one token that was emitted where the plain model had ``step``'s candidates."""
        shares = [0.0] * len(self._observed)
        last = band = len(shares) - 1
        for (candidate, logprob), here in zip(step.top, _BAND_OF_RANK, strict=False):
            shares[here] += math.exp(logprob)
            if candidate == token:
                band = here
        total = sum(shares)
        shares[last] = max(0.0, 1.0 - total)
        if total > 1.0:
            shares = [share / total for share in shares]
        if len(step.top) < TOP and band == last and shares[last] < 1e-6:
            # The candidates that were named are all there are.
            self.impossible += 1
        self.n += 1
        self._observed[band] += 1
        self._rows.append(shares)

    def part(self, step: Step, token: int) -> None:
        """Note the first token where an answer left the plain decoder's way."""
        margin = step.margin(token)
        if margin is not None and margin < 0:
            self.higher += 1
        else:
            self.lower += 1

    def test(self, temperature: float) -> SampledTest:
        """The verdict over all that was added."""
        rows = np.array(self._rows).reshape(-1, len(self._observed))
        groups = _pool(rows.sum(axis=0))
        pooled = np.stack([rows[:, group].sum(axis=1) for group in groups], axis=1)
        expected = pooled.sum(axis=0)
        covariance = np.diag(expected) - pooled.T @ pooled
        observed = np.array([sum(self._observed[i] for i in group) for group in groups])
        df = len(groups) - 1
        chi2, p = 0.0, 1.0
        powers = [0.0, 0.0]
        if df > 0:
            free = slice(0, df)
            inner = covariance[free, free]
            chi2 = quadratic_form((observed - expected)[free], inner)
            p = chi2_tail(chi2, df)
            for i, shift in enumerate(_wrong(expected, self.n)):
                powers[i] = chi2_power(df, quadratic_form(shift[free], inner), ALPHA / 2)
        sign_p = mcnemar(self.higher, self.lower)
        lossy = min(p, sign_p) < ALPHA / 2 or self.impossible > 0
        same = 0 < self.identical == self.answers
        told = "lossless" if same or min(powers) >= LEAST_POWER else "inconclusive"
        return SampledTest(
            tokens=self.n,
            answers=self.answers,
            identical=self.identical,
            temperature=temperature,
            bands=tuple(
                Band(
                    first=1 if g[0] == 0 else BAND_ENDS[g[0] - 1] + 1,
                    last=BAND_ENDS[g[-1]] if g[-1] < len(BAND_ENDS) else None,
                    observed=int(o),
                    expected=float(e),
                )
                for g, o, e in zip(groups, observed, expected, strict=True)
            ),
            chi2=chi2,
            df=df,
            p=p,
            alpha=ALPHA,
            power_plausible=powers[0],
            power_implausible=powers[1],
            impossible=self.impossible,
            higher=self.higher,
            lower=self.lower,
            sign_p=sign_p,
            verdict="lossy" if lossy else told,
        )


def _wrong(expected: Array, n: int) -> tuple[Array, Array]:
    """How the counts move when one token in 50 is wrong: a plausible one, an implausible one.

    Plausible: the first choice in the place of another that was drawn. Implausible: a token of
    the last band in the place of any other.
    """
    moved = WRONG_SHARE * n
    plausible = -expected / max(float(expected[1:].sum()), 1e-9)
    plausible[0] = 1.0
    implausible = -expected / max(float(expected[:-1].sum()), 1e-9)
    implausible[-1] = 1.0
    return (
        plausible * min(moved, float(expected[1:].sum())),
        implausible * min(moved, float(expected[:-1].sum())),
    )


def _pool(expected: Array) -> list[list[int]]:
    """Neighbouring bands, from the rarest on, until each expects enough hits."""
    groups: list[list[int]] = []
    waiting: list[int] = []
    for i in reversed(range(len(expected))):
        waiting.insert(0, i)
        if float(expected[waiting].sum()) >= LEAST_EXPECTED:
            groups.insert(0, waiting)
            waiting = []
    if waiting and groups:
        groups[0] = [*waiting, *groups[0]]
    elif waiting:
        groups = [waiting]
    return groups


async def judge_sampled(
    judge: Judge,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    temperature: float,
    seed: int,
    tally: Tally,
) -> None:
    """Add every token of one sampled answer to the tally.

    The judge draws with the same temperature and seed: where both use their random numbers alike
    it walks the same way, and one request covers the whole answer.
    """
    at, same = 0, True
    while at < len(answer):
        n = len(answer) - at if at == 0 else min(AFTER_PARTING, len(answer) - at)
        steps = await judge.steps(
            [*prompt, *answer[:at]], n=n, temperature=temperature, seed=seed + at
        )
        if not steps:
            break
        for step in steps:
            tally.add(step, answer[at])
            at += 1
            if step.token != answer[at - 1]:
                if same:
                    tally.part(step, answer[at - 1])
                same = False
                break
            if at == len(answer):
                break
    tally.answers += 1
    tally.identical += same
