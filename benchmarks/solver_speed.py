"""How long the choice of types takes, and how near it comes to the bound that nothing beats.

Random instances of 400 tensors with 12 types each (three sizes of tensors, errors that fall
fourfold a bit with some scatter), at nine budgets between the smallest and the largest. Goals:
every one below 0.1 s and within 0.1% of the bound of the linear relaxation.

    python benchmarks/solver_speed.py [--instances 20]

The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import msgspec
import numpy as np

from browndwarf.hardware.devices import machine
from browndwarf.models.ggml_types import GGML_TYPES
from browndwarf.plan.allocate import allocate
from browndwarf.plan.legal import DEFAULT_TYPES

TENSORS = 400
SIZES = (3840 * 2048, 3840 * 4096, 3840 * 15360)
GOAL_S, GOAL_GAP = 0.1, 1e-3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=20)
    args = parser.parse_args()
    bits = np.array([GGML_TYPES[kind].bits_per_element for kind in DEFAULT_TYPES])
    seconds, gaps, unused = [], [], []
    for seed in range(args.instances):
        rng = np.random.default_rng(seed)
        costs, losses = [], []
        for size in rng.choice(SIZES, TENSORS):
            costs.append([int(size * b / 8) for b in bits])
            scatter = rng.lognormal(0, 1) * rng.lognormal(0, 0.2, bits.size)
            losses.append((scatter * 4.0**-bits).tolist())
        low, high = sum(map(min, costs)), sum(map(max, costs))
        for at in np.linspace(0.1, 0.9, 9):
            budget = int(low + at * (high - low))
            began = time.perf_counter()
            found = allocate(costs, losses, budget)
            seconds.append(time.perf_counter() - began)
            gaps.append(found.gap)
            unused.append((budget - found.cost) / budget)
    document = {
        "name": "solver_speed",
        "gap_max": max(gaps),
        "gap_median": statistics.median(gaps),
        "seconds_max": round(max(seconds), 4),
        "seconds_median": round(statistics.median(seconds), 4),
        "unused_max": max(unused),
        "solved": len(seconds),
        "tensors": TENSORS,
        "types": len(DEFAULT_TYPES),
        "goal": {"seconds": GOAL_S, "gap": GOAL_GAP},
        "met": max(seconds) < GOAL_S and max(gaps) <= GOAL_GAP,
        "machine": msgspec.to_builtins(machine()),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
