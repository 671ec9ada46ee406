"""What does a benchmark client cost per streamed event? Ours against those of other tools.

All clients take the same 32 paced streams from the same mock server in another process; a
client's cost is the CPU time of its process over the events that it received. The arms
alternate and are repeated. Goals: ours at most 20 us, and at most half of the best other.

    python benchmarks/client_cost.py --peer llama-benchy=VENV/bin/python [--peer aiperf=...]

Each peer is the Python of an environment in which that tool is installed (nothing is installed
here). Its own client class is driven, without its report and its tokenizer. The last line of
output is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys

STREAMS, REQUESTS, TOKENS, STEP_S = 32, 96, 128, 0.02
GOAL_US, GOAL_SHARE = 20.0, 0.5

#: What a peer's Python runs. ``send`` is defined by the peer's own lines.
DRIVER = """
import asyncio, json, sys, time
base, streams, requests, tokens = sys.argv[1], *map(int, sys.argv[2:5])
PEER
async def main():
    async with client() as send:
        left = list(range(streams))
        async def slot():
            while left:
                left.pop()
                await send()
        await asyncio.gather(*(slot() for _ in range(streams)))
        left.extend(range(requests))
        cpu = time.process_time()
        await asyncio.gather(*(slot() for _ in range(streams)))
        cpu = time.process_time() - cpu
    # role, tokens, finish and usage in one, [DONE]: as the mock sends them
    print(json.dumps({"us": cpu / (requests * (tokens + 2)) * 1e6}))
try:
    import uvloop
    run = uvloop.run if USE_UVLOOP else asyncio.run
except ImportError:
    run = asyncio.run
run(main())
"""

PEERS = {
    "llama-benchy": (
        False,
        """
import aiohttp
from contextlib import asynccontextmanager
from llama_benchy.client import LLMClient
@asynccontextmanager
async def client():
    connector = aiohttp.TCPConnector(limit=streams + 8)
    async with aiohttp.ClientSession(connector=connector) as session:
        own = LLMClient(base + "/v1", "key", "mock")
        async def send():
            done = await own.run_generation(session, "", "a b c", tokens, False)
            assert not done.error and done.total_tokens == tokens, done
        yield send
""",
    ),
    "aiperf": (
        True,
        """
from contextlib import asynccontextmanager
from aiperf.transports.aiohttp_client import AioHttpClient
body = json.dumps({"model": "mock", "max_tokens": tokens, "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": "a b c"}]}).encode()
headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
@asynccontextmanager
async def client():
    own = AioHttpClient()
    async def send():
        done = await own.post_request(base + "/v1/chat/completions", body, headers)
        assert not done.error and len(done.responses) > tokens, done
        # Its workers parse every event after that, to find text and usage.
        for response in done.responses:
            response.get_json() if hasattr(response, "get_json") else None
    yield send
    await own.close()
""",
    ),
}


async def ours_once() -> float:
    """Our client's cost in us per event, measured in this process."""
    import tempfile
    from pathlib import Path

    from browndwarf.bench.mock import Script
    from browndwarf.bench.selftest import measure

    script = Script(ttft_s=0.05, step_s=STEP_S)
    with tempfile.TemporaryDirectory() as name:
        point = await measure(
            script, streams=STREAMS, requests=REQUESTS, tokens=TOKENS, folder=Path(name)
        )
    assert point.completed == REQUESTS, point.errors
    return point.client["cpu_us_per_event"]


async def peer_once(name: str, python: str) -> float:
    """A peer's cost in us per event.

    Raises:
        RuntimeError: it does not run.
    """
    from browndwarf.bench.mock import Script
    from browndwarf.bench.selftest import mock_process

    uvloop, lines = PEERS[name]
    code = DRIVER.replace("PEER", lines).replace("USE_UVLOOP", str(uvloop))
    async with mock_process(Script(ttft_s=0.05, step_s=STEP_S)) as url:
        process = await asyncio.create_subprocess_exec(
            python,
            "-c",
            code,
            url,
            *map(str, (STREAMS, REQUESTS, TOKENS)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 180)
    if process.returncode:
        raise RuntimeError(err.decode("utf-8", "replace").strip().splitlines()[-1])
    return float(json.loads(out.splitlines()[-1])["us"])


def run_ours() -> float:
    """In a fresh event loop: uvloop's, as the command uses it, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(ours_once())
    return uvloop.run(ours_once())


def main() -> None:
    """Alternate all clients, then print the table and the document."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--peer", action="append", default=[], help="NAME=PYTHON; repeatable")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    peers = dict(item.split("=", 1) for item in args.peer)
    costs: dict[str, list[float]] = {"ours": []}
    failed = {name: "no --peer given" for name in PEERS if name not in peers}
    for number in range(args.repeats):
        costs["ours"].append(run_ours())
        for name, python in peers.items():
            if name in failed:
                continue
            try:
                costs.setdefault(name, []).append(asyncio.run(peer_once(name, python)))
            except (RuntimeError, TimeoutError, OSError) as exc:
                failed[name] = str(exc)
        line = ", ".join(f"{name} {values[-1]:.1f}" for name, values in costs.items() if values)
        print(f"repeat {number + 1}: {line} us per event", file=sys.stderr)
    medians = {name: statistics.median(values) for name, values in costs.items() if values}
    others = {name: value for name, value in medians.items() if name != "ours"}
    best = min(others.values(), default=None)
    share = medians["ours"] / best if best else None
    document = {
        "name": "client_cost",
        "ratio_to_best_other": share,
        "ratios": {name: medians["ours"] / value for name, value in others.items()},
        "us_per_event": medians,
        "runs": costs,
        "not_measured": failed,
        "goal": {"us_per_event": GOAL_US, "ratio_to_best_other": GOAL_SHARE},
        "met": medians["ours"] <= GOAL_US and (share is None or share <= GOAL_SHARE),
        "machine": f"{platform.platform()}, Python {platform.python_version()}",
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
