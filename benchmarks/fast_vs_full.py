"""Does a fast sweep end with the full sweep's winner, and how good are its predictions?

One full grid on the embedded pair (two targets, four heads, n_max 1 to 6, four workloads), then
fast sweeps of the same grid. Reported: the share of the grid's cells that a fast sweep runs before
it confirms, whether its winner is the full sweep's or within 2% of it (by the full sweep's own
figures), the median absolute error of the predictions against the full sweep's cells, and the
share of those inside their 90% interval. Goals: 15%, all, 5%, 90%.

The machine's own noise is part of the error: the drift of the full sweep's baselines is printed
with it.

    python benchmarks/fast_vs_full.py [--repeats 5] [--keep DIR]

The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from browndwarf.hardware.devices import machine
from browndwarf.records import CellRecord
from browndwarf.sweep.analysis import Standing, analyse
from browndwarf.sweep.store import RunView, read_run

GRID = [
    *["demo", "--target-types", "Q4_0,Q8_0", "--head-types", "Q8_0,Q6_K,Q4_K,Q2_K"],
    *["--n-max", "1,2,3,4,5,6", "--ctx", "2048", "--natural-end", "--tokens", "96"],
]
GOALS = {"share": 0.15, "winner": 1.0, "median_error": 0.05, "coverage": 0.9}


def sweep(directory: Path, *more: str) -> tuple[RunView, float]:
    """One sweep by the command line; returns the run and its wall time."""
    started = time.monotonic()
    command = [sys.executable, "-m", "browndwarf", "sweep", *GRID, "--out", str(directory), *more]
    done = subprocess.run([*command, "--patience", "10m"], stdout=subprocess.DEVNULL, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"the sweep ended with {done.returncode}")
    return read_run(directory), time.monotonic() - started


def speeds(view: RunView) -> dict[str, float]:
    """Speed over the mix of every configuration that was measured on all workloads."""
    grid = [c for c in view.cells if not c.role.startswith("confirm")]
    return {s.configuration.key(): s.speed for s in analyse(grid).standings}


def compare(full: RunView, fast: RunView) -> dict[str, Any]:
    """One fast sweep against the full one."""
    truth = {c.id: c for c in full.cells if c.decode_tok_s is not None}
    grid_size = sum(not c.role.startswith("confirm") for c in full.cells)
    ran = [c for c in fast.cells if c.status == "ok" and not c.role.startswith("confirm")]
    errors, inside = [], []
    for cell in fast.cells:
        measured = truth.get(cell.id)
        if cell.predicted is None or measured is None or not _trusted(measured):
            continue
        assert measured.decode_tok_s is not None
        rate = measured.decode_tok_s.mean
        errors.append(abs(cell.predicted.decode_tok_s / rate - 1))
        inside.append(cell.predicted.low <= rate <= cell.predicted.high)
    winner, best = analyse(fast.cells).winner, analyse(full.cells).winner
    by_full = speeds(full)
    return {
        "share": len(ran) / grid_size,
        "winner": winner.label if winner else None,
        "loss": _loss(winner, best, by_full),
        "median_error": statistics.median(errors) if errors else None,
        "coverage": sum(inside) / len(inside) if inside else None,
        "predicted": len(errors),
    }


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
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.keep or Path(scratch)
        full, full_s = sweep(root / "full", "--full")
        runs = []
        for number in range(arguments.repeats):
            fast, fast_s = sweep(root / f"fast-{number}")
            runs.append(compare(full, fast) | {"wall_s": fast_s})
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
        best = analyse(full.cells).winner
        drift = [x.change for d in analyse(full.cells).drifts for x in d.by_workload.values()]
    figures = {
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
    document = {
        "name": "fast_vs_full",
        **figures,
        "wall_ratio": statistics.median(r["wall_s"] for r in runs) / full_s,
        "full": {
            "winner": best.label if best else None,
            "cells": len(full.cells),
            "wall_s": full_s,
            "baseline_drift": drift,
        },
        "runs": runs,
        "goal": GOALS,
        "met": met,
        "machine": f"{machine().cpu}, {machine().cores} cores",
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
