"""Measure one configuration: a running server in, one record per workload out.

The server's own timings are the measurement; the client only asks and writes down. Prompt cache
off, fixed seeds, greedy unless told otherwise, one discarded warm-up, the same prompts in every
repeat, and more repeats where those asked for scatter. Acceptance per position comes from the
server's counters, read before and after.

The boundary: ``served.Served`` is what is needed of a running server, so that a fake fits.

Example:
    >>> cell = await measure(served, job, workload, settings)      # doctest: +SKIP
    >>> cell.decode_tok_s.mean, cell.accepted_length               # doctest: +SKIP
    (1613.2, 3.58)
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from browndwarf.errors import BrowndwarfError, RequestFailed
from browndwarf.records import (
    Acceptance,
    CellRecord,
    CellRole,
    CellStatus,
    Prediction,
    Rate,
    RequestTrace,
)
from browndwarf.stats import relative_error, summarize
from browndwarf.sweep.pace import WAIT_S, Tempo
from browndwarf.sweep.served import Counters, Observation, Observer, Served, Settings
from browndwarf.sweep.space import Configuration, cell_id
from browndwarf.sweep.workload import Workload

#: Below this share of accepted drafts the drafter does not belong to the target.
LOWEST_ACCEPTANCE = 0.05

#: A mean that is not known better than this, relative standard error, is unsteady. Three repeats
#: that differ by a quarter of their mean are about there.
UNSTEADY_ERROR = 0.07
#: A cell is repeated so many times as often as asked for, at most, until its mean is known ...
MOST_TIMES = 4
#: ... unless it has generated for so long: what changes within seconds is averaged then.
LONG_S = 4.0
#: Fewer repeats than this are somebody's wish to be quick.
LEAST_REPEATS = 3

#: Tokens of the discarded warm-up request.
WARM_UP_TOKENS = 16


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration with its place in the sweep."""

    configuration: Configuration
    role: CellRole
    group: str


async def measure(
    served: Served,
    job: Job,
    workload: Workload,
    settings: Settings,
    *,
    warm_up: bool = True,
    observe: Observer = Observation,
    tempo: Tempo | None = None,
    wait_s: float | None = None,
) -> CellRecord:
    """Measure ``workload`` on a running server.

    ``observe`` says what was seen on the machine meanwhile; what it saw before is dropped.
    ``tempo`` is asked between requests how fast the machine is, and waits for its fast pace,
    ``wait_s`` at most in all (``WAIT_S`` unless given).

    Raises:
        ServerError: a request failed; nothing is recorded then.
    """
    started = time.time()
    clock = time.perf_counter()
    texts = [(p.id, await served.render(p)) for p in workload.head(settings.prompts).prompts]
    generating = 0.0
    if warm_up:
        warm = await served.complete(
            texts[-1][1], settings=settings, n_predict=WARM_UP_TOKENS, seed=settings.seed
        )
        generating += (warm.timings.prompt_ms + warm.timings.predicted_ms) / 1e3
    before = await served.counters()
    traces: list[RequestTrace] = []
    rates: list[float] = []
    observe()
    waiting = _Waiting(tempo, WAIT_S if wait_s is None else wait_s)
    for repeat in range(MOST_TIMES * settings.repeats):
        if repeat >= settings.repeats and _enough(job.configuration, traces, settings, tempo):
            break
        start = time.perf_counter()
        made, rate = await _one_run(served, job.configuration, texts, repeat, settings, waiting)
        window = time.perf_counter() - start
        # Slots overlap: together they cannot generate for longer than the window lasted.
        served_ms = math.fsum(t.prompt_ms + t.predicted_ms for t in made)
        generating += min(served_ms / 1e3, window)
        traces += made
        rates.append(rate)
    seen = observe()
    acceptance, counted = await _acceptance(served, before, traces)
    marks = list(seen.marks) + _marks(job.configuration, traces, acceptance, counted, settings)
    decode = summarize(rates)
    if _repeat_error(traces, rates) > UNSTEADY_ERROR:
        marks.append("unsteady")
    cycles = sum(t.cycles for t in traces)
    timed = sum(max(t.predicted_n - 1, 0) for t in traces)
    prompt_ms = math.fsum(t.prompt_ms for t in traces)
    memory = served.memory() | seen.memory
    return CellRecord(
        **_names(job, workload.name),
        status="ok",
        decode_tok_s=Rate(mean=decode.mean, spread=decode.spread, runs=tuple(rates)),
        prefill_tok_s=sum(t.prompt_n for t in traces) / prompt_ms * 1e3 if prompt_ms else None,
        ttft_ms=math.fsum(t.ttft_s for t in traces) / len(traces) * 1e3,
        end_to_end_s=math.fsum(t.total_s for t in traces) / len(traces),
        acceptance=acceptance if job.configuration.speculative else None,
        accepted_length=timed / max(cycles, 1),
        cycle_ms=math.fsum(t.predicted_ms for t in traces) / max(cycles, 1),
        memory_mib=memory.get("device_peak") or memory.get("buffers") or memory.get("rss"),
        memory=memory,
        watch=seen.watch,
        marks=tuple(marks),
        traces=tuple(traces),
        seed=settings.seed,
        load_s=served.load_s,
        wall_s=time.perf_counter() - clock,
        generating_s=generating,
        started_unix=started,
    )


