"""Answers for a server: requests wait in line, one thread decodes, events go to the event loop.

One model with one sequence answers one request at a time, as fast as it can; the others wait, a
bounded number of them. A request that nobody waits for any more leaves the line, or ends after
the step that is running. ``stop`` ends everything: who waits is refused, the running answer ends
with a fault, and its conversation is saved with what was said by then.

Boundary: no HTTP. ``submit``, ``leave`` and ``Job.inbox`` belong to the event loop's thread;
``Runtime`` is called by the worker's thread alone, except for ``check``.

Example:
    with load(model, draft) as llm:
        worker = Worker(LlmRuntime(llm))
        worker.start()
        job = worker.submit(ask)          # a Job, or a Fault where the line is full
        await job.inbox.get()             # Begun, Chunk, ..., Finished or Fault
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from browndwarf.decode.answer import Chunk, ToolCall
from browndwarf.decode.openai_reply import Fault, Kept, fault_of, too_long
from browndwarf.decode.openai_wire import Ask
from browndwarf.decode.result import Answer
from browndwarf.decode.server_metrics import Counters
from browndwarf.errors import BrowndwarfError, Interrupted, MachineBusy

_LONGEST_RETRY_S = 60


class Running(Protocol):
    """An answer in the making; ``decode.stream.Stream`` is one. ``prompt`` are its tokens."""

    prompt: list[int]

    @property
    def answer(self) -> Answer:
        """The finished answer."""

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they come."""

    def cancel(self) -> None:
        """End after the step that is running; from any thread."""

    def close(self) -> None:
        """End now, from the iterating thread; a second call does nothing."""


class Runtime(Protocol):
    """What a server needs of a loaded model; ``server_runtime.LlmRuntime`` is one."""

    @property
    def name(self) -> str:
        """The model's name for people."""

    @property
    def n_ctx(self) -> int:
        """Tokens of context."""

    def check(self, ask: Ask) -> None:
        """Refuse what can be refused before waiting in line; quick, and from any thread.

        Raises:
            UsageError: the session's name is not safe, or there is no folder for sessions.
        """

    def start(self, ask: Ask) -> Running:
        """The answer, not begun.

        Raises:
            BrowndwarfError: as ``LLM.stream`` and ``LLM.conversation``.
        """

    def finish(self, ask: Ask, answer: Answer) -> Kept | None:
        """Save the conversation that an answer belongs to; what became of it. Never raises for
        a disk that refuses: the answer is there all the same."""

    def call(self, chunk: Chunk, index: int) -> ToolCall:
        """What a chunk of the kind ``tool_call`` means."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The prompt is accepted, and is being read."""


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of the answer, and the call that it is, if it is one."""

    chunk: Chunk
    call: ToolCall | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The whole answer, after its conversation was saved."""

    answer: Answer
    kept: Kept | None


Event = Begun | Said | Finished | Fault


class Job:
    """One request in the worker's hands. ``inbox`` gets its events, on the loop of ``submit``."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.inbox: asyncio.Queue[Event | None] = asyncio.Queue()
        self.left = False
        self.stream: Running | None = None
        self._loop = asyncio.get_running_loop()

    def put(self, event: Event) -> None:
        """Hand an event over, from any thread. A loop that is closed has no readers left."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.inbox.put_nowait, event)


class Worker:
    """The line and its thread.

    Args:
        queue: requests that may wait while one is answered.
        log: takes a line for people about what went wrong inside.
    """

    def __init__(
        self, runtime: Runtime, *, queue: int = 8, log: Callable[[str], None] = lambda line: None
    ) -> None:
        self.runtime = runtime
        self.counters = Counters()
        self.log = log
        self._queue = queue
        self._changed = threading.Condition()
        self._line: deque[Job] = deque()
        self._running: Job | None = None
        self._stopping = False
        self._last_s = 1.0
        self._thread = threading.Thread(target=self._work, name="browndwarf-decode", daemon=True)

    @property
    def stopping(self) -> bool:
        """Whether no more requests are taken."""
        return self._stopping

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self._running is not None

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def submit(self, ask: Ask) -> Job | Fault:
        """Put a request in line."""
        with self._changed:
            if self._stopping:
                return fault_of(_ending())
            if len(self._line) + self.busy > self._queue:
                return self._full()
            job = Job(ask)
            self._line.append(job)
            self._changed.notify()
        return job

    def leave(self, job: Job) -> None:
        """Nobody waits for this answer any more; without effect on one that is finished."""
        with self._changed:
            job.left = True
            if job in self._line:
                self._line.remove(job)
            elif job.stream is not None:
                job.stream.cancel()

    def stop(self) -> None:
        """Refuse who waits, end the running answer after its step, save its conversation, and
        return when the thread has ended."""
        with self._changed:
            self._stopping = True
            while self._line:
                self._line.popleft().put(fault_of(_ending()))
            if self._running is not None and self._running.stream is not None:
                self._running.stream.cancel()
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _full(self) -> Fault:
        fault = fault_of(
            MachineBusy(
                "too many requests wait already",
                why=f"one is answered and {self.waiting} wait",
                fix="try again later, or start the server with a larger --queue",
            )
        )
        # A place is free when the running answer ends; the last one tells how long that takes.
        retry_s = min(_LONGEST_RETRY_S, max(1, math.ceil(self._last_s)))
        return Fault(503, fault.message, "server_error", "queue_full", retry_s=retry_s)

    # -- the worker's thread ---------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._next()) is not None:
            begun = perf_counter()
            last: Event
            try:
                last = self._answer(job)
            except BrowndwarfError as exc:
                last = self._told(fault_of(exc))
            except Exception as exc:  # a fault of ours must end one answer, not the server
                line = f"an unexpected fault: {type(exc).__name__}: {exc}"
                last = self._told(Fault(500, line, "server_error", "unexpected"))
            # Whoever has the answer finds the place free.
            with self._changed:
                self._running = job.stream = None
            self._last_s = perf_counter() - begun
            job.put(last)

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._line or self._stopping)
            if self._stopping:
                return None
            self._running = self._line.popleft()
            return self._running

    def _answer(self, job: Job) -> Finished | Fault:
        runtime, ask = self.runtime, job.ask
        stream = runtime.start(ask)
        try:
            if len(stream.prompt) >= runtime.n_ctx:
                return too_long(len(stream.prompt), runtime.n_ctx)
            with self._changed:
                job.stream = stream
                if job.left or self._stopping:
                    stream.cancel()
            job.put(Begun())
            self._say(job, stream)
        finally:
            stream.close()
        answer = stream.answer
        kept = None
        if answer.tokens:
            self.counters.add(answer.stats)
            kept = runtime.finish(ask, answer)
            if kept is not None and kept.problem:
                self.log(f"the conversation {kept.name!r} is not saved: {kept.problem}")
        if answer.reason == "cancelled":
            return fault_of(_ending())
        return Finished(answer, kept)

    def _say(self, job: Job, stream: Running) -> None:
        heard = job.ask.stream or job.ask.prompt is not None
        calls = 0
        for chunk in stream:
            call = None
            if chunk.kind == "tool_call":
                call = self.runtime.call(chunk, calls)
                calls += 1
            if heard:
                job.put(Said(chunk, call))

    def _told(self, fault: Fault) -> Fault:
        if fault.status >= 500:
            self.log(fault.message)
        return fault


def _ending() -> Interrupted:
    return Interrupted("the server is shutting down", fix="send the request again later")
