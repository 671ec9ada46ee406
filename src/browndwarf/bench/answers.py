"""Streamed answers of OpenAI-compatible servers: from raw pieces to events with text.

Pure: bytes in, values out, after the answer has ended. Understands chat and plain completions,
reasoning under both names, tool calls, usage at the end or in every event (continuous usage),
llama.cpp's ``timings``, CRLF lines, comments, events split anywhere, and errors inside a 200.

An event *carries text* if it has content, reasoning or tool-call arguments that are not empty;
the event that only names the role does not.

Example:
    >>> answer = parse_answer([(1.0, b'data: {"choices":[{"delta":{"content":"Hi"}}]}\\n\\n')])
    >>> answer.at_s, answer.text_lengths
    ([1.0], [2])
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from browndwarf.bench.framing import Exchange, Pieces
from browndwarf.engine.wire import Timings

T = TypeVar("T")

_NOTHING = msgspec.Raw()


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: msgspec.Raw = _NOTHING
    timings: msgspec.Raw = _NOTHING
    error: msgspec.Raw = _NOTHING
    object: str | None = None
    message: str | None = None


class Details(msgspec.Struct, frozen=True):
    """Where a server says how much of the prompt came out of its cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """``usage`` as it came."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None


_chunk = msgspec.json.Decoder(_Chunk)
_usage = msgspec.json.Decoder(Usage, strict=False)
_timings = msgspec.json.Decoder(Timings, strict=False)


@dataclass(slots=True)
class Answer:
    """What a stream held. Lists run over the events that carry text.

    ``usage_counts`` are cumulative token counts where every event has usage, else empty.
    ``fault`` is ``error-in-stream``, ``bad-event``, ``not-a-stream``, ``incomplete``,
    ``no-text``, or empty.
    """

    at_s: list[float] = field(default_factory=list)
    text_lengths: list[int] = field(default_factory=list)
    usage_counts: list[int] = field(default_factory=list)
    answer_s: float | None = None
    finish: str = ""
    done: bool = False
    usage: Usage | None = None
    timings: Timings | None = None
    events: int = 0
    fault: str = ""
    detail: str = ""


def parse_answer(pieces: Pieces) -> Answer:
    """Events of a body; each has the time at which its last byte came. Never raises."""
    answer = Answer()
    pending = b""
    at_s = 0.0
    for at_s, data in pieces:
        if pending:
            data = pending + data
        *lines, pending = data.split(b"\n")
        for line in lines:
            if line[:5] == b"data:":
                _take(answer, at_s, line[5:])
                if answer.fault:
                    return answer
            elif line[:6] == b"error:":
                _fail(answer, "error-in-stream", line[6:])
                return answer
    if pending[:5] == b"data:":
        _take(answer, at_s, pending[5:])
    return answer


def judge(exchange: Exchange) -> Answer:
    """The answer of an exchange with its one fault class: transport first, then content.

    HTTP errors are ``http-STATUS``, and ``rate-limited`` for 429.
    """
    if exchange.status >= 400:
        answer = Answer()
        name = "rate-limited" if exchange.status == 429 else f"http-{exchange.status}"
        _fail(answer, exchange.fault or name, exchange.body)
        return answer
    answer = parse_answer(exchange.pieces)
    if exchange.fault and not (exchange.fault == "reset" and answer.done):
        if not answer.fault or exchange.fault == "cut":
            answer.fault, answer.detail = exchange.fault, exchange.detail
    elif not answer.fault:
        _judge_whole(answer, exchange)
    return answer


def _judge_whole(answer: Answer, exchange: Exchange) -> None:
    if not answer.events:
        body = exchange.body
        inside = b'"error"' in body[:200]
        _fail(answer, "error-in-stream" if inside else "not-a-stream", body)
    elif not answer.done and not answer.finish:
        _fail(answer, "incomplete", b"the stream ended without a finish reason or [DONE]")
    elif not answer.at_s:
        _fail(answer, "no-text", b"no event of the answer carries text")


def _take(answer: Answer, at_s: float, value: bytes) -> None:
    value = value.strip()
    if not value:
        return
    if value == b"[DONE]":
        answer.done = True
        return
    try:
        chunk = _chunk.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        _fail(answer, "bad-event", f"{exc}: ".encode() + value)
        return
    answer.events += 1
    if (chunk.error and chunk.error != b"null") or chunk.object == "error":
        _fail(answer, "error-in-stream", bytes(chunk.error) or (chunk.message or "").encode())
        return
    length = 0
    for choice in chunk.choices or ():
        length += _text_length(answer, at_s, choice)
        if choice.finish_reason:
            answer.finish = choice.finish_reason
    if chunk.usage and chunk.usage != b"null":
        answer.usage = _decode(_usage, chunk.usage)
    if chunk.timings and chunk.timings != b"null":
        answer.timings = _decode(_timings, chunk.timings)
    if length:
        answer.at_s.append(at_s)
        answer.text_lengths.append(length)
        if chunk.usage and answer.usage is not None:
            answer.usage_counts.append(answer.usage.completion_tokens or 0)


def _text_length(answer: Answer, at_s: float, choice: _Choice) -> int:
    """Characters of text in a choice; notes the first that belongs to the answer proper."""
    text = choice.text or ""
    thought = ""
    if choice.delta is not None:
        delta = choice.delta
        text = delta.content or text
        thought = delta.reasoning_content or delta.reasoning or ""
        for call in delta.tool_calls or ():
            if call.function is not None:
                text += (call.function.name or "") + (call.function.arguments or "")
    if text and answer.answer_s is None:
        answer.answer_s = at_s
    return len(text) + len(thought)


def _decode(decoder: msgspec.json.Decoder[T], raw: msgspec.Raw) -> T | None:
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError:
        return None


def _fail(answer: Answer, fault: str, detail: bytes) -> None:
    answer.fault = fault
    answer.detail = bytes(detail)[:300].decode("utf-8", "replace")
