"""The client over real sockets: pools, faults, timeouts, cuts; and against the mock's clock."""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from browndwarf.bench.answers import judge
from browndwarf.bench.dataset import Prompt
from browndwarf.bench.endpoint import (
    Endpoint,
    Sampling,
    describe,
    parse_counters,
    read_counters,
    request_body,
    request_path,
)
from browndwarf.bench.framing import Exchange
from browndwarf.bench.mock import MockServer, Script
from browndwarf.bench.run import Job, Plan, run_points
from browndwarf.bench.traces import TraceWriter
from browndwarf.bench.transport import Connection, Transport
from browndwarf.errors import RequestFailed, UsageError

BODY = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}'
QUICK = Script(tokens=4, ttft_s=0.0, step_s=0.0)


@asynccontextmanager
async def serving(answer: bytes, *, open_s: float = 0.0) -> AsyncIterator[str]:
    """A server that gives every connection one answer of raw bytes, and closes it."""
    tasks: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(BODY))
        writer.write(answer)
        await asyncio.sleep(open_s)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await asyncio.gather(*(task for task in tasks if task), return_exceptions=True)


async def test_one_answer_is_whole() -> None:
    async with MockServer(QUICK) as server, Transport(server.base_url) as transport:
        exchange = await transport.post("/v1/chat/completions", BODY)
        answer = judge(exchange)
    assert (exchange.status, answer.fault, len(answer.at_s)) == (200, "", 4)
    assert exchange.started_s <= exchange.sent_s <= exchange.first_byte_s <= exchange.end_s


async def test_connections_are_used_again() -> None:
    async with MockServer(QUICK) as server, Transport(server.base_url) as transport:
        for _ in range(3):
            await transport.post("/v1/chat/completions", BODY)
        assert transport.opened == 1


async def test_llama_servers_connections_are_not_since_it_closes_them() -> None:
    answer = b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Length: 2\r\n\r\nhi"
    async with serving(answer, open_s=0.5) as url, Transport(url) as transport:
        faults = [(await transport.post("/x", BODY)).fault for _ in range(3)]
        assert (faults, transport.opened) == ([""] * 3, 3)


async def test_a_server_that_closes_after_each_answer_costs_no_request() -> None:
    """Though it promised to keep the connection; and whether we see that in time or not."""

    answer = (
        b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\nhi\r\n0\r\n\r\n"
    )
    async with serving(answer, open_s=0.005) as url, Transport(url) as transport:
        faults = [(await transport.post("/x", BODY)).fault for _ in range(20)]
    assert faults == [""] * 20


@pytest.mark.parametrize(
    ("answer", "fault", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "", b"hello"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", "", b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 None\r\n\r\n", "", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", "reset", b"hello"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n\r\n", "bad-http", b""),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "bad-http", b""),
        (b"", "reset", b""),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"3;x=y\r\nabc\r\n0\r\nTrailer: 1\r\n\r\n",
            "",
            b"abc",
        ),
    ],
)
async def test_framing(answer: bytes, fault: str, body: bytes) -> None:
    async with serving(answer) as url, Transport(url) as transport:
        exchange = await transport.post("/x", BODY)
    assert (exchange.fault, exchange.body) == (fault, body)


async def test_silence_times_out() -> None:
    async with (
        MockServer(Script(tokens=4, fault="hang")) as server,
        Transport(server.base_url, timeout_s=0.2) as transport,
    ):
        assert (await transport.post("/v1/chat/completions", BODY)).fault == "timeout"


async def test_an_answer_that_has_just_ended_is_not_silent() -> None:
    """Between the last byte and its sender's turn the timer for silence may run."""
    connection = Connection()
    assert connection.last_byte_s == math.inf


async def test_nothing_listening_is_a_connect_fault(unused_port: int) -> None:
    async with Transport(f"http://127.0.0.1:{unused_port}") as transport:
        exchange = await transport.post("/v1/chat/completions", BODY)
        assert exchange.fault == "connect"
        with pytest.raises(RequestFailed):
            await describe(transport)


async def test_a_cut_returns_what_has_come() -> None:
    script = Script(tokens=500, ttft_s=0.0, step_s=0.01)
    async with MockServer(script) as server, Transport(server.base_url) as transport:
        task = asyncio.ensure_future(transport.post("/v1/chat/completions", BODY))
        while not transport.in_flight:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        transport.cut()
        exchange = await asyncio.wait_for(task, 5)
    assert exchange.fault == "cut"
    assert 0 < len(judge(exchange).at_s) < 500


@pytest.mark.parametrize("url", ["ftp://x", "http://", "nonsense://"])
def test_odd_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        Transport(url)


def test_a_key_with_a_line_break_is_refused() -> None:
    with pytest.raises(UsageError):
        Transport("http://127.0.0.1", headers={"Authorization": "Bearer x\r\nEvil: 1"})


