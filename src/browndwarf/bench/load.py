"""When requests are sent: closed loop, open loop, ramp, time cap.

Closed loop: a constant number of slots, each refilled at once. Open loop: an absolute schedule
of arrivals, so a slow server does not slow the load down. Both stop at a ``Gate``: the time cap,
Ctrl-C or a dead server close it; requests under way are then cut, and count as such.

Example:
    >>> list(itertools.islice(arrivals(rate=10.0, burstiness=math.inf), 3))
    [0.0, 0.1, 0.2]
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

Clock = Callable[[], float]
#: Sends one item that was due at the given time, and says how long its slot should then pause.
Send = Callable[[T, float], Awaitable[float]]
MAX_PAUSE_S = 30.0


class Gate:
    """Open until something ends the load. ``reason`` says what; callbacks run once, at once."""

    def __init__(self) -> None:
        self.reason = ""
        self._closed = asyncio.Event()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def open(self) -> bool:
        """Whether more may be sent."""
        return not self.reason

    def on_close(self, callback: Callable[[], None]) -> None:
        """Have something called when the gate closes."""
        self._callbacks.append(callback)

    def close(self, reason: str) -> None:
        """Close it; the first reason stays."""
        if self.reason:
            return
        self.reason = reason
        self._closed.set()
        for callback in self._callbacks:
            callback()

    async def pause(self, seconds: float) -> None:
        """Wait, but no longer than until the gate closes."""
        if seconds > 0 and self.open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), seconds)


@dataclass
class Progress:
    """Times of a load on its clock. ``full_s``: all slots are busy; ``draining_s``: no item is
    left for a free slot; both 0 where it never came to that.
    """

    started_s: float
    full_s: float = 0.0
    draining_s: float = 0.0
    ended_s: float = 0.0
    sent: int = 0


async def closed_loop(
    items: Iterable[T],
    send: Send[T],
    *,
    concurrency: int,
    gate: Gate,
    clock: Clock,
    ramp_s: float = 0.0,
) -> Progress:
    """Keep ``concurrency`` requests under way until the items end or the gate closes.

    Slots start evenly over ``ramp_s``. A slot whose request was refused pauses as told.
    """
    source = iter(items)
    progress: Progress = Progress(clock())

    async def slot(number: int) -> None:
        await gate.pause(ramp_s * number / concurrency)
        due = clock()
        first = True
        while gate.open:
            try:
                item = next(source)
            except StopIteration:
                progress.draining_s = progress.draining_s or clock()
                return
            progress.sent += 1
            if first and number == concurrency - 1:
                progress.full_s = clock()
            first = False
            pause = await send(item, due)
            await gate.pause(min(pause, MAX_PAUSE_S))
            due = clock()

    await _all(slot(number) for number in range(concurrency))
    progress.ended_s = clock()
    return progress


async def open_loop(
    items: Iterable[T], send: Send[T], *, schedule: Iterator[float], gate: Gate, clock: Clock
) -> Progress:
    """Send each item at its time of the schedule (seconds from now), whatever is under way."""
    progress: Progress = Progress(clock())
    tasks: set[asyncio.Task[float]] = set()
    failed: list[BaseException] = []

    def finished(task: asyncio.Task[float]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            failed.append(error)
            gate.close("failed")

    try:
        for item, offset in zip(items, schedule, strict=False):
            due = progress.started_s + offset
            await gate.pause(due - clock())
            if not gate.open:
                break
            progress.sent += 1
            task = asyncio.ensure_future(send(item, due))
            tasks.add(task)
            task.add_done_callback(finished)
        if tasks:
            await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
    if failed:
        raise failed[0]
    progress.ended_s = clock()
    return progress


async def _all(work: Iterable[Awaitable[None]]) -> None:
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def arrivals(
    *, rate: float, burstiness: float = 1.0, ramp_s: float = 0.0, seed: int = 0
) -> Iterator[float]:
    """Times of arrival in seconds, without end.

    Gaps are gamma distributed with shape ``burstiness`` and mean 1/rate: 1 is Poisson, less is
    burstier, infinity is constant. Over ``ramp_s`` the rate grows linearly from zero.
    """
    rng = random.Random(seed)
    count = 0.0
    for number in itertools.count():
        yield _ramped(count / rate, ramp_s)
        if math.isinf(burstiness):
            count = number + 1.0
        else:
            count += rng.gammavariate(burstiness, 1 / burstiness)


def _ramped(at_s: float, ramp_s: float) -> float:
    """When as much load has passed as after ``at_s`` at the full rate.

    The load of the ramp is t^2 / (2 ramp) of the full rate's, hence half of it is missing.
    """
    if ramp_s <= 0:
        return at_s
    return math.sqrt(2 * ramp_s * at_s) if at_s < ramp_s / 2 else at_s + ramp_s / 2
