"""Request traces: everything measured of one request, one JSON line each, statistics later.

A trace keeps the arrival time of every event that carried text; nothing is averaged away. All
times but ``event_us`` are seconds from the start of the point, on the client's clock.

Token counts come from the server (``usage``, cross-checked with llama.cpp's ``timings``), never
from the length that was asked for and never from tokenizing the text again. Where the server
gives none, events are counted and the trace says so: with bundled events that is a lower bound.

Example:
    >>> for trace in read_traces(Path("out/traces.jsonl")):   # doctest: +SKIP
    ...     print(trace.prompt_id, trace.ttft_s)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from browndwarf.bench.answers import Answer
from browndwarf.bench.framing import Exchange
from browndwarf.engine.wire import Timings
from browndwarf.errors import RunFormatError
from browndwarf.files import storage_errors
from browndwarf.records import Record

Status = Literal["ok", "error", "cut"]

#: From this share of events to tokens on, each event is one token: the others gave no text yet.
ONE_PER_EVENT = 0.7
FLUSH_S = 1.0
FLUSH_COUNT = 64


class Trace(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One request.

    ``point`` is the concurrency, or the rate of an open loop. ``event_us`` are microseconds
    from ``sent_s``. ``n_from`` says where ``n`` comes from: ``usage``, ``timings`` or
    ``events``. ``marks``: ``no-usage``, ``wrong-usage``, ``cache-hit``.
    """

    id: int
    point: float
    prompt_id: str
    status: Status
    warmup: bool = False
    error: str = ""
    detail: str = ""
    scheduled_s: float = 0.0
    sent_s: float = 0.0
    headers_s: float = 0.0
    answer_s: float | None = None
    end_s: float = 0.0
    n: int = 0
    n_from: str = ""
    prompt_n: int = 0
    event_us: tuple[int, ...] = ()
    event_tokens: tuple[float, ...] = ()
    timings: Timings | None = None
    finish: str = ""
    marks: tuple[str, ...] = ()
    retry_after_s: float = 0.0
    connect_s: float = 0.0

    @property
    def first_s(self) -> float:
        """When the first event with text came."""
        return self.sent_s + (self.event_us[0] / 1e6 if self.event_us else 0.0)

    @property
    def last_s(self) -> float:
        """When the last event with text came."""
        return self.sent_s + (self.event_us[-1] / 1e6 if self.event_us else 0.0)

    @property
    def ttft_s(self) -> float:
        """Request written to first event with text."""
        return self.event_us[0] / 1e6 if self.event_us else 0.0

    @property
    def total_s(self) -> float:
        """Request written to the end of the answer."""
        return self.end_s - self.sent_s

    @property
    def lag_s(self) -> float:
        """How much later than scheduled the request was written."""
        return self.sent_s - self.scheduled_s


def make_trace(
    exchange: Exchange,
    answer: Answer,
    *,
    id: int,
    point: float,
    prompt_id: str,
    scheduled_s: float,
    origin_s: float,
    warmup: bool = False,
) -> Trace:
    """The trace of a judged exchange. ``origin_s``: the point's start on the same clock."""
    n, n_from, marks = count_tokens(answer)
    status: Status = "ok"
    if answer.fault:
        status = "cut" if answer.fault == "cut" else "error"
    sent = exchange.sent_s
    cached = answer.timings.cache_n if answer.timings else 0
    if answer.usage is not None and answer.usage.prompt_tokens_details is not None:
        cached = max(cached, answer.usage.prompt_tokens_details.cached_tokens or 0)
    if cached:
        marks = (*marks, "cache-hit")
    return Trace(
        id=id,
        point=point,
        prompt_id=prompt_id,
        status=status,
        warmup=warmup,
        error="" if status == "ok" else answer.fault,
        detail=answer.detail,
        scheduled_s=_us(scheduled_s - origin_s),
        sent_s=_us(sent - origin_s),
        headers_s=_us(exchange.first_byte_s - sent),
        answer_s=None if answer.answer_s is None else _us(answer.answer_s - sent),
        end_s=_us(exchange.end_s - origin_s),
        n=n,
        n_from=n_from,
        prompt_n=_prompt_tokens(answer),
        event_us=tuple(round((at - sent) * 1e6) for at in answer.at_s),
        event_tokens=_event_tokens(answer, n),
        timings=answer.timings,
        finish=answer.finish,
        marks=marks if status == "ok" else (),
        retry_after_s=_retry_after(exchange),
        connect_s=0.0 if exchange.reused else _us(sent - exchange.started_s),
    )


