"""llama-server over HTTP: completions with raw timings, chat, tokens, counters.

Boundary: speaks HTTP to a server that runs already; ``process`` starts one. While a completion
streams, bytes are only collected with their arrival times and parsed afterwards, because the
client may share its few cores with the server it measures.

Example:
    >>> async with LlamaClient(server.base_url) as client:  # doctest: +SKIP
    ...     done = await client.completion("Once", n_predict=64, ignore_eos=True)
    ...     done.timings.decode_tok_s
    91.4
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from browndwarf.engine import wire
from browndwarf.engine.wire import Props, SpecCounters, Timings
from browndwarf.errors import RequestFailed, ServerHung

__all__ = ["ChatCompletion", "Completion", "LlamaClient", "Props", "SpecCounters", "Timings"]

_CONNECT_TIMEOUT_S = 10.0


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One finished ``/completion``. ``*_s`` fields named ``at`` count from perf_counter's zero.

    ``event_s`` and ``event_tokens`` say when each streamed event came and how many tokens it
    carried; both are empty for an answer that was not streamed, where ``first_s`` is when the
    answer's first byte came.
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


class _Answer(msgspec.Struct, frozen=True):
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


class LlamaClient:
    """Client of one llama-server; an async context manager.

    Args:
        base_url: such as ``http://127.0.0.1:8080``.
        api_key: sent as a bearer token.
        timeout_s: seconds without a single byte before the server counts as hung.
    """

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # A new connection for each request: a kept one may be closed by the server just as we
        # use it again, and a POST must not be repeated blindly.
        self._session = aiohttp.ClientSession(
            headers=self._headers, connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def health(self, *, timeout_s: float = 5.0) -> bool:
        """True once the model is loaded; False while it loads or nothing answers."""
        try:
            await self._call("GET", "/health", timeout_s=timeout_s)
        except (RequestFailed, ServerHung):
            return False
        return True

    async def props(self) -> Props:
        """Model, slots, context and chat template as the server sees them."""
        return wire.parse_props(await self._json("GET", "/props"))

    async def metrics(self) -> SpecCounters:
        """Speculation counters; zeros on builds without them. Needs ``metrics=True``."""
        return wire.spec_counters(await self.metrics_text())

    async def metrics_text(self) -> str:
        """``/metrics`` as it is."""
        answer = await self._call("GET", "/metrics")
        return answer.body.decode("utf-8", "replace")

    async def apply_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text that the model's chat template makes of messages."""
        body: dict[str, Any] = {"messages": list(messages), **kwargs}
        if tools is not None:
            body["tools"] = list(tools)
        return str((await self._json("POST", "/apply-template", body)).get("prompt", ""))

    async def tokenize(
        self, text: str, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text."""
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        data = await self._json("POST", "/tokenize", body)
        return _tokens(data)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of token ids."""
        data = await self._json("POST", "/detokenize", {"tokens": list(tokens)})
        return str(data.get("content", ""))

    async def completion(
        self,
        prompt: str | Sequence[int],
        *,
        n_predict: int,
        temperature: float = 0.0,
        seed: int | None = None,
        ignore_eos: bool = False,
        cache_prompt: bool = False,
        return_tokens: bool = True,
        stream: bool = True,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """Complete a prompt.

        Args:
            prompt: text, or token ids.
            n_predict: most tokens to generate.
            extra: any other field of the request.
            timeout_s: seconds without a byte before ServerHung; the client's own by default.

        Raises:
            RequestFailed: an error answer, also inside a stream, or a cut connection.
            ServerHung: no byte within the time.
        """
        body: dict[str, Any] = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "n_predict": n_predict,
            "temperature": temperature,
            "ignore_eos": ignore_eos,
            "cache_prompt": cache_prompt,
            "return_tokens": return_tokens,
            "stream": stream,
            **({"seed": seed} if seed is not None else {}),
            **(extra or {}),
        }
        answer = await self._call("POST", "/completion", body, timeout_s=timeout_s)
        return _streamed(answer) if stream else _whole(answer)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
        stream: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> ChatCompletion:
        """One chat turn through the OpenAI-compatible endpoint.

        Raises:
            RequestFailed, ServerHung: as ``completion``.
        """
        body: dict[str, Any] = {
            "messages": list(messages),
            "temperature": temperature,
            "stream": stream,
            **(extra or {}),
        }
        for key, value in (
            ("tools", list(tools) if tools is not None else None),
            ("max_tokens", max_tokens),
            ("seed", seed),
            ("chat_template_kwargs", chat_template_kwargs),
        ):
            if value is not None:
                body[key] = value
        answer = await self._call("POST", "/v1/chat/completions", body, timeout_s=timeout_s)
        return _chat(answer, stream=stream)

    async def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return wire.parse_object((await self._call(method, path, body)).body)

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> _Answer:
        """Send, and collect raw bytes until the answer ends."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        data = msgspec.json.encode(body) if body is not None else None
        async with self._request(method, path, data, limit) as (response, sent_s):
            chunks: list[tuple[float, bytes]] = []
            async for chunk in response.content.iter_any():
                chunks.append((time.perf_counter(), chunk))
            last_s = time.perf_counter()
            if response.status >= 400:
                raise _http_error(response.status, b"".join(part for _, part in chunks))
        return _Answer(sent_s, last_s, chunks)

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, data: bytes | None, limit_s: float
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, float]]:
        """The one place where aiohttp's exceptions become ours."""
        if self._session is None:
            raise RuntimeError("use LlamaClient as an async context manager")
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=min(limit_s, _CONNECT_TIMEOUT_S), sock_read=limit_s
        )
        url = self.base_url + path
        try:
            sent_s = time.perf_counter()
            async with self._session.request(
                method,
                url,
                data=data,
                timeout=timeout,
                headers={"Content-Type": "application/json"} if data is not None else None,
            ) as response:
                yield response, sent_s
        except (TimeoutError, aiohttp.ServerTimeoutError) as exc:
            raise ServerHung(
                f"llama-server sent nothing for {limit_s:g} s",
                why=f"{method} {path} was not answered in time",
                fix="raise the time limit for slow machines, or look into the server's log",
            ) from exc
        except aiohttp.ClientConnectorError as exc:
            raise RequestFailed(
                f"nothing answers at {self.base_url}",
                why=str(exc),
                fix="check that llama-server runs and that the port is right",
            ) from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise RequestFailed(
                "the connection to llama-server was cut in mid-request",
                why=f"{method} {path}: {exc or type(exc).__name__}",
                fix="the server's log tells why it ended",
            ) from exc


