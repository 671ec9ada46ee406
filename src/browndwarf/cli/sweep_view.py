"""A finished sweep as its JSON document, and the sentences that end its report.

The boundary: reads what analysis and laws say; tables are ``tables``'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from browndwarf.sweep.analysis import Standing, Verdict
from browndwarf.sweep.laws import Law
from browndwarf.sweep.pace import Pace
from browndwarf.sweep.store import RunView
from browndwarf.units import format_duration

#: From this factor on it is worth saying that the machine changed its speed.
WORTH_SAYING = 1.05


def payload(view: RunView, verdict: Verdict, laws: Sequence[Law]) -> dict[str, Any]:
    """The ``sweep`` JSON document of a run."""
    winner, baseline = verdict.winner, verdict.baseline
    return {
        "run": str(view.directory),
        "machine": view.meta.get("machine"),
        "engine": view.meta.get("engine"),
        "models": view.meta.get("models"),
        "synthetic": bool(view.plan.get("synth_rates") or view.plan.get("synthetic")),
        "synthetic_model": view.plan.get("synthetic"),
        "baseline": _standing_cell(baseline),
        "winner": _standing_cell(winner),
        "speedup": _interval(winner),
        "verdict": winner.word if winner else None,
        "drift": [
            {"group": d.group, "workload": name, "change": x.change, "beyond_noise": x.beyond_noise}
            for d in verdict.drifts
            for name, x in d.by_workload.items()
        ],
        "laws": [msgspec.to_builtins(law) for law in laws],
        "pace": {"exponent": verdict.pace.exponent, "span": verdict.pace.span},
        "cells": [msgspec.to_builtins(cell) for cell in view.cells],
        "overhead_share": view.meta.get("overhead_share"),
        "wall_s": view.meta.get("wall_s"),
    }


def _standing_cell(standing: Standing | None) -> dict[str, Any] | None:
    """The first workload's cell, with the ids of all workloads' cells and the mix's figures."""
    if standing is None:
        return None
    cell: dict[str, Any] = msgspec.to_builtins(standing.cells[0])
    cell.pop("traces")
    return cell | {
        "label": standing.label,
        "cells": [c.id for c in standing.cells],
        "mix_decode_tok_s": standing.tok_s,
        "by_workload": {
            name: {"mean": i.mean, "low": i.low, "high": i.high}
            for name, i in standing.by_workload.items()
        },
    }


def _interval(standing: Standing | None) -> dict[str, float] | None:
    if standing is None:
        return None
    interval = standing.speedup
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def closing_note(view: RunView) -> str:
    """How long the run took and what share of it made no tokens."""
    wall = float(view.meta.get("wall_s") or 0.0)
    share = float(view.meta.get("overhead_share") or 0.0)
    predicted = sum(cell.status == "predicted" for cell in view.cells)
    more = f" ({predicted} more predicted)" if predicted else ""
    cells = f"{len(view.cells) - predicted} cells{more}"
    return (
        f"{cells} in {format_duration(wall)}; {share:.0%} of the time went into anything but "
        "prefill and decode"
    )


def pace_line(pace: Pace) -> list[str]:
    """That the machine changed its speed, where it did."""
    if pace.span < WORTH_SAYING:
        return []
    return [
        f"The machine's own speed changed by {pace.span:.2f}x while this was measured. Ratios, "
        "order and predictions are evened out by a probe beside each request; columns in tok/s "
        "are as measured."
    ]


def law_lines(laws: Sequence[Law]) -> list[str]:
    """The findings of an 8 GB card, as they show here."""
    width = max((len(law.verdict) for law in laws), default=0)
    lines = [
        f"  {law.verdict:<{width}}  {law.claim}: {law.detail.removeprefix('not measured: ')}"
        for law in laws
    ]
    return ["What held on one 8 GB card, checked here:", *lines]