async def test_every_fault_of_the_mock_lands_in_its_class_over_sockets(tmp_path: Path) -> None:
    names = ["error-in-stream", "reset", "incomplete", "bad-event", "no-text"]
    names += ["http-500", "rate-limited", "hang"]
    prompts = [mock_prompt(name, {"tokens": 8, "fault": name}) for name in names]
    prompts += [mock_prompt(f"fine{i}", {"tokens": 8}) for i in range(8)]
    plan = Plan(sampling=Sampling(model="m"), concurrency=(4,), num_prompts=16, warmup=0)
    base = Script(ttft_s=0.01, step_s=0.002)
    async with MockServer(base) as server, Transport(server.base_url, timeout_s=2.0) as transport:
        job = Job(plan, prompts, Endpoint(kind="other"), "/v1/chat/completions")
        with TraceWriter(tmp_path / "t.jsonl") as traces:
            (point,) = await run_points(job, transport, traces)
    wanted = {name if name != "hang" else "timeout": 1 for name in names}
    assert point.errors == wanted
    assert point.completed == 8
    assert point.error_rate == 0.5


async def test_latencies_equal_the_mocks_own_clock(tmp_path: Path) -> None:
    """Against the times at which the mock really wrote, since sleeps are late on a busy machine.

    The bound is loose here; exactness is shown with recorded times in test_metrics.
    """
    script = Script(tokens=25, burst=3, ttft_s=0.05, step_s=0.02)
    plan = Plan(sampling=Sampling(model="m"), concurrency=(2,), num_prompts=8, warmup=0)
    async with MockServer(script, keep=True) as server, Transport(server.base_url) as transport:
        job = Job(plan, [mock_prompt("p", {})], Endpoint(kind="other"), "/v1/chat/completions")
        with TraceWriter(tmp_path / "t.jsonl") as traces:
            (point,) = await run_points(job, transport, traces)
        writes = server.served.writes
    truth = statistics.median(w[2] for w in writes) * 1e3  # head, role, first token
    assert point.completed == 8
    assert point.ttft_ms["p50"] == pytest.approx(truth, abs=20)
    assert point.tokens_per_step == pytest.approx(3.0, rel=0.05)


async def test_llama_server_is_told_not_to_reuse_prompts_and_others_get_only_standards() -> None:
    prompt = Prompt(
        id="p",
        messages=({"role": "user", "content": "Hi"},),
        extra={"chat_template_kwargs": {"enable_thinking": False}},
    )
    sampling = Sampling(model="m", max_tokens=5)
    llama = msgspec.json.decode(request_body(prompt, sampling, "llama.cpp"))
    other = msgspec.json.decode(request_body(prompt, sampling, "other"))
    vllm = msgspec.json.decode(request_body(prompt, sampling, "vllm"))
    assert llama["cache_prompt"] is False
    assert llama["chat_template_kwargs"] == {"enable_thinking": False}
    assert set(other) == {
        "model",
        "max_tokens",
        "temperature",
        "seed",
        "stream",
        "stream_options",
        "messages",
    }
    assert vllm["stream_options"]["continuous_usage_stats"] is True
    assert all(b["stream_options"]["include_usage"] for b in (llama, other, vllm))


async def test_the_endpoint_describes_itself_and_its_counters(tmp_path: Path) -> None:
    script = Script(tokens=7, burst=3)
    async with MockServer(script) as server, Transport(server.base_url) as transport:
        found = await describe(transport)
        before = await read_counters(transport)
        await transport.post(request_path(transport, "chat"), BODY)
        after = await read_counters(transport)
    assert (found.kind, found.model, found.slots) == ("llama.cpp", "mock.gguf", 4)
    assert before is not None
    assert after is not None
    assert (after - before).drafts == 2


async def test_completions_work_alike() -> None:
    async with MockServer(QUICK) as server, Transport(server.base_url + "/v1") as transport:
        path = request_path(transport, "completions")
        body = request_body(mock_prompt("p", {}), Sampling(model="m", api="completions"), "other")
        exchange: Exchange = await transport.post(path, body)
    assert path == "/completions"
    assert len(judge(exchange).at_s) == 4


def test_counters_of_vllm_are_summed_over_engines() -> None:
    text = """
# HELP vllm:spec_decode_num_drafts_total x
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 3.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 4.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 14.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 3.0
"""
    found = parse_counters(text)
    assert found is not None
    assert (found.drafts, found.draft_tokens, found.accepted) == (7, 14, 9)
    assert found.per_position == (6, 3)
    assert parse_counters("nothing here") is None


def mock_prompt(name: str, changes: dict[str, object]) -> Prompt:
    content = "mock:" + msgspec.json.encode(changes).decode()
    return Prompt(id=name, messages=({"role": "user", "content": content},))


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
