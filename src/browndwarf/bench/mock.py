"""A scriptable stand-in for a server: it streams on a fixed timetable, and fails on request.

``timetable`` is pure: a script becomes raw HTTP bytes with their times, so that the truth about
every metric is known beforehand and the client can be fed without a socket. ``MockServer`` plays
timetables over real sockets; ``python -m browndwarf.bench.mock`` does so as a process of its
own, which ends when its standard input closes (or, with ``--port``, on a signal).

A prompt that begins with ``mock:`` and a JSON object overrides the script for this request.

Example:
    >>> script = Script(tokens=7, ttft_s=0.1, step_s=0.02, burst=3)
    >>> script.truth["tpot_s"] == 2 * 0.02 / 6
    True
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec

from browndwarf.bench.framing import Pieces


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What a request gets. Seconds count from its arrival.

    Args:
        tokens: length of the answer; 0 takes the request's ``max_tokens``.
        first: tokens that come with the first step, at ``ttft_s``.
        burst: tokens of each later step, ``step_s`` apart.
        bundled: one event per step instead of one per token.
        reasoning: so many of the first tokens are ``reasoning_content``.
        role_first: the stream begins with an event that only names the role, at ``headers_s``.
        usage: ``right``, ``wrong`` (ten times too many), ``none``, or ``every`` event.
        timings: whether llama.cpp's ``timings`` come with the last event.
        fault: ``error-in-stream``, ``reset``, ``incomplete``, ``bad-event``, ``no-text``,
            ``hang``, ``http-500``, ``rate-limited``; the first four after ``fault_at`` steps.
        split: every write is cut inside a UTF-8 character or an event.
    """

    tokens: int = 0
    first: int = 1
    burst: int = 1
    ttft_s: float = 0.01
    step_s: float = 0.01
    bundled: bool = False
    reasoning: int = 0
    reasoning_key: str = "reasoning_content"
    role_first: bool = True
    usage: str = "right"
    timings: bool = True
    fault: str = ""
    fault_at: int = 2
    headers_s: float = 0.0
    crlf: bool = False
    comments: bool = False
    split: bool = False
    text: str = "tok "
    prompt_tokens: int = 16
    cached: int = 0
    retry_after: str = "0.05"
    completions: bool = False

    @property
    def steps(self) -> list[int]:
        """Tokens of each step."""
        sizes = [min(self.first, self.tokens)]
        while (left := self.tokens - sum(sizes)) > 0:
            sizes.append(min(self.burst, left))
        return sizes

    @property
    def truth(self) -> dict[str, float]:
        """What a right client must report; seconds and tokens."""
        sizes = self.steps
        last = self.ttft_s + (len(sizes) - 1) * self.step_s
        rest = self.tokens - sizes[0]
        return {
            "n": float(self.tokens),
            "ttft_s": self.ttft_s,
            "last_s": last,
            "tpot_s": (last - self.ttft_s) / rest if rest else float("nan"),
            "step_gap_s": self.step_s,
            "tokens_per_step": rest / (len(sizes) - 1) if len(sizes) > 1 else float("nan"),
        }


def timetable(script: Script) -> Pieces:
    """(seconds, raw bytes) of the whole answer; a ``reset`` or ``hang`` just stops early."""
    if script.fault in ("http-500", "rate-limited"):
        return [(script.headers_s, _refusal(script))]
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    out: Pieces = [(script.headers_s, head)]
    if script.fault == "hang":
        return out
    if script.role_first:
        out.append((script.headers_s, _event(script, {"role": "assistant", "content": None})))
    sent = 0
    for number, size in enumerate(script.steps):
        at_s = script.ttft_s + number * script.step_s
        if script.fault and number == script.fault_at and script.fault != "no-text":
            return out + _failure(script, at_s)
        if script.comments:
            out.append((at_s, _chunk(b": still here" + _end(script))))
        for count in [size] if script.bundled else [1] * size:
            out.append((at_s, _event(script, _delta(script, sent, count), sent + count)))
            sent += count
    out.append((at_s, _last(script)))
    out.append((at_s, _chunk(b"data: [DONE]" + _end(script)) + b"0\r\n\r\n"))
    return _split(out) if script.split else out


def _refusal(script: Script) -> bytes:
    limited = script.fault == "rate-limited"
    status = b"429 Too Many Requests" if limited else b"500 Internal Server Error"
    body = b'{"error": {"message": "refused by the script", "type": "mock", "code": 500}}'
    extra = f"Retry-After: {script.retry_after}\r\n".encode() if limited else b""
    return b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n%b" % (status, extra, len(body), body)


def _failure(script: Script, at_s: float) -> Pieces:
    if script.fault == "error-in-stream":
        error = {"error": {"code": 500, "message": "scripted", "type": "server_error"}}
        return [(at_s, _data(script, error)), (at_s, b"0\r\n\r\n")]
    if script.fault == "bad-event":
        return [(at_s, _chunk(b'data: {"choices": [{"delta"' + _end(script)) + b"0\r\n\r\n")]
    return [(at_s, b"0\r\n\r\n")] if script.fault == "incomplete" else []


def _delta(script: Script, sent: int, count: int) -> dict[str, Any]:
    text = "" if script.fault == "no-text" else script.text * count
    return {script.reasoning_key if sent < script.reasoning else "content": text}


def _event(script: Script, delta: dict[str, Any], sent: int = 0) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    if script.completions:
        choice["text"] = delta.get("content") or ""
    else:
        choice["delta"] = delta
    event: dict[str, Any] = {"object": "chat.completion.chunk", "choices": [choice]}
    if script.usage == "every":
        event["usage"] = _usage(script, sent)
    return _data(script, event)


