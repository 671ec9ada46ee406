"""A runtime without a model: it says what it is told to, one chunk a step, and stops on request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

from browndwarf.decode.answer import GEMMA, Chunk, ToolCall, parse_call
from browndwarf.decode.openai_reply import Kept
from browndwarf.decode.openai_wire import Ask
from browndwarf.decode.result import Answer, AnswerStats, Reason
from browndwarf.errors import UsageError

HELLO = (Chunk("Hello"), Chunk(" there"))
CALL = Chunk('call:add{a:1,b:<|"|>two<|"|>}', "tool_call")
STATS = AnswerStats(
    prompt_tokens=7,
    reused_tokens=4,
    tokens=9,
    steps=4,
    drafted=(4, 3, 2),
    accepted=(2, 1, 1),
    prefill_s=0.5,
    draft_s=0.25,
    verify_s=1.0,
    sample_s=0.5,
    rest_s=0.25,
)


class FakeStream:
    """One answer. With a gate every step waits for it, and looks whether it is cancelled."""

    def __init__(self, owner: FakeRuntime) -> None:
        self.prompt = list(range(owner.prompt_tokens))
        self.steps = 0
        self.cancelled = threading.Event()
        self.closed = False
        self._owner = owner
        self._said: list[Chunk] = []
        self._reason: Reason = owner.reason

    def __iter__(self) -> Iterator[Chunk]:
        owner = self._owner
        for chunk in owner.chunks:
            while owner.gate is not None and not owner.gate.acquire(timeout=0.005):
                if self.cancelled.is_set():
                    break
            if self.cancelled.is_set():
                self._reason = "cancelled"
                return
            self.steps += 1
            if owner.fault is not None and self.steps > owner.fault_after:
                raise owner.fault
            self._said.append(chunk)
            yield chunk

    @property
    def answer(self) -> Answer:
        def text(kind: str) -> str:
            return "".join(c.text for c in self._said if c.kind == kind)

        calls = [parse_call(c.text, GEMMA, 0) for c in self._said if c.kind == "tool_call"]
        tokens = tuple(range(self.steps))
        return Answer(text("text"), text("thinking"), tuple(calls), self._reason, tokens, STATS)

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.closed = True


class FakeRuntime:
    """See the module. ``asks`` and ``streams`` are what was asked and begun, in order."""

    name = "fake"

    def __init__(
        self,
        *chunks: Chunk,
        reason: Reason = "end",
        gated: bool = False,
        prompt_tokens: int = 7,
        n_ctx: int = 100,
        fault: BaseException | None = None,
        fault_after: int = 0,
        disk: str = "",
    ) -> None:
        self.chunks = chunks or HELLO
        self.reason = reason
        self.gate = threading.Semaphore(0) if gated else None
        self.prompt_tokens = prompt_tokens
        self.n_ctx = n_ctx
        self.fault = fault
        self.fault_after = fault_after
        self.disk = disk
        self.asks: list[Ask] = []
        self.streams: list[FakeStream] = []
        self.saved: list[str] = []

    def check(self, ask: Ask) -> None:
        if ask.session is not None and "/" in ask.session:
            raise UsageError("not a safe name")

    def start(self, ask: Ask) -> FakeStream:
        self.asks.append(ask)
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def finish(self, ask: Ask, answer: Answer) -> Kept | None:
        if ask.session is None:
            return None
        self.saved.append(answer.text)
        return replace(Kept(ask.session, 2, 10), problem=self.disk)

    def call(self, chunk: Chunk, index: int) -> ToolCall:
        return parse_call(chunk.text, GEMMA, index)
