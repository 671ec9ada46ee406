"""Does a fast sweep end with the full sweep's winner, and how good are its predictions?

One full grid on the embedded pair (two targets, four heads, n_max 1 to 6, four workloads), then
fast sweeps of the same grid. Reported: the share of the grid's cells that a fast sweep runs before
it confirms, whether its winner is the full sweep's or within 2% of it (by the full sweep's own
figures), the median absolute error of the predictions against the full sweep's cells, and the
share of those inside their 90% interval. Goals: 15%, all, 5%, 90%.

Figures are evened out by the pace of the machine, which is probed beside every cell; errors against
the figures as measured, and the drift of the full sweep's baselines, are printed with them. Kept
runs are gone on with, and can be compared again after the model has changed.

    python benchmarks/fast_vs_full.py [--repeats 5] [--keep DIR]
    python benchmarks/fast_vs_full.py --replay DIR

The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from browndwarf.hardware.devices import machine
from browndwarf.records import CellRecord
from browndwarf.sweep.analysis import Standing, analyse, configuration_of
from browndwarf.sweep.model import FactorModel
from browndwarf.sweep.pace import Pace
from browndwarf.sweep.store import RunView, read_run

GRID = [
    *["demo", "--target-types", "Q4_0,Q8_0", "--head-types", "Q8_0,Q6_K,Q4_K,Q2_K"],
    *["--n-max", "1,2,3,4,5,6", "--ctx", "2048", "--natural-end", "--tokens", "96"],
]
GOALS = {"share": 0.15, "winner": 1.0, "median_error": 0.05, "coverage": 0.9}


def sweep(directory: Path, *more: str) -> None:
    """One sweep by the command line; goes on with one that is there."""
    command = [sys.executable, "-m", "browndwarf", "sweep"]
    if (directory / "run.sqlite").exists():
        command += ["--resume", str(directory), *more]
    else:
        command += [*GRID, "--out", str(directory), *more]
    done = subprocess.run([*command, "--patience", "30m"], stdout=subprocess.DEVNULL, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"the sweep ended with {done.returncode}")


def speeds(view: RunView) -> dict[str, float]:
    """Speed over the mix of every configuration that was measured on all workloads."""
    grid = [c for c in view.cells if not c.role.startswith("confirm")]
    return {s.configuration.key(): s.speed for s in analyse(grid).standings}


def compare(full: RunView, fast: RunView) -> dict[str, Any]:
    """One fast sweep against the full one.

    Both are evened out to the pace that the machine had in the full one; errors against the full
    run's figures as they were measured are given beside it.
    """
    truth = {c.id: c for c in full.cells if c.decode_tok_s is not None and _trusted(c)}
    grid_size = sum(not c.role.startswith("confirm") for c in full.cells)
    seen = [c for c in fast.cells if c.status != "predicted"]
    ran = [c for c in seen if c.status == "ok" and not c.role.startswith("confirm")]
    known = {(configuration_of(c).key(), c.workload) for c in seen if c.status == "ok"}
    pace = Pace(full.cells)
    model = FactorModel(seen, fast.meta.get("curves") or {})
    errors, raw, cycles, inside = [], [], [], []
    for cell in truth.values():
        configuration, measured = configuration_of(cell), pace.rate(cell)
        if (configuration.key(), cell.workload) in known or cell.role not in ("baseline", "mtp"):
            continue
        made = model.predict(configuration, cell.workload)
        if made is None or measured is None or cell.decode_tok_s is None:
            continue
        even = (made.probe_ms / pace.reference) ** pace.exponent if made.probe_ms else 1.0
        errors.append(made.decode_tok_s * even / measured - 1)
        raw.append(made.decode_tok_s / cell.decode_tok_s.mean - 1)
        inside.append(made.low * even <= measured <= made.high * even)
        cycle, took = model.cycle_ms(configuration), pace.cycle_ms(cell)
        if configuration.speculative and cycle and took:
            cycles.append(cycle / even / took - 1)
    winner, best = analyse(fast.cells).winner, analyse(full.cells).winner
    by_full = speeds(full)
    return {
        "share": len(ran) / grid_size,
        "winner": winner.label if winner else None,
        "loss": _loss(winner, best, by_full),
        "median_error": _median(errors),
        "median_error_as_measured": _median(raw),
        "median_cycle_error": _median(cycles),
        "bias": statistics.median(errors) if errors else None,
        "coverage": sum(inside) / len(inside) if inside else None,
        "predicted": len(errors),
        "pace_exponent": model.pace.exponent,
        "pace_span": model.pace.span,
    }


def _median(errors: list[float]) -> float | None:
    return statistics.median(map(abs, errors)) if errors else None


def _trusted(cell: CellRecord) -> bool:
    return not {"busy", "unsteady"}.intersection(cell.marks)


def _loss(winner: Standing | None, best: Standing | None, by_full: dict[str, float]) -> float:
    """How much slower the fast winner is than the full sweep's, by the full sweep's cells."""
    if winner is None or best is None:
        return 1.0
    mine = by_full.get(winner.configuration.key())
    return 1 - mine / by_full[best.configuration.key()] if mine else 1.0


def main() -> None:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="keep the run directories here")
    parser.add_argument("--replay", type=Path, help="compare kept runs again; measures nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.replay or arguments.keep or Path(scratch)
        if arguments.replay is None:
            sweep(root / "full", "--full")
            for number in range(arguments.repeats):
                sweep(root / f"fast-{number}")
        full = read_run(root / "full")
        fast = [read_run(path.parent) for path in sorted(root.glob("fast-*/run.sqlite"))]
        runs = [
            compare(full, view)
            | {"wall_s": view.meta.get("wall_s"), "overhead": view.meta.get("overhead_share")}
            for view in fast
        ]
    for run in runs:
        print(json.dumps(run), file=sys.stderr, flush=True)
    print(json.dumps(document(full, runs)))


def document(full: RunView, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """All runs together, against the goals."""
    verdict = analyse(full.cells)
    figures: dict[str, float] = {
        "share": max(r["share"] for r in runs),
        "winner": sum(r["loss"] <= 0.02 for r in runs) / len(runs),
        "median_error": statistics.median(r["median_error"] for r in runs),
        "coverage": statistics.median(r["coverage"] for r in runs),
    }
    met = (
        figures["share"] <= GOALS["share"]
        and figures["winner"] >= GOALS["winner"]
        and figures["median_error"] <= GOALS["median_error"]
        and figures["coverage"] >= GOALS["coverage"]
    )
    full_s = full.meta.get("wall_s") or 0.0
    return {
        "name": "fast_vs_full",
        **figures,
        "wall_ratio": statistics.median(r["wall_s"] for r in runs) / full_s,
        "full": {
            "winner": verdict.winner.label if verdict.winner else None,
            "cells": len(full.cells),
            "not_counted": sum(not _trusted(c) for c in full.cells),
            "wall_s": full_s,
            "baseline_drift": [x.change for d in verdict.drifts for x in d.by_workload.values()],
            "pace_exponent": verdict.pace.exponent,
            "pace_span": verdict.pace.span,
        },
        "runs": runs,
        "goal": GOALS,
        "met": met,
        "machine": f"{machine().cpu}, {machine().cores} cores",
    }


if __name__ == "__main__":
    main()
