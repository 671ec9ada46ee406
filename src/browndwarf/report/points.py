"""What the charts show, as plain rows: from a reading to points, without any drawing.

Speeds and cycles are evened out by the machine's pace (``sweep.pace``), because predictions are
made for an even machine; the tables have what was measured. Cells whose mark keeps them from
winning are shown as *not counted* or left out, as each function says.

Example:
    >>> ratios(reading)[0]                                         # doctest: +SKIP
    Ratio(group='Q4_0', label='Q4_K n3', mean=1.34, low=1.30, high=1.38, word='faster', ...)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from browndwarf.records import CellRecord
from browndwarf.report.reading import Reading, draft_label, head_label
from browndwarf.sweep.analysis import configuration_of
from browndwarf.sweep.model import pooled_rates, trusted
from browndwarf.sweep.space import Configuration

#: So many rows of a chart can still be read; tables hold the others.
MOST_RATIOS = 80
MOST_PROBES = 800
#: What stands for the head where nothing drafts.
PLAIN = "no MTP"

Kind = Literal["measured", "not counted", "predicted", "baseline", "predicted baseline"]


@dataclass(frozen=True)
class Ratio:
    """A configuration's speed-up against its group's baseline, with its 95% interval; no ends
    where a single run has none."""

    group: str
    label: str
    mean: float
    low: float | None
    high: float | None
    word: str
    shown: Literal["confirmed", "measured", "not counted"]


@dataclass(frozen=True)
class Speed:
    """Decode tok/s of a cell. ``low`` and ``high``: the slowest and fastest repeat of a measured
    one, the 90% band of a predicted one, the mean of a baseline."""

    group: str
    head: str
    workload: str
    n_max: int
    tok_s: float
    low: float
    high: float
    kind: Kind


@dataclass(frozen=True)
class Accepted:
    """The share of drafts whose ``position`` (from 1) was accepted."""

    head: str
    workload: str
    position: int
    rate: float


@dataclass(frozen=True)
class Cycle:
    """Milliseconds of a verify cycle, or of a plain step at n_max 0."""

    group: str
    head: str
    n_max: int
    ms: float
    kind: Literal["measured", "model"]


@dataclass(frozen=True)
class Probe:
    """An answer of the machine's probe, ``minutes`` after the first cell began."""

    minutes: float
    ms: float
    pace: Literal["fast", "slow"]


def ratios(reading: Reading, hide: Collection[str] = ()) -> tuple[Ratio, ...]:
    """Every measured MTP configuration, fastest first, group by group."""
    drafting = [s for s in reading.verdict.standings if s.configuration.speculative]
    best = sorted(drafting, key=lambda s: (not s.confirmed, -s.speedup.mean))[:MOST_RATIOS]
    places = {group: place for place, group in enumerate(reading.groups)}
    return tuple(
        Ratio(
            group=s.group,
            label=draft_label(s.configuration, hide),
            mean=s.speedup.mean,
            low=s.speedup.low if math.isfinite(s.speedup.high) else None,
            high=s.speedup.high if math.isfinite(s.speedup.high) else None,
            word=s.word,
            shown="not counted" if not s.eligible else "confirmed" if s.confirmed else "measured",
        )
        for s in sorted(best, key=lambda s: (places[s.group], -s.speedup.mean))
    )


def speeds(reading: Reading, group: str) -> tuple[Speed, ...]:
    """A group's cells over n_max: each measured one, those that were predicted instead, and the
    mean of the baseline on each workload."""
    cells = [c for c in reading.cells if c.group == group]
    drafting = [c for c in cells if c.head_type is not None]
    found = [point for c in drafting if (point := _measured(reading, c)) is not None]
    known = {(configuration_of(c), c.workload) for c in drafting if c.decode_tok_s is not None}
    found += [
        _predicted(c, "predicted")
        for c in drafting
        if c.predicted is not None and (configuration_of(c), c.workload) not in known
    ]
    return (*found, *_baselines(reading, [c for c in cells if c.head_type is None]))


