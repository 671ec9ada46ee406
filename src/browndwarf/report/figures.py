"""The page's charts with their words: title, how to read it, and what it says to who cannot see it.

Drawing needs the extra ``report``; without it there are no figures, and a page has its tables.

Example:
    >>> [figure.title for figure in figures(reading) or ()]        # doctest: +SKIP
    ['Speed-up of each configuration', 'Speed over n_max', ...]
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from dataclasses import dataclass

from browndwarf.report import points
from browndwarf.report.points import Accepted, Cycle, Ratio, Speed
from browndwarf.report.reading import Reading

#: What draws, and how a user gets it.
NEEDED = ("altair", "vl_convert")
INSTALL = "pip install 'browndwarf[report]'"
#: Groups that are drawn one by one at most; the tables have all.
MOST_GROUPS = 6


@dataclass(frozen=True)
class Drawing:
    """One SVG. ``alt`` says in a sentence what it shows; ``name`` tells it from its neighbours."""

    svg: str
    alt: str
    name: str = ""


@dataclass(frozen=True)
class Figure:
    """Drawings of one kind. ``section`` is the part of docs/metrics.md that defines them."""

    title: str
    caption: str
    section: str
    drawings: tuple[Drawing, ...]


def drawable() -> bool:
    """Whether the extra is installed and can be loaded."""
    try:
        for name in NEEDED:
            importlib.import_module(name)
    except ImportError:
        return False
    return True


def figures(reading: Reading, hide: Collection[str] = ()) -> tuple[Figure, ...]:
    """Every chart that this run has the figures for. Needs the extra."""
    made = (_speedups(reading, hide), _speeds(reading), _acceptances(reading), _cycles(reading))
    return tuple(figure for figure in (*made, _probes(reading)) if figure is not None)


def _speedups(reading: Reading, hide: Collection[str]) -> Figure | None:
    from browndwarf.report import charts

    rows = points.ratios(reading, hide)
    if not rows:
        return None
    measured = sum(s.configuration.speculative for s in reading.verdict.standings)
    left = (
        f" The {measured - len(rows)} slowest are in the table only."
        if measured > len(rows)
        else ""
    )
    caption = (
        "How many times as fast as the same server without MTP, with the 95% interval; the dashed "
        "line is no gain. Filled: confirmed side by side with its baseline. Hollow: measured "
        f"in the grid. Cross: not counted because of a mark.{left}"
    )
    drawing = Drawing(charts.themed(charts.speedups(rows)), _ratios_told(rows))
    return Figure("Speed-up of each configuration", caption, "Of a comparison", (drawing,))


def _ratios_told(rows: tuple[Ratio, ...]) -> str:
    best, worst = max(rows, key=lambda r: r.mean), min(rows, key=lambda r: r.mean)
    return (
        f"Speed-ups of {len(rows)} configurations: the best is {best.group} {best.label} at "
        f"{best.mean:.2f}, the lowest {worst.group} {worst.label} at {worst.mean:.2f}."
    )


def _speeds(reading: Reading) -> Figure | None:
    from browndwarf.report import charts

    drawings = []
    for group in reading.groups[:MOST_GROUPS]:
        rows = points.speeds(reading, group)
        if any(row.head for row in rows):
            svg = charts.themed(charts.speeds(rows))
            drawings.append(Drawing(svg, _speeds_told(group, rows), group))
    if not drawings:
        return None
    caption = (
        "Decode tok/s, evened out by the machine's pace. Filled, with a line from the slowest to "
        "the fastest repeat: measured. Hollow, on a broad band: not measured but predicted, with "
        "the 90% interval. Cross: not counted because of a mark. The rule is the baseline, dashed "
        f"where it is predicted.{_left(reading)}"
    )
    return Figure("Speed over n_max", caption, "Predicted cells, Pace", tuple(drawings))


def _speeds_told(group: str, rows: tuple[Speed, ...]) -> str:
    measured = [row for row in rows if row.kind == "measured"]
    predicted = sum(row.kind == "predicted" for row in rows)
    text = f"tok/s of {group} over n_max: {len(measured)} cells measured, {predicted} predicted."
    if measured:
        best = max(measured, key=lambda r: r.tok_s)
        text += (
            f" The fastest measured one is {best.head} at n_max {best.n_max} on {best.workload}, "
            f"{best.tok_s:.0f} tok/s."
        )
    return text


def _acceptances(reading: Reading) -> Figure | None:
    from browndwarf.report import charts

    rows = points.acceptances(reading)
    if not rows:
        return None
    given = " It was given, not measured." if reading.plan.synth_rates else ""
    caption = (
        "The share of all drafts whose token at this position was accepted, pooled over the cells "
        f"of a head.{given}"
    )
    drawing = Drawing(charts.themed(charts.acceptances(rows)), _accepted_told(rows))
    return Figure("Acceptance per position", caption, "Of a cell", (drawing,))


def _accepted_told(rows: tuple[Accepted, ...]) -> str:
    firsts = [row.rate for row in rows if row.position == 1]
    deepest = max(row.position for row in rows)
    lasts = [row.rate for row in rows if row.position == deepest]
    return (
        f"Acceptance at position 1 lies between {min(firsts):.0%} and {max(firsts):.0%}, at "
        f"position {deepest} between {min(lasts):.0%} and {max(lasts):.0%}."
    )


def _cycles(reading: Reading) -> Figure | None:
    from browndwarf.report import charts

    rows: tuple[Cycle, ...] = ()
    for group in reading.groups[:MOST_GROUPS]:
        made = points.cycles(reading, group)
        if any(row.n_max for row in made):
            rows += made
    if not rows:
        return None
    caption = (
        "Milliseconds from one verify step to the next. Points: measured, evened out by the "
        "machine's pace. Lines: the model that predictions are made with, at the context depth of "
        f"the first baseline.{_left(reading)}"
    )
    drawing = Drawing(charts.themed(charts.cycles(rows)), _cycles_told(rows))
    return Figure("Time of a cycle over n_max", caption, "Predicted cells, Pace", (drawing,))


def _cycles_told(rows: tuple[Cycle, ...]) -> str:
    measured = [row.ms for row in rows if row.kind == "measured"] or [row.ms for row in rows]
    return (
        f"Cycle times of {len({row.group for row in rows})} groups, from {min(measured):.2f} to "
        f"{max(measured):.2f} ms."
    )


def _probes(reading: Reading) -> Figure | None:
    from browndwarf.report import charts

    rows = points.probes(reading)
    if not rows:
        return None
    limit = points.fast_limit(reading)
    slow = sum(row.pace == "slow" for row in rows) / len(rows)
    caption = (
        "What a fixed piece of work took beside each request. Up to the dashed line the machine "
        "was at its fast pace."
    )
    alt = (
        f"The probe took {min(r.ms for r in rows):.2f} to {max(r.ms for r in rows):.2f} ms; "
        f"{slow:.0%} of its answers lie above the limit of the fast pace, {limit:.2f} ms."
    )
    drawing = Drawing(charts.themed(charts.probes(rows, limit)), alt)
    return Figure("The machine's pace", caption, "Pace", (drawing,))


def _left(reading: Reading) -> str:
    """A sentence about the groups that are not drawn; "" where all are."""
    more = len(reading.groups) - MOST_GROUPS
    return f" {more} more groups are in the table only." if more > 0 else ""
