"""One answer as it comes: an iterator of chunks over the steps of one slot.

Each ``next`` runs as many steps as it takes to have something to show; text is put together after
the step, never in it. The iterator can be left at any time: ``close``, ``cancel`` (from any
thread), the end of a ``with`` block or the garbage collector leave a conversation that can go on.

Boundary: made by ``llm``; holds a slot until it ends.

Example:
    with llm.stream(messages) as stream:
        for chunk in stream:
            chunk.text, chunk.kind
    stream.answer.stats.tok_s
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Self

from browndwarf.decode.answer import AnswerParser, Chunk, Markup, held_back
from browndwarf.decode.result import Answer, Reason, stats_of
from browndwarf.decode.slot import Slot, Tally
from browndwarf.errors import Interrupted

if TYPE_CHECKING:
    from browndwarf.decode.llm import LLM


class Stream:
    """An answer in the making. Iterate it once, from one thread at a time."""

    def __init__(
        self,
        llm: LLM,
        slot: Slot,
        prompt: list[int],
        *,
        max_tokens: int,
        stop: Sequence[str],
        markup: Markup,
        thinking: bool,
        before: Sequence[int] = (),
        on_end: Callable[[Stream], None],
    ) -> None:
        self._llm = llm
        self.slot = slot
        self.prompt = prompt
        self._max_tokens = max_tokens
        self._stop = tuple(s for s in stop if s)
        self._parser = AnswerParser(markup, thinking=thinking)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ready: deque[Chunk] = deque()
        self._held_back = ""
        self._on_end = on_end
        self._started = False
        self._cancelled = False
        self._reused = 0
        self._prefill_s = 0.0
        self._tokens: list[int] = []
        self._answer: Answer | None = None
        if before:
            # The parser must be where the answer was cut; what it shows was shown before.
            self._parser.feed(self._text(before))

    def _text(self, tokens: Sequence[int]) -> str:
        vocab = self._llm.pair.vocab
        return self._decoder.decode(b"".join(vocab.piece(t) for t in tokens if not vocab.is_end(t)))

    # -- use ---------------------------------------------------------------------------------

    @property
    def answer(self) -> Answer:
        """The finished answer.

        Raises:
            Interrupted: it is not finished; read the stream to its end, or close it.
        """
        if self._answer is None:
            raise Interrupted("the answer is not finished", fix="read the stream to its end")
        return self._answer

    @property
    def done(self) -> bool:
        """Whether the answer is finished."""
        return self._answer is not None

    def run(self) -> Answer:
        """Read to the end and return the answer."""
        for _ in self:
            pass
        return self.answer

    def cancel(self) -> None:
        """End after the step that is running; from any thread."""
        self._cancelled = True

    def close(self) -> None:
        """End now; a second call does nothing."""
        if self._answer is None:
            self._finish("cancelled")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        while not self._ready:
            if self._answer is not None:
                raise StopIteration
            self.advance()
        return self._ready.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_answer", True) is None:
            self.close()

    # -- the work ----------------------------------------------------------------------------

    def advance(self) -> None:
        """Read the prompt, or run one step, and take what it gave."""
        try:
            with self._llm.lock:
                if self._cancelled:
                    self._finish("cancelled")
                    return
                if not self._started:
                    self._start()
                elif not self.slot.ended:
                    self._llm.speculator.step([self.slot])
            self.take()
        except Interrupted:
            self._finish("cancelled")
        except BaseException:
            self._finish("cancelled")
            raise

    def _start(self) -> None:
        begun = perf_counter()
        slot = self.slot
        slot.tally = Tally()
        keeper = self._llm.keeper
        self._reused = keeper.prefill(slot, self.prompt, cancelled=lambda: self._cancelled)
        slot.budget = min(self._max_tokens, self._llm.pair.n_ctx - len(self.prompt))
        if self._llm.pair.options.context_shift:
            slot.budget = self._max_tokens
        self._llm.speculator.begin(slot)
        self._started = True
        self._prefill_s = perf_counter() - begun

    def take(self) -> None:
        """Turn the last step's tokens into chunks; after the step, outside of its time."""
        slot = self.slot
        fresh = list(slot.fresh)
        slot.fresh.clear()
        self._tokens += fresh
        stopped = self._show(self._text(fresh))
        if stopped:
            self._finish("stop")
        elif slot.ended:
            self._finish(self._reason())

    def _reason(self) -> Reason:
        last = self._tokens[-1] if self._tokens else -1
        if self._llm.pair.vocab.is_end(last):
            return "end"
        return "length" if len(self._tokens) >= self._max_tokens else "context"

    def _show(self, text: str) -> bool:
        """Hand text to the parser up to a stop string; whether one was met."""
        self._held_back += text
        if not self._stop:
            text, self._held_back = self._held_back, ""
            self._ready.extend(self._parser.feed(text))
            return False
        places = [p for s in self._stop if (p := self._held_back.find(s)) >= 0]
        if places:
            self._ready.extend(self._parser.feed(self._held_back[: min(places)]))
            self._held_back = ""
            return True
        keep = held_back(self._held_back, self._stop)
        cut = len(self._held_back) - keep
        self._ready.extend(self._parser.feed(self._held_back[:cut]))
        self._held_back = self._held_back[cut:]
        return False

    def _finish(self, reason: Reason) -> None:
        if self._answer is not None:
            return
        if reason != "stop":
            self._ready.extend(self._parser.feed(self._held_back + self._decoder.decode(b"", True)))
        self._ready.extend(self._parser.finish())
        parser = self._parser
        self._answer = Answer(
            text=parser.text,
            thinking=parser.thought,
            tool_calls=tuple(parser.calls),
            reason=reason,
            tokens=tuple(self._tokens),
            stats=stats_of(
                self.slot.tally,
                prompt_tokens=len(self.prompt),
                reused_tokens=self._reused,
                prefill_s=self._prefill_s,
            ),
        )
        self._on_end(self)
