"""Does the memory plan equal what llama-server allocates? On a CPU, shape by shape.

For each shape a header of full width is written (fewer layers and a smaller vocabulary, no
weights), and for each setting of context, slots, KV type, micro-batch and drafting the plan's
lines are compared with the server's own log. Goal: every line within 1 MiB or 0.5%.

    python benchmarks/budget_matrix.py [--shapes gemma4-12b,...] [--quick] [--rows rows.jsonl]

The last line of output is one JSON document. ``--quick`` takes every seventh setting.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from browndwarf.engine.dryalloc import DryModels
from browndwarf.engine.locate import Build, choose_build, find_builds
from browndwarf.engine.options import ServerOptions
from browndwarf.engine.process import LlamaServer
from browndwarf.models.gguf import read_model
from browndwarf.models.hollow import SHAPES, scaled, write_hollow, write_hollow_head
from browndwarf.plan.compare import Compared, compare
from browndwarf.plan.compute import DryCompute
from browndwarf.plan.limits import limit_from_size
from browndwarf.plan.memory import plan_memory
from browndwarf.plan.setup import setup_from_options
from browndwarf.units import GIB

CONTEXTS = (2048, 8192, 32768)
SLOTS = ((1, False), (4, False), (4, True))
KV_TYPES = ("f16", "q8_0", "q4_0")
UBATCHES = (256, 512)
LAYERS = {"gemma4": 12, "qwen35": 8, "qwen35moe": 8, "llama": 8}
VOCABULARY = 32768
# No warm-up and no prefetch (--numa): only the allocation is looked at. No repacking but in the
# first setting of a shape: it takes long, and its bytes depend on none of the axes.
QUIET = (("--no-warmup", None), ("--numa", "distribute"))


@dataclass(frozen=True)
class Pair:
    """A target and its head (None for an embedded one), and whether it can draft."""

    name: str
    target: Path
    head: Path | None
    drafts: bool


def make_pair(folder: Path, name: str) -> Pair:
    """Write the hollow files of one shape."""
    shape = scaled(SHAPES[name], layers=LAYERS[SHAPES[name].arch], vocab=VOCABULARY)
    target, head = folder / f"{name}.gguf", None
    write_hollow(target, shape)
    if shape.arch == "gemma4":
        head = folder / f"{name}-head.gguf"
        write_hollow_head(head, shape)
    return Pair(name, target, head, shape.arch != "llama")


def settings(pair: Pair) -> Iterator[ServerOptions]:
    """Every setting of the matrix for one pair."""
    axes = itertools.product(CONTEXTS, SLOTS, KV_TYPES, UBATCHES, (True, False))
    for ctx, (slots, unified), kv, ubatch, draft in axes:
        first = (ctx, slots, kv, ubatch) == (CONTEXTS[0], 1, KV_TYPES[0], UBATCHES[0])
        if draft and not pair.drafts:
            continue
        yield ServerOptions(
            model=str(pair.target),
            draft=str(pair.head) if draft and pair.head else None,
            spec_type="draft-mtp" if draft else None,
            n_max=2 if draft else None,
            ctx=ctx,
            parallel=slots,
            kv_unified=unified,
            kv_k=kv,
            kv_v=kv,
            ubatch=ubatch,
            threads=1,
            extra=QUIET if first else (*QUIET, ("--no-repack", None)),
        )


async def measure(build: Build, options: ServerOptions, compute: DryCompute) -> list[Compared]:
    """One setting: plan it, start it, compare."""
    target = read_model(options.model)
    head = read_model(options.draft) if options.draft else None
    setup = setup_from_options(options, target, head, backend="cpu")
    budget = plan_memory(setup, limit_from_size(64 * GIB, backend="cpu"), compute)
    with tempfile.TemporaryDirectory() as folder:
        async with LlamaServer(build, options, log_path=Path(folder) / "log") as server:
            return list(compare(budget, server.log))


def describe(options: ServerOptions) -> dict[str, Any]:
    """The axes of a setting."""
    return {
        "ctx": options.ctx,
        "parallel": options.parallel,
        "unified": options.kv_unified,
        "kv": options.kv_k,
        "ubatch": options.ubatch,
        "draft": options.speculative,
    }


async def run(names: list[str], quick: bool, rows_path: Path | None) -> dict[str, Any]:
    """All settings of all shapes; returns the result document."""
    build = choose_build(find_builds())
    rows: list[dict[str, Any]] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="budget-") as folder:
        for name in names:
            pair = make_pair(Path(folder), name)
            models = DryModels(str(pair.target), str(pair.head) if pair.head else None)
            with DryCompute(models) as compute:
                chosen = list(settings(pair))[:: 7 if quick else 1]
                for options in chosen:
                    for row in await measure(build, options, compute):
                        rows.append(
                            {
                                "shape": name,
                                **describe(options),
                                "line": row.name,
                                "planned_mib": round(row.planned_mib, 2),
                                "logged_mib": round(row.logged_mib, 2),
                                "excess": round(row.excess, 4),
                            }
                        )
            worst = max((r for r in rows if r["shape"] == name), key=lambda r: r["excess"])
            print(f"{name}: {len(chosen)} settings, worst {worst}", file=sys.stderr, flush=True)
    if rows_path is not None:
        with rows_path.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    return summary(rows, build.label, time.monotonic() - started)


def summary(rows: list[dict[str, Any]], engine: str, seconds: float) -> dict[str, Any]:
    """The document: worst line first."""
    worst_per_line = {
        line: max((r for r in rows if r["line"] == line), key=lambda r: r["excess"])
        for line in dict.fromkeys(r["line"] for r in rows)
    }
    worst = max(rows, key=lambda r: r["excess"])
    return {
        "name": "budget_matrix",
        "worst_excess": worst["excess"],
        "worst": worst,
        "worst_per_line": worst_per_line,
        "lines": len(rows),
        "settings": sum(r["line"] == "total" for r in rows),
        "seconds": round(seconds, 1),
        "goal": "every planned line within 1 MiB or 0.5% of the server's log (excess <= 1)",
        "met": worst["excess"] <= 1.0,
        "engine": engine,
        "machine": {"os": platform.system(), "arch": platform.machine()},
    }


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="planned against allocated memory, on a CPU")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rows", type=Path)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(run(args.shapes.split(","), args.quick, args.rows))))


if __name__ == "__main__":
    main()
