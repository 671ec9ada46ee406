"""OpenAI's requests as typed values: JSON in, an ``Ask`` for the runtime out.

Boundary: pure; no sockets, no model. Foreign JSON is validated here and nowhere else. Fields that
we don't know are ignored, because clients send many; fields that we know and cannot honour are
refused, because an answer of another kind would be taken for what was asked.

Not covered: images and audio, ``logprobs``, ``logit_bias``, several answers to one request, and
a ``tool_choice`` that forces a call.

Example:
    >>> body = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}'
    >>> ask = read_chat(body, Defaults())
    >>> ask.messages, ask.max_tokens, ask.stream
    ([{'role': 'user', 'content': 'Hi'}], 5, False)
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from browndwarf.decode.chat import Message
from browndwarf.decode.sampling import Sampling
from browndwarf.errors import UsageError

_SEEDS = 0xFFFFFFFF
_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where a request says nothing."""

    sampling: Sampling = field(default_factory=Sampling)
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, understood.

    Either ``messages`` hold a chat, or ``prompt`` a text or tokens to go on with. ``ident`` is a
    random name of the answer, in hex; ``session`` names the conversation on disk, and ``usage``
    asks for token counts at the end of a stream.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    session: str | None = None
    ident: str = field(default_factory=lambda: uuid.uuid4().hex)

    def call_id(self, index: int) -> str:
        """Name of this answer's call ``index``; no other answer's call has it, so that a tool's
        result finds its call in a long conversation."""
        return f"call_{self.ident[:16]}_{index}"


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _Schema(msgspec.Struct):
    schema: dict[str, Any] | None = None


class _Format(msgspec.Struct):
    type: str = "text"
    json_schema: _Schema | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _TemplateSettings(msgspec.Struct):
    enable_thinking: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    """What both kinds of request share. Null is the same as left out."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    response_format: _Format | None = None
    n: int | None = None
    session: str | None = None


class _ChatBody(_Body, kw_only=True):
    messages: list[_Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: _TemplateSettings | None = None


class _CompletionBody(_Body, kw_only=True):
    prompt: str | list[str | int]


_B = TypeVar("_B", bound=_Body)
_chat_body = msgspec.json.Decoder(_ChatBody)
_completion_body = msgspec.json.Decoder(_CompletionBody)


def read_chat(body: bytes, defaults: Defaults, session: str | None = None) -> Ask:
    """The request for ``/v1/chat/completions``; ``session`` is what the header says, and counts
    where the body names none.

    Raises:
        UsageError: it is no JSON, a field has another type than OpenAI's, or it asks for what
            this server cannot do.
    """
    request = _decoded(_chat_body, body)
    if not request.messages:
        raise UsageError("messages is empty", fix="send at least one message")
    settings = request.chat_template_kwargs
    thinking = settings.enable_thinking if settings is not None else None
    return replace(
        _asked(request, defaults, request.session or session),
        messages=[_message(m, f"messages[{i}]") for i, m in enumerate(request.messages)],
        tools=_tools(request),
        thinking=defaults.thinking if thinking is None else thinking,
    )


def read_completion(body: bytes, defaults: Defaults, session: str | None = None) -> Ask:
    """The request for ``/v1/completions``: a prompt as text or tokens.

    Raises:
        UsageError: as ``read_chat``.
    """
    request = _decoded(_completion_body, body)
    if request.session or session:
        raise UsageError("a session keeps a chat", fix="use /v1/chat/completions, or no session")
    prompt = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if not isinstance(prompt, str):
        tokens = [token for token in prompt if isinstance(token, int)]
        if len(tokens) < len(prompt):
            raise UsageError("prompt holds several texts", fix="send one request for each")
        return replace(_asked(request, defaults, None), prompt=tokens)
    return replace(_asked(request, defaults, None), prompt=prompt)


def joined(kept: Sequence[Message], sent: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation that ``sent`` goes on with, where ``kept`` is on disk.

    Most clients send the whole conversation with each request, and may have edited it: then
    ``sent`` is all of it. It is taken so where it holds an answer, or begins with the same
    message as ``kept`` (a first question, asked again). Else it holds only what is new, and
    follows what is kept; a system message replaces the one that is kept.
    """
    plain = [m for m in sent if m.get("role") not in _SYSTEM]
    before = [m for m in kept if m.get("role") not in _SYSTEM]
    whole = any(m.get("role") == "assistant" for m in plain) or plain[:1] == before[:1]
    if whole or not plain or not before:
        return [dict(m) for m in sent]
    systems = [m for m in sent if m.get("role") in _SYSTEM]
    systems = systems or [m for m in kept if m.get("role") in _SYSTEM]
    return [dict(m) for m in (*systems, *before, *plain)]


