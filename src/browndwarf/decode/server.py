"""The runtime as an OpenAI-compatible HTTP server.

    POST /v1/chat/completions    messages, tools, thinking; streamed or whole
    POST /v1/completions         a prompt as text or tokens
    GET  /v1/models  /health  /metrics

Boundary: HTTP only. ``openai_wire`` and ``openai_reply`` translate, ``server_worker`` decodes in a
thread of its own, so that the event loop answers at any time, and ``server_thread`` listens. Needs
the packages starlette and uvicorn (the extra ``serve``). Errors have OpenAI's form and a true
status, until a stream has begun: there they are its last event.

Not covered: TLS (put a proxy in front), pages of other origins (CORS): without an API key they are
refused, and names that are not localhost with them.

Example:
    with load("demo", "demo") as llm:
        app = build_app(Worker(LlmRuntime(llm)))
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from browndwarf.decode.openai_reply import Fault, Reply, fault_of
from browndwarf.decode.openai_wire import Ask, Defaults, read_chat, read_completion
from browndwarf.decode.server_metrics import exposition
from browndwarf.decode.server_worker import Begun, Event, Finished, Job, Said, Worker
from browndwarf.errors import BrowndwarfError
from browndwarf.units import MIB

_BODY_LIMIT = 16 * MIB
_DRAIN = 8
"""So many times the limit of a body is read and dropped, since a client that is still sending may
not see an answer before it has been read."""

Read = Callable[[bytes, Defaults, str | None], Ask]


def build_app(
    worker: Worker,
    *,
    api_key: str | None = None,
    defaults: Defaults | None = None,
    body_limit: int = _BODY_LIMIT,
) -> Starlette:
    """The application. With ``api_key`` everything but ``/health`` asks for it as a bearer token;
    a body of more than ``body_limit`` bytes is refused."""
    settings = defaults or Defaults()
    created = int(time.time())

    async def answer(request: Request, read: Read) -> ASGIApp:
        body = await _body(request, body_limit)
        if isinstance(body, Fault):
            return _refusal(body)
        try:
            ask = read(body, settings, request.headers.get("x-session"))
            worker.runtime.check(ask)
        except BrowndwarfError as exc:
            return _refusal(fault_of(exc))
        job = worker.submit(ask)
        return _refusal(job) if isinstance(job, Fault) else _Answering(worker, job)

    async def chat(request: Request) -> ASGIApp:
        return await answer(request, read_chat)

    async def completions(request: Request) -> ASGIApp:
        return await answer(request, read_completion)

    async def models(request: Request) -> ASGIApp:
        model = {
            "id": worker.runtime.name,
            "object": "model",
            "created": created,
            "owned_by": "browndwarf",
            "meta": {"n_ctx": worker.runtime.n_ctx},
        }
        return _json({"object": "list", "data": [model]})

    async def health(request: Request) -> ASGIApp:
        if worker.stopping:
            return _refusal(Fault(503, "the server is shutting down", "server_error"))
        return _json({"status": "ok"})

    async def metrics(request: Request) -> ASGIApp:
        text = exposition(worker.counters, busy=worker.busy, waiting=worker.waiting)
        return Response(text, media_type="text/plain; version=0.0.4")

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        middleware=[Middleware(_Door, api_key=api_key, log=worker.log)],
        exception_handlers={HTTPException: _not_here},
    )


def _json(data: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


def _refusal(fault: Fault) -> Response:
    response = _json(fault.body(), fault.status)
    if fault.retry_s is not None:
        response.headers["Retry-After"] = str(fault.retry_s)
    if fault.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _not_here(request: Request, exc: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(exc, HTTPException)
    asked = f"{request.method} {request.url.path}"
    code = exc.detail.lower().replace(" ", "_")
    response = _refusal(Fault(exc.status_code, f"{asked}: {exc.detail}", code=code))
    response.headers.update(exc.headers or {})
    return response


async def _body(request: Request, limit: int) -> bytes | Fault:
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit * _DRAIN:
                break
            if size <= limit:
                parts.append(part)
    except ClientDisconnect:
        return Fault(400, "the request was not sent to its end")
    if size > limit:
        return Fault(413, f"the request has more than {limit} bytes", code="request_too_large")
    return b"".join(parts)


class _Door:
    """Around everything: who may come in, and what nobody foresaw. ASGI middleware."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, log: Callable[[str], None]) -> None:
        self._app = app
        self._key = api_key.encode() if api_key is not None else None
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._key is not None and scope["path"] != "/health" and not self._knows(scope):
            fault = Fault(401, "the API key is missing or wrong", code="invalid_api_key")
            await _refusal(fault)(scope, receive, send)
            return
        if self._key is None and (name := _foreign(scope)) is not None:
            text = f"{name} may not come in without an API key: only localhost and plain addresses"
            await _refusal(Fault(403, text, code="forbidden_origin"))(scope, receive, send)
            return
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as exc:  # our own fault, told without a traceback
            line = f"an unexpected fault: {type(exc).__name__}: {exc}"
            self._log(line)
            if not begun:
                await _refusal(Fault(500, line, "server_error"))(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key or b"")


