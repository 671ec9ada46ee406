"""A conversation over several turns, in the cache and on disk.

``say`` adds a message and streams the answer; when the answer ends, it becomes a message too. A
named conversation is saved by ``save``, and goes on later without being read again. Cancelling an
answer keeps what was said by then.

Example:
    talk = llm.conversation("anna")
    talk.say("Hello").run()
    talk.save()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from browndwarf.decode.result import Answer
from browndwarf.decode.sampling import Sampler, Sampling
from browndwarf.decode.session import SessionStore
from browndwarf.decode.session_records import Saved, Snapshot
from browndwarf.errors import RunChanged, RunFormatError, UsageError

if TYPE_CHECKING:
    from browndwarf.decode.llm import LLM
    from browndwarf.decode.stream import Stream


class Conversation:
    """Made by ``LLM.conversation``. ``messages`` may be read and edited between answers."""

    def __init__(
        self,
        llm: LLM,
        name: str | None,
        *,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> None:
        self.name = name
        self.messages: list[dict[str, Any]] = []
        if system:
            self.messages.append({"role": "system", "content": system})
        self.tools = [dict(tool) for tool in tools] if tools else None
        self.thinking = thinking
        self.last: Answer | None = None
        self._llm = llm
        self._rest: Snapshot | None = None
        self._cut: dict[str, Any] | None = None
        self._produced = 0
        self._stream: Stream | None = None
        if name is not None and llm.store is None:
            raise UsageError(
                "there is no folder for sessions",
                why="the model was loaded without one",
                fix="give sessions=FOLDER when loading",
            )

    def say(self, content: str | Mapping[str, Any], **settings: Any) -> Stream:
        """Add a message (text of the user, or any message) and stream the answer; settings as
        ``LLM.stream_text``'s.

        Raises:
            UsageError, MachineBusy: as ``LLM.stream``; the message is not added then.
        """
        message = {"role": "user", "content": content} if isinstance(content, str) else content
        before = len(self.messages)
        self.messages.append(dict(message))
        try:
            return self.go_on(**settings)
        except BaseException:
            del self.messages[before:]
            raise

    def go_on(self, **settings: Any) -> Stream:
        """Stream an answer to the messages as they are, such as after tool results."""
        prompt = self._llm.template.render(self.messages, tools=self.tools, thinking=self.thinking)
        stream = self._llm.stream_text(prompt, owner=self, **settings)
        self._watch(stream, 0)
        return stream

    def _watch(self, stream: Stream, produced: int) -> None:
        """Make the answer a message when it ends."""
        finish = stream._on_end

        def ended(done: Stream) -> None:
            finish(done)
            self.last = done.answer
            self._produced = produced + len(done.answer.tokens)
            self._cut = None
            self.messages.append(done.answer.as_message())

        stream._on_end = ended
        self._stream = stream

    def _sampler_state(self, sampler: Sampler | None) -> dict[str, Any]:
        if sampler is None:
            return {}
        settings = asdict(sampler.settings) | {"bias": list(sampler.settings.bias)}
        return {
            "settings": settings,
            "seed": sampler.seed,
            "draws": sampler.draws,
            "produced": self._produced,
        }

    def extend(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Stream:
        """Go on with the last answer where it was cut off, with its sampler as it was: the tokens
        are those that the uncut answer would have had. Its message grows.

        Raises:
            UsageError: there is no such answer, or it had ended by itself.
        """
        llm = self._llm
        slot = llm.slot_of(self)
        state = self._sampler_state(slot.sampler) if slot is not None else {}
        if slot is None or not slot.tokens or not self._produced:
            raise UsageError("there is no answer to go on with", fix="say something first")
        if llm.pair.vocab.is_end(slot.tokens[-1]):
            raise UsageError("the last answer had ended by itself", fix="say something")
        state = self._cut or state
        tokens = list(slot.tokens)
        before = tokens[len(tokens) - self._produced :]
        settings = Sampling(**{**state["settings"], "seed": state["seed"]})
        stream = llm.stream_text(
            tokens,
            sampling=settings,
            max_tokens=max_tokens,
            stop=stop,
            owner=self,
            recall=(state["draws"], before),
        )
        del self.messages[-1:]
        self._watch(stream, len(before))
        return stream

    def save(self) -> Saved:
        """Save under its name; costs what the turns since the last save added.

        Raises:
            UsageError: it has no name, holds nothing yet, or an answer is running.
            DiskFull, StorageError: the last saved state is untouched.
        """
        llm = self._llm
        slot = llm.slot_of(self)
        if self.name is None or slot is None or not slot.kept:
            raise UsageError(
                "there is nothing to save",
                why="it has no name" if self.name is None else "nothing of it is in the cache",
                fix="give the conversation a name and let it answer once",
            )
        if self._stream is not None and not self._stream.done:
            raise UsageError("an answer is running", fix="read or close the stream first")
        with llm.lock:
            snapshot = llm.keeper.capture(slot)
        if self._rest is not None and slot.saved_as is self._rest:
            snapshot.layouts = self._rest.layouts
        else:
            snapshot.unchanged = 0
        snapshot.messages = list(self.messages)
        snapshot.sampler = self._cut or self._sampler_state(slot.sampler)
        saved = self._store.save(self.name, snapshot, llm.fingerprint)
        if not saved.replay:
            slot.unchanged = slot.kept
        snapshot.states = {}
        self._rest = slot.saved_as = snapshot
        return saved

    def resume(self, *, reread: bool = False) -> bool:
        """Take up the saved conversation of this name; False when there is none. ``reread`` takes
        its messages alone where its state cannot be used.

        Raises:
            RunChanged, RunFormatError: the state does not fit or is damaged.
        """
        name, llm = self.name, self._llm
        if name is None or not self._store.has(name):
            return False
        try:
            snapshot = self._store.load(name, llm.fingerprint)
            with llm.lock:
                slot = llm.lease_for(self)
                llm.keeper.restore(slot, snapshot)
                slot.saved_as = snapshot
        except (RunChanged, RunFormatError):
            if not reread:
                raise
            snapshot = self._store.load(name, llm.fingerprint, states=False)
            self.messages = snapshot.messages
            return True
        snapshot.states = {}
        self._rest = snapshot
        self.messages = list(snapshot.messages)
        self._cut = snapshot.sampler or None
        self._produced = int(snapshot.sampler.get("produced", 0))
        return True

    @property
    def _store(self) -> SessionStore:
        store = self._llm.store
        assert store is not None, "checked when the conversation was made"
        return store
