"""What llama-server says over HTTP, as typed values: timings, counters, streamed events.

Boundary: bytes in, values out; no sockets here. Foreign JSON is validated once, in this module.

Derived figures follow the server's clock, which starts when the first token is out: that token
belongs to the prompt pass, and the other ``predicted_n - 1`` to the verify cycles.

Example:
    >>> t = Timings(predicted_n=25, predicted_ms=36.0, draft_n=30, draft_n_accepted=12)
    >>> t.cycles, t.cycle_ms, t.accepted_length
    (12, 3.0, 2.0)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from browndwarf.errors import RequestFailed

_METRIC = re.compile(r"^(?:llamacpp:)?(\w+)(?:\{([^}]*)\})?\s+([-+.\deE]+|NaN|nan|[+-]?Inf)\s*$")
_POSITION = re.compile(r'position="(\d+)"')


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """``timings`` of an answer; times in milliseconds. ``draft_*`` are 0 if nothing was drafted."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0

    @property
    def steps(self) -> int:
        """Decode calls of the target, the prompt pass included."""
        return self.predicted_n - self.draft_n_accepted

    @property
    def cycles(self) -> int:
        """Verify cycles (plain decode steps without speculation), the prompt pass excluded."""
        return max(0, self.predicted_n - 1 - self.draft_n_accepted)

    @property
    def cycle_ms(self) -> float:
        """Milliseconds per cycle; nan if there was none."""
        return self.predicted_ms / self.cycles if self.cycles else float("nan")

    @property
    def accepted_length(self) -> float:
        """Tokens per cycle, the target's own included; nan if there was no cycle."""
        return (self.predicted_n - 1) / self.cycles if self.cycles else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the drafted tokens; nan if none was drafted."""
        return self.draft_n_accepted / self.draft_n if self.draft_n else float("nan")

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second after the first; nan below two tokens. Equals length / cycle time."""
        if self.predicted_n < 2 or self.predicted_ms <= 0:
            return float("nan")
        return (self.predicted_n - 1) / self.predicted_ms * 1000

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens per second, cached ones not counted; nan if none was processed."""
        if not self.prompt_n or self.prompt_ms <= 0:
            return float("nan")
        return self.prompt_n / self.prompt_ms * 1000


class SpecCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Speculation counters of ``/metrics`` since the start; subtract two for an interval."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()

    def __sub__(self, other: SpecCounters) -> SpecCounters:
        pairs = zip_longest(self.per_position, other.per_position, fillvalue=0)
        return SpecCounters(
            drafts=self.drafts - other.drafts,
            draft_tokens=self.draft_tokens - other.draft_tokens,
            accepted=self.accepted - other.accepted,
            per_position=tuple(a - b for a, b in pairs),
        )

    @property
    def rates(self) -> tuple[float, ...]:
        """Unconditional acceptance per position: accepted there over drafts."""
        return tuple(n / self.drafts for n in self.per_position) if self.drafts else ()


class Event(msgspec.Struct, frozen=True):
    """One streamed event: when its last byte came (perf_counter seconds), and its JSON."""

    at_s: float
    data: dict[str, Any]


class Props(msgspec.Struct, frozen=True, kw_only=True):
    """The part of ``/props`` that browndwarf reads; ``raw`` is all of it."""

    model_path: str = ""
    total_slots: int = 0
    n_ctx: int = 0
    chat_template: str = ""
    build_info: str = ""
    raw: dict[str, Any] = {}


def parse_timings(data: dict[str, Any]) -> Timings:
    """``timings`` of an answer; zeros where it has none.

    Raises:
        RequestFailed: a field is no number.
    """
    try:
        return msgspec.convert(data.get("timings") or {}, Timings, strict=False)
    except msgspec.ValidationError as exc:
        raise RequestFailed("llama-server sent timings that make no sense", why=str(exc)) from exc


def parse_props(data: dict[str, Any]) -> Props:
    """Typed view of ``/props``; unknown or odd fields stay at their defaults."""

    def text(key: str) -> str:
        value = data.get(key)
        return value if isinstance(value, str) else ""

    settings = data.get("default_generation_settings")
    n_ctx = settings.get("n_ctx", 0) if isinstance(settings, dict) else 0
    slots = data.get("total_slots", 0)
    return Props(
        model_path=text("model_path"),
        total_slots=slots if isinstance(slots, int) else 0,
        n_ctx=n_ctx if isinstance(n_ctx, int) else 0,
        chat_template=text("chat_template"),
        build_info=text("build_info"),
        raw=data,
    )


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as a dict, ``llamacpp:`` dropped; labelled samples keep their label."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if match := _METRIC.match(line):
            name = match[1] + (f"{{{match[2]}}}" if match[2] else "")
            try:
                values[name] = float(match[3])
            except ValueError:
                continue
    return values


def spec_counters(text: str) -> SpecCounters:
    """Speculation counters of ``/metrics``; zeros where a build has none."""
    values = parse_metrics(text)

    def count(name: str) -> int:
        value = values.get(f"spec_decode_num_{name}_total", 0.0)
        return int(value) if abs(value) < 1e18 else 0

    positions: dict[int, int] = {}
    for name, value in values.items():
        if name.startswith("spec_decode_num_accepted_tokens_per_pos_total{"):
            match = _POSITION.search(name)
            if match and int(match[1]) < 1024 and abs(value) < 1e18:
                positions[int(match[1])] = int(value)
    return SpecCounters(
        drafts=count("drafts"),
        draft_tokens=count("draft_tokens"),
        accepted=count("accepted_tokens"),
        per_position=tuple(positions.get(i, 0) for i in range(max(positions, default=-1) + 1)),
    )


def parse_stream(chunks: Sequence[tuple[float, bytes]]) -> list[Event]:
    """Server-sent events from chunks as they came; each event gets its last chunk's time.

    ``[DONE]`` and comments are dropped.

    Args:
        chunks: (perf_counter seconds, bytes) in order of arrival.

    Raises:
        RequestFailed: an event is not JSON, or is an error that the server reports.
    """
    events: list[Event] = []
    pending = b""
    for at_s, data in chunks:
        pending += data
        *lines, pending = pending.split(b"\n")
        events += [event for line in lines if (event := _event(line, at_s))]
    if pending and chunks and (event := _event(pending, chunks[-1][0])):
        events.append(event)
    return events


def _event(line: bytes, at_s: float) -> Event | None:
    field, _, value = line.strip().partition(b":")
    value = value.strip()
    if field not in (b"data", b"error") or not value or value == b"[DONE]":
        return None
    data = parse_object(value)
    if field == b"error":
        data = {"error": data}
    if "error" in data:
        raise error_from_body(200, data)
    return Event(at_s, data)


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        RequestFailed: it is something else.
    """
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        shown = body[:120].decode("utf-8", "replace")
        raise RequestFailed(
            "llama-server sent something that is not a JSON object",
            why=f"{exc}; it begins with {shown!r}",
            fix="check that the address belongs to a llama-server",
        ) from exc


def error_from_body(status: int, data: object) -> RequestFailed:
    """RequestFailed from llama.cpp's error JSON (``{"error": {message, type, code}}``)."""
    inner = data.get("error", data) if isinstance(data, dict) else data
    message, kind = str(inner), ""
    if isinstance(inner, dict):
        message = str(inner.get("message", inner))
        kind = str(inner.get("type", ""))
        code = inner.get("code")
        status = code if isinstance(code, int) else status
    fixes = {
        "exceed_context_size_error": "send a shorter prompt, or start with a larger --ctx",
        "unavailable_error": "wait until the model is loaded",
        "authentication_error": "give the server's API key",
        "not_supported_error": "start the server with the feature that the message names",
    }
    return RequestFailed(
        f"llama-server answered a request with error {status}",
        why=f"{kind}: {message}" if kind else message,
        fix=fixes.get(kind, "the server's log tells more"),
    )