def count_tokens(answer: Answer) -> tuple[int, str, tuple[str, ...]]:
    """Tokens of an answer, where the number comes from, and marks.

    ``usage`` is believed unless ``timings`` contradict it, or it is far below the number of
    events with text (a token may be split over two events, but hardly often).
    """
    events = len(answer.at_s)
    timed = answer.timings.predicted_n if answer.timings else 0
    used = (answer.usage.completion_tokens or 0) if answer.usage else 0
    if not used:
        marks = ("no-usage",)
    elif (timed and timed != used) or used < 0.9 * events - 1:
        marks = ("wrong-usage",)
    else:
        return used, "usage", ()
    return (timed, "timings", marks) if timed else (events, "events", marks)


def _event_tokens(answer: Answer, n: int) -> tuple[float, ...]:
    """Tokens of each event; empty where each is one.

    Exact from continuous usage; else by length of text, which only bundled events need.
    """
    events = len(answer.at_s)
    counts = answer.usage_counts
    if events and len(counts) == events and counts[-1] == n:
        steps = [counts[0], *(b - a for a, b in itertools.pairwise(counts))]
        return tuple(float(step) for step in steps) if set(steps) != {1} else ()
    if not events or n == 0 or events >= ONE_PER_EVENT * n:
        return ()
    total = sum(answer.text_lengths)
    return tuple(round(n * length / total, 3) for length in answer.text_lengths)


def _prompt_tokens(answer: Answer) -> int:
    if answer.usage is not None and answer.usage.prompt_tokens:
        return answer.usage.prompt_tokens
    return answer.timings.prompt_n + answer.timings.cache_n if answer.timings else 0


def _retry_after(exchange: Exchange) -> float:
    text = exchange.headers.get("retry-after", "")
    try:
        return max(0.0, float(text)) if text else 0.0
    except ValueError:
        return 1.0  # a date; a short pause will do


def _us(seconds: float) -> float:
    return round(seconds, 6)


class TraceWriter:
    """Appends traces to a file as they come; a crash loses those of the last second."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._flushed_s = 0.0
        self._pending: list[bytes] = []
        self._encoder = msgspec.json.Encoder()
        with storage_errors(path, "write the traces"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")

    def write(self, trace: Trace) -> None:
        """Add one trace."""
        self._pending.append(self._encoder.encode(trace))
        if time.monotonic() - self._flushed_s > FLUSH_S or len(self._pending) >= FLUSH_COUNT:
            self.flush()

    def flush(self) -> None:
        """Put what is pending on disk."""
        if self._pending:
            self._flushed_s = time.monotonic()
            with storage_errors(self.path, "write the traces"):
                self._file.write(b"\n".join(self._pending) + b"\n")
                self._file.flush()
            self._pending.clear()

    def tell(self) -> int:
        """Bytes written so far, after a flush: where the next trace will begin."""
        self.flush()
        return self._file.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.flush()
        finally:
            self._file.close()


def read_traces(
    path: Path, *, start: int = 0, on_bad: Callable[[int], None] | None = None
) -> Iterator[Trace]:
    """Traces of a file in order, one at a time.

    Args:
        start: byte to begin at.
        on_bad: told the number of a line that is no trace; without it such a line raises. The
            last line of a run that was killed may be cut off.

    Raises:
        StorageError: the file cannot be read.
        RunFormatError: a line is no trace, and ``on_bad`` is not given.
    """
    decoder = msgspec.json.Decoder(Trace)
    with storage_errors(path, "read the traces"), path.open("rb") as file:
        file.seek(start)
        for number, line in enumerate(file, 1):
            try:
                trace = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                if on_bad is None:
                    raise RunFormatError(
                        f"line {number} of {path} is not a request trace",
                        why=str(exc),
                        fix="it is damaged or of another version; run the benchmark again",
                    ) from exc
                on_bad(number)
                continue
            yield trace
