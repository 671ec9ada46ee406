"""From request traces to the figures of one point, exactly as defined in docs/serving.md.

Pure: traces in, a record out; nothing is taken from anywhere but the traces and the window.
Latency statistics use completed requests only; throughput counts every token that came inside
the window, those of requests that the time cap cut short included.

Example:
    >>> point = summarize(traces, point=8, window=Window(0.0, 30.0))  # doctest: +SKIP
    >>> point.tpot_ms["p50"], point.tokens_per_step                   # doctest: +SKIP
    (11.2, 2.31)
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from browndwarf.bench.traces import Trace
from browndwarf.errors import UsageError
from browndwarf.records import Acceptance, Record
from browndwarf.units import parse_duration

PERCENTILES = (50, 90, 95, 99)
#: Events closer than this share of the mean gap belong to one burst, where nothing says better.
SAME_BURST = 0.25
SAME_BURST_MAX_S = 0.005
EXAMPLES = 3

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Window:
    """The measurement window in seconds from the point's start; ``capped`` by the time cap.

    ``full_s`` to ``draining_s`` is the part in which all slots were busy.
    """

    start_s: float
    end_s: float
    capped: bool = False
    full_s: float = 0.0
    draining_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Length."""
        return max(self.end_s - self.start_s, 0.0)


