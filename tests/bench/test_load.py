"""Loads in virtual time: when requests are sent, how they stop, what is counted."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from pathlib import Path

import msgspec
import pytest

from browndwarf.bench.dataset import Prompt
from browndwarf.bench.endpoint import Endpoint, Sampling
from browndwarf.bench.framing import Exchange
from browndwarf.bench.load import Gate, arrivals, closed_loop, open_loop
from browndwarf.bench.metrics import PointRecord
from browndwarf.bench.mock import Script
from browndwarf.bench.run import Job, Plan, Stop, run_points
from browndwarf.bench.traces import TraceWriter, read_traces
from virtual import feed, run_virtual


class Recorder:
    """Notes when each item was sent; each takes a given time."""

    def __init__(self, seconds: float, pause: float = 0.0) -> None:
        self.seconds = seconds
        self.pause = pause
        self.sent: list[float] = []
        self.due: list[float] = []
        self.active = 0
        self.most = 0

    async def __call__(self, item: int, due: float) -> float:
        loop = asyncio.get_running_loop()
        self.sent.append(loop.time())
        self.due.append(due)
        self.active += 1
        self.most = max(self.most, self.active)
        await asyncio.sleep(self.seconds)
        self.active -= 1
        return self.pause


def test_a_closed_loop_keeps_its_concurrency_and_refills_at_once() -> None:
    send = Recorder(1.0)

    async def work() -> None:
        clock = asyncio.get_running_loop().time
        done = await closed_loop(range(10), send, concurrency=3, gate=Gate(), clock=clock)
        assert done.ended_s == pytest.approx(4.0)
        assert done.draining_s == pytest.approx(3.0)

    run_virtual(work())
    assert send.most == 3
    assert send.sent == pytest.approx([0, 0, 0, 1, 1, 1, 2, 2, 2, 3])


def test_a_ramp_starts_the_slots_one_by_one() -> None:
    send = Recorder(10.0)

    async def work() -> None:
        clock = asyncio.get_running_loop().time
        await closed_loop(range(4), send, concurrency=4, gate=Gate(), clock=clock, ramp_s=8.0)

    run_virtual(work())
    assert send.sent == pytest.approx([0, 2, 4, 6])


def test_an_open_loop_keeps_its_schedule_however_slow_the_server() -> None:
    send = Recorder(100.0)

    async def work() -> None:
        clock = asyncio.get_running_loop().time
        schedule = arrivals(rate=10, burstiness=math.inf)
        await open_loop(range(50), send, schedule=schedule, gate=Gate(), clock=clock)

    run_virtual(work())
    assert send.sent == pytest.approx([i / 10 for i in range(50)])
    assert send.due == pytest.approx(send.sent)
    assert send.most == 50


def test_a_refused_slot_pauses_as_told() -> None:
    send = Recorder(0.0, pause=2.0)

    async def work() -> None:
        clock = asyncio.get_running_loop().time
        await closed_loop(range(3), send, concurrency=1, gate=Gate(), clock=clock)

    run_virtual(work())
    assert send.sent == pytest.approx([0, 2, 4])


def test_a_closed_gate_ends_pauses_and_schedules_at_once() -> None:
    send = Recorder(0.0, pause=20.0)

    async def work() -> float:
        loop = asyncio.get_running_loop()
        gate = Gate()
        loop.call_later(5.0, gate.close, "enough")
        schedule = arrivals(rate=0.01, burstiness=math.inf)
        await asyncio.gather(
            closed_loop(range(9), send, concurrency=1, gate=gate, clock=loop.time),
            open_loop(range(9), send, schedule=schedule, gate=gate, clock=loop.time),
        )
        return loop.time()

    assert run_virtual(work()) == pytest.approx(5.0)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(
    burstiness: float, variation: float
) -> None:
    """Gamma gaps of shape k have a coefficient of variation of 1/sqrt(k)."""
    times = list(itertools.islice(arrivals(rate=8, burstiness=burstiness, seed=3), 20000))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) / mean == pytest.approx(variation, rel=0.1)


def test_arrivals_repeat_with_their_seed() -> None:
    first, again, other = (list(itertools.islice(arrivals(rate=1, seed=s), 5)) for s in (1, 1, 2))
    assert first == again != other


def test_a_ramped_rate_grows_linearly_and_loses_half_of_the_ramp() -> None:
    times = list(itertools.islice(arrivals(rate=10, burstiness=math.inf, ramp_s=10), 101))
    assert sum(t < 5 for t in times) == 13  # a quarter of the fifty in the ramp
    assert sum(t < 10 for t in times) == 50
    assert times[60] - times[59] == pytest.approx(0.1)


class FakeTarget:
    """Answers by script in the loop's own (virtual) time; ``cut`` ends what is under way."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.events: list[asyncio.Event] = []
        self.bodies: list[dict[str, object]] = []

    async def post(self, path: str, body: bytes) -> Exchange:
        loop = asyncio.get_running_loop()
        self.bodies.append(msgspec.json.decode(body))
        sent = loop.time()
        event = asyncio.Event()
        self.events.append(event)
        whole = feed(self.script)
        try:
            await asyncio.wait_for(event.wait(), whole.end_s)
            exchange = feed(self.script, cut_at=loop.time() - sent)
        except TimeoutError:
            exchange = whole
        exchange.sent_s = exchange.started_s = sent
        exchange.first_byte_s += sent
        exchange.end_s += sent
        exchange.pieces = [(at + sent, data) for at, data in exchange.pieces]
        return exchange

    def cut(self) -> None:
        for event in self.events:
            event.set()


