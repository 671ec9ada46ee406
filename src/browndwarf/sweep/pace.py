"""The machine's momentary speed, probed beside every cell, and figures evened out by it.

A shared or small machine may change its speed by half for seconds or minutes: neighbours on the
same cores, clocks, heat. Then two cells differ because they were measured at different times. So
where the processor computes, a second small server of a fixed model stays loaded, and between
requests it is timed at a few plain decode steps. What it says is used as far as this very run
shows that it tells something: the exponent is fitted to cycles of the same configuration, which
should have taken equal times. Where it tells nothing the exponent is near 0 and nothing changes.

Pure, but for the protocol ``Pacer`` that a probe fulfils.

Example:
    >>> pace = Pace(cells)                                         # doctest: +SKIP
    >>> pace.exponent, pace.span, pace.rate(cells[0])              # doctest: +SKIP
    (0.93, 1.41, 918.2)
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from browndwarf.records import CellRecord, RequestTrace

#: Answers of the probe that differ by less than this, in logarithms, are taken for the same: they
#: differ so much on a steady machine.
TOLD = 0.25
#: An answer so many times beyond the run's 10th or 90th percentile was disturbed itself.
STRAY = 1.4
#: More scatter than this is accidents, and no property of the machine.
LARGEST_NOISE = 0.1
#: An exponent above this would believe the probe more than it can know.
LARGEST_EXPONENT = 1.2


class Pacer(Protocol):
    """Times a fixed piece of work on this machine."""

    async def take(self) -> float:
        """Milliseconds that it takes now; a recent answer may be given again."""


class Pace:
    """How the machine's speed changed over these cells.

    ``reference`` is the probe's time that figures are evened out to: the median over the cells
    unless it is given. Cells without a probe stay as they are. ``noise`` is by how much, relative,
    evened cycles of one configuration still differ from cell to cell.
    """

    def __init__(self, cells: Iterable[CellRecord], *, reference: float | None = None) -> None:
        usable = [c for c in cells if c.status == "ok" and "busy" not in c.marks]
        answers = [t.probe_ms for c in usable if _probed(c) for t in c.traces]
        self._low, self._high = _bounds(answers)
        self._probes = [ms for ms in answers if self._low <= ms <= self._high]
        self.exponent = self._fitted([c for c in usable if _probed(c)])
        self.reference = reference or (statistics.median(self._probes) if self._probes else 0.0)
        self.noise = self._scatter(usable)

    @property
    def span(self) -> float:
        """How many times slower the machine was at its slow end (90th percentile) than at its
        fast end (10th), as far as the probe tells; 1 without probes."""
        if len(self._probes) < 10:
            return 1.0
        cuts = statistics.quantiles(self._probes, n=10)
        return float((cuts[-1] / cuts[0]) ** self.exponent)

    def factors(self, cell: CellRecord) -> tuple[float, ...]:
        """What each request's time is multiplied with to even it out."""
        if not self._paced(cell):
            return (1.0,) * len(cell.traces)
        return tuple((self.reference / ms) ** self.exponent for ms in self._smoothed(cell.traces))

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
        by_configuration: dict[str, list[float]] = {}
        for cell in cells:
            cycle = self.cycle_ms(cell)
            if cycle:
                by_configuration.setdefault(_settings(cell), []).append(math.log(cycle))
        apart = [
            value - statistics.median(values)
            for values in by_configuration.values()
            if len(values) > 2
            for value in values
        ]
        return min(statistics.pstdev(apart), LARGEST_NOISE) if len(apart) > 2 else 0.0

    def _fitted(self, cells: Sequence[CellRecord]) -> float:
        """How a cycle's time follows the probe's: 0 not at all, 1 in proportion.

        Cycles of one configuration cost the same whatever the text, so all repeats of all its
        cells are compared with each other: the median of the slopes between any two, which
        accidents of single ones do not bend.
        """
        by_configuration: dict[str, list[tuple[float, float]]] = {}
        for cell in cells:
            by_repeat: dict[int, list[RequestTrace]] = {}
            for trace in cell.traces:
                sound = self._low <= trace.probe_ms <= self._high
                if sound and trace.predicted_ms > 0 and trace.cycles:
                    by_repeat.setdefault(trace.repeat, []).append(trace)
            points = by_configuration.setdefault(_settings(cell), [])
            for traces in by_repeat.values():
                probe = statistics.median(t.probe_ms for t in traces)
                cycle = math.fsum(t.predicted_ms for t in traces) / sum(t.cycles for t in traces)
                points.append((math.log(probe), math.log(cycle)))
        slopes = [
            ((y2 - y1) / (x2 - x1), abs(x2 - x1))
            for points in by_configuration.values()
            for (x1, y1), (x2, y2) in itertools.combinations(points, 2)
            if abs(x2 - x1) >= TOLD
        ]
        return min(max(_weighted_median(slopes), 0.0), LARGEST_EXPONENT)


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


def _weighted_median(values: list[tuple[float, float]]) -> float:
    """The value with half of the weight below it; 0 without values."""
    half, below = math.fsum(weight for _, weight in values) / 2, 0.0
    for value, weight in sorted(values):
        below += weight
        if below >= half:
            return value
    return 0.0
