"""HTTP/1.1 for a benchmark: streamed answers as raw bytes with their arrival times.

The client shares its few cores with the server that it measures, so as little as possible is
done while an answer streams: the time is taken, the bytes are put aside. Framing is undone when
the answer has ended, and JSON is parsed by ``answers`` after that. Connections are pooled and
speak over the running event loop (uvloop's where it is installed).

Not covered: HTTP/2, proxies, compression, redirects.

Example:
    >>> async with Transport("http://127.0.0.1:8080") as transport:  # doctest: +SKIP
    ...     exchange = await transport.post("/v1/chat/completions", body)
    ...     exchange.status, exchange.fault, len(exchange.pieces)
    (200, '', 64)
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from browndwarf.bench.framing import Dechunker, Exchange, Pieces
from browndwarf.errors import UsageError

#: A connection that was idle for longer is not used again.
IDLE_S = 2.0
SWEEP_S = 1.0


class Connection(asyncio.Protocol):
    """One connection; serves one request at a time.

    While an answer streams, ``data_received`` only notes the time and keeps the bytes, and
    looks for what may be the last chunk.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._raw: Pieces = []
        self._fed = 0
        self._mode = "idle"
        self._left = 0
        self._chunks = Dechunker()
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self.keep = True
        self.idle_since = 0.0
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio's protocol."""
        self._transport = transport  # type: ignore[assignment]

    @property
    def open(self) -> bool:
        """Whether another request may be sent."""
        return self.keep and self._transport is not None and not self._transport.is_closing()

    @property
    def last_byte_s(self) -> float:
        """When something came last; when the request was sent, if nothing has. Endless if the
        exchange is over and its sender has not been woken yet.
        """
        if self._exchange is None:
            return math.inf
        return self._raw[-1][0] if self._raw else self._exchange.sent_s

    def begin(self, exchange: Exchange, done: asyncio.Future[None], request: bytes) -> None:
        """Write a request; ``done`` is resolved when ``exchange`` is complete or has failed."""
        assert self._transport is not None
        self._raw, self._fed, self._mode, self._chunks = [], 0, "head", Dechunker()
        self._exchange, self._done = exchange, done
        exchange.sent_s = self._clock()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Part of asyncio's protocol: the hot path."""
        self._raw.append((self._clock(), data))
        mode = self._mode
        if mode == "chunked":
            # The last chunk ends so; an event with CRLF lines does as well, hence a real parse.
            if data.endswith(b"\r\n\r\n") or len(data) < 5:
                self._unframe()
        elif mode == "head":
            self._head()
        elif mode == "length":
            self._left -= len(data)
            if self._left <= 0:
                self.finish()
        elif mode == "idle":
            self.keep = False  # an answer that nobody asked for

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of asyncio's protocol."""
        self.keep = False
        self.closed.set()
        if self._mode == "until-close" and exc is None:
            self.finish()
        elif self._exchange is not None:
            why = str(exc) if exc else "the server closed the connection"
            self.finish("reset", why)

    def finish(self, fault: str = "", detail: str = "") -> None:
        """End the exchange: undo the framing of what has come, wake the one who waits."""
        exchange, done = self._exchange, self._done
        if exchange is None or done is None:
            return
        if self._mode == "chunked":
            try:
                self._feed()
            except ValueError:
                fault, detail = fault or "bad-http", detail or "chunk sizes make no sense"
            exchange.pieces = self._chunks.pieces
        elif self._mode in ("length", "until-close"):
            exchange.pieces = self._raw
        exchange.end_s = self._raw[-1][0] if self._raw and not fault else self._clock()
        exchange.first_byte_s = exchange.first_byte_s or exchange.end_s
        exchange.fault, exchange.detail = fault, detail
        if fault or self._mode == "until-close":
            self.close()
        self._exchange = self._done = None
        self._mode, self._raw, self.idle_since = "idle", [], self._clock()
        if not done.done():
            done.set_result(None)

    def close(self) -> None:
        """Cut the connection now."""
        self.keep = False
        if self._transport is not None:
            self._transport.abort()

    def _feed(self) -> None:
        for at_s, data in self._raw[self._fed :]:
            self._chunks.feed(at_s, data)
        self._fed = len(self._raw)

    def _unframe(self) -> None:
        try:
            self._feed()
        except ValueError:
            self.finish("bad-http", "chunk sizes make no sense")
            return
        if self._chunks.done:
            self.finish()

    def _head(self) -> None:
        assert self._exchange is not None
        exchange = self._exchange
        if not exchange.first_byte_s:
            exchange.first_byte_s = self._raw[0][0]
        joined = b"".join(data for _, data in self._raw)
        head, gap, rest = joined.partition(b"\r\n\r\n")
        if not gap:
            if len(joined) > 1 << 16:
                self.finish("bad-http", "the headers do not end")
            return
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            self.finish("bad-http", f"the answer begins with {lines[0][:60]!r}")
            return
        exchange.status = int(words[1])
        exchange.headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines[1:])
        }
        at_s = self._raw[-1][0]
        self._raw = [(at_s, rest)] if rest else []
        if 100 <= exchange.status < 200:
            if rest:
                self._head()
            return
        self._begin_body(exchange, len(rest), words[0])

    def _begin_body(self, exchange: Exchange, there: int, version: str) -> None:
        headers = exchange.headers
        connection = headers.get("connection", "").lower()
        if "close" in connection or (version == "HTTP/1.0" and "keep-alive" not in connection):
            self.keep = False
        if headers.get("server") == "llama.cpp":
            # It promises to keep a connection, and closes it right after a streamed answer.
            self.keep = False
        length = headers.get("content-length", "")
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._mode = "chunked"
            self._unframe()
        elif length.isdigit() or exchange.status in (204, 304):
            self._mode = "length"
            self._left = int(length or 0) - there
            if self._left <= 0:
                self.finish()
        else:
            self._mode = "until-close"


