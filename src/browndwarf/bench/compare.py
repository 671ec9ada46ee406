"""Base against MTP: a ratio with its interval, a verdict, and where the gain ends.

Pure: figures of finished runs in, records out. A *repeat* is one run of each arm, taken in the
order in which they were made; requests are paired by prompt.

Of one quantity at one concurrency, repeat i has the log ratio L_i (MTP over base): of decode
throughput as measured, or the mean over prompts of the log ratio of TTFT or TPOT. The interval
is a bootstrap with two parts. Between repeats: the L_i are drawn with replacement, and their
deviations are stretched by k = sqrt(r/(r-1)) t(r-1)/1.96, without which three repeats would seem
surer than they are. Within: prompts are drawn with replacement, all repeats of a prompt
together; for throughput the estimator is sum(n)/sum(latency) of the drawn requests, which in a
closed loop is throughput per slot. The verdict is ``faster`` or ``slower`` if the interval
excludes 1, else ``inconclusive``.

The crossover is the concurrency where the throughput ratio falls below 1. Measured ratios are
first made non-increasing (isotonic regression over log concurrency), then interpolated; the
interval comes from the same draws, and is open where they leave the measured range.

Example:
    >>> compare_runs(base, mtp).points[0].verdict   # doctest: +SKIP
    'faster'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from browndwarf.errors import UsageError
from browndwarf.records import Record
from browndwarf.stats import Interval, student_t

Floats = npt.NDArray[np.float64]
Verdict = Literal["faster", "slower", "inconclusive"]

DRAWS = 4000


@dataclass(frozen=True, slots=True)
class Sample:
    """One completed request: tokens, and seconds. ``tpot_s`` may be unknown."""

    n: int
    total_s: float
    ttft_s: float
    tpot_s: float | None


@dataclass(frozen=True)
class PointData:
    """One point of one run: throughput (tok/s) and its completed requests by prompt."""

    decode_tok_s: float
    samples: Mapping[str, Sample] = field(default_factory=dict)
    completed: int = 0
    failed: int = 0


#: A run: its points by concurrency.
RunData = Mapping[int, PointData]


class Ratio(Record, frozen=True, kw_only=True):
    """MTP over base of one quantity, with its 95% interval and what it means."""

    mean: float
    low: float
    high: float
    verdict: Verdict
    runs: tuple[float, ...] = ()


class ComparedPoint(Record, frozen=True, kw_only=True):
    """One concurrency. ``ratio`` and ``verdict`` are of decode throughput.

    A ratio of ``ttft`` or ``tpot`` below 1 is faster; of throughput above 1.
    """

    concurrency: int
    base_tok_s: float
    mtp_tok_s: float
    ratio: Ratio
    verdict: Verdict
    ttft: Ratio | None = None
    tpot: Ratio | None = None
    pairs: int = 0


class Crossover(Record, frozen=True, kw_only=True):
    """Where the gain ends. None: not within the measured range, on that side.

    ``where`` is ``inside``, ``above`` (MTP still gains at the highest point), ``below`` (it
    gains nowhere).
    """

    concurrency: float | None
    low: float | None
    high: float | None
    where: Literal["inside", "above", "below"]


class Comparison(Record, frozen=True, kw_only=True):
    """Base against MTP over all concurrencies that both have."""

    points: tuple[ComparedPoint, ...]
    crossover: Crossover
    repeats: int
    label: str = ""
    notes: tuple[str, ...] = ()


def compare_runs(
    base: Sequence[RunData], mtp: Sequence[RunData], *, label: str = "", seed: int = 0
) -> Comparison:
    """Compare repeats of both arms; the i-th run of one belongs to the i-th of the other.

    Raises:
        UsageError: the arms have not the same number of runs, or no concurrency in common.
    """
    if len(base) != len(mtp) or not base:
        raise UsageError(
            f"{len(base)} base runs cannot be paired with {len(mtp)} MTP runs",
            why="each repeat needs one run of both",
            fix="give as many directories before -- as after it",
        )
    shared = sorted(set.intersection(*(set(run) for run in (*base, *mtp))))
    if not shared:
        raise UsageError(
            "the runs have no concurrency in common",
            fix="measure both with the same --concurrency",
        )
    rng = np.random.default_rng(seed)
    points: list[ComparedPoint] = []
    draws: list[Floats] = []
    for level in shared:
        pairs = [(a[level], b[level]) for a, b in zip(base, mtp, strict=True)]
        point, drawn = _compare_point(level, pairs, rng)
        points.append(point)
        draws.append(drawn)
    return Comparison(
        points=tuple(points),
        crossover=crossover(shared, [math.log(p.ratio.mean) for p in points], np.array(draws)),
        repeats=len(base),
        label=label,
        notes=tuple(_notes(base, mtp, shared)),
    )


def _notes(base: Sequence[RunData], mtp: Sequence[RunData], shared: Sequence[int]) -> list[str]:
    notes = []
    if len(base) < 3:
        notes.append(
            f"{len(base)} repeat(s): the intervals know little or nothing of the drift between runs"
        )
    failed = sum(run[c].failed for run in (*base, *mtp) for c in shared)
    if failed:
        notes.append(f"{failed} requests failed; only prompts that both arms completed are paired")
    return notes


def _compare_point(
    level: int, pairs: Sequence[tuple[PointData, PointData]], rng: np.random.Generator
) -> tuple[ComparedPoint, Floats]:
    for a, b in pairs:
        if a.decode_tok_s <= 0 or b.decode_tok_s <= 0:
            raise UsageError(
                f"a run has no tokens at concurrency {level}",
                why="its requests failed",
                fix="look at its errors, and measure it again",
            )
    prompts = sorted(set.intersection(*(set(d.samples) for pair in pairs for d in pair)))
    logs = np.array([math.log(b.decode_tok_s / a.decode_tok_s) for a, b in pairs])
    drawn = _draw(logs, _throughput_noise(pairs, prompts, rng), rng)
    ratio = _ratio(logs, drawn, more_is_faster=True)
    latencies = {
        name: _latency(name, pairs, prompts, rng) for name in ("ttft_s", "tpot_s") if prompts
    }
    point = ComparedPoint(
        concurrency=level,
        base_tok_s=float(np.mean([a.decode_tok_s for a, _ in pairs])),
        mtp_tok_s=float(np.mean([b.decode_tok_s for _, b in pairs])),
        ratio=ratio,
        # One repeat knows nothing of what changes between runs.
        verdict=ratio.verdict if len(pairs) > 1 else "inconclusive",
        ttft=latencies.get("ttft_s"),
        tpot=latencies.get("tpot_s"),
        pairs=len(prompts),
    )
    return point, drawn


def _draw(logs: Floats, within: Floats, rng: np.random.Generator) -> Floats:
    """Draws of the mean log ratio: repeats (stretched) plus the noise within."""
    count = len(logs)
    mean = logs.mean()
    if count == 1:
        single: Floats = mean + within
        return single
    stretch = math.sqrt(count / (count - 1)) * student_t(count - 1) / 1.96
    between = logs[rng.integers(0, count, (DRAWS, count))].mean(axis=1) - mean
    result: Floats = mean + stretch * between + within
    return result


def _picks(count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """How often each of ``count`` prompts is drawn, per draw: (DRAWS, count)."""
    drawn: npt.NDArray[np.int64] = rng.multinomial(count, np.full(count, 1 / count), size=DRAWS)
    return drawn


def _throughput_noise(
    pairs: Sequence[tuple[PointData, PointData]], prompts: Sequence[str], rng: np.random.Generator
) -> Floats:
    if len(prompts) < 2:
        return np.zeros(DRAWS)
    picks = _picks(len(prompts), rng).astype(np.float64)
    total = np.zeros(DRAWS)
    for base, mtp in pairs:
        for data, sign in ((mtp, 1.0), (base, -1.0)):
            found = [data.samples[p] for p in prompts]
            tokens = np.array([s.n for s in found], dtype=np.float64)
            waits = np.array([s.total_s for s in found])
            centre = math.log(tokens.sum() / waits.sum())
            total += sign * (np.log((picks @ tokens) / (picks @ waits)) - centre)
    noise: Floats = total / len(pairs)
    return noise


def _latency(
    name: str,
    pairs: Sequence[tuple[PointData, PointData]],
    prompts: Sequence[str],
    rng: np.random.Generator,
) -> Ratio | None:
    """Geometric mean ratio of TTFT or TPOT over the prompts that have it in every run."""
    rows: list[list[float]] = []
    for prompt in prompts:
        values = [
            (getattr(a.samples[prompt], name), getattr(b.samples[prompt], name)) for a, b in pairs
        ]
        if all(x and y for x, y in values):
            rows.append([math.log(y / x) for x, y in values])
    if not rows:
        return None
    table = np.array(rows)
    logs: Floats = table.mean(axis=0)
    within = np.zeros(DRAWS)
    if len(rows) > 1:
        within = _picks(len(rows), rng) @ table.mean(axis=1) / len(rows) - table.mean()
    return _ratio(logs, _draw(logs, within, rng), more_is_faster=False)


def _ratio(logs: Floats, drawn: Floats, *, more_is_faster: bool) -> Ratio:
    low, high = (float(math.exp(q)) for q in np.quantile(drawn, (0.025, 0.975)))
    mean = float(math.exp(logs.mean()))
    # Resampling is not centred exactly; the interval always holds its own estimate.
    interval = Interval(mean, min(low, mean), max(high, mean))
    verdict: Verdict = "inconclusive"
    if interval.excludes(1.0):
        verdict = "faster" if (mean > 1) == more_is_faster else "slower"
    return Ratio(
        mean=mean,
        low=interval.low,
        high=interval.high,
        verdict=verdict,
        runs=tuple(float(math.exp(x)) for x in logs),
    )


def crossover(levels: Sequence[int], logs: Sequence[float], draws: Floats) -> Crossover:
    """Where the log ratio passes zero; ``draws`` has one row a level, one column a draw."""
    at = _crossing(levels, logs)
    found = np.array([_crossing(levels, column) for column in draws.T])
    low, high = np.quantile(found, (0.025, 0.975), method="nearest")
    where: Literal["inside", "above", "below"] = "inside"
    if at == math.inf:
        where = "above"
    elif at == 0.0:
        where = "below"
    return Crossover(concurrency=_known(at), low=_known(low), high=_known(high), where=where)


def _known(value: float) -> float | None:
    return float(value) if 0 < value < math.inf else None


def _crossing(levels: Sequence[int], logs: Sequence[float] | Floats) -> float:
    """0 if it gains nowhere, infinity if everywhere, else the concurrency between."""
    values = falling(logs)
    if values[0] < 0:
        return 0.0
    for i in range(1, len(levels)):
        if values[i] < 0:
            x0, x1 = math.log2(levels[i - 1]), math.log2(levels[i])
            share = values[i - 1] / (values[i - 1] - values[i])
            return float(2 ** (x0 + share * (x1 - x0)))
    return math.inf


def falling(values: Sequence[float] | Floats) -> list[float]:
    """The closest sequence that never rises (pool adjacent violators, equal weights)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] < mean:
            other, size = pools.pop()
            mean, count = (mean * count + other * size) / (count + size), count + size
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
