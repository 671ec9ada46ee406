"""Does a fast sweep end with the full sweep's winner, and how good are its predictions?

One full grid on the embedded pair (two targets, four heads, n_max 1 to 6, four workloads), then
fast sweeps of the same grid. Reported: the share of the grid's cells that a fast sweep runs before
it confirms, whether its winner is the full sweep's or within 2% of it, the median absolute error
of the predictions against the full sweep's cells, and the share of those inside their 90%
interval. Goals: 15%, all, 5%, 90%.

Two winners are compared by a duel: all of them are measured again, one after the other, forwards
and backwards in turn, and their speeds are compared pass by pass. The full sweep's own cells cannot
judge it: the best of 192 cells is among those that chance made look fast.

Figures are evened out by the pace of the machine, which is probed beside every cell. Two runs are
minutes apart, and the machine may be a few percent faster in one: ``shift`` is the median ratio of
the cells that both measured, and is taken out of the errors; errors against the figures as measured
are printed beside. Kept runs are gone on with, and can be compared again after the model has
changed.

    python benchmarks/fast_vs_full.py [--repeats 5] [--keep DIR]
    python benchmarks/fast_vs_full.py --replay DIR

The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from browndwarf.cli import sweeping
from browndwarf.cli.machine import devices
from browndwarf.hardware.devices import machine
from browndwarf.records import CellRecord
from browndwarf.stats import Interval, student_t
from browndwarf.sweep.analysis import analyse, configuration_of
from browndwarf.sweep.cell import Job
from browndwarf.sweep.model import FactorModel
from browndwarf.sweep.pace import Pace
from browndwarf.sweep.planned import SweepPlan
from browndwarf.sweep.quiet import MachineQuiet
from browndwarf.sweep.run import measure_jobs
from browndwarf.sweep.setup import prepare
from browndwarf.sweep.store import RunStore, RunView, read_run

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


@dataclass(frozen=True)
class Duel:
    """Speeds over the mix by configuration, pass by pass."""

    passes: tuple[dict[str, float], ...]

    def loss(self, mine: str, best: str) -> Interval | None:
        """How much slower ``mine`` is than ``best``, with a 95% interval over the passes."""
        if mine == best:
            return Interval(0.0, 0.0, 0.0)
        logs = [math.log(p[mine] / p[best]) for p in self.passes if mine in p and best in p]
        if len(logs) < 2:
            return None
        mean = statistics.fmean(logs)
        half = student_t(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        return Interval(*(1 - math.exp(x) for x in (mean, mean + half, mean - half)))


def duel(root: Path, views: list[RunView], passes: int) -> Duel:
    """Measure the winners of all views again, ``passes`` times (0: only read what is there)."""
    wanted = {
        winner.configuration.key(): winner
        for view in views
        if (winner := analyse(view.cells).winner) is not None
    }
    jobs = [
        Job(configuration=w.configuration, role="confirm-a", group=w.group)
        for _, w in sorted(wanted.items())
    ]
    stores = [root / f"duel-{number}" for number in range(passes)]
    if not passes:
        stores = sorted(root.glob("duel-*"))
    elif len(jobs) > 1:
        asyncio.run(_measure(msgspec.convert(views[0].plan, SweepPlan), stores, jobs))
    taken = [read_run(d) for d in stores if (d / "run.sqlite").exists()]
    pace = Pace([cell for view in taken for cell in view.cells])
    return Duel(tuple(_speeds(view.cells, pace) for view in taken))


def _speeds(cells: Sequence[CellRecord], pace: Pace) -> dict[str, float]:
    rates: dict[str, list[float]] = {}
    for cell in cells:
        if cell.status == "ok" and (rate := pace.rate(cell)):
            rates.setdefault(configuration_of(cell).key(), []).append(rate)
    most = max(map(len, rates.values()), default=0)
    return {k: statistics.geometric_mean(v) for k, v in rates.items() if len(v) == most}


async def _measure(plan: SweepPlan, stores: list[Path], jobs: list[Job]) -> None:
    build = sweeping.find_engine(plan)
    prepared = prepare(plan, build, on_make=lambda _: None)
    engine = sweeping.local_engine(
        prepared, build, devices(build), lambda _: None, on_make=lambda _: None
    )
    quiet = MachineQuiet(patience_s=1800.0)
    for number, directory in enumerate(stores):
        if (directory / "run.sqlite").exists():
            opened = RunStore.open(directory)
        else:
            opened = RunStore.create(directory, plan={}, identity={})
        with opened as store:
            await measure_jobs(
                prepared.plan, store, engine, quiet, jobs[:: -1 if number % 2 else 1]
            )


def compare(full: RunView, fast: RunView, judge: Duel) -> dict[str, Any]:
    """One fast sweep against the full one.

    Both are evened out to the fast pace of the machine, and the full one to the fast one's by the
    cells that both measured; errors against the full run's figures as they were measured are given
    beside it.
    """
    truth = {c.id: c for c in full.cells if c.decode_tok_s is not None and _trusted(c)}
    grid_size = sum(not c.role.startswith("confirm") for c in full.cells)
    seen = [c for c in fast.cells if c.status != "predicted"]
    ran = [c for c in seen if c.status == "ok" and not c.role.startswith("confirm")]
    known = {(configuration_of(c).key(), c.workload) for c in seen if c.status == "ok"}
    full_model = FactorModel(full.cells, full.meta.get("curves") or {})
    pace = full_model.pace
    model = FactorModel(seen, fast.meta.get("curves") or {})
    shift = _shift(seen, model.pace, truth.values(), pace)
    errors, raw, cycles, inside = [], [], [], []
    for cell in truth.values():
        configuration, measured = configuration_of(cell), pace.rate(cell)
        if (configuration.key(), cell.workload) in known or cell.role not in ("baseline", "mtp"):
            continue
        made = model.predict(configuration, cell.workload)
        if made is None or measured is None or cell.decode_tok_s is None:
            continue
        errors.append(made.decode_tok_s / (measured * shift) - 1)
        raw.append(made.decode_tok_s / cell.decode_tok_s.mean - 1)
        inside.append(made.low <= measured * shift <= made.high)
        cycle = model.cycle_ms(configuration) if configuration.speculative else None
        if cycle is not None:
            cycles.append(cycle / (full_model.took_ms(cell) / shift) - 1)
    winner, best = analyse(fast.cells).winner, analyse(full.cells).winner
    loss = None
    if winner is not None and best is not None:
        loss = judge.loss(winner.configuration.key(), best.configuration.key())
    return {
        "share": len(ran) / grid_size,
        "winner": winner.label if winner else None,
        "loss": loss.mean if loss else 1.0,
        "loss_interval": [loss.low, loss.high] if loss else None,
        "median_error": _median(errors),
        "median_error_as_measured": _median(raw),
        "median_cycle_error": _median(cycles),
        "bias": statistics.median(errors) if errors else None,
        "shift": shift,
        "coverage": sum(inside) / len(inside) if inside else None,
        "predicted": len(errors),
        "pace_exponent": model.pace.exponent,
        "pace_span": model.pace.span,
    }


def _shift(
    mine: Iterable[CellRecord], my_pace: Pace, theirs: Iterable[CellRecord], their_pace: Pace
) -> float:
    """How many times faster the machine was in my run, by the cells that both measured."""
    rates: dict[tuple[str, str], list[list[float]]] = {}
    for arm, (cells, pace) in enumerate(((mine, my_pace), (theirs, their_pace))):
        for cell in cells:
            if cell.status == "ok" and (rate := pace.rate(cell)):
                key = configuration_of(cell).key(), cell.workload
                rates.setdefault(key, [[], []])[arm].append(rate)
    both = [statistics.fmean(a) / statistics.fmean(b) for a, b in rates.values() if a and b]
    return statistics.median(both) if both else 1.0


def _median(errors: list[float]) -> float | None:
    return statistics.median(map(abs, errors)) if errors else None


def _trusted(cell: CellRecord) -> bool:
    return not {"busy", "unsteady"}.intersection(cell.marks)


def main() -> None:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--passes", type=int, default=6, help="of the duel between the winners")
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
        judge = duel(root, [full, *fast], 0 if arguments.replay else arguments.passes)
        runs = [
            compare(full, view, judge)
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