def _http_error(status: int, body: bytes) -> RequestFailed:
    try:
        return wire.error_from_body(status, msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return wire.error_from_body(status, body[:300].decode("utf-8", "replace") or "no text")


def _convert(value: object, kind: Any, name: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        raise RequestFailed(f"llama-server sent odd {name}", why=str(exc)) from exc


def _tokens(data: Mapping[str, Any]) -> list[int]:
    return list(_convert(data.get("tokens") or [], list[int], "tokens"))


def _cut(why: str) -> RequestFailed:
    return RequestFailed(
        "llama-server ended an answer before it was finished",
        why=why,
        fix="the server's log tells why",
    )


def _whole(answer: _Answer) -> Completion:
    data = wire.parse_object(answer.body)
    if "error" in data:
        raise wire.error_from_body(200, data)
    return _finished(data, answer, str(data.get("content", "")), _tokens(data))


def _streamed(answer: _Answer) -> Completion:
    events = wire.parse_stream(answer.chunks)
    if not events or not events[-1].data.get("stop"):
        raise _cut("the stream holds no final event")
    carrying = [e for e in events if e.data.get("content") or e.data.get("tokens")]
    tokens = [_tokens(event.data) for event in carrying]
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
    answer: _Answer,
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


def _chat(answer: _Answer, *, stream: bool) -> ChatCompletion:
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