def measure(plan: Plan, script: Script, path: Path, stop: Stop | None = None) -> list[PointRecord]:
    prompts = [Prompt(id=f"p{i}", messages=({"role": "user", "content": "Hi"},)) for i in range(4)]

    async def work() -> list[PointRecord]:
        clock = asyncio.get_running_loop().time
        job = Job(plan, prompts, Endpoint(kind="llama.cpp", slots=4), "/x", clock=clock)
        with TraceWriter(path) as traces:
            return await run_points(job, FakeTarget(script), traces, stop)

    return run_virtual(work())


PLAN = Plan(sampling=Sampling(model="m"), concurrency=(2, 4), num_prompts=8, warmup=2)


def test_throughput_is_tokens_over_the_window(tmp_path: Path) -> None:
    """Eight answers of 11 tokens in 1.1 s each: on 2 slots in 4.4 s, on 4 in 2.2 s."""
    script = Script(tokens=11, ttft_s=0.1, step_s=0.1)
    two, four = measure(PLAN, script, tmp_path / "t.jsonl")
    assert (two.concurrency, four.concurrency) == (2, 4)
    assert two.decode_tok_s == pytest.approx(88 / 4.4, rel=1e-3)
    assert four.decode_tok_s == pytest.approx(88 / 2.2, rel=1e-3)
    assert two.completed == four.completed == 8
    assert four.schedule_lag_ms["p99"] == pytest.approx(0)


def test_the_time_cap_cuts_and_the_next_point_still_runs(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(PLAN, max_seconds=1.65)
    script = Script(tokens=11, ttft_s=0.1, step_s=0.1)
    two, four = measure(plan, script, tmp_path / "t.jsonl")
    assert two.stopped == four.stopped == "time cap"
    assert (two.completed, two.truncated) == (2, 2)
    assert two.duration_s == pytest.approx(1.65)
    # Two whole answers, and the five tokens that each of two others had got until then.
    assert two.decode_tok_s == pytest.approx((22 + 10) / 1.65, rel=1e-3)
    assert four.completed == 4


def test_a_stopped_run_yields_what_it_has_and_begins_no_other_point(tmp_path: Path) -> None:
    stop = Stop()

    class Stopper:
        def point(self, value: float, number: int, of: int) -> None: ...

        def request(self, trace: object, done: int, of: int) -> None:
            if done == 3:
                stop.now("interrupted")

    prompts = [Prompt(id="p", messages=({"role": "user", "content": "Hi"},))]

    async def work() -> list[PointRecord]:
        clock = asyncio.get_running_loop().time
        job = Job(PLAN, prompts, Endpoint(kind="other"), "/x", observer=Stopper(), clock=clock)
        with TraceWriter(tmp_path / "t.jsonl") as traces:
            target = FakeTarget(Script(tokens=11, ttft_s=0.1, step_s=0.1))
            return await run_points(job, target, traces, stop)

    points = run_virtual(work())
    assert [p.stopped for p in points] == ["interrupted"]
    assert points[0].completed >= 3


def test_a_server_that_died_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    async def work() -> list[PointRecord]:
        loop = asyncio.get_running_loop()
        job = Job(
            PLAN,
            [Prompt(id="p", messages=({"role": "user", "content": "Hi"},))],
            Endpoint(kind="other"),
            "/x",
            health=lambda: "the server died: abort" if loop.time() > 3 else "",
            clock=loop.time,
        )
        with TraceWriter(tmp_path / "t.jsonl") as traces:
            return await run_points(job, FakeTarget(Script(tokens=11, step_s=0.1)), traces)

    assert [p.stopped for p in run_virtual(work())] == ["the server died: abort"]


def test_traces_hold_what_the_figures_were_made_of(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    measure(PLAN, Script(tokens=5, ttft_s=0.1, step_s=0.1), path)
    traces = list(read_traces(path))
    assert sum(t.warmup for t in traces) == 4
    assert sum(not t.warmup for t in traces) == 16
    kept = [t for t in traces if not t.warmup]
    assert {t.prompt_id for t in kept} == {"p0", "p1", "p2", "p3"}
    assert all(t.event_us == (100000, 200000, 300000, 400000, 500000) for t in kept)


def test_a_trace_file_that_was_cut_off_gives_all_whole_traces(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    measure(PLAN, Script(tokens=5), path)
    path.write_bytes(path.read_bytes()[:-40])
    bad: list[int] = []
    assert len(list(read_traces(path, on_bad=bad.append))) == 19
    assert bad == [20]


def test_too_few_slots_are_noted(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(PLAN, concurrency=(8,))
    (point,) = measure(plan, Script(tokens=5), tmp_path / "t.jsonl")
    assert any("4 slots for 8 requests" in note for note in point.notes)
    assert any("used again" in note for note in point.notes)
