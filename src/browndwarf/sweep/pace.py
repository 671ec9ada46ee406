"""The machine's momentary speed, probed beside every cell, and figures evened out by it.

A shared or small machine may change its speed by half for seconds or minutes: neighbours on the
same cores, clocks, heat. Then two cells differ because they were measured at different times. So
where the processor computes, a second small server of a fixed model stays loaded, and between
requests it is timed at a few plain decode steps. That serves twice:

- A cell waits, for a while, until the machine is as fast as this run has seen it (``Tempo``), and
  requests that ran in a slow spell are set aside where enough others did not.
- Where all ran in one, their times are evened out as far as this very run shows that the probe
  tells something: the exponent is fitted to cycles of the same configuration, which should have
  taken equal times. Where it tells nothing the exponent is near 0 and nothing changes.

Pure, but for ``Tempo``, which waits.

Example:
    >>> pace = Pace(cells)                                         # doctest: +SKIP
    >>> pace.exponent, pace.span, pace.rate(cells[0])              # doctest: +SKIP
    (0.93, 1.41, 918.2)
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from browndwarf.records import CellRecord, RequestTrace
from browndwarf.stats import percentile

#: Up to so many times the fastest tenth of its answers the probe says that the machine is fast.
FAST = 1.15
#: A cell waits for the fast pace so many seconds at most, all in all.
WAIT_S = 10.0
WAIT_STEP_S = 0.1
#: Answers from which the fast pace is told; older ones are forgotten.
REMEMBERED = 2000
#: At least this share of a cell's requests at the fast pace, and the others are set aside.
ENOUGH_FAST = 1 / 3
#: Passes over the batch sizes at the fast pace that make the others superfluous.
ENOUGH_PASSES = 3
#: Answers of the probe that differ by less than this, in logarithms, are taken for the same: they
#: differ so much on a steady machine.
TOLD = 0.25
#: An answer so many times beyond the run's 10th or 90th percentile was disturbed itself.
STRAY = 1.4
#: What the noise is taken for before it was seen, and the number of measurements that this counts
#: for. Servers started anew for one configuration were seen 2 to 8% apart on a large GPU.
PRIOR_NOISE = 0.03
PRIOR_FREEDOM = 3
#: More scatter than this is accidents, and no property of the machine.
LARGEST_NOISE = 0.1
#: An exponent above this would believe the probe more than it can know.
LARGEST_EXPONENT = 1.8
#: Pairs of repeats that tell a kind of work's own exponent.
ENOUGH_PAIRS = 30

#: A group and n_max, a group, or nothing: all work.
Kind = tuple[object, ...]


@dataclass(frozen=True)
class CurvePass:
    """Milliseconds of batches of 1, 2, ... tokens, timed one size after the other, and the
    probe's answers before the first and after the last."""

    ms: tuple[float, ...]
    before: float
    after: float


def evened_curve(
    passes: Sequence[CurvePass], limit: float = math.inf, reference: float | None = None
) -> tuple[float, ...]:
    """The median over passes for each size, on a machine whose probe answers ``reference`` (the
    passes' own median unless given).

    Passes whose two answers lie within ``limit`` make the others superfluous, if there are enough.
    Between its two answers the probe is taken to have moved evenly; the time of a batch follows
    it in proportion, since it is the same work.
    """
    fast = [one for one in passes if max(one.before, one.after) <= limit]
    used = fast if len(fast) >= ENOUGH_PASSES else passes
    if not used:
        return ()
    if reference is None:
        reference = statistics.median(ms for one in used for ms in (one.before, one.after))
    sizes = len(used[0].ms)
    curve = []
    for i in range(sizes):
        way = (i + 0.5) / sizes
        curve.append(
            statistics.median(
                one.ms[i] * reference / (one.before ** (1 - way) * one.after**way) for one in used
            )
        )
    return tuple(curve)


class Pacer(Protocol):
    """Times a fixed piece of work on this machine."""

    async def take(self) -> float:
        """Milliseconds that it takes now; a recent answer may be given again."""


