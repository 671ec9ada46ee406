"""How well does a fast sweep predict a whole grid on a large GPU? A Gemma-4-12B shape.

(a) `sweep --fast` over heads x n_max x layers x KV x backend sampling on a synthetic model, to its
end: wall time, the share of the grid's cells that it ran, the winner. (b) Then cells of the rest in
a random order, as many as fit into ``--seconds``, and the error of what was predicted of them.
(c) With ``--ballast 8GiB`` the same while another process leaves only so much device memory.

    python3 benchmarks/h200_grid.py --out DIR [--seconds 560] [--ballast 8GiB] [--from DIR]
    python3 benchmarks/h200_grid.py --replay DIR        # figures again from saved records
    python3 benchmarks/h200_grid.py --rehearse --out DIR

Everything is saved in DIR after each cell: result.json, fast.sqlite, sample.sqlite. ``--from``
goes on from such a folder, also on another machine of the same kind. ``-ngl`` counts the output
layer: 48, 44 and 42 layers are all, 45 and 43. The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from browndwarf.cli import requests, sweeping
from browndwarf.cli.machine import devices
from browndwarf.hardware.devices import machine
from browndwarf.records import CellRecord
from browndwarf.sweep.analysis import analyse, configuration_of
from browndwarf.sweep.cell import Job
from browndwarf.sweep.events import CellDone, Event
from browndwarf.sweep.model import FactorModel
from browndwarf.sweep.planned import SweepPlan
from browndwarf.sweep.quiet import MachineQuiet
from browndwarf.sweep.run import measure_jobs, run_sweep
from browndwarf.sweep.setup import Prepared, engine_record, prepare
from browndwarf.sweep.store import RunStore, RunView, read_run
from browndwarf.units import parse_bytes

RATES = ".80,.54,.43,.35"
GOALS = {"share": 0.10, "median_error": 0.05, "coverage": 0.9, "wall_s": 600}


def plan_of(args: argparse.Namespace) -> SweepPlan:
    """The whole grid, or a small one."""
    small = args.rehearse
    axes = requests.axes(
        target_types=args.target_type,
        head_types="Q8_0,Q4_K" if small else "Q8_0,Q6_K,Q4_K,Q2_K",
        n_max="1,2" if small else "0,1,2,3,4",
        p_min=None,
        layers="all" if small else args.layers,
        kv="f16,q8_0",
        draft_kv=None,
        ctx="1024" if small else str(args.ctx),
        parallel="1",
        ubatch=None,
        backend_sampling="off,on",
        threads=None,
        extra=[],
    )
    return requests.plan(
        None,
        None,
        axes,
        synthetic="gemma4-tiny" if small else args.shape,
        rates=RATES,
        workloads="prose",
        prompts=2 if small else 3,
        repeats=2 if small else 3,
        tokens=24 if small else 96,
        seed=1,
        temperature=0.0,
        natural_end=False,
        allow_busy=True,
        llama_dir=args.llama_dir,
        docker=None,
        fast=True,
        budget_s=args.explore,
    )


class Keeper:
    """Copies of what was measured, renewed after each cell, so that a cut loses nothing."""

    def __init__(self, out: Path, work: Path, started: float) -> None:
        self.out, self.work, self.started = out, work, started
        self.facts: dict[str, Any] = {}

    def listen(self, event: Event) -> None:
        """Told by a sweep; saves after each cell."""
        if isinstance(event, CellDone):
            cell = event.cell
            rate = f"{cell.decode_tok_s.mean:.1f} tok/s" if cell.decode_tok_s else cell.status
            age = time.monotonic() - self.started
            print(f"{age:5.0f} s  {cell.id}  {rate}", file=sys.stderr, flush=True)
            self.save()

    def save(self) -> dict[str, Any]:
        """Write databases and figures; return the figures."""
        for name in ("fast", "sample"):
            source = self.work / name / "run.sqlite"
            if source.exists():
                with (
                    contextlib.closing(sqlite3.connect(source)) as have,
                    contextlib.closing(sqlite3.connect(self.out / f"{name}.sqlite")) as copy,
                ):
                    have.backup(copy)
        made = figures(self.work) | self.facts
        text = json.dumps(made, indent=1)
        (self.out / "result.json").write_text(text + "\n", encoding="utf-8")
        return made


def figures(work: Path) -> dict[str, Any]:
    """All that the two runs say so far."""
    if not (work / "fast" / "run.sqlite").exists():
        return {"name": "h200_grid", "met": False}
    fast = read_run(work / "fast")
    plan = msgspec.convert(fast.plan, SweepPlan)
    grid = sum(len(group.candidates) + 1 for group in plan.axes.groups()) * len(plan.workloads)
    explored = [c for c in fast.cells if c.status == "ok" and not c.role.startswith("confirm")]
    tried = [c for c in fast.cells if c.status not in ("ok", "predicted")]
    sample: tuple[CellRecord, ...] = ()
    if (work / "sample" / "run.sqlite").exists():
        sample = read_run(work / "sample").cells
    errors = prediction_errors(fast, sample)
    verdict = analyse(fast.cells, allow_busy=True)
    made: dict[str, Any] = {
        "name": "h200_grid",
        "share": round(len(explored) / grid, 4),
        "grid_cells": grid,
        "explored_cells": len(explored),
        "not_run_or_failed": {c.id: (c.error or {}).get("what") for c in tried},
        "fast_wall_s": fast.meta.get("wall_s"),
        "overhead_share": fast.meta.get("overhead_share"),
        **errors,
        "winner": verdict.winner.label if verdict.winner else None,
        "winner_tok_s": verdict.winner.speed if verdict.winner else None,
        "speedup": msgspec.to_builtins(verdict.winner.speedup) if verdict.winner else None,
        "best_sampled": best_of(sample),
        "goal": GOALS,
    }
    made["met"] = bool(
        made["share"] <= GOALS["share"]
        and made["fast_wall_s"]
        and made["fast_wall_s"] <= GOALS["wall_s"]
        and (made["median_error"] or 1.0) <= GOALS["median_error"]
        and (made["coverage"] or 0.0) >= GOALS["coverage"]
    )
    made["cells"] = [row(c) for c in (*fast.cells, *sample) if c.status == "ok"]
    return made


def prediction_errors(fast: RunView, sample: Sequence[CellRecord]) -> dict[str, Any]:
    """The model of the fast run's cells against cells that it did not see."""
    seen = [c for c in fast.cells if c.status != "predicted"]
    model = FactorModel(seen, fast.meta.get("curves") or {}, allow_busy=True)
    known = {(configuration_of(c).key(), c.workload) for c in seen if c.status == "ok"}
    rates, cycles, inside, rows = [], [], [], []
    for cell in sample:
        configuration = configuration_of(cell)
        if cell.decode_tok_s is None or (configuration.key(), cell.workload) in known:
            continue
        made = model.predict(configuration, cell.workload)
        if made is None:
            continue
        rate = cell.decode_tok_s.mean
        rates.append(made.decode_tok_s / rate - 1)
        inside.append(made.low <= rate <= made.high)
        cycle = model.cycle_ms(configuration) if configuration.speculative else None
        if cycle is not None and cell.cycle_ms:
            cycles.append(cycle / model.took_ms(cell) - 1)
        rows.append([configuration.label(), round(made.decode_tok_s, 1), round(rate, 1)])
    return {
        "predicted_cells": len(rates),
        "median_error": _median(rates),
        "worst_error": max(map(abs, rates), default=None),
        "median_cycle_error": _median(cycles),
        "coverage": sum(inside) / len(inside) if inside else None,
        "predicted_and_measured": rows,
    }


