"""The server over real sockets, with a runtime that says what it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from browndwarf.bench.answers import parse_answer
from browndwarf.bench.endpoint import describe, parse_counters
from browndwarf.bench.transport import Transport
from browndwarf.decode.answer import Chunk
from browndwarf.decode.server import build_app
from browndwarf.decode.server_thread import Serving, listening
from browndwarf.decode.server_worker import Worker
from browndwarf.engine.client import LlamaClient
from browndwarf.errors import DiskFull, EngineError, PortTaken, RequestFailed, UsageError
from decode.fake_runtime import CALL, HELLO, FakeRuntime

HI = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


@dataclass
class Served:
    """A server in this process; ``url`` is its root."""

    url: str
    worker: Worker
    serving: Serving
    lines: list[str]

    @asynccontextmanager
    async def post(
        self, path: str = CHAT, body: Any = None, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        fields = body if body is not None else {"messages": HI, **options.pop("fields", {})}
        data = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, data=data, **options) as response,
        ):
            yield response

    async def get(self, path: str, **options: Any) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.url + path, **options) as response,
        ):
            return response.status, await response.text()


Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:

        def make(runtime: FakeRuntime, *, queue: int = 8, **settings: Any) -> Served:
            lines: list[str] = []
            worker = Worker(runtime, queue=queue, log=lines.append)
            app = build_app(worker, **settings)
            serving = stack.enter_context(Serving(app, listening("127.0.0.1", 0), worker))
            return Served(serving.base_url.removesuffix("/v1"), worker, serving, lines)

        yield make


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in another thread."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


def events(body: bytes) -> list[dict[str, Any]]:
    lines = [line for line in body.split(b"\n\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    assert lines[-1] == b"data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


# -- answers -------------------------------------------------------------------------------


async def test_our_own_client_reads_both_forms_of_an_answer(serve: Serve) -> None:
    served = serve(FakeRuntime(Chunk("hm", "thinking"), *HELLO))
    async with LlamaClient(served.url) as client:
        assert await client.health()
        whole = await client.chat(HI)
        streamed = await client.chat(
            HI, stream=True, extra={"stream_options": {"include_usage": True}}
        )
    for answer in (whole, streamed):
        assert answer.text == "Hello there"
        assert answer.reasoning == "hm"
        assert answer.finish_reason == "stop"
        assert (answer.timings.predicted_n, answer.timings.draft_n_accepted) == (9, 4)
        assert (answer.prompt_tokens, answer.completion_tokens) == (7, 9)


async def test_a_stream_has_openais_events(serve: Serve) -> None:
    served = serve(FakeRuntime())
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    async with served.post(fields=fields) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        body = await response.read()
    made = events(body)
    deltas = [event["choices"][0]["delta"] for event in made[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello there"
    assert made[-2]["choices"][0]["finish_reason"] == "stop"
    assert made[-1]["choices"] == []
    assert made[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert len({event["id"] for event in made}) == 1
    assert {event["object"] for event in made} == {"chat.completion.chunk"}
    parsed = parse_answer([(0.0, body)])
    assert (parsed.done, parsed.finish, parsed.fault) == (True, "stop", "")


async def test_usage_in_a_stream_comes_only_when_it_was_asked_for(serve: Serve) -> None:
    async with serve(FakeRuntime()).post(fields={"stream": True}) as response:
        made = events(await response.read())
    assert not any("usage" in event for event in made)
    assert made[-1]["timings"]["cache_n"] == 4


async def test_tool_calls_come_whole_and_end_the_answer(serve: Serve) -> None:
    served = serve(FakeRuntime(Chunk("I add. "), CALL, CALL))
    async with served.post() as response:
        whole = (await response.json())["choices"][0]
    async with served.post(fields={"stream": True}) as response:
        made = events(await response.read())
    assert whole["finish_reason"] == made[-1]["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [event["choices"][0]["delta"] for event in made]
    streamed = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in streamed] == [0, 1]
    for call in (*whole["message"]["tool_calls"], *streamed):
        assert call["type"] == "function"
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "two"}
    names = [call["id"] for call in (*whole["message"]["tool_calls"], *streamed)]
    assert len(set(names)) == 4
    assert whole["message"]["content"] == "I add. "


@pytest.mark.parametrize("stream", [False, True])
async def test_plain_completions(serve: Serve, stream: bool) -> None:
    served = serve(FakeRuntime(Chunk("a", "thinking"), Chunk("b")))
    async with served.post("/v1/completions", {"prompt": "Once", "stream": stream}) as response:
        body = await response.read()
    made = events(body) if stream else [json.loads(body)]
    assert "".join(event["choices"][0]["text"] for event in made) == "ab"
    assert {event["object"] for event in made} == {"text_completion"}


async def test_models_and_metrics_are_what_the_benchmark_reads(serve: Serve) -> None:
    served = serve(FakeRuntime())
    async with served.post() as response:
        await response.read()
    async with Transport(served.url) as transport:
        endpoint = await describe(transport)
    assert (endpoint.model, endpoint.metrics) == ("fake", True)
    status, text = await served.get("/metrics")
    counters = parse_counters(text)
    assert status == 200
    assert counters is not None
    assert (counters.drafts, counters.draft_tokens, counters.accepted) == (4, 9, 4)
    assert "llamacpp:tokens_predicted_total 9\n" in text
    for line in text.splitlines():
        assert line.startswith("# ") or len(line.split(" ")) == 2


async def test_a_session_is_named_in_the_body_or_the_header(serve: Serve) -> None:
    runtime = FakeRuntime()
    served = serve(runtime)
    async with served.post(headers={"X-Session": "anna"}) as response:
        assert (await response.json())["session"] == {"name": "anna", "messages": 2, "bytes": 10}
    fields = {"session": "ben", "stream": True}
    async with served.post(fields=fields, headers={"X-Session": "anna"}) as response:
        assert events(await response.read())[-1]["session"]["name"] == "ben"
    async with served.post() as response:
        assert "session" not in await response.json()
    assert [ask.session for ask in runtime.asks] == ["anna", "ben", None]
    async with served.post(fields={"session": "../ben"}) as response:
        assert response.status == 400
    assert runtime.saved == ["Hello there"] * 2


async def test_a_disk_that_refuses_costs_no_answer(serve: Serve) -> None:
    served = serve(FakeRuntime(disk="no space left"))
    async with served.post(fields={"session": "anna"}) as response:
        body = await response.json()
    assert body["choices"][0]["message"]["content"] == "Hello there"
    assert body["session"]["problem"] == "no space left"
    assert served.lines == ["the conversation 'anna' is not saved: no space left"]


# -- the line ------------------------------------------------------------------------------


async def test_health_answers_while_an_answer_is_made(serve: Serve) -> None:
    runtime = FakeRuntime(gated=True)
    served = serve(runtime)
    async with served.post(fields={"stream": True}) as response:
        assert await served.get("/health") == (200, '{"status":"ok"}')
        assert "llamacpp:requests_processing 1\n" in (await served.get("/metrics"))[1]
        assert runtime.gate is not None
        runtime.gate.release(2)
        assert events(await response.read())


async def test_a_piece_is_sent_when_it_is_made(serve: Serve) -> None:
    runtime = FakeRuntime(gated=True)
    served = serve(runtime)
    async with served.post(fields={"stream": True}) as response:
        assert b"assistant" in await response.content.readuntil(b"\n\n")
        assert runtime.gate is not None
        runtime.gate.release()
        assert b"Hello" in await response.content.readuntil(b"\n\n")
        assert runtime.streams[0].steps == 1
        runtime.gate.release()
        await response.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_answer_within_a_step(
    serve: Serve, stream: bool
) -> None:
    runtime = FakeRuntime(*HELLO * 500, gated=True)
    assert runtime.gate is not None
    served = serve(runtime)
    runtime.gate.release(2)
    async with aiohttp.ClientSession() as session:
        task = asyncio.create_task(
            session.post(served.url + CHAT, json={"messages": HI, "stream": stream})
        )
        await until(lambda: bool(runtime.streams) and runtime.streams[0].steps == 2)
        if stream:
            (await task).close()
        else:
            task.cancel()
        await until(lambda: runtime.streams[0].closed)
    assert runtime.streams[0].cancelled.is_set()
    assert runtime.streams[0].steps == 2
    runtime.chunks = HELLO
    runtime.gate.release(2)
    async with served.post() as response:
        assert (await response.json())["choices"][0]["message"]["content"] == "Hello there"
    assert served.lines == []


async def test_a_client_that_goes_away_in_line_is_never_answered(serve: Serve) -> None:
    runtime = FakeRuntime(gated=True)
    assert runtime.gate is not None
    served = serve(runtime, queue=1)
    async with served.post(fields={"stream": True}), aiohttp.ClientSession() as session:
        waiting = asyncio.create_task(session.post(served.url + CHAT, json={"messages": HI}))
        await until(lambda: served.worker.waiting == 1)
        waiting.cancel()
        await until(lambda: served.worker.waiting == 0)
    assert len(runtime.asks) == 1


async def test_a_full_line_is_told_with_a_time(serve: Serve) -> None:
    runtime = FakeRuntime(gated=True)
    assert runtime.gate is not None
    served = serve(runtime, queue=1)
    async with served.post(fields={"stream": True}), aiohttp.ClientSession() as session:
        waiting = asyncio.create_task(session.post(served.url + CHAT, json={"messages": HI}))
        await until(lambda: served.worker.waiting == 1)
        async with served.post() as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "queue_full"
        runtime.gate.release(4)
        assert (await waiting).status == 200


async def test_answers_are_made_one_after_the_other(serve: Serve) -> None:
    runtime = FakeRuntime()
    served = serve(runtime)

    async def one(number: int) -> str:
        async with served.post(fields={"seed": number, "stream": bool(number % 2)}) as response:
            return str(response.status)

    assert set(await asyncio.gather(*(one(i) for i in range(9)))) == {"200"}
    assert {ask.sampling.seed for ask in runtime.asks} == set(range(9))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_is_told_to_everybody_and_saves(serve: Serve, stream: bool) -> None:
    runtime = FakeRuntime(*HELLO * 50, gated=True)
    assert runtime.gate is not None
    served = serve(runtime)
    runtime.gate.release()
    async with aiohttp.ClientSession() as session:
        first = asyncio.create_task(
            session.post(
                served.url + CHAT, json={"messages": HI, "stream": stream, "session": "anna"}
            )
        )
        await until(lambda: bool(runtime.streams) and runtime.streams[0].steps == 1)
        waiting = asyncio.create_task(session.post(served.url + CHAT, json={"messages": HI}))
        await until(lambda: served.worker.waiting == 1)
        await asyncio.to_thread(served.worker.stop)
        assert (await waiting).status == 503
        response = await first
        body = (await response.read()).split(b"\n\n")
        if stream:
            assert response.status == 200
            assert b"shutting down" in body[-2]
            assert b"[DONE]" not in body[-2]
        else:
            assert response.status == 503
        async with served.post() as refused:
            assert refused.status == 503
        assert (await served.get("/health"))[0] == 503
    assert runtime.saved == ["Hello"]


# -- who may come in, and what is refused -----------------------------------------------------


async def test_a_key_is_asked_for_everywhere_but_at_health(serve: Serve) -> None:
    served = serve(FakeRuntime(), api_key="sesame ä")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
        async with served.post(headers=headers) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert (await response.json())["error"]["code"] == "invalid_api_key"
        assert (await served.get("/v1/models", headers=headers))[0] == 401
    assert (await served.get("/health"))[0] == 200
    async with served.post(headers={"Authorization": "bearer sesame ä"}) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Host": "rebound.example:8080"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[::1"}, 403),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "http://[::1]:3000", "Host": "192.168.0.7:8080"}, 200),
    ],
)
async def test_pages_of_others_do_not_come_in_without_a_key(
    serve: Serve, headers: dict[str, str], status: int
) -> None:
    async with serve(FakeRuntime()).post(headers=headers) as response:
        assert response.status == status
    served = serve(FakeRuntime(), api_key="sesame")
    known = headers | {"Authorization": "Bearer sesame"}
    async with served.post(headers=known) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, b"{", 400),
        (CHAT, b"", 400),
        (CHAT, {"messages": [{"role": "wizard"}], "temperature": "hot"}, 400),
        (CHAT, {"messages": "Hi"}, 400),
        (CHAT, b'{"messages": "' + b"a" * 2000 + b'"}', 413),
        (CHAT, b" " * 5000, 413),
        ("/v1/nothing", {}, 404),
        ("/v1/models", {}, 405),
    ],
)
async def test_errors_have_a_true_status_and_openais_form(
    serve: Serve, path: str, body: Any, status: int
) -> None:
    served = serve(FakeRuntime(), body_limit=1000)
    async with served.post(path, body) as response:
        assert response.status == status
        assert response.headers["Content-Type"] == "application/json"
        inner = (await response.json())["error"]
    assert inner["message"]
    assert inner["type"] == "invalid_request_error"
    assert "Traceback" not in inner["message"]
    async with served.post() as response:
        assert response.status == 200


async def test_a_wrong_method_is_told_the_right_one(serve: Serve) -> None:
    served = serve(FakeRuntime())
    async with (
        aiohttp.ClientSession() as session,
        session.get(served.url + CHAT) as response,
    ):
        assert response.status == 405
        assert response.headers["Allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_longer_than_the_context_is_refused_with_figures(
    serve: Serve, stream: bool
) -> None:
    runtime = FakeRuntime(prompt_tokens=100, n_ctx=100)
    async with serve(runtime).post(fields={"stream": stream}) as response:
        assert response.status == 400
        inner = (await response.json())["error"]
    assert inner["code"] == "context_length_exceeded"
    assert (inner["n_prompt_tokens"], inner["n_ctx"]) == (100, 100)
    assert runtime.streams[0].closed


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (UsageError("no such role"), 400),
        (EngineError("llama.cpp failed"), 500),
        (DiskFull("no space"), 500),
        (ZeroDivisionError("oops"), 500),
    ],
)
async def test_a_fault_ends_one_answer_and_not_the_server(
    serve: Serve, fault: Exception, status: int
) -> None:
    runtime = FakeRuntime(fault=fault)
    served = serve(runtime)
    async with LlamaClient(served.url) as client:
        with pytest.raises(RequestFailed) as caught:
            await client.chat(HI)
        assert f"error {status}" in str(caught.value)
        runtime.fault_after = 1
        with pytest.raises(RequestFailed) as caught:
            await client.chat(HI, stream=True)
        assert str(fault).splitlines()[0] in str(caught.value)
        assert "Traceback" not in str(caught.value)
        runtime.fault = None
        assert (await client.chat(HI)).text == "Hello there"
    assert len(served.lines) == (0 if status == 400 else 2)


async def test_what_nobody_foresaw_is_a_500_without_a_traceback(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(runtime, "check", lambda ask: 1 / 0)
    served = serve(runtime)
    async with served.post() as response:
        assert response.status == 500
        assert "ZeroDivisionError" in (await response.json())["error"]["message"]
    assert "ZeroDivisionError" in served.lines[0]
    assert "Traceback" not in capfd.readouterr().err


# -- the socket ----------------------------------------------------------------------------


def test_a_port_that_is_taken_is_told_with_a_way_out() -> None:
    with listening("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortTaken) as caught:
            listening("127.0.0.1", port)
        assert str(port) in caught.value.what
        assert "--port" in caught.value.fix
    with pytest.raises(UsageError):
        listening("a" * 64, 8080)


async def test_a_server_that_is_left_is_gone(serve: Serve) -> None:
    worker = Worker(FakeRuntime())
    with Serving(build_app(worker), listening("127.0.0.1", 0), worker) as serving:
        url = serving.base_url.removesuffix("/v1")
        async with LlamaClient(url) as client:
            assert await client.health()
    assert not serving.alive
    async with LlamaClient(url) as client:
        assert not await client.health(timeout_s=1)