class Slo(Record, frozen=True, kw_only=True):
    """Limits that a good request keeps, in seconds; None is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    total_s: float | None = None

    def kept_by(self, ttft_s: float, tpot_s: float | None, total_s: float) -> bool:
        """Whether a completed request keeps all limits; an unknown TPOT keeps its limit."""
        pairs = ((self.ttft_s, ttft_s), (self.tpot_s, tpot_s), (self.total_s, total_s))
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


def parse_slo(text: str) -> Slo:
    """``ttft=2s,tpot=80ms,e2e=10s`` as limits.

    Raises:
        UsageError: an unknown name or no duration.
    """
    names = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "total_s"}
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name.strip() not in names:
            raise UsageError(
                f"{part.strip()!r} is no service level",
                why=f"known are {', '.join(names)}",
                fix="write --slo ttft=2s,tpot=80ms",
            )
        limits[names[name.strip()]] = parse_duration(value)
    return Slo(**limits)


class PointRecord(Record, frozen=True, kw_only=True):
    """One point of a run: a concurrency, or the rate of an open loop.

    ``decode_tok_s`` is output tokens inside the window over the window; ``steady_tok_s`` the
    same while all slots were busy. ``prefill_tok_s`` is prompt tokens over the server's prompt
    time (``prefill_from`` = ``server``), or over time to first token (``client``);
    ``prompt_tok_s`` is prompt tokens of completed requests over the window.
    """

    concurrency: int | None
    rate: float | None = None
    requests: int = 0
    completed: int = 0
    truncated: int = 0
    errors: dict[str, int] = msgspec.field(default_factory=dict)
    error_examples: dict[str, list[str]] = msgspec.field(default_factory=dict)
    marks: dict[str, int] = msgspec.field(default_factory=dict)
    tokens_from: dict[str, int] = msgspec.field(default_factory=dict)
    duration_s: float = 0.0
    stopped: str = ""
    output_tokens: float = 0.0
    prompt_tokens: int = 0
    decode_tok_s: float = 0.0
    steady_tok_s: float | None = None
    prefill_tok_s: float | None = None
    prefill_from: str = ""
    prompt_tok_s: float = 0.0
    requests_s: float = 0.0
    ttft_ms: dict[str, float] = msgspec.field(default_factory=dict)
    answer_ms: dict[str, float] = msgspec.field(default_factory=dict)
    tpot_ms: dict[str, float] = msgspec.field(default_factory=dict)
    tpot_pooled_ms: float | None = None
    step_gap_ms: dict[str, float] = msgspec.field(default_factory=dict)
    longest_stall_ms: float | None = None
    tokens_per_step: float | None = None
    e2e_ms: dict[str, float] = msgspec.field(default_factory=dict)
    schedule_lag_ms: dict[str, float] = msgspec.field(default_factory=dict)
    server_prompt_ms: dict[str, float] = msgspec.field(default_factory=dict)
    server_tpot_ms: dict[str, float] = msgspec.field(default_factory=dict)
    acceptance: Acceptance | None = None
    accepted_length: float | None = None
    goodput: dict[str, float] | None = None
    memory_mib: float | None = None
    watch: dict[str, float] = msgspec.field(default_factory=dict)
    client: dict[str, float] = msgspec.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def error_rate(self) -> float:
        """Errors over requests that ended by themselves."""
        failed = sum(self.errors.values())
        ended = failed + self.completed
        return failed / ended if ended else 0.0


def burst_starts(at_s: Floats, steps: int | None = None) -> npt.NDArray[np.intp]:
    """Indices of the events that begin a burst (the tokens of one step); the first is 0.

    Where the number of steps is known from the server, the largest gaps part them. Otherwise a
    gap under a quarter of the mean gap (and under 5 ms) stays inside a burst.
    """
    gaps = np.diff(at_s)
    if not len(gaps):
        return np.zeros(min(len(at_s), 1), dtype=np.intp)
    if steps is not None and 0 < steps <= len(gaps):
        starts = np.sort(np.argpartition(gaps, len(gaps) - steps)[len(gaps) - steps :])
        starts = starts[gaps[starts] > 0]
    else:
        limit = min(SAME_BURST * float(gaps.mean()), SAME_BURST_MAX_S)
        starts = np.flatnonzero(gaps > limit)
    return np.concatenate(([0], starts + 1)).astype(np.intp)


@dataclass(slots=True)
class RequestFigures:
    """What one completed request says. ``tpot_s`` is None if all its tokens came at once."""

    ttft_s: float
    total_s: float
    tpot_s: float | None
    decode_s: float
    decode_tokens: float
    gaps_s: Floats
    bursts: int


def request_figures(trace: Trace) -> RequestFigures:
    """Figures of one request with at least one event that carries text.

    TPOT = (t_last - t_first) / (n - tokens in the first burst).
    """
    at = np.asarray(trace.event_us, dtype=np.float64) / 1e6
    steps = None
    if trace.timings is not None and trace.timings.draft_n and not trace.event_tokens:
        steps = trace.timings.cycles
    starts = burst_starts(at, steps)
    stop = int(starts[1]) if len(starts) > 1 else len(at)
    first = math.fsum(trace.event_tokens[:stop]) if trace.event_tokens else float(stop)
    rest = trace.n - max(round(first), 1)
    span = float(at[-1] - at[0])
    return RequestFigures(
        ttft_s=trace.ttft_s,
        total_s=trace.total_s,
        tpot_s=span / rest if rest > 0 and len(starts) > 1 else None,
        decode_s=span,
        decode_tokens=float(rest) if len(starts) > 1 else 0.0,
        gaps_s=np.diff(at[starts]),
        bursts=len(starts),
    )


@dataclass
class _Sums:
    """What is gathered in one pass over the traces; arrays hold seconds."""

    ttft: array[float] = field(default_factory=lambda: array("d"))
    answer: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))
    total: array[float] = field(default_factory=lambda: array("d"))
    lag: array[float] = field(default_factory=lambda: array("d"))
    server_prompt: array[float] = field(default_factory=lambda: array("d"))
    server_tpot: array[float] = field(default_factory=lambda: array("d"))
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    marks: Counter[str] = field(default_factory=Counter)
    origins: Counter[str] = field(default_factory=Counter)
    cut: list[Trace] = field(default_factory=list)
    decode_s: float = 0.0
    decode_tokens: float = 0.0
    in_window: float = 0.0
    in_steady: float = 0.0
    events: int = 0
    good: int = 0
    prompt_all: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    stepped: int = 0
    n: int = 0


def summarize(
    traces: Iterable[Trace], *, window: Window, slo: Slo | None = None, point: float = 0.0
) -> PointRecord:
    """The figures of one point. Warm-up traces are left out; concurrency is the caller's."""
    sums = _Sums()
    for trace in traces:
        if trace.warmup:
            continue
        sums.counts[trace.status] += 1
        if trace.status == "error":
            sums.errors[trace.error] += 1
            examples = sums.examples.setdefault(trace.error, [])
            if len(examples) < EXAMPLES and trace.detail not in examples:
                examples.append(trace.detail)
            continue
        sums.lag.append(trace.lag_s)
        if trace.status == "cut":
            sums.cut.append(trace)
            continue
        _completed(sums, trace, window, slo)
    # How many tokens an unfinished request has got is known from its events only.
    per_event = sums.n / sums.events if sums.events else 1.0
    for trace in sums.cut:
        _in_windows(sums, trace, window, per_event)
    return _record(sums, window, slo, point)


def _completed(sums: _Sums, trace: Trace, window: Window, slo: Slo | None) -> None:
    figures = request_figures(trace)
    sums.ttft.append(figures.ttft_s)
    sums.total.append(figures.total_s)
    if trace.answer_s is not None:
        sums.answer.append(trace.answer_s)
    if figures.tpot_s is not None:
        sums.tpot.append(figures.tpot_s)
        sums.decode_s += figures.decode_s
        sums.decode_tokens += figures.decode_tokens
    sums.gaps.extend(figures.gaps_s)
    sums.stepped += max(figures.bursts - 1, 0)
    sums.marks.update(trace.marks)
    sums.origins[trace.n_from] += 1
    sums.events += len(trace.event_us)
    sums.n += trace.n
    sums.prompt_all += trace.prompt_n
    if slo is not None:
        sums.good += slo.kept_by(figures.ttft_s, figures.tpot_s, figures.total_s)
    timings = trace.timings
    if timings is not None:
        sums.prompt_n += timings.prompt_n
        sums.prompt_ms += timings.prompt_ms
        sums.server_prompt.append(timings.prompt_ms / 1e3)
        if timings.predicted_n > 1:
            sums.server_tpot.append(timings.predicted_ms / 1e3 / (timings.predicted_n - 1))
        sums.drafted += timings.draft_n
        sums.accepted += timings.draft_n_accepted
        sums.steps += timings.cycles
    _in_windows(sums, trace, window, trace.n / max(len(trace.event_us), 1))


