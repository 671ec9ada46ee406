"""Answers in OpenAI's form: whole, as server-sent events, and as errors.

Boundary: pure; records of the runtime in, bytes and plain mappings out. Besides OpenAI's fields an
answer has llama-server's ``timings``, so that clients which measure llama-server measure this
one as well, and ``session`` where it belongs to a conversation on disk.

Example:
    >>> Reply(Ask(messages=[]), "demo", created=0).opening()[:22]
    b'data: {"id":"chatcmpl-'
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from browndwarf.decode.answer import Chunk, ToolCall
from browndwarf.decode.openai_wire import Ask
from browndwarf.decode.result import Answer, AnswerStats
from browndwarf.errors import (
    BrowndwarfError,
    Interrupted,
    MachineBusy,
    RunChanged,
    RunFormatError,
    UsageError,
)

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as clients see it: HTTP's status, OpenAI's type and code, a sentence for people.
    ``figures`` stand beside them; ``retry_s`` becomes ``Retry-After``, in seconds."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    figures: Mapping[str, int] = field(default_factory=dict)
    retry_s: int | None = None

    def body(self) -> dict[str, Any]:
        """``{"error": {...}}``."""
        inner = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return {"error": {**inner, **self.figures}}

    def event(self) -> bytes:
        """The same inside a stream that has begun; nothing follows it."""
        return _event(self.body())


def fault_of(error: BrowndwarfError) -> Fault:
    """An error of ours as HTTP tells it."""
    parts = [error.what, *([error.why] if error.why else [])]
    message = ": ".join(parts) + (f"; {error.fix}" if error.fix else "")
    if isinstance(error, UsageError):
        return Fault(400, message)
    if isinstance(error, RunChanged | RunFormatError):
        return Fault(409, message, code="session_unfit")
    if isinstance(error, MachineBusy | Interrupted):
        return Fault(503, message, "server_error", "unavailable", retry_s=1)
    return Fault(500, message, "server_error", error.kind)


def too_long(prompt_tokens: int, n_ctx: int) -> Fault:
    """The prompt leaves no room for an answer; both figures in tokens."""
    return Fault(
        400,
        f"the prompt has {prompt_tokens} tokens and the context {n_ctx}: at least one token must "
        "fit after it; send less, or start the server with a larger --ctx",
        code="context_length_exceeded",
        figures={"n_prompt_tokens": prompt_tokens, "n_ctx": n_ctx},
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of a conversation on disk: the bytes written, or why it could not be saved."""

    name: str
    messages: int
    bytes: int = 0
    problem: str = ""

    def body(self) -> dict[str, Any]:
        """As clients see it."""
        shown: dict[str, Any] = {"name": self.name, "messages": self.messages}
        return shown | ({"problem": self.problem} if self.problem else {"bytes": self.bytes})


class Reply:
    """Writes one answer. ``created`` is in seconds since 1970."""

    def __init__(self, ask: Ask, model: str, *, created: int | None = None) -> None:
        self._ask = ask
        self._chat = ask.prompt is None
        kind = "chat.completion" if self._chat else "text_completion"
        self._calls = 0
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{ask.ident}" if self._chat else f"cmpl-{ask.ident}",
            "object": f"{kind}.chunk" if self._chat and ask.stream else kind,
            "created": int(time.time()) if created is None else created,
            "model": model,
        }

    def opening(self) -> bytes:
        """A stream's first event, when the prompt is accepted; empty for plain completions."""
        return self._piece({"role": "assistant", "content": ""}) if self._chat else b""

    def piece(self, chunk: Chunk, call: ToolCall | None) -> bytes:
        """One event; ``call`` is what a chunk of that kind means. A call comes whole."""
        if not self._chat:
            return self._piece({"text": chunk.text})
        if call is not None:
            self._calls += 1
            index = self._calls - 1
            written = {"index": index, **_call(call, self._ask.call_id(index))}
            return self._piece({"tool_calls": [written]})
        name = "reasoning_content" if chunk.kind == "thinking" else "content"
        return self._piece({name: chunk.text})

    def closing(self, answer: Answer, kept: Kept | None) -> bytes:
        """A stream's last events."""
        last = {**self._choices({}, _finish(answer)), "timings": timings_of(answer.stats)}
        if kept is not None:
            last["session"] = kept.body()
        out = _event(last)
        if self._ask.usage:
            out += _event({**self._head, "choices": [], "usage": usage_of(answer.stats)})
        return out + DONE

    def whole(self, answer: Answer, kept: Kept | None, text: str = "") -> dict[str, Any]:
        """An answer that was not streamed; ``text`` is a plain completion's."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": _finish(answer), "logprobs": None}
        if self._chat:
            choice["message"] = self._message(answer)
        else:
            choice["text"] = text
        stats = answer.stats
        figures = {"usage": usage_of(stats), "timings": timings_of(stats)}
        body = {**self._head, "choices": [choice], **figures}
        return body if kept is None else {**body, "session": kept.body()}

    def _message(self, answer: Answer) -> dict[str, Any]:
        calls = [_call(c, self._ask.call_id(i)) for i, c in enumerate(answer.tool_calls)]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.text if answer.text or not calls else None,
        }
        if answer.thinking:
            message["reasoning_content"] = answer.thinking
        if calls:
            message["tool_calls"] = calls
        return message

    def _piece(self, delta: dict[str, Any]) -> bytes:
        return _event(self._choices(delta, None))

    def _choices(self, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        held = {"delta": delta} if self._chat else {"text": "", **delta}
        return {**self._head, "choices": [{"index": 0, **held, "finish_reason": finish}]}


def usage_of(stats: AnswerStats) -> dict[str, Any]:
    """Token counts under OpenAI's names; the token that ends an answer counts."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.tokens,
        "total_tokens": stats.prompt_tokens + stats.tokens,
        "prompt_tokens_details": {"cached_tokens": stats.reused_tokens},
    }


def timings_of(stats: AnswerStats) -> dict[str, Any]:
    """Figures under llama-server's names; milliseconds, and tokens per second.

    ``predicted_ms`` begins after the first token, which comes out of the prompt; so do the rates.
    """
    read = stats.prompt_tokens - stats.reused_tokens
    return {
        "cache_n": stats.reused_tokens,
        "prompt_n": read,
        "prompt_ms": 1e3 * stats.prefill_s,
        "prompt_per_second": read / stats.prefill_s if stats.prefill_s > 0 else 0.0,
        "predicted_n": stats.tokens,
        "predicted_ms": 1e3 * stats.decode_s,
        "predicted_per_second": stats.tok_s,
        "draft_n": sum(stats.drafted),
        "draft_n_accepted": sum(stats.accepted),
    }


def _finish(answer: Answer) -> str:
    if answer.reason in ("length", "context"):
        return "length"
    return "tool_calls" if answer.tool_calls else "stop"


def _call(call: ToolCall, identity: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _written(call.arguments)}
    return {"id": identity, "type": "function", "function": function}


def _written(arguments: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(arguments).decode()
    except OverflowError:  # a number of more than 64 bits
        return json.dumps(arguments, ensure_ascii=False)


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