def _last(script: Script) -> bytes:
    choice = {"index": 0, "finish_reason": "length", "delta": {}}
    event: dict[str, Any] = {"object": "chat.completion.chunk", "choices": [choice]}
    if script.usage != "none":
        factor = 10 if script.usage == "wrong" else 1
        event["usage"] = _usage(script, script.tokens * factor)
    if script.timings:
        sizes = script.steps
        event["timings"] = {
            "cache_n": script.cached,
            "prompt_n": script.prompt_tokens - script.cached,
            "prompt_ms": script.ttft_s * 1e3,
            "predicted_n": script.tokens,
            "predicted_ms": (len(sizes) - 1) * script.step_s * 1e3,
        }
        if script.burst > 1 and script.first == 1:
            drafted = (len(sizes) - 1) * script.burst
            accepted = script.tokens - len(sizes)
            event["timings"] |= {"draft_n": drafted, "draft_n_accepted": accepted}
    return _data(script, event)


def _usage(script: Script, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": script.prompt_tokens,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": script.cached},
    }


def _data(script: Script, event: dict[str, Any]) -> bytes:
    body = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
    return _chunk(b"data: " + body + _end(script))


def _end(script: Script) -> bytes:
    return b"\r\n\r\n" if script.crlf else b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _split(pieces: Pieces) -> Pieces:
    """Every write in two; the cut falls into a multi-byte character where there is one."""
    out: Pieces = []
    for at_s, data in pieces:
        wide = next((i for i, byte in enumerate(data) if byte >= 0x80), len(data) // 2 - 1)
        out += [(at_s, data[: wide + 1]), (at_s, data[wide + 1 :])]
    return out


@dataclass
class Served:
    """What a MockServer did: requests by path, bodies' summary, and when it wrote."""

    paths: Counter[str]
    writes: list[list[float]]
    bodies: list[dict[str, Any]]
    aborted: int = 0


class MockServer:
    """Plays scripts over HTTP on 127.0.0.1, on the running loop; an async context manager.

    ``served.writes`` has the loop times of every request's writes if ``keep`` is set.
    """

    def __init__(self, script: Script | None = None, *, port: int = 0, keep: bool = False) -> None:
        self.script = script or Script()
        self.port = port
        self.keep = keep
        self.served = Served(Counter(), [], [])
        self.drafts = [0, 0, 0]
        self._server: asyncio.Server | None = None
        self._tables: dict[Script, Pieces] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def base_url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self.port, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # sockets are closed in the loop's next rounds

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            self.served.aborted += 1
        finally:
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; False if the connection should end."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        except asyncio.IncompleteReadError:
            return False
        path = head.split(" ", 2)[1]
        self.served.paths[path] += 1
        if head.startswith("get "):
            writer.write(self._page(path))
            return "connection: close" not in head
        length = int(head.partition("content-length:")[2].split("\r\n", 1)[0])
        script = self._script(json.loads(await reader.readexactly(length)), path)
        if script not in self._tables:
            if len(self._tables) > 256:
                self._tables.clear()
            self._tables[script] = timetable(script)
        await self._play(self._tables[script], writer)
        if script.fault == "hang":
            await asyncio.sleep(3600)
        self._count(script)
        return script.fault not in ("reset",)

    async def _play(self, table: Pieces, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        writes: list[float] = []
        for at_s, data in table:
            wait = start + at_s - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
                if writer.transport.is_closing():
                    raise ConnectionResetError
            writer.write(data)
            if self.keep:
                writes.append(loop.time() - start)
        if self.keep:
            self.served.writes.append(writes)

    def _script(self, body: dict[str, Any], path: str) -> Script:
        if self.keep:
            self.served.bodies.append(body)
        content = body.get("prompt")
        if content is None:
            content = body["messages"][-1]["content"]
        changes: dict[str, Any] = {"completions": not path.endswith("/chat/completions")}
        if isinstance(content, str) and content.startswith("mock:"):
            changes |= json.loads(content[5:])
        script = msgspec.structs.replace(self.script, **changes)
        if not script.tokens:
            script = msgspec.structs.replace(script, tokens=int(body.get("max_tokens", 16)))
        return script

    def _count(self, script: Script) -> None:
        steps = len(script.steps) - 1
        if script.burst > 1 and not script.fault:
            self.drafts[0] += steps
            self.drafts[1] += steps * script.burst
            self.drafts[2] += script.tokens - 1 - steps

    def _page(self, path: str) -> bytes:
        drafts, drafted, accepted = self.drafts
        pages = {
            "/health": b'{"status": "ok"}',
            "/v1/models": b'{"data": [{"id": "mock"}]}',
            "/props": b'{"model_path": "mock.gguf", "total_slots": 4, "build_info": "mock"}',
            "/metrics": (
                f"llamacpp:spec_decode_num_drafts_total {drafts}\n"
                f"llamacpp:spec_decode_num_draft_tokens_total {drafted}\n"
                f"llamacpp:spec_decode_num_accepted_tokens_total {accepted}\n"
            ).encode(),
        }
        body = pages.get(path)
        status = b"200 OK" if body is not None else b"404 Not Found"
        body = body or b"{}"
        return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


async def _main(script: Script, port: int | None) -> None:
    """Serve on a given port until a signal; else on a free one, until standard input ends."""
    async with MockServer(script, port=port or 0) as server:
        if port is not None:
            await asyncio.Event().wait()
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.buffer.read)


def _arguments() -> tuple[Script, int | None]:
    parser = argparse.ArgumentParser(description="a mock server for benchmarks")
    parser.add_argument("script", nargs="?", default="{}", help="JSON of a Script")
    parser.add_argument("--port", type=int, default=None)
    found = parser.parse_args()
    return msgspec.json.decode(found.script, type=Script), found.port


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(*_arguments()))
