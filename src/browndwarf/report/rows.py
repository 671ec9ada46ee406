"""The page's tables, as typed rows of text: from a reading to what stands in each cell.

tok/s are as measured; ratios come from the verdict, which evens them out by the machine's pace.

Example:
    >>> configurations(reading)[0].rows[1].speedup                 # doctest: +SKIP
    '1.34 (1.30 to 1.38)'
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from browndwarf.records import CellRecord, Prediction
from browndwarf.report.reading import Reading, in_order
from browndwarf.stats import Interval, summarize
from browndwarf.sweep.analysis import Standing, configuration_of
from browndwarf.sweep.space import Configuration


@dataclass(frozen=True)
class Figure:
    """tok/s on one workload, as text. ``predicted``: it was not measured."""

    text: str
    predicted: bool = False


@dataclass(frozen=True)
class Row:
    """One configuration. ``how``: confirmed, measured, in part, or predicted."""

    label: str
    figures: tuple[Figure, ...]
    tokens_per_step: str
    speedup: str
    verdict: str
    marks: str
    how: str
    winner: bool = False


@dataclass(frozen=True)
class GroupRows:
    """The configurations that share a baseline."""

    label: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class DriftRow:
    """How a group's baseline moved between two measurements on one workload."""

    group: str
    workload: str
    change: str
    noise: str
    beyond_noise: bool


@dataclass(frozen=True)
class MemoryTable:
    """MiB by kind of memory; a row per configuration, in the order of ``kinds``."""

    kinds: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Failure:
    """Cells without a figure for the same reason; ``fix`` is the next step."""

    status: str
    what: str
    why: str
    fix: str
    cells: tuple[str, ...]


def ratio_text(interval: Interval) -> str:
    """A ratio with its interval; a single run has no spread to make one from."""
    if math.isinf(interval.high):
        return f"{interval.mean:.2f} (one run: no spread)"
    return f"{interval.mean:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def configurations(reading: Reading, hide: Collection[str] = ()) -> tuple[GroupRows, ...]:
    """Every configuration that was measured or predicted, group by group."""
    cells: dict[Configuration, list[CellRecord]] = {}
    for cell in reading.cells:
        cells.setdefault(configuration_of(cell), []).append(cell)
    standings = {s.configuration: s for s in reading.verdict.standings}
    found = []
    for group in reading.groups:
        mine = {c: made for c, made in cells.items() if c.group_label() == group}
        ranked = in_order([s for c, s in standings.items() if c in mine])
        rows = [_standing_row(reading, s, mine[s.configuration], hide) for s in ranked]
        others = {c: made for c, made in mine.items() if c not in standings}
        rows += [row for c, made in others.items() if (row := _lone_row(reading, c, made, hide))]
        rows += _predicted_rows(reading, others, hide)
        if rows:
            label = ranked[0].configuration if ranked else next(iter(mine))
            found.append(GroupRows(label.group_label(hide), tuple(rows)))
    return tuple(found)


def _standing_row(
    reading: Reading, standing: Standing, cells: Sequence[CellRecord], hide: Collection[str]
) -> Row:
    drafting = standing.configuration.speculative
    figures = _figures(reading, standing.cells, cells)
    how = "confirmed" if standing.confirmed else "measured"
    return Row(
        label=standing.configuration.label(hide),
        figures=figures,
        tokens_per_step=_tokens_per_step(standing.cells),
        speedup=ratio_text(standing.speedup) if drafting else "1.00",
        verdict=standing.word if standing.eligible else "not counted",
        marks=_marks(standing.cells),
        how=f"{how} in part" if any(f.predicted for f in figures) else how,
        winner=standing is reading.verdict.winner,
    )


def _lone_row(
    reading: Reading,
    configuration: Configuration,
    cells: Sequence[CellRecord],
    hide: Collection[str],
) -> Row | None:
    """A measured configuration without a baseline to compare it with; None if none was measured."""
    measured = [c for c in cells if c.status == "ok" and c.decode_tok_s is not None]
    if not measured:
        return None
    return Row(
        label=configuration.label(hide),
        figures=_figures(reading, measured, cells),
        tokens_per_step=_tokens_per_step(measured),
        speedup="",
        verdict="no baseline",
        marks=_marks(measured),
        how="measured",
    )