def _median(errors: list[float]) -> float | None:
    return statistics.median(map(abs, errors)) if errors else None


def best_of(cells: Sequence[CellRecord]) -> list[Any] | None:
    """The fastest sampled configuration."""
    known = [c for c in cells if c.decode_tok_s is not None]
    best = max(known, key=lambda c: c.decode_tok_s.mean if c.decode_tok_s else 0.0, default=None)
    if best is None or best.decode_tok_s is None:
        return None
    return [configuration_of(best).label(), best.decode_tok_s.mean]


def row(cell: CellRecord) -> dict[str, Any]:
    """A cell for a table."""
    assert cell.decode_tok_s is not None
    return {
        "label": configuration_of(cell).label(),
        "role": cell.role,
        "tok_s": round(cell.decode_tok_s.mean, 2),
        "spread": round(cell.decode_tok_s.spread, 2),
        "cycle_ms": round(cell.cycle_ms or 0.0, 3),
        "length": round(cell.accepted_length or 0.0, 3),
        "memory_mib": cell.memory_mib,
        "load_s": round(cell.load_s, 2),
        "marks": list(cell.marks),
    }


def sample_jobs(plan: SweepPlan, seed: int, layers: str | None) -> list[Job]:
    """The grid without the second baselines, in a random order; of these ``layers`` alone."""
    wanted = None if layers is None else {None if n == "all" else int(n) for n in layers.split(",")}
    jobs = [
        job
        for job in plan.jobs()
        if job.role != "baseline-again" and (wanted is None or job.configuration.layers in wanted)
    ]
    random.Random(seed).shuffle(jobs)
    return jobs