def _enough(
    configuration: Configuration,
    traces: Sequence[RequestTrace],
    settings: Settings,
    tempo: Tempo | None,
) -> bool:
    """Whether the repeats that were asked for tell the mean well enough, those in a slow spell of
    the machine set aside.

    Slots that overlap are not repeated: their rate is over the wall, request by request it says
    nothing.
    """
    if settings.repeats < LEAST_REPEATS or not settings.precision or configuration.parallel > 1:
        return True
    if math.fsum(t.prompt_ms + t.predicted_ms for t in traces) >= 1e3 * LONG_S:
        return True
    limit = tempo.limit if tempo is not None else math.inf
    fast = [t for t in traces if t.probe_ms <= limit]
    wanted = len(traces) // (1 + max(t.repeat for t in traces)) * settings.repeats
    return len(fast) >= wanted / 2 and cycle_error(fast) <= settings.precision


def cycle_error(traces: Sequence[RequestTrace]) -> float:
    """Relative standard error of the mean cycle, as measured or by the probe, which is less.

    A cycle costs the same whatever the text and however much was accepted. Deviations are taken
    from the mean of the same prompt, since prompts differ in their context.
    """
    return min(_deviation(traces, probed) for probed in (False, True))


def _deviation(traces: Sequence[RequestTrace], probed: bool) -> float:
    if probed and not all(t.probe_ms for t in traces):
        return math.inf
    by_prompt: dict[str, list[float]] = {}
    for trace in traces:
        if trace.cycles and trace.predicted_ms > 0:
            cycle = trace.predicted_ms / trace.cycles
            by_prompt.setdefault(trace.prompt_id, []).append(
                cycle / trace.probe_ms if probed else cycle
            )
    relative = [v / (math.fsum(vs) / len(vs)) for vs in by_prompt.values() for v in vs]
    return relative_error(relative) if len(relative) > len(by_prompt) else 0.0


def _repeat_error(traces: Sequence[RequestTrace], rates: Sequence[float]) -> float:
    """Relative standard error of the mean over the repeats, as measured or by the probe, which is
    less: a machine that changed its pace made no unsteady cell. 0 for one repeat."""
    if len(rates) < 2:
        return 0.0
    if not all(t.probe_ms for t in traces):
        return relative_error(rates)
    spent: dict[int, float] = {}
    for trace in traces:
        even = trace.predicted_ms / trace.probe_ms
        spent[trace.repeat] = spent.get(trace.repeat, 0.0) + even
    return min(relative_error(rates), relative_error(list(spent.values())))


def failed(job: Job, workload: str, error: BrowndwarfError, *, seed: int) -> CellRecord:
    """The record of a cell that could not be measured, with the reason."""
    reason = {"kind": error.kind, "what": error.what, "why": error.why, "fix": error.fix}
    return msgspec.structs.replace(unmeasured(job, workload, "failed", reason), seed=seed)


def unmeasured(job: Job, workload: str, status: CellStatus, reason: dict[str, str]) -> CellRecord:
    """The record of a cell without figures; ``reason`` has kind, what, why, fix."""
    return CellRecord(
        **_names(job, workload), status=status, error=reason, started_unix=time.time()
    )


def predicted(job: Job, workload: str, prediction: Prediction) -> CellRecord:
    """The record of a cell that was not run: what the model expects."""
    return CellRecord(**_names(job, workload), status="predicted", predicted=prediction)


def _names(job: Job, workload: str) -> dict[str, Any]:
    configuration = job.configuration
    return {
        "id": cell_id(configuration, workload, job.role),
        "options": configuration.as_dict(),
        "target_type": configuration.target_type,
        "head_type": configuration.head_type,
        "n_max": configuration.n_max,
        "workload": workload,
        "role": job.role,
        "group": job.group,
    }


