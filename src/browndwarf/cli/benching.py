"""Compose serving benchmarks from the floors below, for ``bench run``, ``compare`` and ``ab``."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

from browndwarf.bench.dataset import Filters, Loaded, load_prompts
from browndwarf.bench.endpoint import Api, Endpoint, Sampling, describe, read_counters, request_path
from browndwarf.bench.metrics import parse_slo
from browndwarf.bench.run import Job, Plan, Stop, run_points
from browndwarf.bench.saved import (
    TRACES,
    BenchRecord,
    dataset_record,
    write_run,
)
from browndwarf.bench.selftest import SelfTest, selftest
from browndwarf.bench.serve import CommandServer, recipe_argv, split_command
from browndwarf.bench.traces import Trace, TraceWriter
from browndwarf.bench.transport import Transport
from browndwarf.cli.render import Output
from browndwarf.engine.locate import Build, find_builds
from browndwarf.errors import EngineError, Interrupted, UsageError
from browndwarf.hardware.devices import machine
from browndwarf.records import EngineRecord
from browndwarf.units import format_duration, parse_duration

T = TypeVar("T")

INTERRUPTED = "interrupted"
PROGRESS_S = 5.0


@dataclass(frozen=True)
class Settings:
    """A validated request for a run; ``plan`` still lacks the server's own model name."""

    plan: Plan
    dataset: str
    prompts: Loaded
    api_key: str
    timeout_s: float
    load_timeout_s: float
    label: str | None
    llama_dir: str | None


@dataclass(frozen=True)
class Source:
    """What is measured: a running server's address, or argv to start."""

    base_url: str = ""
    argv: tuple[str, ...] = ()


def settings(
    *,
    model: str | None,
    dataset: str,
    concurrency: str,
    num_prompts: int,
    max_seconds: str | None,
    max_tokens: int,
    warmup: int,
    ignore_eos: bool,
    seed: int,
    temperature: float,
    api: str,
    shuffle: bool,
    strict: bool,
    min_chars: int,
    max_chars: int,
    timeout: str,
    load_timeout: str,
    label: str | None,
    llama_dir: str | None,
    rate: float | None = None,
    burstiness: float = 1.0,
    ramp: str = "0",
    slo: str | None = None,
    api_key_env: str = "BROWNDWARF_API_KEY",
    prefix_cache: bool = False,
) -> Settings:
    """Check everything that can be checked before a server starts, and read the prompts."""
    if api not in ("chat", "completions"):
        raise UsageError(f"no API {api!r}", fix="use chat or completions")
    if rate is not None and not 0 < rate < math.inf:
        raise UsageError(
            f"a rate of {rate:g} makes no load", fix="give requests a second, e.g. 2.5"
        )
    if not burstiness > 0:
        raise UsageError(f"burstiness {burstiness:g} is not positive", fix="1 is Poisson")
    sampling = Sampling(
        model=model or "",
        api=cast(Api, api),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
        prefix_cache=prefix_cache,
    )
    plan = Plan(
        sampling=sampling,
        concurrency=_levels(concurrency),
        rate=rate,
        burstiness=burstiness,
        ramp_s=parse_duration(ramp),
        num_prompts=num_prompts,
        max_seconds=parse_duration(max_seconds) if max_seconds else None,
        warmup=warmup,
        slo=parse_slo(slo) if slo else None,
    )
    prompts = load_prompts(
        dataset,
        limit=num_prompts,
        filters=Filters(min_chars, max_chars),
        shuffle=shuffle,
        seed=seed,
        strict=strict,
    )
    return Settings(
        plan=plan,
        dataset=dataset,
        prompts=prompts,
        api_key=os.environ.get(api_key_env, ""),
        timeout_s=parse_duration(timeout),
        load_timeout_s=parse_duration(load_timeout),
        label=label,
        llama_dir=llama_dir,
    )


def _levels(text: str) -> tuple[int, ...]:
    try:
        levels = tuple(int(part) for part in text.split(","))
    except ValueError:
        levels = ()
    if not levels or min(levels) < 1 or len(set(levels)) != len(levels):
        raise UsageError(
            f"{text!r} are no concurrencies",
            why="they are different whole numbers from 1 on",
            fix="write --concurrency 1,2,4,8",
        )
    return levels


def source(base_url: str | None, server: str | None, recipe: Path | None) -> Source:
    """The one thing that is measured.

    Raises:
        UsageError: none was named, or several.
    """
    if sum(x is not None for x in (base_url, server, recipe)) != 1:
        raise UsageError(
            "say what to measure: one of --base-url, --server and --recipe",
            fix="browndwarf bench run --base-url http://127.0.0.1:8080 --dataset packaged",
        )
    if base_url is not None:
        return Source(base_url=base_url)
    if recipe is not None:
        return Source(argv=tuple(recipe_argv(recipe)))
    return Source(argv=tuple(split_command(server or "")))


def new_directory(name: str) -> Path:
    """A fresh folder below ``runs/``."""
    return Path("runs") / f"{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"


def run_selftest(out: Output) -> SelfTest:
    """The client against the built-in mock."""
    out.note("measuring this client against the built-in mock: about ten seconds")
    return run_loop(lambda stop: selftest())


def bench(wanted: Settings, source: Source, folder: Path, out: Output) -> BenchRecord:
    """Measure, write the run directory, and return its record; also when interrupted."""
    if (folder / "bench.json").exists():
        raise UsageError(
            f"{folder} holds a run already", why="results are never overwritten", fix="new --out"
        )
    loaded = wanted.prompts
    for warning in loaded.warnings:
        out.note(f"warning: {warning}")
    dropped = ", ".join(f"{count} {reason}" for reason, count in loaded.dropped.most_common())
    out.note(
        f"dataset: {len(loaded.prompts)} prompts of {loaded.seen} records read ({loaded.kind})"
        + (f"; dropped: {dropped}" if dropped else "")
    )
    return run_loop(lambda stop: _bench(wanted, source, folder, out, stop))