def _in_windows(sums: _Sums, trace: Trace, window: Window, per_event: float) -> None:
    """Count tokens inside the window, each event with its share."""
    at = np.asarray(trace.event_us, dtype=np.float64) / 1e6 + trace.sent_s
    if not len(at):
        return
    weights: Floats | float = per_event
    if trace.event_tokens and trace.status == "ok":
        weights = np.asarray(trace.event_tokens)
    tokens = np.broadcast_to(weights, at.shape)
    # Traces are rounded to microseconds, the window is not.
    inside = (at >= window.start_s) & (at <= window.end_s + 1e-6)
    sums.in_window += float(tokens[inside].sum())
    if window.draining_s > window.full_s:
        sums.in_steady += float(tokens[(at >= window.full_s) & (at < window.draining_s)].sum())


def _record(sums: _Sums, window: Window, slo: Slo | None, point: float) -> PointRecord:
    seconds = window.seconds or math.nan
    steady = window.draining_s - window.full_s
    completed = sums.counts["ok"]
    prefill, source = _prefill(sums)
    goodput = None
    if slo is not None and completed:
        ended = completed + sum(sums.errors.values())
        goodput = {"requests_s": sums.good / seconds, "share": sums.good / ended}
    return PointRecord(
        concurrency=int(point),
        requests=sum(sums.counts.values()),
        completed=completed,
        truncated=sums.counts["cut"],
        errors=dict(sums.errors.most_common()),
        error_examples=sums.examples,
        marks=dict(sums.marks),
        tokens_from=dict(sums.origins),
        duration_s=window.seconds,
        output_tokens=sums.in_window,
        prompt_tokens=sums.prompt_all,
        decode_tok_s=_ratio(sums.in_window, window.seconds) or 0.0,
        steady_tok_s=sums.in_steady / steady if steady > 0 else None,
        prefill_tok_s=prefill,
        prefill_from=source,
        prompt_tok_s=_ratio(sums.prompt_all, window.seconds) or 0.0,
        requests_s=_ratio(completed, window.seconds) or 0.0,
        ttft_ms=percentiles_ms(sums.ttft),
        answer_ms=percentiles_ms(sums.answer),
        tpot_ms=percentiles_ms(sums.tpot),
        tpot_pooled_ms=_ratio(sums.decode_s * 1e3, sums.decode_tokens),
        step_gap_ms=percentiles_ms(sums.gaps),
        longest_stall_ms=max(sums.gaps) * 1e3 if sums.gaps else None,
        tokens_per_step=_ratio(sums.decode_tokens, sums.stepped),
        e2e_ms=percentiles_ms(sums.total),
        schedule_lag_ms=percentiles_ms(sums.lag),
        server_prompt_ms=percentiles_ms(sums.server_prompt),
        server_tpot_ms=percentiles_ms(sums.server_tpot),
        acceptance=_acceptance(sums),
        accepted_length=_ratio(sums.steps + sums.accepted, sums.steps),
        goodput=goodput,
    )


def _prefill(sums: _Sums) -> tuple[float | None, str]:
    if sums.prompt_ms > 0 and len(sums.server_prompt) == len(sums.ttft):
        return sums.prompt_n / sums.prompt_ms * 1e3, "server"
    waited = math.fsum(sums.ttft)
    return (sums.prompt_all / waited, "client") if sums.prompt_all and waited else (None, "")


def _acceptance(sums: _Sums) -> Acceptance | None:
    if not sums.drafted:
        return None
    return Acceptance(
        rate=sums.accepted / sums.drafted,
        per_position=(),
        drafted=sums.drafted,
        accepted=sums.accepted,
    )


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > 0 else None


def percentiles_ms(seconds: array[float]) -> dict[str, float]:
    """``{"p50": ..., "p99": ..., "mean": ...}`` in milliseconds; empty without values."""
    if not seconds:
        return {}
    values = np.frombuffer(seconds, dtype=np.float64) * 1e3
    found: Mapping[str, float] = {
        f"p{q}": float(v)
        for q, v in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
    }
    return {**found, "mean": float(values.mean())}
