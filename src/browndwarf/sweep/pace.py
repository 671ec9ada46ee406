"""The machine's momentary speed, probed beside every cell, and figures evened out by it.

A shared or small machine may change its speed by half for seconds or minutes: neighbours on the
same cores, clocks, heat. Then two cells differ because they were measured at different times. So
where the processor computes, a second small server of a fixed model stays loaded, and between
requests it is timed at a few plain decode steps. What it says is used as far as this very run
shows that it tells something: the exponent is fitted to repeats of the same requests, which should
have taken equal times. Where it tells nothing the exponent is near 0 and nothing changes.

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
from collections.abc import Iterable, Sequence
from typing import Protocol

from browndwarf.records import CellRecord, RequestTrace

#: Spread of log times that repeats have anyway; the exponent is pulled towards 0 by as much.
RIDGE = 0.01
#: Deviations beyond this factor are accidents, not another pace of the machine.
ACCIDENT = math.log(2.5)
#: An exponent above this would believe the probe more than it can know.
LARGEST_EXPONENT = 1.2


class Pacer(Protocol):
    """Times a fixed piece of work on this machine."""

    async def take(self) -> float:
        """Milliseconds that it takes now; a recent answer may be given again."""


class Pace:
    """How the machine's speed changed over these cells.

    ``reference`` is the probe's time that figures are evened out to: the median over the cells
    unless it is given. Cells without a probe stay as they are.
    """

    def __init__(self, cells: Iterable[CellRecord], *, reference: float | None = None) -> None:
        usable = [c for c in cells if c.status == "ok" and "busy" not in c.marks]
        probes = [t.probe_ms for c in usable for t in c.traces if t.probe_ms]
        self.exponent = fitted_exponent(usable)
        self.reference = reference or (statistics.median(probes) if probes else 0.0)
        self._probes = probes

    @property
    def span(self) -> float:
        """How many times slower the machine was at its slow end (90th percentile) than at its
        fast end (10th), as far as the probe tells; 1 without probes."""
        if len(self._probes) < 10:
            return 1.0
        cuts = statistics.quantiles(self._probes, n=10)
        return float((cuts[-1] / cuts[0]) ** self.exponent)

    def factor(self, trace: RequestTrace) -> float:
        """What a request's time is multiplied with to even it out."""
        if not trace.probe_ms or not self.reference:
            return 1.0
        return float((self.reference / trace.probe_ms) ** self.exponent)

    def ms_per_token(self, trace: RequestTrace) -> float:
        """Decode time per token at the reference speed."""
        return trace.ms_per_token * self.factor(trace)

    def cycle_ms(self, cell: CellRecord) -> float | None:
        """Cycle time at the reference speed."""
        cycles = sum(t.cycles for t in cell.traces)
        if cell.cycle_ms is None or not cycles or not self._paced(cell):
            return cell.cycle_ms
        return math.fsum(t.predicted_ms * self.factor(t) for t in cell.traces) / cycles

    def rates(self, cell: CellRecord) -> tuple[float, ...]:
        """Decode tok/s of each repeat at the reference speed."""
        if cell.decode_tok_s is None:
            return ()
        if not self._paced(cell):
            return cell.decode_tok_s.runs
        made = []
        for _, group in itertools.groupby(cell.traces, key=lambda t: t.repeat):
            traces = list(group)
            tokens = sum(max(t.predicted_n - 1, 0) for t in traces)
            spent = math.fsum(t.predicted_ms * self.factor(t) for t in traces)
            made.append(1e3 * tokens / spent if spent else 0.0)
        return tuple(made)

    def rate(self, cell: CellRecord) -> float | None:
        """Decode tok/s at the reference speed, the mean over the repeats."""
        rates = self.rates(cell)
        return math.fsum(rates) / len(rates) if rates else None

    def _paced(self, cell: CellRecord) -> bool:
        # With several slots requests overlap, and the rate is over the wall.
        return bool(self.reference) and all(t.probe_ms for t in cell.traces) and _single(cell)


def _single(cell: CellRecord) -> bool:
    return int(cell.options.get("parallel", 1)) == 1


def fitted_exponent(cells: Sequence[CellRecord]) -> float:
    """How a request's time follows the probe's, from repeats of the same requests: 0 not at all,
    1 in proportion."""
    xy, xx = 0.0, 0.0
    for cell in cells:
        by_prompt: dict[str, list[tuple[float, float]]] = {}
        for trace in cell.traces:
            if trace.probe_ms > 0 and trace.predicted_ms > 0 and trace.cycles:
                pair = math.log(trace.probe_ms), math.log(trace.predicted_ms / trace.cycles)
                by_prompt.setdefault(trace.prompt_id, []).append(pair)
        for pairs in by_prompt.values():
            middle_x = statistics.median(x for x, _ in pairs)
            middle_y = statistics.median(y for _, y in pairs)
            for x, y in pairs:
                if max(abs(x - middle_x), abs(y - middle_y)) < ACCIDENT:
                    xy += (x - middle_x) * (y - middle_y)
                    xx += (x - middle_x) ** 2
    return min(max(xy / (xx + RIDGE), 0.0), LARGEST_EXPONENT)