def _measured(reading: Reading, cell: CellRecord) -> Speed | None:
    rates = reading.verdict.pace.rates(cell)
    if cell.status != "ok" or not rates:
        return None
    return Speed(
        group=cell.group,
        head=head_label(configuration_of(cell)),
        workload=cell.workload,
        n_max=cell.n_max,
        tok_s=math.fsum(rates) / len(rates),
        low=min(rates),
        high=max(rates),
        kind="measured" if reading.counts(cell) else "not counted",
    )


def _predicted(cell: CellRecord, kind: Kind) -> Speed:
    assert cell.predicted is not None
    return Speed(
        group=cell.group,
        head=head_label(configuration_of(cell)),
        workload=cell.workload,
        n_max=cell.n_max,
        tok_s=cell.predicted.decode_tok_s,
        low=cell.predicted.low,
        high=cell.predicted.high,
        kind=kind,
    )


def _baselines(reading: Reading, cells: list[CellRecord]) -> Iterator[Speed]:
    for workload in reading.workloads:
        mine = [c for c in cells if c.workload == workload]
        speeds = [s.tok_s for c in mine if (s := _measured(reading, c)) and s.kind == "measured"]
        if speeds:
            mean = math.fsum(speeds) / len(speeds)
            yield Speed(cells[0].group, "", workload, 0, mean, mean, mean, "baseline")
        else:
            yield from (
                _predicted(c, "predicted baseline") for c in mine if c.predicted is not None
            )


def acceptances(reading: Reading) -> tuple[Accepted, ...]:
    """Unconditional acceptance per position, pooled over the cells of a head on a workload."""
    cells: dict[tuple[str, str], list[CellRecord]] = {}
    for cell in reading.measured:
        if cell.head_type is not None:
            key = head_label(configuration_of(cell)), cell.workload
            cells.setdefault(key, []).append(cell)
    return tuple(
        Accepted(head, workload, position, rate)
        for (head, workload), members in cells.items()
        for position, rate in enumerate(pooled_rates(members), 1)
    )


def cycles(reading: Reading, group: str) -> tuple[Cycle, ...]:
    """A group's cycles over n_max: cells that the model was fitted to, and its line for every
    head, at the depth of the first baseline. Nothing with several slots: there cycles overlap."""
    configurations = _configurations(reading, group)
    if any(c.parallel != 1 for c in configurations):
        return ()
    found = []
    for cell in reading.measured:
        ms = reading.verdict.pace.cycle_ms(cell)
        if cell.group == group and ms and trusted(cell, reading.plan.allow_busy):
            head = head_label(configuration_of(cell)) or PLAIN
            found.append(Cycle(group, head, cell.n_max, ms, "measured"))
    for configuration in configurations:
        line = reading.model.cycle_ms(configuration) if configuration.speculative else None
        if line is not None:
            head = head_label(configuration)
            found.append(Cycle(group, head, configuration.n_max, line, "model"))
    return tuple(found)


def _configurations(reading: Reading, group: str) -> list[Configuration]:
    found = {configuration_of(c): None for c in reading.cells if c.group == group}
    return sorted(found, key=lambda c: (head_label(c), c.n_max))


def probes(reading: Reading) -> tuple[Probe, ...]:
    """The probe's answers over the time of the run, evenly thinned out where they are many.

    A cell's requests are taken to be spread evenly over its time; waiting is part of it. Nothing
    where the fast pace is unknown, as when all cells are marked busy.
    """
    limit = fast_limit(reading)
    if math.isinf(limit):
        return ()
    cells = [c for c in reading.measured if c.traces and c.traces[0].probe_ms]
    start = min((c.started_unix for c in cells), default=0.0)
    found = [
        Probe(
            minutes=(cell.started_unix - start + cell.wall_s * (i + 0.5) / len(cell.traces)) / 60,
            ms=trace.probe_ms,
            pace="fast" if trace.probe_ms <= limit else "slow",
        )
        for cell in cells
        for i, trace in enumerate(cell.traces)
        if trace.probe_ms > 0
    ]
    return tuple(found[:: math.ceil(len(found) / MOST_PROBES) or 1])


def fast_limit(reading: Reading) -> float:
    """Answers up to here, in milliseconds, are the fast pace; infinite where that is unknown."""
    return reading.verdict.pace.limit