def _decoded(decoder: msgspec.json.Decoder[_B], body: bytes) -> _B:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise UsageError(
            "a field of the request has the wrong type", why=str(exc), fix="send OpenAI's form"
        ) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise UsageError(
            "the request is not JSON", why=str(exc) or type(exc).__name__, fix="send a JSON object"
        ) from exc


def _asked(request: _Body, defaults: Defaults, session: str | None) -> Ask:
    if (request.n or 1) != 1:
        raise UsageError(
            f"n cannot be {request.n}", why="a request gets one answer", fix="send it n times"
        )
    limit = request.max_completion_tokens
    limit = request.max_tokens if limit is None else limit
    if limit is not None and limit < 1 and limit != -1:
        raise UsageError(
            f"max_tokens cannot be {limit}",
            why="an answer has at least one token",
            fix="send a larger one, or none for as much as fits",
        )
    stop = request.stop or ()
    options = request.stream_options
    return Ask(
        sampling=_sampling(request, defaults.sampling),
        max_tokens=None if limit == -1 else limit,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=bool(request.stream),
        usage=bool(options is not None and options.include_usage),
        session=session or None,
    )


def _sampling(request: _Body, defaults: Sampling) -> Sampling:
    given: dict[str, Any] = {
        name: value
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repeat_penalty",
            "frequency_penalty",
            "presence_penalty",
        )
        if (value := getattr(request, name)) is not None
    }
    if request.top_k is not None:
        given["top_k"] = max(0, request.top_k)  # some servers write "off" as -1
    if request.seed is not None:
        # OpenAI's seeds have 64 bits and llama.cpp's 32; a negative one means none.
        given["seed"] = request.seed % _SEEDS if request.seed >= 0 else None
    form = request.response_format
    if form is not None and form.type != "text":
        given["json_schema"] = _schema(form)
    return replace(defaults, **given)


def _schema(form: _Format) -> dict[str, Any]:
    if form.type == "json_object":
        return {"type": "object"}
    schema = form.json_schema.schema if form.json_schema is not None else None
    if form.type != "json_schema" or schema is None:
        raise UsageError(
            f"response_format {form.type!r} cannot be used",
            why="it is text, json_object, or json_schema with a schema",
            fix="correct response_format",
        )
    return schema


def _message(message: _Message, place: str) -> dict[str, Any]:
    """A message as templates take it: text as one string, arguments as a mapping."""
    made: dict[str, Any] = {"role": message.role, "content": _text(message.content, place)}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            made[name] = value
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id or f"call_{i}",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return made


def _text(content: str | list[_Part] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None or part.type not in ("text", "input_text", "output_text"):
            raise UsageError(
                f"{place} holds a part of type {part.type!r}",
                why="the runtime reads text only",
                fix="send text",
            )
    return "\n".join(part.text or "" for part in content)


def _arguments(written: str | dict[str, Any] | None) -> dict[str, Any] | str:
    """Arguments of an earlier call: OpenAI sends them as JSON text. Text that is none stays as it
    is, because the model wrote it so."""
    if not written or not isinstance(written, str):
        return written or {}
    try:
        return msgspec.json.decode(written, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return written


def _tools(request: _ChatBody) -> list[dict[str, Any]] | None:
    choice = request.tool_choice
    if choice not in (None, "auto", "none"):
        shown = choice if isinstance(choice, str) else "a certain function"
        raise UsageError(
            f"tool_choice cannot be {shown}",
            why="the model decides whether it calls a tool",
            fix="send auto or none",
        )
    for i, tool in enumerate(request.tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError(
                f"tools[{i}] is not a function with a name",
                fix='send {"type": "function", "function": {"name": ..., "parameters": ...}}',
            )
    return None if choice == "none" else request.tools or None
