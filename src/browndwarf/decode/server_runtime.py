"""A loaded model for the server's worker: answers, and conversations that are kept on disk.

Boundary: between ``llm`` and ``server_worker``; no HTTP.

Example:
    with load(model, draft, sessions=folder) as llm:
        worker = Worker(LlmRuntime(llm))
"""

from __future__ import annotations

from typing import Any

from browndwarf.decode.answer import Chunk, ToolCall, parse_call
from browndwarf.decode.conversation import Conversation
from browndwarf.decode.llm import LLM
from browndwarf.decode.openai_reply import Kept
from browndwarf.decode.openai_wire import Ask, joined
from browndwarf.decode.result import Answer
from browndwarf.decode.stream import Stream
from browndwarf.errors import BrowndwarfError, UsageError


class LlmRuntime:
    """``server_worker.Runtime`` on an ``LLM`` with one sequence, which it does not own.

    ``reread`` reads a conversation again where its saved state does not fit the loaded model, or
    is damaged; without it such a conversation is refused.
    """

    def __init__(self, llm: LLM, *, reread: bool = False) -> None:
        self._llm = llm
        self._reread = reread
        self._answering: Conversation | None = None
        self._held: Conversation | None = None
        self._held_as: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The model's name."""
        return self._llm.pair.info.name

    @property
    def n_ctx(self) -> int:
        """Tokens of context."""
        return self._llm.pair.n_ctx

    def check(self, ask: Ask) -> None:
        """See ``server_worker.Runtime``."""
        size = self._llm.pair.vocab.size
        if isinstance(ask.prompt, list) and not all(0 <= token < size for token in ask.prompt):
            raise UsageError(
                "prompt holds numbers that are no tokens", why=f"tokens are from 0 to {size - 1}"
            )
        if ask.session is None:
            return
        if self._llm.store is None:
            raise UsageError(
                "this server keeps no conversations",
                why="it was started without a folder for them",
                fix="start it with --sessions DIR, or send no session",
            )
        self._llm.store.has(ask.session)

    def start(self, ask: Ask) -> Stream:
        """See ``server_worker.Runtime``."""
        llm = self._llm
        # What fails from here on leaves no conversation in memory: the disk has its last state.
        held, self._held, self._answering = self._held, None, None
        settings: dict[str, Any] = {
            "sampling": ask.sampling,
            "max_tokens": ask.max_tokens,
            "stop": ask.stop,
        }
        if ask.prompt is not None:
            return llm.stream_text(ask.prompt, **settings)
        if ask.session is None:
            return llm.stream(ask.messages, tools=ask.tools, thinking=ask.thinking, **settings)
        talk = held
        # Another program may have gone on with it, or deleted it, since it was saved here.
        current = self._held_as == self._on_disk(ask.session)
        if talk is None or talk.name != ask.session or llm.slot_of(talk) is None or not current:
            talk = llm.conversation(ask.session, reread=self._reread)
        talk.messages = joined(talk.messages, ask.messages)
        talk.tools, talk.thinking = ask.tools, ask.thinking
        stream = talk.go_on(**settings)
        self._answering = talk
        return stream

    def finish(self, ask: Ask, answer: Answer) -> Kept | None:
        """See ``server_worker.Runtime``."""
        talk, self._answering = self._answering, None
        if talk is None or talk.name is None:
            return None
        # The client knows the calls by these names, and answers to them.
        for i, call in enumerate(talk.messages[-1].get("tool_calls", ())):
            call["id"] = ask.call_id(i)
        self._held = talk
        try:
            saved = talk.save()
        except BrowndwarfError as exc:
            return Kept(talk.name, len(talk.messages), problem=exc.what)
        finally:
            self._held_as = self._on_disk(talk.name)
        return Kept(talk.name, len(talk.messages), saved.bytes)

    def call(self, chunk: Chunk, index: int) -> ToolCall:
        """See ``server_worker.Runtime``."""
        return parse_call(chunk.text, self._llm.markup, index)

    def _on_disk(self, name: str) -> tuple[int, int] | None:
        """What tells a saved state from a later one of the same name; None where there is none."""
        if self._llm.store is None:
            return None
        try:
            stat = (self._llm.store.folder / name / "manifest").stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns
