"""Run the points of a benchmark: for each concurrency (or the rate) load, trace, sum up.

Boundary: works on anything that posts (``Target``) and keeps traces in a file; starts no server
and prints nothing. A run that is stopped - time cap, Ctrl-C, a server that died - yields the
points measured so far, the last one marked with the reason.

Example:
    >>> async with Transport(url) as transport:                    # doctest: +SKIP
    ...     job = Job(plan=plan, prompts=prompts, endpoint=endpoint, path=path)
    ...     points = await run_points(job, transport, writer)
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from browndwarf.bench.answers import judge
from browndwarf.bench.dataset import Prompt
from browndwarf.bench.endpoint import Endpoint, Sampling, request_body
from browndwarf.bench.framing import Exchange
from browndwarf.bench.load import Clock, Gate, Progress, arrivals, closed_loop, open_loop
from browndwarf.bench.metrics import PointRecord, Slo, Window, percentiles_ms, summarize
from browndwarf.bench.traces import Trace, TraceWriter, make_trace, read_traces
from browndwarf.engine.wire import SpecCounters
from browndwarf.records import Acceptance, Record

LAG_SAMPLE_S = 0.2
#: Above these the client is said to have been the limit.
LAG_LIMIT_MS = 50.0
CPU_LIMIT = 0.8
CONNECT_PAUSE_S = 0.2
MAX_CONNECT_ERRORS = 25

TIME_CAP = "time cap"


class Target(Protocol):
    """Where requests go; ``transport.Transport`` is one."""

    async def post(self, path: str, body: bytes) -> Exchange: ...

    def cut(self) -> None: ...


class Observer(Protocol):
    """Is told how a run goes. All methods are called on the event loop and must be quick."""

    def point(self, value: float, number: int, of: int) -> None: ...

    def request(self, trace: Trace, done: int, of: int) -> None: ...


class Plan(Record, frozen=True, kw_only=True):
    """What to measure. ``rate`` (requests a second) makes an open loop of one point."""

    sampling: Sampling
    concurrency: tuple[int, ...] = (1,)
    rate: float | None = None
    burstiness: float = 1.0
    ramp_s: float = 0.0
    num_prompts: int = 100
    max_seconds: float | None = None
    warmup: int = 1
    slo: Slo | None = None

    @property
    def points(self) -> tuple[float, ...]:
        """Concurrencies, or the one rate."""
        return self.concurrency if self.rate is None else (self.rate,)


async def _no_counters() -> SpecCounters | None:
    return None


@dataclass
class Job:
    """A plan with what it runs on.

    ``counters`` reads the server's speculation counters; ``health`` says why the server cannot
    go on, or nothing; ``memory`` is asked after each point.
    """

    plan: Plan
    prompts: Sequence[Prompt]
    endpoint: Endpoint
    path: str
    counters: Callable[[], Awaitable[SpecCounters | None]] = _no_counters
    health: Callable[[], str] = lambda: ""
    watch: Callable[[], dict[str, float]] = dict
    observer: Observer | None = None
    clock: Clock = time.perf_counter


@dataclass
class Stop:
    """Lets a signal handler end a run: ``now`` closes the gate of the point under way."""

    reason: str = ""
    gate: Gate | None = None

    def now(self, reason: str) -> None:
        """Stop the run."""
        self.reason = self.reason or reason
        if self.gate is not None:
            self.gate.close(reason)


async def run_points(
    job: Job, target: Target, traces: TraceWriter, stop: Stop | None = None
) -> list[PointRecord]:
    """Measure every point in order; see the module's text for how it may end."""
    stop = stop or Stop()
    records: list[PointRecord] = []
    values = job.plan.points
    for number, value in enumerate(values, 1):
        if stop.reason:
            break
        if job.observer is not None:
            job.observer.point(value, number, len(values))
        records.append(await _Point(job, target, traces, stop, value).run())
        if fault := job.health():
            stop.now(fault)
    return records


class _Point:
    """One point under way."""

    def __init__(
        self, job: Job, target: Target, traces: TraceWriter, stop: Stop, value: float
    ) -> None:
        self.job = job
        self.target = target
        self.traces = traces
        self.stop = stop
        self.value = value
        self.gate = Gate()
        self.origin = 0.0
        self.done = 0
        self.events = 0
        self.refused = 0
        self.warming = False
        self.ids = itertools.count()

    async def run(self) -> PointRecord:
        plan = self.job.plan
        start = self.traces.tell()
        self.stop.gate = self.gate
        self.gate.on_close(self.target.cut)
        if plan.warmup:
            self.warming = True
            await self._load(plan.warmup)
            self.warming = False
        before = await self.job.counters()
        lags: array[float] = array("d")
        async with self._beside(lags):
            cpu = time.process_time()
            self.origin = self.job.clock()
            progress = await self._load(plan.num_prompts)
            cpu = time.process_time() - cpu
        after = await self.job.counters()
        self.traces.flush()
        window = Window(
            0.0,
            progress.ended_s - self.origin,
            bool(self.gate.reason),
            progress.full_s - self.origin if progress.full_s else 0.0,
            self._steady_end(progress),
        )
        record = summarize(read_traces(self.traces.path, start=start), window=window, slo=plan.slo)
        return self._finish(record, cpu, lags, before, after)

    def _steady_end(self, progress: Progress) -> float:
        if self.job.plan.rate is not None or not progress.full_s:
            return 0.0
        return (progress.draining_s or progress.ended_s) - self.origin

    async def _load(self, count: int) -> Progress:
        plan, gate, clock = self.job.plan, self.gate, self.job.clock
        items = self._prompts(count)
        if plan.rate is not None and not self.warming:
            schedule = arrivals(
                rate=plan.rate,
                burstiness=plan.burstiness,
                ramp_s=plan.ramp_s,
                seed=plan.sampling.seed,
            )
            return await open_loop(items, self._send, schedule=schedule, gate=gate, clock=clock)
        slots = 1 if plan.rate is not None else int(self.value)
        ramp_s = 0.0 if self.warming else plan.ramp_s
        return await closed_loop(
            items,
            self._send,
            concurrency=max(1, min(slots, count)),
            gate=gate,
            clock=clock,
            ramp_s=ramp_s,
        )

    def _prompts(self, count: int) -> Iterator[Prompt]:
        """The same prompts for every point; the warm-up takes them from the end."""
        prompts = self.job.prompts
        if self.warming:
            return itertools.islice(itertools.cycle(reversed(prompts)), count)
        return itertools.islice(itertools.cycle(prompts), count)

    async def _send(self, prompt: Prompt, due_s: float) -> float:
        job = self.job
        number = next(self.ids)
        body = request_body(prompt, job.plan.sampling, job.endpoint.kind)
        exchange = await self.target.post(job.path, body)
        answer = judge(exchange)
        trace = make_trace(
            exchange,
            answer,
            id=number,
            point=self.value,
            prompt_id=prompt.id,
            scheduled_s=due_s,
            origin_s=self.origin,
            warmup=self.warming,
        )
        self.traces.write(trace)
        if not self.warming:
            self.events += answer.events
            self.done += 1
            if job.observer is not None:
                job.observer.request(trace, self.done, job.plan.num_prompts)
        return self._pause(trace)

    def _pause(self, trace: Trace) -> float:
        if trace.error != "connect":
            self.refused = 0
            return trace.retry_after_s if trace.status == "error" else 0.0
        self.refused += 1
        if self.refused >= MAX_CONNECT_ERRORS:
            self.gate.close("nothing answers any more")
            self.stop.now("nothing answers any more")
        return CONNECT_PAUSE_S

    @asynccontextmanager
    async def _beside(self, lags: array[float]) -> AsyncIterator[None]:
        """The time cap, the look at the server and the look at our own loop."""
        tasks = [asyncio.ensure_future(self._watch(lags))]
        if self.job.plan.max_seconds is not None:
            tasks.append(asyncio.ensure_future(self._cap(self.job.plan.max_seconds)))
        # A full collection would stop our clock for tens of milliseconds and is paid by events;
        # what was there before need not be looked at again.
        gc.collect()
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _cap(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.gate.close(TIME_CAP)

    async def _watch(self, lags: array[float]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_SAMPLE_S
            await asyncio.sleep(LAG_SAMPLE_S)
            lags.append(max(0.0, loop.time() - due))
            if fault := self.job.health():
                self.stop.now(fault)
                self.gate.close(fault)

    def _finish(
        self,
        record: PointRecord,
        cpu_s: float,
        lags: array[float],
        before: SpecCounters | None,
        after: SpecCounters | None,
    ) -> PointRecord:
        lag = percentiles_ms(lags)
        share = cpu_s / record.duration_s if record.duration_s else 0.0
        client = {
            "cpu_us_per_event": cpu_s / self.events * 1e6 if self.events else 0.0,
            "cpu_share": share,
            "events": float(self.events),
            "loop_lag_ms": lag.get("p99", 0.0),
            "loop_lag_max_ms": max(lags) * 1e3 if lags else 0.0,
        }
        watch = self.job.watch()
        rate = self.job.plan.rate
        return msgspec.structs.replace(
            record,
            concurrency=int(self.value) if rate is None else None,
            rate=rate,
            stopped=self.gate.reason,
            acceptance=_with_counters(record.acceptance, before, after),
            client=client,
            watch=watch,
            memory_mib=watch.get("memory_mib"),
            notes=tuple(self._notes(record, client)),
        )

    def _notes(self, record: PointRecord, client: dict[str, float]) -> Iterator[str]:
        if client["cpu_share"] > CPU_LIMIT or client["loop_lag_ms"] > LAG_LIMIT_MS:
            yield (
                f"the client was a limit: {client['cpu_share']:.0%} of a core, "
                f"event loop {client['loop_lag_ms']:.0f} ms late (p99)"
            )
        slots = self.job.endpoint.slots
        if self.job.plan.rate is None and slots and slots < self.value:
            yield f"the server has {slots} slots for {self.value:g} requests: some wait"
        if record.marks.get("cache-hit") and not self.job.plan.sampling.prefix_cache:
            yield f"{record.marks['cache-hit']} answers took part of the prompt from a cache"
        if record.marks.get("wrong-usage"):
            yield f"{record.marks['wrong-usage']} answers state a usage that cannot be right"
        if record.tokens_from.get("events"):
            yield (
                f"{record.tokens_from['events']} answers have no token count: their events were "
                "counted, which is too few if events bundle tokens"
            )
        if len(self.job.prompts) < self.job.plan.num_prompts:
            yield f"the dataset has {len(self.job.prompts)} prompts: they were used again"


def _with_counters(
    found: Acceptance | None, before: SpecCounters | None, after: SpecCounters | None
) -> Acceptance | None:
    """Acceptance from the answers, with what only the counters tell."""
    if before is None or after is None:
        return found
    passed = after - before
    if passed.drafts <= 0:
        return found
    if found is None:
        drafted, accepted = passed.draft_tokens, passed.accepted
    else:
        drafted, accepted = found.drafted, found.accepted
    return Acceptance(
        rate=accepted / drafted if drafted else 0.0,
        per_position=passed.rates,
        drafted=drafted,
        accepted=accepted,
        drafts=passed.drafts,
    )
