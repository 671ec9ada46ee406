"""How far is the fitted estimate of compute buffers from llama.cpp's own dry allocation?

Random shapes of six families (width, heads, feed-forward, vocabulary, head), each over contexts,
slots, micro-batches and KV types. The estimate is only used where the engine's library does not
load. Goal: 95% of target buffers within 30%.

    python benchmarks/compute_fit.py [--shapes 30] [--seed 2]

The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from browndwarf.engine.dryalloc import DryModels
from browndwarf.models.gguf import read_model
from browndwarf.models.hollow import SHAPES, HollowShape, write_hollow, write_hollow_head
from browndwarf.plan.compute import DryCompute, FittedCompute
from browndwarf.plan.setup import Setup


def random_shape(rng: random.Random) -> HollowShape:
    """A shape of a random family with random sizes that llama.cpp accepts."""
    base = rng.choice(list(SHAPES.values()))
    width = rng.choice([1024, 1536, 2048, 2560, 3072, 3840, 4096, 5376, 6144])
    changes: dict[str, Any] = {
        "width": width,
        "ff": width * rng.choice([2, 3, 4]),
        "heads": rng.choice([16, 32]),
        "layers": 8 if base.arch == "qwen35" else 12,
        "vocab": rng.choice([8192, 32768, 65536]),
        "head_width": rng.choice([256, 512, 768]),
        "head_ff": rng.choice([1024, 2048, 4096, 8192]),
    }
    if base.shared:
        changes["shared"] = 6
    if base.experts:
        changes |= {"expert_ff": rng.choice([512, 768, 1024]), "experts_used": rng.choice([4, 8])}
    return replace(base, **changes)


def errors_of(shape: HollowShape, folder: Path, rng: random.Random) -> list[tuple[float, float]]:
    """Relative errors of (target, draft; 0 without one) over settings of one shape."""
    target, head = folder / "t.gguf", folder / "h.gguf"
    write_hollow(target, shape)
    paired = shape.arch == "gemma4"
    if paired:
        write_hollow_head(head, shape)
    models = read_model(target), read_model(head) if paired else None
    setups = []
    for ctx in (2048, 8192, 32768):
        for parallel, unified in ((1, False), (4, False), (4, True)):
            for ubatch in (128, 512, 2048):
                kind = rng.choice(["f16", "q8_0", "q4_0"])
                draft = shape.arch != "llama" and rng.random() < 0.7
                setups.append(
                    Setup(
                        target=models[0],
                        head=models[1] if draft else None,
                        draft=draft,
                        n_ctx=ctx,
                        parallel=parallel,
                        unified=unified,
                        ubatch=ubatch,
                        kv_k=kind,
                        kv_v=kind,
                        n_max=rng.choice([1, 2, 4]),
                    )
                )
    with DryCompute(DryModels(str(target), str(head) if paired else None)) as dry:
        real = dry.sizes(setups)
    guesses = FittedCompute().sizes(setups)
    return [
        (g.target_mib / r.target_mib - 1, g.draft_mib / r.draft_mib - 1 if r.draft_mib else 0.0)
        for g, r in zip(guesses, real, strict=True)
        if r.exact
    ]


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="fitted against exact compute buffers")
    parser.add_argument("--shapes", type=int, default=30)
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    started = time.monotonic()
    found: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as name:
        for _ in range(args.shapes):
            found += errors_of(random_shape(rng), Path(name), rng)
    target = np.array([pair[0] for pair in found])
    draft = np.array([pair[1] for pair in found if pair[1]])
    share = float(np.mean(np.abs(target) <= 0.30))
    points = (0, 0.05, 0.5, 0.95, 1)
    print(
        json.dumps(
            {
                "name": "compute_fit",
                "share_within_30_percent": round(share, 4),
                "median_error": round(float(np.median(np.abs(target))), 4),
                "target_error_quantiles": np.quantile(target, points).round(3).tolist(),
                "draft_error_quantiles": np.quantile(draft, points).round(3).tolist(),
                "quantiles": list(points),
                "settings": len(found),
                "goal": "95% of target buffers within 30%",
                "met": share >= 0.95,
                "seconds": round(time.monotonic() - started, 1),
                "machine": {"os": platform.system(), "arch": platform.machine()},
            }
        )
    )


if __name__ == "__main__":
    main()