class Transport:
    """A pool of connections to one server; an async context manager.

    Args:
        base_url: ``http://host:port`` with an optional path, which is put before every path.
        headers: sent with every request, such as ``Authorization``.
        timeout_s: seconds without a byte after which a request fails with ``timeout``.
        clock: seconds; another one only in tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"{base_url!r} is no address of a server",
                why="it must be http or https with a host",
                fix="write it like http://127.0.0.1:8080",
            )
        self.base_path = parts.path.rstrip("/")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._timeout_s = timeout_s
        self._clock = clock
        lines = {"Host": parts.netloc, "Accept-Encoding": "identity", **(headers or {})}
        for name, value in lines.items():
            if any(ord(c) < 32 or ord(c) > 255 for c in name + value):
                raise UsageError(
                    f"the header {name} holds characters that HTTP does not allow",
                    fix="check the API key and the address",
                )
        self._common = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._reuse = True
        self.opened = 0

    async def __aenter__(self) -> Self:
        self._sweep()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        connections = [*self._idle, *self._busy]
        for connection in connections:
            connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                for connection in connections:
                    await connection.closed.wait()
        self._idle.clear()

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return len(self._busy)

    def cut(self) -> None:
        """End all requests under way; each returns what it has, with the fault ``cut``."""
        for connection in list(self._busy):
            connection.finish("cut", "ended by the benchmark")

    async def post(self, path: str, body: bytes) -> Exchange:
        """Send JSON and collect the answer. Never raises for a fault of the server."""
        head = (
            f"POST {self.base_path}{path} HTTP/1.1\r\n{self._common}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return await self._send(head.encode("latin-1") + body)

    async def get(self, path: str, *, base: bool = True) -> Exchange:
        """Fetch a path on a connection of its own; without ``base`` from the server's root."""
        prefix = self.base_path if base else ""
        head = f"GET {prefix}{path} HTTP/1.1\r\n{self._common}Connection: close\r\n\r\n"
        return await self._send(head.encode("latin-1"), fresh=True)

    async def _send(self, request: bytes, *, fresh: bool = False) -> Exchange:
        exchange = await self._once(request, fresh=fresh or not self._reuse)
        if exchange.fault == "reset" and exchange.reused and not exchange.status:
            # The server had closed the kept connection before it saw the request. This is the
            # only case in which a request is sent again; from now on none is kept.
            self._reuse = False
            exchange = await self._once(request, fresh=True)
        return exchange

    async def _once(self, request: bytes, *, fresh: bool) -> Exchange:
        exchange = Exchange(self._clock())
        connection = None if fresh else self._take()
        exchange.reused = connection is not None
        if connection is None:
            try:
                connection = await self._connect()
            except (OSError, TimeoutError) as exc:
                exchange.fault = "timeout" if isinstance(exc, TimeoutError) else "connect"
                exchange.detail = str(exc) or type(exc).__name__
                exchange.sent_s = exchange.first_byte_s = exchange.end_s = self._clock()
                return exchange
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._busy.add(connection)
        try:
            connection.begin(exchange, done, request)
            await done
        except BaseException:
            connection.finish("cut", "cancelled")
            raise
        finally:
            self._busy.discard(connection)
        if connection.open and not fresh:
            self._idle.append(connection)
        else:
            connection.close()
        return exchange

    def _take(self) -> Connection | None:
        now = self._clock()
        while self._idle:
            connection = self._idle.pop()
            if connection.open and now - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        async with asyncio.timeout(min(self._timeout_s, 30.0)):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._clock), self._host, self._port, ssl=self._tls
            )
        self.opened += 1
        return connection

    def _sweep(self) -> None:
        """One timer for all requests: renewing one per event would cost more than the event."""
        now = self._clock()
        for connection in list(self._busy):
            silent = now - connection.last_byte_s
            if silent > self._timeout_s:
                connection.finish("timeout", f"nothing came for {silent:.1f} s")
        self._idle = [c for c in self._idle if c.open]
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(min(SWEEP_S, self._timeout_s / 4), self._sweep)