def _foreign(scope: Scope) -> str | None:
    """The name, in Origin or Host, of neither localhost nor an address; None without one.

    A page in the user's browser can post here, and a name that is made to point here reads the
    answer too; both show by such a name.
    """
    for header, value in scope["headers"]:
        if header in (b"origin", b"host"):
            text = value.decode("latin-1")
            try:
                name = urlsplit(text if "//" in text else f"//{text}").hostname or text
            except ValueError:
                name = text
            if name != "localhost" and not _is_address(name):
                return name
    return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Answering:
    """A response that follows a job, and ends the job when the client is gone."""

    def __init__(self, worker: Worker, job: Job) -> None:
        self._worker = worker
        self._job = job
        self._reply = Reply(job.ask, worker.runtime.name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            with contextlib.suppress(OSError):  # the client is gone
                await self._answer(scope, receive, send)
        finally:
            watcher.cancel()
            self._worker.leave(self._job)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = await self._job.inbox.get()
        if isinstance(first, Fault):
            await _refusal(first)(scope, receive, send)
        elif first is not None and self._job.ask.stream:
            await self._stream(send)
        elif first is not None:
            response = await self._whole()
            if response is not None:
                await response(scope, receive, send)

    async def _watch(self, receive: Receive) -> None:
        """Put None into the inbox when the client is gone."""
        with contextlib.suppress(OSError):
            while (await receive())["type"] != "http.disconnect":
                pass
        self._job.inbox.put_nowait(None)

    async def _whole(self) -> Response | None:
        said: list[str] = []
        while (event := await self._job.inbox.get()) is not None:
            if isinstance(event, Said):
                said.append(event.chunk.text)
            elif isinstance(event, Finished):
                return _json(self._reply.whole(event.answer, event.kept, "".join(said)))
            elif isinstance(event, Fault):
                return _refusal(event)
        return None

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        out, more = self._reply.opening(), True
        while True:
            # What has gathered meanwhile goes out at once.
            while more and not self._job.inbox.empty():
                event = self._job.inbox.get_nowait()
                if event is None:
                    return
                out += self._written(event)
                more = isinstance(event, Begun | Said)
            if out or not more:
                await send({"type": "http.response.body", "body": out, "more_body": more})
            if not more:
                return
            event = await self._job.inbox.get()
            if event is None:
                return
            out = self._written(event)
            more = isinstance(event, Begun | Said)

    def _written(self, event: Event) -> bytes:
        if isinstance(event, Said):
            return self._reply.piece(event.chunk, event.call)
        if isinstance(event, Finished):
            return self._reply.closing(event.answer, event.kept)
        return event.event() if isinstance(event, Fault) else b""