async def _one_run(
    served: Served,
    configuration: Configuration,
    texts: Sequence[tuple[str, str]],
    repeat: int,
    settings: Settings,
    waiting: _Waiting,
) -> tuple[list[RequestTrace], float]:
    """All prompts once. The rate is tokens over decode time; with several slots, over the wall.

    With ``parallel`` slots each is kept full: a closed loop over the prompts, repeated often
    enough that every slot has at least two requests.
    """
    slots = configuration.parallel
    work = list(enumerate(texts))
    if slots == 1:
        traces = []
        for index, (prompt_id, text) in work:
            seed = _seed(settings, index, repeat)
            before = await waiting.settle()
            trace = await _request(served, prompt_id, text, repeat, settings, seed=seed)
            beside = math.sqrt(before * await waiting.take())
            traces.append(msgspec.structs.replace(trace, probe_ms=beside))
        tokens = sum(max(t.predicted_n - 1, 0) for t in traces)
        spent = math.fsum(t.predicted_ms for t in traces) / 1e3
        return traces, tokens / spent if spent else 0.0
    rounds = max(1, math.ceil(2 * slots / len(work)))
    queue = iter([(i + r * len(work), texts[i]) for r in range(rounds) for i, _ in work])
    results: list[RequestTrace] = []

    async def slot() -> None:
        for index, (prompt_id, text) in queue:
            name = f"{prompt_id}#{index}"
            results.append(
                await _request(
                    served, name, text, repeat, settings, seed=_seed(settings, index, repeat)
                )
            )

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(slots):
            group.create_task(slot())
    window = time.perf_counter() - start
    results.sort(key=lambda t: t.prompt_id)
    return results, sum(t.predicted_n for t in results) / window


class _Waiting:
    """The tempo with one cell's patience; without a tempo all answers are 0."""

    def __init__(self, tempo: Tempo | None, wait_s: float) -> None:
        self._tempo, self._left = tempo, wait_s

    async def settle(self) -> float:
        """Wait for the fast pace, as long as there is patience."""
        if self._tempo is None:
            return 0.0
        answer, spent = await self._tempo.settle(self._left)
        self._left = max(self._left - spent, 0.0)
        return answer

    async def take(self) -> float:
        return await self._tempo.take() if self._tempo is not None else 0.0


def _seed(settings: Settings, index: int, repeat: int) -> int:
    """The same in every repeat; but made-up acceptance is a draw, and repeats draw anew."""
    return settings.seed + index + (1000 * repeat if settings.synthetic else 0)


async def _request(
    served: Served, prompt_id: str, text: str, repeat: int, settings: Settings, *, seed: int
) -> RequestTrace:
    answer = await served.complete(text, settings=settings, n_predict=settings.n_predict, seed=seed)
    timings = answer.timings
    if timings.predicted_n < 1 or not timings.predicted_ms >= 0:
        raise RequestFailed(
            f"the server's timings for {prompt_id} make no sense",
            why=f"predicted_n {timings.predicted_n}, predicted_ms {timings.predicted_ms}",
            fix="see the server's log in the run directory",
        )
    return RequestTrace(
        prompt_id=prompt_id,
        repeat=repeat,
        prompt_n=timings.prompt_n,
        prompt_ms=timings.prompt_ms,
        predicted_n=timings.predicted_n,
        predicted_ms=timings.predicted_ms,
        draft_n=timings.draft_n,
        draft_accepted=timings.draft_n_accepted,
        cache_n=timings.cache_n,
        ttft_s=answer.ttft_s,
        total_s=answer.total_s,
        stop=answer.stop,
        text_sha=hashlib.sha256(answer.text.encode()).hexdigest()[:16],
    )


async def _acceptance(
    served: Served, before: Counters, traces: Sequence[RequestTrace]
) -> tuple[Acceptance, bool]:
    """Acceptance of these requests, and whether the counters account for exactly them.

    A slot flushes its counters when it is released, a moment after the last byte went out, so
    a reading that is short is taken again.
    """
    drafted = sum(t.draft_n for t in traces)
    accepted = sum(t.draft_accepted for t in traces)
    after = await served.counters()
    for _ in range(20):
        if after.draft_tokens - before.draft_tokens >= drafted:
            break
        await asyncio.sleep(0.02)
        after = await served.counters()
    counted = after.draft_tokens - before.draft_tokens == drafted
    drafts = after.drafts - before.drafts
    earlier = list(before.per_position) + [0] * len(after.per_position)
    per_position = tuple(
        (late - early) / drafts if drafts else 0.0
        for late, early in zip(after.per_position, earlier, strict=False)
    )
    rate = accepted / drafted if drafted else 0.0
    return Acceptance(
        rate=rate, per_position=per_position, drafted=drafted, accepted=accepted, drafts=drafts
    ), counted


def _marks(
    configuration: Configuration,
    traces: Sequence[RequestTrace],
    acceptance: Acceptance,
    counted: bool,
    settings: Settings,
) -> list[str]:
    """What a reader must know about a cell before believing it."""
    marks = []
    if any(t.cache_n for t in traces):
        marks.append("cache-hit")
    if configuration.speculative:
        if not acceptance.drafted:
            raise RequestFailed(
                "the server drafted nothing although a head is loaded",
                why="no request reports draft_n: speculation is silently off",
                fix="see the server's log; does the head belong to this model?",
            )
        if not counted:
            marks.append("counters-disagree")
        if acceptance.rate < LOWEST_ACCEPTANCE and not settings.synthetic:
            marks.append("low-acceptance")
    return marks
