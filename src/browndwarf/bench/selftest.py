"""What the client itself costs and where its limit lies, against the mock in another process.

Two loads: paced streams as a server sends them (cost per event, correctness against the mock's
timetable), and streams without any pace (the most events a second that the client can take, or
the mock can send).

Example:
    >>> report = asyncio.run(selftest())           # doctest: +SKIP
    >>> report.cpu_us_per_event, report.max_events_s   # doctest: +SKIP
    (9.8, 61000.0)
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from browndwarf.bench.dataset import load_prompts
from browndwarf.bench.endpoint import Endpoint, Sampling
from browndwarf.bench.metrics import PointRecord
from browndwarf.bench.mock import Script
from browndwarf.bench.run import Job, Plan, run_points
from browndwarf.bench.traces import TraceWriter
from browndwarf.bench.transport import Transport
from browndwarf.errors import EnvironmentFault
from browndwarf.records import Record

STREAMS = 32
PACED = Script(ttft_s=0.05, step_s=0.02, burst=1)
RUSH = Script(ttft_s=0.0, step_s=0.0, burst=8)


class SelfTest(Record, frozen=True, kw_only=True):
    """The result. ``*_error_ms`` are differences of medians from the mock's timetable."""

    streams: int
    events: int
    loop: str
    cpu_us_per_event: float
    cpu_share: float
    loop_lag_ms: float
    ttft_error_ms: float
    tpot_error_ms: float
    max_events_s: float
    rush_cpu_us_per_event: float


@asynccontextmanager
async def mock_process(script: Script) -> AsyncIterator[str]:
    """A mock server in a process of its own; yields its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "browndwarf.bench.mock",
        msgspec.json.encode(script).decode(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 30.0)
        if not line.strip().isdigit():
            raise EnvironmentFault(
                "the built-in mock server did not start",
                why=f"it said {line[:100]!r}",
                fix="check that this Python may open a port on 127.0.0.1",
            )
        yield f"http://127.0.0.1:{int(line)}"
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 5.0)
        except TimeoutError:
            process.kill()
            await process.wait()


async def measure(
    script: Script, *, streams: int, requests: int, tokens: int, folder: Path
) -> PointRecord:
    """One closed-loop point against a mock with this script."""
    async with mock_process(script) as url, Transport(url, timeout_s=60.0) as transport:
        sampling = Sampling(model="mock", max_tokens=tokens)
        plan = Plan(sampling=sampling, concurrency=(streams,), num_prompts=requests, warmup=streams)
        prompts = load_prompts("synthetic:16", limit=requests).prompts
        job = Job(plan, prompts, Endpoint(kind="other"), "/v1/chat/completions")
        with TraceWriter(folder / "traces.jsonl") as traces:
            return (await run_points(job, transport, traces))[0]


async def selftest(*, streams: int = STREAMS, tokens: int = 128, rounds: int = 3) -> SelfTest:
    """Measure the client: ``rounds`` answers of ``tokens`` tokens on each stream, paced."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        requests = streams * rounds
        paced = await measure(
            PACED, streams=streams, requests=requests, tokens=tokens, folder=folder
        )
        rush = await measure(
            RUSH, streams=streams, requests=requests * 2, tokens=tokens, folder=folder
        )
    return SelfTest(
        streams=streams,
        events=int(paced.client["events"]),
        loop=type(asyncio.get_running_loop()).__module__.partition(".")[0],
        cpu_us_per_event=paced.client["cpu_us_per_event"],
        cpu_share=paced.client["cpu_share"],
        loop_lag_ms=paced.client["loop_lag_ms"],
        ttft_error_ms=paced.ttft_ms["p50"] - PACED.ttft_s * 1e3,
        tpot_error_ms=paced.tpot_ms["p50"] - PACED.step_s * 1e3,
        max_events_s=rush.client["events"] / rush.duration_s,
        rush_cpu_us_per_event=rush.client["cpu_us_per_event"],
    )
