"""A finished sweep as tables and sentences for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rich.table import Table

from browndwarf.records import CellRecord
from browndwarf.stats import Interval, summarize
from browndwarf.sweep.analysis import Standing, Verdict, configuration_of
from browndwarf.sweep.space import Configuration


def common_settings(verdict: Verdict) -> list[str]:
    """Settings that all configurations share, such as ``ctx=2048``: said once, not per row."""
    listed = [s.configuration.settings() for s in verdict.standings]
    return [text for text in (listed[0] if listed else []) if all(text in x for x in listed)]


#: Width that a table with one column per workload needs beside those columns.
FIXED_WIDTH = 84
WORKLOAD_WIDTH = 11
#: Acceptance rates shown in a row, where there is room.
POSITIONS = 6


def standings_table(verdict: Verdict, workloads: Sequence[str], *, width: int = 120) -> Table:
    """One row a configuration, fastest first inside its group, the baseline on top.

    A star marks rows that were confirmed side by side with their baseline; they come first,
    because the others were measured at another time. Where ``width`` is too small for a column
    per workload, one column has the speed over all of them.
    """
    hide = common_settings(verdict)
    if FIXED_WIDTH + WORKLOAD_WIDTH * len(workloads) > width:
        workloads = ()
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.add_column("configuration", no_wrap=True)
    for workload in workloads or ("all",):
        table.add_column(f"{workload}\ntok/s", justify="right", no_wrap=True, min_width=6)
    table.add_column("accepted\nper position", no_wrap=True)
    table.add_column("tokens\nper step", justify="right", min_width=6)
    table.add_column("vs no MTP\n(95% interval)", no_wrap=True, min_width=16)
    table.add_column("verdict", no_wrap=True)
    shown = POSITIONS if width >= FIXED_WIDTH else 2
    groups = dict.fromkeys(s.group for s in verdict.standings)
    for group in groups:
        members = [s for s in verdict.standings if s.group == group]
        members.sort(key=lambda s: (s.configuration.speculative, not s.confirmed, -s.speedup.mean))
        for standing in members:
            style = "bold green" if standing is verdict.winner else ""
            table.add_row(*_row(standing, workloads, hide, shown), style=style)
        table.add_section()
        if group != list(groups)[-1]:
            table.add_row()
    return table


def _row(
    standing: Standing, workloads: Sequence[str], hide: Sequence[str], shown: int
) -> list[str]:
    speeds = [_speed([c for c in standing.cells if c.workload == name]) for name in workloads]
    if not workloads:
        speeds = [f"{standing.tok_s:.0f}" if standing.tok_s >= 100 else f"{standing.tok_s:.1f}"]
    interval = standing.speedup
    label = standing.configuration.label(hide) + (" *" if standing.confirmed else "")
    if not standing.configuration.speculative:
        return [label, *speeds, "", "1.00", "1.00", "baseline"]
    word = standing.word if standing.eligible else "not counted"
    marks = sorted({mark for cell in standing.cells for mark in cell.marks})
    return [
        label,
        *speeds,
        _rates(_positions(standing.cells), shown),
        f"{_mean_length(standing.cells):.2f}",
        interval_text(interval, "-"),
        " ".join([word, *(f"[{mark}]" for mark in marks)]),
    ]


def interval_text(interval: Interval, to: str = " to ", *, unit: str = "") -> str:
    """A ratio with its interval; a single run has no spread to make one from."""
    mean = f"{interval.mean:.2f}{unit}"
    if math.isinf(interval.high):
        return f"{mean} (one run: no spread)"
    return f"{mean} ({interval.low:.2f}{to}{interval.high:.2f})"


def _rates(positions: Sequence[float], shown: int) -> str:
    more = " ..." if len(positions) > shown else ""
    return " ".join(f"{p:.2f}" for p in positions[:shown]) + more


def _speed(cells: Sequence[CellRecord]) -> str:
    """Mean over all repeats, and half of their spread."""
    runs = [run for c in cells if c.decode_tok_s is not None for run in c.decode_tok_s.runs]
    if not runs:
        return "-"
    rate = summarize(runs)
    digits = 0 if rate.mean >= 100 else 1
    return f"{rate.mean:.{digits}f} ±{rate.spread / 2:.{digits}f}"


def _positions(cells: Sequence[CellRecord]) -> list[float]:
    """Acceptance per position over all workloads, weighted by drafts."""
    known = [c.acceptance for c in cells if c.acceptance is not None and c.acceptance.drafts]
    total = sum(a.drafts for a in known)
    depth = max((len(a.per_position) for a in known), default=0)
    return [
        sum(a.per_position[i] * a.drafts for a in known if i < len(a.per_position)) / total
        for i in range(depth)
    ]


def _mean_length(cells: Sequence[CellRecord]) -> float:
    lengths = [c.accepted_length for c in cells if c.accepted_length is not None]
    return sum(lengths) / len(lengths) if lengths else 0.0


def failures(cells: Sequence[CellRecord]) -> list[str]:
    """One line for each reason why cells have no figure."""
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if cell.decode_tok_s is None and cell.status != "predicted":
            error = cell.error or {}
            reason = f"{cell.status}: {error.get('what', 'no reason saved')}"
            why = error.get("why", "").splitlines()
            reasons.setdefault(reason + (f" ({why[0]})" if why else ""), []).append(cell.id)
    return [
        f"{len(ids)} cell{'s' if len(ids) > 1 else ''} {reason}; first: {ids[0]}"
        for reason, ids in reasons.items()
    ]


#: What a mark says to a reader, for those that keep a cell from winning.
MEANINGS = {
    "busy": "other programs used the machine",
    "cache-hit": "a prompt came out of the cache",
    "low-acceptance": "under 5% of the drafts were accepted: the head hardly belongs to the model",
    "spilled": "device memory ran over into RAM",
    "throttled": "the device's clocks were held down",
}


def marks(cells: Sequence[CellRecord]) -> list[str]:
    """One line for each mark that kept cells from being counted."""
    counted = {m: sum(m in c.marks for c in cells) for m in MEANINGS}
    return [
        f"{n} cell{'s' if n > 1 else ''} marked {mark}: {MEANINGS[mark]}"
        for mark, n in counted.items()
        if n
    ]


def synthetic_lines(plan: Mapping[str, Any]) -> list[str]:
    """What of a run was made up, said before its table."""
    lines = []
    if spec := plan.get("synthetic"):
        label = spec.get("shape") or f"the header of {PurePath(spec.get('model') or '').name}"
        lines.append(f"SYNTHETIC model: random weights in the shape of {label}.")
    if rates := plan.get("synth_rates"):
        given = " ".join(f"{rate:.2f}" for rate in rates)
        lines.append(
            f"SYNTHETIC acceptance ({given}): speeds are right for it, texts are not valid."
        )
    return lines


def predicted_line(verdict: Verdict, cells: Sequence[CellRecord]) -> list[str]:
    """What a fast sweep expects of the configurations that it did not measure."""
    hide = common_settings(verdict)
    logs: dict[Configuration, list[float]] = {}
    for cell in cells:
        if cell.status == "predicted" and cell.predicted is not None:
            rate = cell.predicted.decode_tok_s
            logs.setdefault(configuration_of(cell), []).append(math.log(rate))
    whole = max((len(values) for values in logs.values()), default=0)
    speeds = {c: math.exp(sum(v) / len(v)) for c, v in logs.items() if len(v) == whole}
    if not speeds:
        return []
    best = max(speeds, key=lambda c: speeds[c])
    return [
        f"Not measured but predicted: {len(logs)} configurations; the fastest of them by the "
        f"model is {best.label(hide)}, about {speeds[best]:.0f} tok/s."
    ]


def story(verdict: Verdict) -> list[str]:
    """What the run says, in sentences."""
    winner = verdict.winner
    if winner is None:
        return ["No configuration can be recommended: see the marks and errors of the cells."]
    hide = common_settings(verdict)
    lines = [_winner_line(verdict, winner, hide)]
    lines += _per_group_lines(verdict, winner, hide)
    worst = min(
        (s for s in verdict.standings if s.configuration.speculative and s.eligible),
        key=lambda s: s.speedup.mean,
        default=None,
    )
    if worst is not None and worst.speedup.mean < 1:
        lines.append(
            f"MTP does not pay everywhere: {worst.configuration.label(hide)} runs at "
            f"{worst.speedup.mean:.2f}x."
        )
    for drift in verdict.drifts:
        if drift.beyond_noise:
            change = max((d.change for d in drift.by_workload.values()), key=abs)
            lines.append(
                f"Careful: the baseline of {drift.group} moved by {change:+.0%} between the start "
                "and the end of its cells; its ratios are as uncertain as that."
            )
    return lines


def _winner_line(verdict: Verdict, winner: Standing, hide: Sequence[str]) -> str:
    name = winner.configuration.label(hide)
    if not winner.configuration.speculative:
        return f"Fastest: {name}, {winner.tok_s:.1f} tok/s. {_why_no_mtp(verdict, hide)}"
    interval = winner.speedup
    gain = interval_text(interval, unit="x its baseline")
    if winner.word != "faster":
        gain += f"; {winner.doubt}"
    return f"Fastest: {name}, {winner.tok_s:.1f} tok/s, {gain}."


def _why_no_mtp(verdict: Verdict, hide: Sequence[str]) -> str:
    """What is known of MTP when a plain server is the fastest."""
    best = verdict.best(speculative=True)
    if best is None:
        return "No MTP configuration was measured validly, so nothing is said about MTP."
    interval = best.speedup
    ratio = interval_text(interval, unit="x")
    if best.word == "slower":
        return f"MTP does not pay here: the best of it, {best.configuration.label(hide)}, {ratio}."
    return f"MTP is not proven to pay: the best of it, {best.configuration.label(hide)}, {ratio}."


def _per_group_lines(verdict: Verdict, winner: Standing, hide: Sequence[str]) -> list[str]:
    lines = []
    for group in dict.fromkeys(s.group for s in verdict.standings):
        if group == winner.group:
            continue
        best = verdict.best(speculative=True, group=group)
        if best is not None and best is not winner:
            lines.append(
                f"Best MTP for {best.configuration.group_label(hide)}: "
                f"{best.configuration.label(hide)}, {best.speedup.mean:.2f}x its own baseline."
            )
    return lines
