"""Time that passes only in the mind: feed a client without sockets, run a loop without waiting."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from browndwarf.bench.framing import Exchange
from browndwarf.bench.mock import Script, timetable
from browndwarf.bench.transport import Connection

T = TypeVar("T")


class _Now:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


class _Wire(asyncio.Transport):
    """Takes what is written; closing it is all it can do."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = False

    def write(self, data: Any) -> None:
        pass

    def abort(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing


def feed(script: Script, *, cut_at: float | None = None) -> Exchange:
    """The exchange that a timetable gives, with the timetable's own times; no loop runs.

    A timetable that stops early ends in a closed connection; ``cut_at`` cuts it ourselves.
    """
    loop = asyncio.new_event_loop()
    try:
        clock = _Now()
        connection = Connection(clock)
        connection.connection_made(_Wire())
        exchange = Exchange(0.0)
        done = loop.create_future()
        connection.begin(exchange, done, b"")
        for at_s, data in timetable(script):
            if cut_at is not None and at_s > cut_at:
                clock.s = cut_at
                connection.finish("cut", "ended by the benchmark")
                break
            clock.s = at_s
            connection.data_received(data)
        if not done.done():
            connection.connection_lost(None)
        return exchange
    finally:
        loop.close()


class _Selector(selectors.DefaultSelector):
    """Instead of waiting, moves the clock on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing is left that could happen")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose sleeps take no time, in exact order."""

    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
