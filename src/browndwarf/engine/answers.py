"""Answers of llama-server as typed values: completions and chat turns, streamed or whole.

Boundary: takes the raw bytes of an answer with their arrival times; ``client`` collects them.

Example:
    >>> body = b'{"content": "hi", "stop": true, "stop_type": "eos"}'
    >>> completion_of(RawAnswer(0.0, 2.0, [(1.5, body)]), stream=False).ttft_s
    1.5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from browndwarf.engine import wire
from browndwarf.engine.wire import Timings
from browndwarf.errors import RequestFailed


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One finished ``/completion``. ``*_s`` fields named ``at`` count from perf_counter's zero.

    ``event_s`` and ``event_tokens`` say when each streamed event came and how many tokens it
    carried; both are empty for an answer that was not streamed, where ``first_s`` is when the
    answer's first byte came.

    llama-server leaves out of a stream the ids of tokens that end in the middle of a character.
    Where every id matters, ask with ``stream=False``; ``timings.predicted_n`` is right always.
    """

    text: str
    tokens: tuple[int, ...]
    sent_s: float
    first_s: float
    last_s: float
    timings: Timings
    stop: str
    truncated: bool = False
    event_s: tuple[float, ...] = ()
    event_tokens: tuple[int, ...] = ()
    raw: dict[str, Any] = {}

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to the first token."""
        return self.first_s - self.sent_s

    @property
    def total_s(self) -> float:
        """Seconds from the request to the last byte."""
        return self.last_s - self.sent_s


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """One finished ``/v1/chat/completions``; ``raw`` is the last JSON object of the answer."""

    text: str
    reasoning: str
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    sent_s: float
    first_s: float
    last_s: float
    timings: Timings
    prompt_tokens: int = 0
    completion_tokens: int = 0
    event_s: tuple[float, ...] = ()
    raw: dict[str, Any] = {}

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to the first token."""
        return self.first_s - self.sent_s

    @property
    def total_s(self) -> float:
        """Seconds from the request to the last byte."""
        return self.last_s - self.sent_s


class RawAnswer(msgspec.Struct, frozen=True):
    """Raw bytes of an answer with their arrival times, from perf_counter."""

    sent_s: float
    last_s: float
    chunks: list[tuple[float, bytes]]

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.chunks)

    @property
    def first_byte_s(self) -> float:
        return self.chunks[0][0] if self.chunks else self.last_s


def _convert(value: object, kind: Any, name: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        raise RequestFailed(f"llama-server sent odd {name}", why=str(exc)) from exc


def tokens_in(data: Mapping[str, Any]) -> list[int]:
    """``tokens`` of an answer.

    Raises:
        RequestFailed: they are no list of numbers.
    """
    return list(_convert(data.get("tokens") or [], list[int], "tokens"))


def _cut(why: str) -> RequestFailed:
    return RequestFailed(
        "llama-server ended an answer before it was finished",
        why=why,
        fix="the server's log tells why",
    )


def completion_of(answer: RawAnswer, *, stream: bool) -> Completion:
    """The completion in an answer.

    Raises:
        RequestFailed: the server reports an error in it, or it ends too early.
    """
    return _streamed(answer) if stream else _whole(answer)


def _whole(answer: RawAnswer) -> Completion:
    data = wire.parse_object(answer.body)
    if "error" in data:
        raise wire.error_from_body(200, data)
    return _finished(data, answer, str(data.get("content", "")), tokens_in(data))


def _streamed(answer: RawAnswer) -> Completion:
    events = wire.parse_stream(answer.chunks)
    if not events or not events[-1].data.get("stop"):
        raise _cut("the stream holds no final event")
    carrying = [e for e in events if e.data.get("content") or e.data.get("tokens")]
    tokens = [tokens_in(event.data) for event in carrying]
    return _finished(
        events[-1].data,
        answer,
        "".join(str(event.data.get("content", "")) for event in events),
        [token for part in tokens for token in part],
        first_s=carrying[0].at_s if carrying else events[0].at_s,
        event_s=tuple(event.at_s for event in carrying),
        event_tokens=tuple(len(part) for part in tokens),
    )


def _finished(
    data: dict[str, Any],
    answer: RawAnswer,
    text: str,
    tokens: list[int],
    *,
    first_s: float | None = None,
    event_s: tuple[float, ...] = (),
    event_tokens: tuple[int, ...] = (),
) -> Completion:
    return Completion(
        text=text,
        tokens=tuple(tokens),
        sent_s=answer.sent_s,
        first_s=answer.first_byte_s if first_s is None else first_s,
        last_s=answer.last_s,
        timings=wire.parse_timings(data),
        stop=_stop_reason(data),
        truncated=bool(data.get("truncated", False)),
        event_s=event_s,
        event_tokens=event_tokens,
        raw=data,
    )


def _stop_reason(data: Mapping[str, Any]) -> str:
    """``eos``, ``limit``, ``word`` or ``none``; older builds have one flag for each."""
    if isinstance(kind := data.get("stop_type"), str):
        return kind
    for word in ("eos", "limit", "word"):
        if data.get(f"stopped_{word}"):
            return word
    return "none"


def chat_of(answer: RawAnswer, *, stream: bool) -> ChatCompletion:
    """The chat turn in an answer.

    Raises:
        RequestFailed: as ``completion_of``.
    """
    events = (
        wire.parse_stream(answer.chunks)
        if stream
        else [wire.Event(answer.first_byte_s, wire.parse_object(answer.body))]
    )
    if events and "error" in events[-1].data:
        raise wire.error_from_body(200, events[-1].data)
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    finish = ""
    first_s: float | None = None
    times: list[float] = []
    for event in events:
        for choice in event.data.get("choices") or []:
            part = choice.get("delta") or choice.get("message") or {}
            text.append(part.get("content") or "")
            reasoning.append(part.get("reasoning_content") or "")
            _merge_calls(calls, part.get("tool_calls") or [])
            finish = choice.get("finish_reason") or finish
            if any(part.get(key) for key in ("content", "reasoning_content", "tool_calls")):
                first_s = event.at_s if first_s is None else first_s
                times.append(event.at_s)
    if not finish:
        raise _cut("the answer holds no finish reason")
    last = next((e.data for e in reversed(events) if e.data.get("timings")), events[-1].data)
    usage = last.get("usage") or events[-1].data.get("usage") or {}
    return ChatCompletion(
        text="".join(text),
        reasoning="".join(reasoning),
        tool_calls=tuple(calls),
        finish_reason=finish,
        sent_s=answer.sent_s,
        first_s=answer.first_byte_s if first_s is None else first_s,
        last_s=answer.last_s,
        timings=wire.parse_timings(last),
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        event_s=tuple(times) if stream else (),
        raw=last,
    )


def _merge_calls(calls: list[dict[str, Any]], parts: Sequence[Mapping[str, Any]]) -> None:
    """Join streamed pieces of tool calls by their index."""
    for part in parts:
        index = part.get("index", len(calls))
        function = dict(part.get("function") or {})
        if isinstance(index, int) and index < len(calls):
            known = calls[index]["function"]
            known["arguments"] = known.get("arguments", "") + (function.get("arguments") or "")
        else:
            calls.append({**part, "function": function})