def open_store(directory: Path, plan: SweepPlan, prepared: Prepared) -> RunStore:
    """The run directory, new or begun."""
    if (directory / "run.sqlite").exists():
        store = RunStore.open(directory)
        store.check_identity(prepared.identity)
        return store
    saved = msgspec.to_builtins(plan)
    return RunStore.create(directory, plan=saved, identity=prepared.identity)


async def measure(args: argparse.Namespace, keeper: Keeper) -> None:
    """Both phases."""
    plan = plan_of(args)
    build = sweeping.find_engine(plan)
    prepared = prepare(plan, build, on_make=lambda name: print(f"making {name}", file=sys.stderr))
    plan = prepared.plan
    listed = devices(build)
    keeper.facts |= {
        "models_s": round(time.monotonic() - keeper.started, 1),
        "engine": build.label,
        "machine": msgspec.to_builtins(machine(listed)),
        "ballast": args.ballast,
        "free_mib": [device.free_mib for device in listed],
    }
    quiet = MachineQuiet(patience_s=None)
    with sweeping.memory_gate(build, listed) as fits:
        engine = sweeping.local_engine(
            prepared,
            build,
            listed,
            fits,
            on_make=lambda name: print(f"making {name}", file=sys.stderr, flush=True),
        )
        with open_store(keeper.work / "fast", plan, prepared) as store:
            store.set_meta("engine", msgspec.to_builtins(engine_record(build)))
            await run_sweep(plan, store, engine, quiet, keeper.listen)
            fast_cells = store.cells()
        keeper.save()
        done = {
            (configuration_of(c).key(), c.workload)
            for c in fast_cells
            if c.status == "ok" and not c.role.startswith("confirm")
        }
        name = plan.workloads[0].name
        jobs = [
            job
            for job in sample_jobs(plan, args.seed, args.sample_layers)
            if (job.configuration.key(), name) not in done
        ]

        def go_on() -> bool:
            # A cell and its server's start must still fit.
            return bool(time.monotonic() - keeper.started < args.seconds - args.reserve)

        with open_store(keeper.work / "sample", plan, prepared) as store:
            await measure_jobs(
                plan, store, engine, quiet, jobs[: args.cells], go_on=go_on, listen=keeper.listen
            )


def restore(saved: Path, work: Path) -> None:
    """Lay saved databases where runs expect them."""
    for name in ("fast", "sample"):
        if (saved / f"{name}.sqlite").exists():
            (work / name / "logs").mkdir(parents=True, exist_ok=True)
            shutil.copy(saved / f"{name}.sqlite", work / name / "run.sqlite")


def main() -> None:
    """Parse the command line and run."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--from", dest="saved", type=Path, help="go on from this folder")
    parser.add_argument("--replay", type=Path, help="figures from saved records; runs nothing")
    parser.add_argument("--seconds", type=float, default=560.0, help="end by then, all in all")
    parser.add_argument("--reserve", type=float, default=25.0, help="seconds that a cell may take")
    parser.add_argument("--explore", type=float, default=330.0, help="budget of the exploration")
    parser.add_argument("--cells", type=int, default=10_000, help="sampled cells at most")
    parser.add_argument("--sample-layers", help="sample cells of these -ngl values only")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shape", default="gemma4-12b")
    parser.add_argument("--target-type", default="Q4_0")
    parser.add_argument("--layers", default="all,45,43", help="-ngl values; the output counts")
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--ballast", help="device memory that another process leaves, e.g. 8GiB")
    parser.add_argument("--llama-dir")
    parser.add_argument("--rehearse", action="store_true", help="a tiny shape on a CPU")
    args = parser.parse_args()
    if args.replay is None and args.out is None:
        parser.error("--out or --replay is needed")
    with tempfile.TemporaryDirectory(prefix="grid-") as name:
        work = Path(name)
        if args.replay is not None:
            restore(args.replay, work)
            print(json.dumps(figures(work)))
            return
        args.out.mkdir(parents=True, exist_ok=True)
        for saved in (args.saved, args.out):
            if saved is not None:
                restore(saved, work)
        keeper = Keeper(args.out, work, started)
        with contextlib.ExitStack() as stack:
            if args.ballast:
                from budget_gpu import ballast

                left = stack.enter_context(ballast(parse_bytes(args.ballast)))
                keeper.facts["left_bytes"] = left
            asyncio.run(measure(args, keeper))
        keeper.facts["seconds"] = round(time.monotonic() - started, 1)
        print(json.dumps(keeper.save()))


if __name__ == "__main__":
    main()
