"""Answers arrive whole, streamed or not at all, and each way to fail has its own error."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from browndwarf.engine.client import LlamaClient
from browndwarf.engine.locate import Build
from browndwarf.engine.options import ServerOptions
from browndwarf.engine.process import LlamaServer
from browndwarf.errors import RequestFailed, ServerHung
from fakes import behave

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="fakes are POSIX scripts")

Connect = Callable[..., Any]


@pytest.fixture
def connect(fake_build: Callable[..., Build], tmp_path: Path) -> Connect:
    @asynccontextmanager
    async def go(**behaviour: object) -> AsyncIterator[LlamaClient]:
        model = tmp_path / "model.gguf"
        model.write_bytes(b"GGUF")
        options = ServerOptions(model=str(model), ctx=512)
        env = behave(**behaviour)
        async with (
            LlamaServer(
                fake_build(), options, log_path=tmp_path / "log", env=env, grace_s=0.3
            ) as server,
            LlamaClient(server.base_url, timeout_s=20) as client,
        ):
            yield client

    return go


async def test_a_streamed_completion_has_every_token_and_its_time(connect: Connect) -> None:
    async with connect() as client:
        done = await client.completion("hello", n_predict=7, ignore_eos=True)
    assert done.text == " w0 w1 w2 w3 w4 w5 w6"
    assert done.tokens == tuple(range(7))
    assert done.event_tokens == (1,) * 7
    assert len(done.event_s) == 7
    assert list(done.event_s) == sorted(done.event_s)
    assert done.sent_s <= done.first_s == done.event_s[0] <= done.last_s
    assert 0 <= done.ttft_s <= done.total_s
    assert done.stop == "limit"
    assert done.timings.predicted_n == 7


async def test_a_whole_completion_says_the_same(connect: Connect) -> None:
    async with connect() as client:
        streamed = await client.completion("hello", n_predict=7)
        whole = await client.completion([1, 2, 3], n_predict=7, stream=False, seed=1)
    assert (whole.text, whole.tokens) == (streamed.text, streamed.tokens)
    assert whole.timings == streamed.timings
    assert whole.event_s == ()


async def test_counters_can_be_subtracted(connect: Connect) -> None:
    async with connect() as client:
        await client.completion("a", n_predict=4)
        before = await client.metrics()
        done = await client.completion("b", n_predict=10)
        difference = await client.metrics() - before
    assert difference.drafts == done.timings.cycles
    assert difference.accepted == done.timings.draft_n_accepted
    assert difference.draft_tokens == done.timings.draft_n


async def test_the_small_endpoints(connect: Connect) -> None:
    async with connect() as client:
        assert await client.health()
        assert await client.tokenize("hi") == [104, 105]
        assert await client.detokenize([104, 105]) == "hi"
        assert await client.apply_template([{"role": "user", "content": "x"}]) == "<user>x"
        props = await client.props()
        assert props.n_ctx == 512
        assert props.model_path.endswith("model.gguf")


async def test_chat_whole_and_streamed(connect: Connect) -> None:
    messages = [{"role": "user", "content": "x"}]
    async with connect() as client:
        whole = await client.chat(messages, max_tokens=4, seed=1)
        with_tools = await client.chat(messages, tools=[{"type": "function"}])
        streamed = await client.chat(messages, stream=True, chat_template_kwargs={"a": 1})
    assert (whole.text, whole.reasoning, whole.finish_reason) == ("hello", "hm", "stop")
    assert (whole.prompt_tokens, whole.completion_tokens) == (5, 4)
    assert with_tools.tool_calls[0]["function"]["name"] == "f"
    assert streamed.text == "hello"
    assert streamed.tool_calls[0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert len(streamed.event_s) == 5
    assert streamed.timings == whole.timings


@pytest.mark.parametrize(
    ("mode", "stream", "words"),
    [
        ("error", True, "exceed_context_size_error"),
        ("error", False, "exceed_context_size_error"),
        ("stream-error", True, "Compute error"),
        ("cut", True, "POST /completion"),
        ("crash", True, "POST /completion"),
        ("crash", False, "POST /completion"),
        ("no-final", True, "no final event"),
        ("not-json", False, "<html>"),
    ],
)
async def test_a_failed_request_says_what_why_and_next(
    connect: Connect, mode: str, stream: bool, words: str
) -> None:
    async with connect(request=mode) as client:
        with pytest.raises(RequestFailed) as caught:
            await client.completion("x", n_predict=4, stream=stream)
    assert words in caught.value.why
    assert caught.value.fix


@pytest.mark.parametrize("mode", ["hang", "hang-in-stream"])
async def test_a_request_that_gets_no_byte_is_hung(connect: Connect, mode: str) -> None:
    async with connect(request=mode) as client:
        with pytest.raises(ServerHung, match="sent nothing"):
            await client.completion("x", n_predict=4, timeout_s=0.3)


async def test_nobody_listening(unused_tcp_port: int) -> None:
    async with LlamaClient(f"http://127.0.0.1:{unused_tcp_port}") as client:
        assert not await client.health()
        with pytest.raises(RequestFailed, match="nothing answers"):
            await client.props()


async def test_a_client_must_be_entered() -> None:
    with pytest.raises(RuntimeError):
        await LlamaClient("http://127.0.0.1:1").props()