async def _bench(
    wanted: Settings, source: Source, folder: Path, out: Output, stop: Stop
) -> BenchRecord:
    async with contextlib.AsyncExitStack() as stack:
        server: CommandServer | None = None
        build: Build | None = None
        base_url = source.base_url
        if source.argv:
            build = _build(wanted.llama_dir)
            out.note(f"starting: {' '.join(source.argv)}"[:300])
            server = CommandServer(
                source.argv,
                log=folder / "server.log",
                build=build,
                load_timeout_s=wanted.load_timeout_s,
                on_wait=lambda s, line: out.note(f"  loading, {format_duration(s)}: {line}"),
            )
            await stack.enter_async_context(server)
            base_url = server.base_url
        headers = {"Authorization": f"Bearer {wanted.api_key}"} if wanted.api_key else {}
        transport = await stack.enter_async_context(
            Transport(base_url, headers=headers, timeout_s=wanted.timeout_s)
        )
        endpoint = await describe(transport)
        plan = _named(wanted.plan, endpoint)
        out.note(f"server: {endpoint.kind} {endpoint.build}, model {plan.sampling.model or '?'}")
        job = Job(
            plan=plan,
            prompts=wanted.prompts.prompts,
            endpoint=endpoint,
            path=request_path(transport, plan.sampling.api),
            counters=lambda: read_counters(transport),
            observer=_Progress(out),
        )
        if server is not None:
            job.health, job.watch = server.fault, server.watched
        traces = stack.enter_context(TraceWriter(folder / TRACES))
        started = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        points = await run_points(job, transport, traces, stop)
        record = BenchRecord(
            label=wanted.label or plan.sampling.model,
            created=started,
            plan=plan,
            endpoint=endpoint,
            dataset=dataset_record(wanted.dataset, wanted.prompts),
            points=tuple(points),
            machine=machine(),
            engine=_engine(build, server),
            command=tuple(server.argv) if server else (),
            load_s=server.load_s if server else None,
            stopped=stop.reason,
        )
        write_run(folder, record)
    return record


def _named(plan: Plan, endpoint: Endpoint) -> Plan:
    import msgspec

    if plan.sampling.model:
        return plan
    sampling = msgspec.structs.replace(plan.sampling, model=endpoint.model)
    return msgspec.structs.replace(plan, sampling=sampling)


def _build(llama_dir: str | None) -> Build | None:
    """The llama.cpp build for a bare ``llama-server``; the command may be of another program."""
    try:
        return next(iter(find_builds(Path(llama_dir) if llama_dir else None)), None)
    except EngineError:
        if llama_dir:
            raise
        return None


def _engine(build: Build | None, server: CommandServer | None) -> EngineRecord | None:
    if build is None or server is None or server.argv[0] != str(build.server):
        return None
    return EngineRecord(
        path=str(build.server),
        version=build.version,
        sha=build.sha,
        features=tuple(sorted(build.features)),
        faults=tuple(fault.id for fault in build.faults),
    )


class _Progress:
    """Tells every few seconds how a point goes."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._told = 0.0
        self._errors = 0
        self._title = ""

    def point(self, value: float, number: int, of: int) -> None:
        self._title = f"[{number}/{of}] {value:g}"
        self._errors = 0
        self._told = time.monotonic()
        self._out.note(f"{self._title}: warming up, measuring")

    def request(self, trace: Trace, done: int, of: int) -> None:
        self._errors += trace.status == "error"
        now = time.monotonic()
        if now - self._told >= PROGRESS_S:
            self._told = now
            self._out.note(f"{self._title}: {done}/{of} requests, {self._errors} errors")


def exit_code(record: BenchRecord, max_error_rate: float, out: Output) -> int:
    """0; 1 for too many errors or a server that died; 130 after Ctrl-C."""
    if record.stopped == INTERRUPTED:
        out.note("interrupted: the report covers what was measured until then")
        return Interrupted.exit_code
    if record.stopped:
        out.note(f"the run ended early: {record.stopped}")
        return 1
    worst = max((point.error_rate for point in record.points), default=0.0)
    if worst > max_error_rate:
        out.note(f"{worst:.1%} of the requests failed; --max-error-rate is {max_error_rate:.1%}")
        return 1
    return 0


def run_loop(work: Callable[[Stop], Coroutine[Any, Any, T]]) -> T:
    """Run on uvloop where it exists. The first Ctrl-C (or SIGTERM) ends the load under way and
    leaves a report; before or after the load, and the second time, it ends everything.
    """
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop

    async def main() -> T:
        stop = Stop()
        task = asyncio.ensure_future(work(stop))

        def on_signal() -> None:
            if stop.gate is None or stop.reason:
                task.cancel()
            else:
                stop.now(INTERRUPTED)

        loop = asyncio.get_running_loop()
        if sys.platform == "win32":
            signal.signal(signal.SIGINT, lambda *_: loop.call_soon_threadsafe(on_signal))
        else:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, on_signal)
        try:
            return await task
        finally:
            if sys.platform == "win32":
                signal.signal(signal.SIGINT, signal.default_int_handler)
            else:
                # uvloop leaves its handlers behind when it closes, and Ctrl-C would do nothing.
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.remove_signal_handler(number)

    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(main())
    except asyncio.CancelledError as exc:
        raise Interrupted("interrupted", why="nothing was measured yet") from exc