def _predicted_rows(
    reading: Reading, cells: dict[Configuration, list[CellRecord]], hide: Collection[str]
) -> list[Row]:
    """Configurations that were only predicted, the fastest first."""
    found = []
    for configuration, made in cells.items():
        rates = [c.predicted.decode_tok_s for c in made if c.predicted is not None]
        if rates and all(c.decode_tok_s is None for c in made):
            figures = _figures(reading, (), made)
            row = Row(configuration.label(hide), figures, "", "", "predicted", "", "predicted")
            found.append((statistics.geometric_mean(rates), row))
    return [row for _, row in sorted(found, key=lambda pair: -pair[0])]


def _figures(
    reading: Reading, measured: Sequence[CellRecord], cells: Sequence[CellRecord]
) -> tuple[Figure, ...]:
    """A figure per workload: of ``measured``, else what else was measured, else what was predicted,
    else nothing."""
    guesses = {c.workload: c.predicted for c in cells if c.predicted is not None}
    others = [c for c in cells if c.status == "ok"]
    return tuple(
        _measured([c for c in measured if c.workload == name])
        or _measured([c for c in others if c.workload == name])
        or _predicted(guesses.get(name))
        for name in reading.workloads
    )


def _measured(cells: Sequence[CellRecord]) -> Figure | None:
    """The mean over all repeats, and half of max - min."""
    runs = [run for c in cells if c.decode_tok_s is not None for run in c.decode_tok_s.runs]
    if not runs:
        return None
    rate = summarize(runs)
    return Figure(f"{_rate(rate.mean)} ±{_rate(rate.spread / 2, like=rate.mean)}")


def _predicted(prediction: Prediction | None) -> Figure:
    if prediction is None:
        return Figure("")
    mean = prediction.decode_tok_s
    low, high = (_rate(end, like=mean) for end in (prediction.low, prediction.high))
    return Figure(f"{_rate(mean)} ({low} to {high})", predicted=True)


def _rate(tok_s: float, *, like: float | None = None) -> str:
    """tok/s to three figures or so; with as many decimals as ``like`` has."""
    return f"{tok_s:.0f}" if (like or tok_s) >= 100 else f"{tok_s:.1f}"


def _tokens_per_step(cells: Sequence[CellRecord]) -> str:
    lengths = [c.accepted_length for c in cells if c.accepted_length is not None]
    return f"{statistics.fmean(lengths):.2f}" if lengths else ""


def _marks(cells: Sequence[CellRecord]) -> str:
    return " ".join(sorted({mark for cell in cells for mark in cell.marks}))


def drift_rows(reading: Reading) -> tuple[DriftRow, ...]:
    """Each group's baseline, measured later against earlier."""
    return tuple(
        DriftRow(d.group, name, f"{x.change:+.1%}", f"{x.noise:.1%}", x.beyond_noise)
        for d in reading.verdict.drifts
        for name, x in d.by_workload.items()
    )


def memory_table(reading: Reading, hide: Collection[str] = ()) -> MemoryTable | None:
    """What the engine and the watcher said of memory; None where nothing was recorded."""
    known: dict[Configuration, dict[str, float]] = {}
    for cell in reading.measured:
        if cell.memory:
            known.setdefault(configuration_of(cell), cell.memory)
    kinds = tuple(dict.fromkeys(kind for lines in known.values() for kind in lines))
    if not kinds:
        return None
    rows = [
        (c.label(hide), tuple(f"{lines[k]:.0f}" if k in lines else "" for k in kinds))
        for c, lines in known.items()
    ]
    return MemoryTable(kinds, tuple(rows))


def failure_rows(reading: Reading) -> tuple[Failure, ...]:
    """Why cells have no figure, and what to do: one row for each reason."""
    cells: dict[tuple[str, str, str, str], list[str]] = {}
    for cell in reading.cells:
        if cell.decode_tok_s is None and cell.status != "predicted":
            error = cell.error or {}
            what = error.get("what", "no reason saved")
            reason = cell.status, what, error.get("why", ""), error.get("fix", "")
            cells.setdefault(reason, []).append(cell.id)
    return tuple(Failure(*reason, tuple(ids)) for reason, ids in cells.items())