class Tempo:
    """A pacer that remembers how fast the machine can be, and waits for that."""

    def __init__(
        self,
        pacer: Pacer,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._pacer, self._clock, self._sleep = pacer, clock, sleep
        self._answers: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def limit(self) -> float:
        """Answers up to here are the fast pace, as far as is known."""
        return FAST * _tenth(self._answers) if self._answers else math.inf

    @property
    def fast(self) -> float | None:
        """The median answer at the fast pace."""
        found = [ms for ms in self._answers if ms <= self.limit]
        return statistics.median(found) if found else None

    async def take(self) -> float:
        """As ``Pacer.take``."""
        answer = await self._pacer.take()
        self._answers.append(answer)
        return answer

    async def settle(self, patience_s: float = WAIT_S) -> tuple[float, float]:
        """Wait for the fast pace; the last answer, and the seconds that were spent on it."""
        start = self._clock()
        answer = await self.take()
        while answer > self.limit and self._clock() - start < patience_s:
            await self._sleep(WAIT_STEP_S)
            answer = await self.take()
        return answer, self._clock() - start


class Pace:
    """How the machine's speed changed over these cells.

    ``reference`` is the probe's time that figures are evened out to: the median of the answers at
    the fast pace. Cells without a probe stay as they are. ``noise`` is by how much, relative,
    evened cycles of one configuration still differ from cell to cell.
    """

    def __init__(self, cells: Iterable[CellRecord]) -> None:
        self._cells = [c for c in cells if c.status == "ok" and "busy" not in c.marks]
        answers = [t.probe_ms for c in self._cells if _probed(c) for t in c.traces]
        self._low, self._high = _bounds(answers)
        self._probes = [ms for ms in answers if self._low <= ms <= self._high]
        self._limit = FAST * _tenth(self._probes) if self._probes else math.inf
        fast = [ms for ms in self._probes if ms <= self._limit]
        self.reference = statistics.median(fast) if fast else 0.0

    # Fits over all pairs of repeats: whoever only asks for the fast pace does not pay for them.
    @cached_property
    def noise(self) -> float:
        """By how much evened cycles of one configuration still differ, relative."""
        return self._scatter(self._cells)

    @cached_property
    def _exponents(self) -> dict[Kind, float]:
        return self._fitted([c for c in self._cells if _probed(c)])

    @property
    def limit(self) -> float:
        """Answers of the probe up to here are the fast pace; infinite without probes."""
        return self._limit

    @property
    def span(self) -> float:
        """How many times slower the machine was at its slow end (90th percentile) than at its
        fast end (10th), as far as the probe tells; 1 without probes."""
        if len(self._probes) < 10:
            return 1.0
        cuts = statistics.quantiles(self._probes, n=10)
        return float((cuts[-1] / cuts[0]) ** self.exponent)

    @property
    def exponent(self) -> float:
        """How a cycle's time follows the probe's, over all cells: 0 not at all, 1 in proportion."""
        return self._exponents.get((), 0.0)

    def exponent_of(self, cell: CellRecord) -> float:
        """The same for a cell's own kind of work: the same group and n_max, or the same group,
        where enough of their repeats can be compared."""
        known = (self._exponents[key] for key in _kinds(cell) if key in self._exponents)
        return next(known, 0.0)

    def factors(self, cell: CellRecord) -> tuple[float, ...]:
        """What each request's time is multiplied with to even it out.

        A request of a slow spell takes the mean cycle of the same prompt's others, or of the
        cell's, where enough of them ran at the fast pace.
        """
        if not self._paced(cell):
            return (1.0,) * len(cell.traces)
        probes = self._smoothed(cell.traces)
        exponent = self.exponent_of(cell)
        plain = [(self.reference / ms) ** exponent for ms in probes]
        if self.slow(cell):
            return tuple(plain)
        fast = [
            ms <= self._limit and t.cycles > 0 for ms, t in zip(probes, cell.traces, strict=True)
        ]
        cycles = [
            (t.prompt_id, t.predicted_ms * factor / t.cycles)
            for t, factor, good in zip(cell.traces, plain, fast, strict=True)
            if good
        ]
        return tuple(
            factor
            if good or not t.cycles
            else _mean_of(cycles, t.prompt_id) * t.cycles / t.predicted_ms
            for t, factor, good in zip(cell.traces, plain, fast, strict=True)
        )

    def fast_share(self, cell: CellRecord) -> float:
        """The share of a cell's requests that ran at the fast pace; 1 without a probe."""
        if not self._paced(cell):
            return 1.0
        probes = zip(self._smoothed(cell.traces), cell.traces, strict=True)
        return sum(ms <= self._limit and t.cycles > 0 for ms, t in probes) / len(cell.traces)

    def slow(self, cell: CellRecord) -> bool:
        """Whether too few of a cell's requests ran at the fast pace to do without the others."""
        share = self.fast_share(cell)
        return share < max(ENOUGH_FAST, 2 / max(len(cell.traces), 2))

    def ms_per_token(self, cell: CellRecord) -> Iterator[tuple[RequestTrace, float]]:
        """Each request with its decode time per token at the reference speed."""
        for trace, factor in zip(cell.traces, self.factors(cell), strict=True):
            yield trace, trace.ms_per_token * factor

    def cycle_ms(self, cell: CellRecord) -> float | None:
        """Cycle time at the reference speed."""
        cycles = sum(t.cycles for t in cell.traces)
        if cell.cycle_ms is None or not cycles or not self._paced(cell):
            return cell.cycle_ms
        pairs = zip(cell.traces, self.factors(cell), strict=True)
        return math.fsum(t.predicted_ms * factor for t, factor in pairs) / cycles

    def rates(self, cell: CellRecord) -> tuple[float, ...]:
        """Decode tok/s of each repeat at the reference speed."""
        if cell.decode_tok_s is None:
            return ()
        if not self._paced(cell):
            return cell.decode_tok_s.runs
        spent: dict[int, float] = {}
        tokens: dict[int, int] = {}
        for trace, factor in zip(cell.traces, self.factors(cell), strict=True):
            spent[trace.repeat] = spent.get(trace.repeat, 0.0) + trace.predicted_ms * factor
            tokens[trace.repeat] = tokens.get(trace.repeat, 0) + max(trace.predicted_n - 1, 0)
        return tuple(1e3 * tokens[r] / spent[r] if spent[r] else 0.0 for r in spent)

    def rate(self, cell: CellRecord) -> float | None:
        """Decode tok/s at the reference speed, the mean over the repeats."""
        rates = self.rates(cell)
        return math.fsum(rates) / len(rates) if rates else None

    def _paced(self, cell: CellRecord) -> bool:
        return bool(self.reference) and _probed(cell)

    def _smoothed(self, traces: Sequence[RequestTrace]) -> list[float]:
        """The probe beside each request, as the median with its neighbours'. Strays say nothing:
        beside them the cell's other answers count, or the reference."""
        known = [t.probe_ms if self._low <= t.probe_ms <= self._high else None for t in traces]
        sound = [ms for ms in known if ms is not None]
        other = statistics.median(sound) if sound else self.reference
        found = []
        for i in range(len(known)):
            near = [ms for ms in known[max(i - 1, 0) : i + 2] if ms is not None]
            found.append(statistics.median(near) if near else other)
        return found

    def _scatter(self, cells: Sequence[CellRecord]) -> float:
        """The standard deviation of a configuration's cells from their mean, pooled over all
        configurations that were measured more than once, and with a prior."""
        by_configuration: dict[str, list[float]] = {}
        for cell in cells:
            cycle = self.cycle_ms(cell)
            if cycle:
                by_configuration.setdefault(_settings(cell), []).append(math.log(cycle))
        several = [values for values in by_configuration.values() if len(values) > 1]
        apart = math.fsum(statistics.pvariance(v) * len(v) for v in several)
        freedom = sum(len(v) - 1 for v in several) + PRIOR_FREEDOM
        found = math.sqrt((apart + PRIOR_FREEDOM * PRIOR_NOISE**2) / freedom)
        return min(found, LARGEST_NOISE)

    def _fitted(self, cells: Sequence[CellRecord]) -> dict[Kind, float]:
        """The exponent for each kind of work that was seen often enough, and for all.

        Cycles of one configuration cost the same whatever the text, so all repeats of all its
        cells are compared with each other: the median of the slopes between any two, which
        accidents of single ones do not bend.
        """
        points: dict[str, list[tuple[float, float]]] = {}
        kinds: dict[str, tuple[Kind, ...]] = {}
        for cell in cells:
            name = _settings(cell)
            kinds[name] = _kinds(cell)
            points.setdefault(name, []).extend(self._points(cell))
        slopes: dict[Kind, list[tuple[float, float]]] = {}
        for name, known in points.items():
            found = [
                ((y2 - y1) / (x2 - x1), abs(x2 - x1))
                for (x1, y1), (x2, y2) in itertools.combinations(known, 2)
                if abs(x2 - x1) >= TOLD
            ]
            for kind in kinds[name]:
                slopes.setdefault(kind, []).extend(found)
        return {
            kind: min(max(_weighted_median(found), 0.0), LARGEST_EXPONENT)
            for kind, found in slopes.items()
            if not kind or len(found) >= ENOUGH_PAIRS
        }

    def _points(self, cell: CellRecord) -> Iterator[tuple[float, float]]:
        """Probe and cycle of each repeat, as logarithms."""
        by_repeat: dict[int, list[RequestTrace]] = {}
        for trace in cell.traces:
            sound = self._low <= trace.probe_ms <= self._high
            if sound and trace.predicted_ms > 0 and trace.cycles:
                by_repeat.setdefault(trace.repeat, []).append(trace)
        for traces in by_repeat.values():
            probe = statistics.median(t.probe_ms for t in traces)
            cycle = math.fsum(t.predicted_ms for t in traces) / sum(t.cycles for t in traces)
            yield math.log(probe), math.log(cycle)


def _kinds(cell: CellRecord) -> tuple[Kind, ...]:
    """Kinds of work that a cell belongs to, from the narrowest to all."""
    n_max = cell.n_max if cell.head_type is not None else 0
    return (cell.group, n_max), (cell.group,), ()


def _probed(cell: CellRecord) -> bool:
    """Whether every request has a probe. With several slots requests overlap, and the rate is over
    the wall."""
    single = int(cell.options.get("parallel", 1)) == 1
    return single and bool(cell.traces) and all(t.probe_ms for t in cell.traces)


def _settings(cell: CellRecord) -> str:
    return repr(sorted(cell.options.items()))


def _bounds(answers: Sequence[float]) -> tuple[float, float]:
    """Between which answers of the probe are believed."""
    if len(answers) < 10:
        return 0.0, math.inf
    cuts = statistics.quantiles(answers, n=10)
    return cuts[0] / STRAY, cuts[-1] * STRAY


def _mean_of(cycles: Sequence[tuple[str, float]], prompt_id: str) -> float:
    """The mean cycle of a prompt; of all where it has none."""
    same = [ms for name, ms in cycles if name == prompt_id] or [ms for _, ms in cycles]
    return math.fsum(same) / len(same)


def _tenth(answers: Iterable[float]) -> float:
    """The 10th percentile."""
    return percentile(list(answers), 10)


def _weighted_median(values: list[tuple[float, float]]) -> float:
    """The value with half of the weight below it; 0 without values."""
    half, below = math.fsum(weight for _, weight in values) / 2, 0.0
    for value, weight in sorted(values):
        below += weight
        if below >= half:
            return value
    return 0.0
