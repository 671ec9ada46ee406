"""Is decoding in this process as fast as llama-server, step by step, at every context?

Parts:
- ``cycle``: milliseconds per verify step for n_max 1, 2, 3. Three arms take turns on the same
  prompts and the same build: llama-server with its default flags, llama-server with
  ``--backend-sampling``, and this process (wall time from the first token to the last, text
  included). Goal on a CPU: at least 0.90 of the default server's speed; on a GPU at least 1.00 of
  the second arm's and 1.15 of the first's.
- ``frontier``: decode rate with MTP over plain, both in this process, after 2k to 16k tokens.

    python benchmarks/inprocess_vs_server.py                        # CPU, the embedded pair
    python benchmarks/inprocess_vs_server.py --shape gemma4-12b --parts cycle,frontier

With ``--shape`` the models have random weights of that shape and acceptance is made up
(0.80, 0.54, 0.43): the speed is right, the text is noise. Set ``LLAMA_CPP_LIB_PATH`` to the lib
folder of the server's own build. The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from browndwarf.decode.llm import LLM, load
from browndwarf.engine.client import LlamaClient
from browndwarf.engine.listing import list_devices
from browndwarf.engine.locate import Build, choose_build, find_builds
from browndwarf.engine.native import load_library
from browndwarf.engine.options import ServerOptions
from browndwarf.engine.process import LlamaServer
from browndwarf.engine.quantizer import quantize
from browndwarf.models import demo
from browndwarf.models.gguf_read import read_header
from browndwarf.models.hollow import SHAPES, scaled, write_hollow, write_hollow_head

RATES = (0.80, 0.54, 0.43)
SCALES: dict[str, tuple[int, tuple[tuple[int, float], ...]]] = {
    # type: (bytes per block, ((offset of a half-precision scale, its value), ...))
    "Q4_K": (144, ((0, 2e-4), (2, 1.5e-3))),
    "Q6_K": (210, ((208, 2e-5),)),
    "Q8_0": (34, ((0, 2e-4),)),
}
TILE = 1 << 15
PAUSE_S = 0.1


def fill(path: Path, seed: int = 0) -> None:
    """Give a hollow model random weights: one random tile of blocks per type, repeated."""
    rng = np.random.default_rng(seed)
    tiles: dict[str, bytes] = {}
    header = read_header(path, complete=False)
    with path.open("r+b") as out:
        for tensor in header.tensors:
            if tensor.type not in SCALES:
                continue
            size, scales = SCALES[tensor.type]
            if tensor.type not in tiles:
                blocks = rng.integers(0, 256, (TILE, size), dtype=np.uint8)
                for offset, value in scales:
                    half = np.frombuffer(np.float16(value).tobytes(), np.uint8)
                    blocks[:, offset : offset + 2] = half
                tiles[tensor.type] = blocks.tobytes()
            tile = tiles[tensor.type]
            out.seek(header.data_offset + tensor.offset)
            left = tensor.bytes
            while left:
                left -= out.write(tile[: min(left, len(tile))])


def models(args: argparse.Namespace, folder: Path, build: Build) -> tuple[Path, Path]:
    """The pair to measure: random weights of a shape, or the embedded one as Q4_0."""
    target, head = folder / "target.gguf", folder / "head.gguf"
    if args.shape:
        shape = SHAPES[args.shape]
        if args.layers:
            shape = scaled(shape, layers=args.layers, vocab=8192)
        write_hollow(target, shape)
        write_hollow_head(head, shape, main="Q6_K")
        fill(target)
        fill(head, 1)
        return target, head
    quantize(build, demo.TARGET, target, "Q4_0", allow_requantize=True)
    return target, demo.HEAD


def open_here(pair: tuple[Path, Path], args: argparse.Namespace, **settings: Any) -> LLM:
    """The pair in this process; answers go on past their end."""
    rates = RATES if args.shape else None
    llm = load(pair[0], settings.pop("draft", pair[1]), synthetic=rates, **settings)
    llm.pair.vocab.is_end = lambda token: False  # type: ignore[method-assign]
    return llm


def here(llm: LLM, prompt: list[int], tokens: int) -> tuple[float, dict[str, float]]:
    """Milliseconds per step, wall time, and the parts of a step."""
    llm.keeper.clear(llm._slots[0])
    with llm.stream_text(prompt, max_tokens=tokens) as stream:
        stream.advance()
        begun = time.perf_counter()
        for _ in stream:
            pass
        wall = time.perf_counter() - begun
        stats = stream.answer.stats
    n = max(1, stats.steps)
    parts = {
        "draft": stats.draft_s,
        "verify": stats.verify_s,
        "sample": stats.sample_s,
        "python_and_cache": stats.rest_s,
        "text": wall - stats.decode_s,
    }
    return 1e3 * wall / n, {key: round(1e3 * value / n, 4) for key, value in parts.items()}


async def there(client: LlamaClient, prompt: list[int], tokens: int) -> float:
    """llama-server's own milliseconds per step."""
    done = await client.completion(prompt, n_predict=tokens, ignore_eos=True, stream=False)
    timings = done.timings
    steps = timings.cycles
    return timings.predicted_ms / max(1, steps)


