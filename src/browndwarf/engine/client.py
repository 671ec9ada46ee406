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
from browndwarf.engine.answers import (
    ChatCompletion,
    Completion,
    RawAnswer,
    chat_of,
    completion_of,
    tokens_in,
)
from browndwarf.engine.wire import Props, SpecCounters, Timings
from browndwarf.errors import RequestFailed, ServerHung

__all__ = ["ChatCompletion", "Completion", "LlamaClient", "Props", "SpecCounters", "Timings"]

_CONNECT_TIMEOUT_S = 10.0


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
        return tokens_in(data)

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
        return completion_of(answer, stream=stream)

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
        return chat_of(answer, stream=stream)

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
    ) -> RawAnswer:
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
        return RawAnswer(sent_s, last_s, chunks)

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
