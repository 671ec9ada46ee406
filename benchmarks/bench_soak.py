"""Does the benchmark client stay small? 10,000 prompts over 256 streams against the mock.

Memory and open descriptors of this process are sampled while it runs; then the command is
started with the same load and gets Ctrl-C. Goals: memory in the last tenth of the run within 15%
and 16 MiB of that after the first tenth, no descriptor more at the end than at the start, and a
valid partial report within 2 s of Ctrl-C.

    python benchmarks/bench_soak.py [--prompts 10000] [--streams 256]

The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from browndwarf.bench.dataset import load_prompts
from browndwarf.bench.endpoint import Endpoint, Sampling
from browndwarf.bench.mock import Script
from browndwarf.bench.run import Job, Plan, run_points
from browndwarf.bench.selftest import mock_process
from browndwarf.bench.traces import Trace, TraceWriter
from browndwarf.bench.transport import Transport
from browndwarf.units import MIB

SCRIPT = Script(ttft_s=0.05, step_s=0.02, burst=4)
TOKENS = 64
GROWTH, GROWTH_MIB, REPORT_S = 0.15, 16.0, 2.0


class Sampler:
    """Resident memory and descriptors after each request."""

    def __init__(self) -> None:
        self.me = psutil.Process()
        self.rss: list[float] = []

    def point(self, value: float, number: int, of: int) -> None: ...

    def request(self, trace: Trace, done: int, of: int) -> None:
        if done % 100 == 0:
            self.rss.append(self.me.memory_info().rss / MIB)


async def soak(prompts: int, streams: int, folder: Path) -> dict[str, object]:
    """The long run in this process."""
    sampler = Sampler()
    loaded = load_prompts("synthetic:64", limit=1000).prompts
    sampling = Sampling(model="mock", max_tokens=TOKENS)
    plan = Plan(sampling=sampling, concurrency=(streams,), num_prompts=prompts, warmup=streams)
    async with mock_process(SCRIPT) as url:
        before = sampler.me.num_fds()
        async with Transport(url) as transport:
            job = Job(plan, loaded, Endpoint(kind="other"), "/v1/chat/completions")
            job.observer = sampler
            with TraceWriter(folder / "traces.jsonl") as traces:
                (point,) = await run_points(job, transport, traces)
        await asyncio.sleep(0.2)
        after = sampler.me.num_fds()
    tenth = max(len(sampler.rss) // 10, 1)
    return {
        "completed": point.completed,
        "errors": point.errors,
        "seconds": point.duration_s,
        "tok_s": point.decode_tok_s,
        "rss_after_first_tenth_mib": sampler.rss[tenth],
        "rss_last_tenth_mib": max(sampler.rss[-tenth:]),
        "rss_with_statistics_mib": sampler.me.memory_info().rss / MIB,
        "descriptors": [before, after],
        "cpu_us_per_event": point.client["cpu_us_per_event"],
        "loop_lag_ms": point.client["loop_lag_ms"],
    }


async def interrupted(streams: int, folder: Path) -> tuple[float, bool]:
    """Seconds from Ctrl-C to the end of the command, and whether its report is valid."""
    out = folder / "run"
    async with mock_process(SCRIPT) as url:
        argv = [sys.executable, "-m", "browndwarf", "bench", "run", "--base-url", url, "--json"]
        argv += ["--dataset", "synthetic:64", "--num-prompts", "100000", "--max-tokens", "64"]
        argv += ["--concurrency", str(streams), "--out", str(out)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        traces = out / "traces.jsonl"
        while not (traces.exists() and traces.stat().st_size > 1 << 20):
            await asyncio.sleep(0.1)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        text, _ = await asyncio.to_thread(process.communicate)
        seconds = time.monotonic() - started
    report = json.loads(text)
    point = report["points"][0]
    valid = process.returncode == 130 and report["stopped"] == "interrupted"
    return seconds, valid and point["completed"] > 0 and point["truncated"] > 0


def main() -> None:
    """Both parts, then the document."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=256)
    args = parser.parse_args()
    if os.name != "posix":
        sys.exit("needs POSIX signals and descriptors")
    with tempfile.TemporaryDirectory() as name:
        figures = asyncio.run(soak(args.prompts, args.streams, Path(name)))
        print(json.dumps(figures), file=sys.stderr)
        seconds, valid = asyncio.run(interrupted(args.streams, Path(name)))
    first = float(str(figures["rss_after_first_tenth_mib"]))
    last = float(str(figures["rss_last_tenth_mib"]))
    before, after = json.loads(json.dumps(figures["descriptors"]))
    flat = last - first <= max(GROWTH * first, GROWTH_MIB)
    document = {
        "name": "bench_soak",
        "memory_ratio": last / first,
        **figures,
        "report_after_ctrl_c_s": seconds,
        "report_valid": valid,
        "goal": {"report_after_ctrl_c_s": REPORT_S, "memory_ratio": 1 + GROWTH},
        "met": flat and after <= before and valid and seconds <= REPORT_S,
        "machine": f"{platform.platform()}, Python {platform.python_version()}",
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
