"""Does the memory plan hold on a GPU, with a filled context, and with little room?

Part 1: six configurations of the Gemma-4-12B shape with its drafter (zero weights, real sizes):
the plan's own bytes against the growth of the device's used memory at its peak, after every slot's
context was filled. The first configuration gives what the device context costs; goal: each of the
others within 1%.

Part 2: another process takes memory until 8 GiB are left. The plan's largest context must load
and survive a filled context; one step above it the plan must refuse, and the server, forced, must
fail or spill. Goal: both hold.

    python benchmarks/budget_gpu.py --prepare compute.json      # where llama-cpp-python is
    python benchmarks/budget_gpu.py --compute compute.json      # on the GPU machine

Without ``--compute`` the library is asked on the spot. ``--rehearse`` runs a small shape on a CPU
(resident memory in place of device memory, part 2 left out). The last line of output is one JSON
document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from browndwarf.engine.client import LlamaClient
from browndwarf.engine.dryalloc import DryModels
from browndwarf.engine.listing import list_devices
from browndwarf.engine.locate import Build, choose_build, find_builds
from browndwarf.engine.options import ServerOptions
from browndwarf.engine.process import LlamaServer
from browndwarf.errors import ServerError
from browndwarf.hardware.devices import parse_devices
from browndwarf.hardware.watch import Watcher
from browndwarf.models.gguf import read_model
from browndwarf.models.hollow import SHAPES, scaled, write_hollow, write_hollow_head
from browndwarf.plan.compare import compare
from browndwarf.plan.compute import ComputeSizes, ComputeSource, DryCompute
from browndwarf.plan.limits import limit_from_free, limit_from_size
from browndwarf.plan.memory import Budget, max_context, plan_memory
from browndwarf.plan.setup import Setup, setup_from_options
from browndwarf.units import GIB, MIB

CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {"ctx": 4096},
    {"ctx": 16384},
    {"ctx": 16384, "kv_k": "q8_0", "kv_v": "q8_0"},
    {"ctx": 16384, "parallel": 4, "kv_unified": False},
    {"ctx": 32768, "kv_k": "q8_0", "kv_v": "q8_0", "n_max": 4},
    {"ctx": 8192, "ubatch": 2048},
)
REHEARSAL: tuple[dict[str, Any], ...] = (
    {"ctx": 512},
    {"ctx": 1024, "parallel": 2, "kv_k": "q8_0", "kv_v": "q8_0"},
)
LEFT_BYTES = 8 * GIB
STEP = 16384
PREDICT = 16
BALLAST = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1" if sys.platform != "win32" else "nvcuda.dll")
def check(status):
    if status: sys.exit(f"CUDA driver error {status}")
device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
check(cuda.cuInit(0)); check(cuda.cuDeviceGet(ctypes.byref(device), 0))
check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device))
check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
take = free.value - int(sys.argv[1])
if take > 0: check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(take)))
check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
print(free.value, flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Recorded:
    """Compute sizes that were measured elsewhere, by the setup's options."""

    sizes_by_key: dict[str, list[float]]

    def sizes(self, setups: Sequence[Setup]) -> list[ComputeSizes]:
        """See ``ComputeSource``; between recorded contexts the next larger one counts."""
        return [self._one(setup) for setup in setups]

    def _one(self, setup: Setup) -> ComputeSizes:
        for ctx in (setup.n_ctx, *range(-(-setup.n_ctx // 4096) * 4096, 2**20, 4096)):
            found = self.sizes_by_key.get(key_of(setup.with_(n_ctx=ctx)))
            if found is not None:
                return ComputeSizes(found[0], found[1], "recorded dry allocation", True)
        raise SystemExit(f"no recorded compute size for {key_of(setup)}")


def key_of(setup: Setup) -> str:
    """What decides a compute buffer, as one word."""
    return (
        f"{setup.n_ctx}-{setup.parallel}-{setup.unified}-{setup.ubatch}-{setup.kv_k}-"
        f"{setup.kv_v}-{setup.n_max}"
    )


def files(folder: Path, rehearse: bool) -> tuple[Path, Path]:
    """The hollow pair."""
    shape = SHAPES["gemma4-12b"]
    if rehearse:
        shape = scaled(shape, layers=6, vocab=4096)
    target, head = folder / "target.gguf", folder / "head.gguf"
    if not target.exists():
        write_hollow(target, shape)
        write_hollow_head(head, shape)
    return target, head


def options_of(target: Path, head: Path, changes: dict[str, Any]) -> ServerOptions:
    """One configuration's server."""
    base: dict[str, Any] = {"n_max": 2, "spec_type": "draft-mtp", "flash_attn": "on"}
    return ServerOptions(model=str(target), draft=str(head), **{**base, **changes})


def setup_of(options: ServerOptions, backend: str) -> Setup:
    """Its setup."""
    models = read_model(options.model), read_model(str(options.draft))
    return setup_from_options(options, *models, backend="cpu" if backend == "cpu" else "cuda")


async def fill(server: LlamaServer, options: ServerOptions) -> None:
    """Fill every slot's context but for a few tokens, then decode some."""
    per_slot = options.ctx // options.parallel
    # The template server renders nothing here: prompts are token ids.
    prompts = [
        [4 + (7 * i + 131 * slot) % 1000 for i in range(per_slot - PREDICT - 8)]
        for slot in range(options.parallel)
    ]
    async with LlamaClient(server.base_url, timeout_s=500) as client:
        await asyncio.gather(
            *(
                client.completion(
                    prompt, n_predict=PREDICT, temperature=0.0, ignore_eos=True, cache_prompt=False
                )
                for prompt in prompts
            )
        )


async def used_mib(pid: int = 0) -> float | None:
    """MiB used on the device now."""
    with Watcher(pid or 1) as watcher:
        await asyncio.sleep(0.2)
    return watcher.record.peak_device_used_mib


async def measure(
    build: Build, options: ServerOptions, budget: Budget, folder: Path
) -> dict[str, Any]:
    """Run one configuration with a filled context and compare."""
    idle = await used_mib()
    log = folder / f"{key_of(budget.setup)}.log"
    async with LlamaServer(build, options, log_path=log, load_timeout_s=300) as server:
        with Watcher(server.pid, interval_s=0.05) as watcher:
            await fill(server, options)
        rows = compare(budget, server.log)
    record = watcher.record
    peak = record.peak_device_used_mib
    on_device = peak is not None and idle is not None and budget.setup.backend != "cpu"
    grown = peak - idle if on_device and peak is not None and idle is not None else None
    measured = grown if grown is not None else record.peak_rss_mib
    return {
        "options": vars_of(options),
        "planned_over_measured": round(budget.engine_mib / measured, 4),
        "planned_mib": round(budget.engine_mib, 1),
        "measured_mib": round(measured, 1),
        "measured_by": "device used - idle" if grown is not None else "resident memory",
        "process_device_mib": record.peak_device_mib,
        "idle_mib": idle,
        "logged_mib": round(rows[-1].logged_mib, 1),
        "worst_line": max(rows, key=lambda row: row.excess).name,
        "worst_line_excess": round(max(row.excess for row in rows), 3),
        "scratch_mib": round(budget.line("flash_scratch"), 1),
        "spill_mib": record.spill_mib,
    }


def vars_of(options: ServerOptions) -> dict[str, Any]:
    """The options that vary here."""
    names = ("ctx", "parallel", "kv_k", "kv_v", "n_max", "ubatch")
    return {name: getattr(options, name) for name in names}


@contextlib.contextmanager
def ballast(leave: int) -> Iterator[int]:
    """Another process that leaves ``leave`` bytes of the first device; yields what is left."""
    process = subprocess.Popen(
        [sys.executable, "-c", BALLAST, str(leave)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.strip():
            raise SystemExit("the ballast process could not take device memory")
        yield int(line)
    finally:
        process.kill()
        process.wait()


async def tight(
    build: Build, target: Path, head: Path, compute: ComputeSource, folder: Path
) -> dict[str, Any]:
    """Part 2."""
    with ballast(LEFT_BYTES) as left:
        device = parse_devices(list_devices(build))[0]
        limit = limit_from_free(int(device.free_mib * MIB), "free beside the ballast")
        base = setup_of(options_of(target, head, {"ctx": 4096}), "cuda")
        longest = max_context(base, limit, compute)
        result: dict[str, Any] = {
            "left_mib": round(left / MIB, 1),
            "free_mib": device.free_mib,
            "max_ctx": longest,
            "step": STEP,
        }
        fitting = options_of(target, head, {"ctx": longest})
        budget = plan_memory(base.with_(n_ctx=longest), limit, compute)
        try:
            result["largest"] = await measure(build, fitting, budget, folder)
            result["largest_survives"] = True
        except ServerError as error:
            result["largest_survives"] = False
            result["largest_error"] = str(error)[:500]
        above = plan_memory(base.with_(n_ctx=longest + STEP), limit, compute)
        result["above_refused_by_plan"] = not above.fits
        forced = options_of(target, head, {"ctx": longest + STEP})
        try:
            outcome = await measure(build, forced, above, folder)
            spilled = (outcome["spill_mib"] or 0.0) >= 64
            result["above_forced"] = "spilled" if spilled else "ran"
        except ServerError as error:
            result["above_forced"] = f"failed: {error.kind}"
    result["met"] = bool(
        result["largest_survives"]
        and result["above_refused_by_plan"]
        and result["above_forced"] != "ran"
    )
    return result


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Both parts."""
    started = time.monotonic()
    build = choose_build(find_builds())
    backend = "cpu" if args.rehearse else "cuda"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="budget-gpu-")))
        target, head = files(folder, args.rehearse)
        compute: ComputeSource
        if args.compute is not None:
            compute = Recorded(json.loads(args.compute.read_text(encoding="utf-8")))
        else:
            compute = stack.enter_context(DryCompute(DryModels(str(target), str(head))))
        rows = []
        limit = limit_from_size(1024 * GIB, backend="cuda")
        for changes in REHEARSAL if args.rehearse else CONFIGURATIONS:
            options = options_of(target, head, changes)
            budget = plan_memory(setup_of(options, backend), limit, compute)
            rows.append(await measure(build, options, budget, folder))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        part2 = None if args.rehearse else await tight(build, target, head, compute, folder)
    # What a device context costs beside the buffers is a constant of the device: the first
    # configuration measures it, the others test the plan with it.
    context = rows[0]["measured_mib"] - rows[0]["planned_mib"]
    errors = [(row["planned_mib"] + context) / row["measured_mib"] - 1 for row in rows[1:]]
    worst = max(map(abs, errors))
    return {
        "name": "budget_gpu",
        "worst_error_share": round(worst, 4),
        "context_mib": round(context, 1),
        "errors": [round(error, 4) for error in errors],
        "configurations": rows,
        "tight": part2,
        "goal": "with the context measured once, planned within 1% of the measured peak; the "
        "largest context survives, a step above it is refused and fails",
        "met": worst <= 0.01 and (part2 is None or part2["met"]),
        "engine": build.label,
        "machine": {"os": platform.system(), "devices": list_devices(build).strip()},
        "seconds": round(time.monotonic() - started, 1),
    }


def prepare(path: Path) -> None:
    """Record compute sizes for every configuration, and for a ladder of contexts."""
    with tempfile.TemporaryDirectory() as name:
        target, head = files(Path(name), False)
        setups = [setup_of(options_of(target, head, changes), "cuda") for changes in CONFIGURATIONS]
        ladder = [setups[0].with_(n_ctx=n * 4096) for n in range(1, 65)]
        ladder += [setups[0].with_(n_ctx=256 * 2**k) for k in range(11)]
        with DryCompute(DryModels(str(target), str(head))) as compute:
            sizes = compute.sizes([*setups, *ladder])
    assert all(size.exact for size in sizes)
    pairs = zip([*setups, *ladder], sizes, strict=True)
    table = {key_of(setup): [size.target_mib, size.draft_mib] for setup, size in pairs}
    path.write_text(json.dumps(table, indent=1), encoding="utf-8")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="planned against used memory, on a GPU")
    parser.add_argument("--prepare", type=Path, help="write compute sizes here and stop")
    parser.add_argument("--compute", type=Path, help="compute sizes recorded by --prepare")
    parser.add_argument("--rehearse", action="store_true", help="a small shape on a CPU")
    args = parser.parse_args()
    if args.prepare is not None:
        prepare(args.prepare)
        return
    print(json.dumps(asyncio.run(run(args))))


if __name__ == "__main__":
    main()