async def cycle(
    args: argparse.Namespace, build: Build, pair: tuple[Path, Path], folder: Path
) -> list[dict[str, Any]]:
    """All three arms for each n_max."""
    rows = []
    for n_max in (1, 2, 3):
        async with contextlib.AsyncExitStack() as stack:
            clients: dict[str, LlamaClient] = {}
            for name, sampling in (("server", False), ("server_backend_sampling", True)):
                options = ServerOptions(
                    model=str(pair[0]),
                    draft=str(pair[1]),
                    n_max=n_max,
                    ctx=4096,
                    backend_sampling=sampling,
                    synth_rates=RATES[:n_max] if args.shape else None,
                    seed=1,
                    verbosity=None,
                )
                server = await stack.enter_async_context(
                    LlamaServer(build, options, log_path=folder / f"{name}-{n_max}.log")
                )
                clients[name] = await stack.enter_async_context(LlamaClient(server.base_url))
            llm = stack.enter_context(open_here(pair, args, n_max=n_max, n_ctx=4096))
            rows.append(await take_turns(args, n_max, clients, llm))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


async def take_turns(
    args: argparse.Namespace, n_max: int, clients: dict[str, LlamaClient], llm: LLM
) -> dict[str, Any]:
    """Rounds in which the order of the arms is reversed every time."""
    prompts = prompts_of(args, llm)
    times: dict[str, list[float]] = {"here": [], **{name: [] for name in clients}}
    parts: list[dict[str, float]] = []
    for turn in range(args.rounds + 1):
        for prompt in prompts:
            order = list(times) if turn % 2 else list(reversed(times))
            for arm in order:
                # Threads of the arm before may still spin for some milliseconds.
                await asyncio.sleep(PAUSE_S)
                if arm == "here":
                    value, split = here(llm, prompt, args.tokens)
                    if turn:
                        parts.append(split)
                else:
                    value = await there(clients[arm], prompt, args.tokens)
                if turn:  # the first round warms up
                    times[arm].append(value)
    middle = {arm: statistics.median(values) for arm, values in times.items()}
    return {
        "n_max": n_max,
        "ratio_server": round(middle["server"] / middle["here"], 4),
        "ratio_backend_sampling": round(middle["server_backend_sampling"] / middle["here"], 4),
        "cycle_ms": {arm: round(value, 4) for arm, value in middle.items()},
        "spread_ms": {arm: round(max(v) - min(v), 4) for arm, v in times.items()},
        "step_ms": {key: statistics.median(p[key] for p in parts) for key in parts[0]},
    }


def prompts_of(args: argparse.Namespace, llm: LLM) -> list[list[int]]:
    """Chat prompts of the embedded pair; noise for random weights."""
    if args.shape:
        rng = np.random.default_rng(4)
        return [rng.integers(300, 8000, 64).tolist() for _ in range(2)]
    found = []
    for workload in ("prose", "code", "json", "chat"):
        item = demo.prompts(workload)[0]
        found.append(llm.tokenize(llm.template.render(item["messages"])))
    return found


def frontier(args: argparse.Namespace, pair: tuple[Path, Path]) -> list[dict[str, Any]]:
    """Plain and MTP decoding after long prompts, alternated."""
    rng = np.random.default_rng(2)
    depths = [int(d) for d in args.depths.split(",")]
    room = max(depths) + 4 * args.tokens
    rows = []
    with (
        open_here(pair, args, n_max=args.best, n_ctx=room) as fast,
        open_here(pair, args, draft="none", n_ctx=room) as plain,
    ):
        for depth in depths:
            prompt = rng.integers(300, min(4000, fast.pair.vocab.size), depth).tolist()
            rates: dict[str, list[float]] = {"mtp": [], "plain": []}
            prefill: dict[str, float] = {}
            for turn in range(args.rounds):
                for name, llm in (("mtp", fast), ("plain", plain))[:: 1 if turn % 2 else -1]:
                    with llm.stream_text(prompt, max_tokens=args.tokens) as stream:
                        stats = stream.run().stats
                    rates[name].append(stats.tok_s)
                    if not turn:
                        prefill[name] = stats.prefill_s
            middle = {name: statistics.median(values) for name, values in rates.items()}
            rows.append(
                {
                    "depth": depth,
                    "speedup": round(middle["mtp"] / middle["plain"], 4),
                    "tok_s": {name: round(value, 2) for name, value in middle.items()},
                    "prefill_s": {name: round(value, 4) for name, value in prefill.items()},
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """The parts that were asked for."""
    started = time.monotonic()
    build = choose_build(find_builds())
    parts = args.parts.split(",")
    result: dict[str, Any] = {"name": "inprocess_vs_server"}
    met = []
    with tempfile.TemporaryDirectory(prefix="inprocess-") as name:
        folder = Path(name)
        pair = models(args, folder, build)
        if "cycle" in parts:
            rows = await cycle(args, build, pair, folder)
            result["ratio_server"] = min(row["ratio_server"] for row in rows)
            result["ratio_backend_sampling"] = min(row["ratio_backend_sampling"] for row in rows)
            result["cycle"] = rows
            low, high = (0.90, 0.0) if not args.shape else (1.15, 1.00)
            met.append(result["ratio_server"] >= low and result["ratio_backend_sampling"] >= high)
        if "frontier" in parts:
            result["frontier"] = frontier(args, pair)
    return {
        **result,
        "goal": "CPU: at least 0.90 of the default server's speed; GPU: 1.15 of it and 1.00 of "
        "--backend-sampling's",
        "met": all(met),
        "engine": {"server": build.label, "library": load_library().version},
        "machine": {
            "os": platform.system(),
            "cores": os.cpu_count(),
            "devices": list_devices(build).strip(),
        },
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="decoding in this process against llama-server")
    parser.add_argument("--parts", default="cycle", help="cycle, frontier")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--layers", type=int, help="fewer layers, to rehearse a shape")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--depths", default="2048,4096,8192,16384")
    parser.add_argument("--best", type=int, default=2, help="n_max of frontier")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
