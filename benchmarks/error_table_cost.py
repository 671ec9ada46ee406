"""What the error table costs beyond ggml's quantizer, and how much memory it takes.

A model of random F16 rows in the width of a 12B is written, and its table measured on two
processes: all CPU seconds of these processes (Python's start, reading, dequantizing, comparing),
over those spent inside ``ggml_quantize_chunk``. Goals: at most 1.3, and a peak of memory below
1 GiB in every process.

    python benchmarks/error_table_cost.py [--repeats 3] [--layers 4]

The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from browndwarf.hardware.devices import machine
from browndwarf.models.gguf import read_model
from browndwarf.models.synthetic import PairShape, write_pair
from browndwarf.plan.legal import DEFAULT_TYPES, legal_types
from browndwarf.plan.loss import ErrorTable
from browndwarf.units import MIB

GOAL_RATIO, GOAL_MIB = 1.3, 1024
PROCESSES = 2
KIB_PER_UNIT = 1 if sys.platform != "darwin" else 1024
"""macOS states the peak in bytes, Linux in KiB."""


def once(path: Path) -> dict[str, float]:
    """One table, from nothing."""
    model = read_model(path)
    wanted = {
        t.name: legal_types(t, DEFAULT_TYPES, covered=False)
        for t in model.tensors
        if len(t.shape) > 1
    }
    table = ErrorTable(model)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    own, began = time.process_time(), time.monotonic()
    table.measure(wanted, workers=PROCESSES)
    wall, own = time.monotonic() - began, time.process_time() - own
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    inside = sum(result.quantize_s for result in table.results)
    peak = max(after.ru_maxrss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return {
        "ratio": (spent + own) / inside,
        "quantizer_s": inside,
        "all_s": spent + own,
        "wall_s": wall,
        "peak_mib": peak / KIB_PER_UNIT * 1024 / MIB,
    }


def again(*arguments: str) -> str:
    """This script in a process of its own: memory is counted by process, and what wrote the model
    must not count."""
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--write", type=Path, help="only write the model into this folder")
    parser.add_argument("--measure", type=Path, help="only measure this file, once")
    args = parser.parse_args()
    if args.write:
        shape = PairShape(
            width=3840, layers=args.layers, ff=15360, heads=16, kv_heads=8, head_full=512,
            head_sliding=256, vocab=4096,
        )  # fmt: skip
        print(write_pair(args.write, shape)[0])
        return
    if args.measure:
        print(json.dumps(once(args.measure)))
        return
    with tempfile.TemporaryDirectory(prefix="browndwarf-cost-") as folder:
        target = again("--write", folder, "--layers", str(args.layers)).strip()
        runs = [json.loads(again("--measure", target)) for _ in range(args.repeats)]
    for run in runs:
        print(", ".join(f"{name} {value:.3g}" for name, value in run.items()))
    ratios = sorted(run["ratio"] for run in runs)
    document: dict[str, Any] = {
        "name": "error_table_cost",
        "ratio": round(ratios[len(ratios) // 2], 4),
        "ratio_spread": round(ratios[-1] - ratios[0], 4),
        "peak_mib": round(max(run["peak_mib"] for run in runs), 1),
        "runs": runs,
        "goal": {"ratio": GOAL_RATIO, "peak_mib": GOAL_MIB},
        "met": ratios[-1] <= GOAL_RATIO and max(r["peak_mib"] for r in runs) < GOAL_MIB,
        "machine": msgspec.to_builtins(machine()),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
