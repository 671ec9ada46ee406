"""The Python interface: load a model with its head, stream answers, keep conversations.

    import browndwarf

    with browndwarf.load("demo", draft="demo") as llm:
        with llm.stream([{"role": "user", "content": "Hello"}]) as stream:
            for chunk in stream:
                print(chunk, end="")
        print(stream.answer.stats.tok_s)

``LLM`` owns the models, the contexts and as many sequences as ``sequences`` says. Answers to
different messages may run in turns or from several threads, one step at a time; ``batch`` lets
several move together. What two prompts begin with together is decoded once.

Errors are browndwarf's own (``browndwarf.errors``). Not covered: images, embeddings.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from browndwarf.decode.answer import Chunk, markup_of
from browndwarf.decode.cache import CacheKeeper, common_prefix
from browndwarf.decode.chat import ChatTemplate, Message
from browndwarf.decode.conversation import Conversation
from browndwarf.decode.options import RuntimeOptions
from browndwarf.decode.pair import Pair, open_pair
from browndwarf.decode.result import Answer
from browndwarf.decode.sampling import Sampler, Sampling
from browndwarf.decode.session import SessionStore
from browndwarf.decode.slot import Slot
from browndwarf.decode.speculate import Speculator
from browndwarf.decode.stream import Stream
from browndwarf.errors import MachineBusy, UsageError
from browndwarf.models.fingerprints import fingerprint
from browndwarf.models.resolve import resolve_model

Messages = Sequence[Message]


def load(
    model: Path | str,
    draft: Path | str | None = None,
    *,
    sessions: Path | str | None = None,
    sessions_cap_bytes: int = 0,
    compress: bool = False,
    options: RuntimeOptions | None = None,
    **settings: Any,
) -> LLM:
    """Load a target and its MTP head; the result is a context manager.

    Args:
        model: a path, ``demo``, or ``hf:owner/name[:file]``.
        draft: the head's file in the same notation; None takes the one inside the model, if it
            has one; ``none`` decodes plainly; ``lookup`` drafts from the conversation itself.
        sessions: folder for conversations on disk; together at most ``sessions_cap_bytes``.
        compress: compress sessions, if the package zstandard is installed.
        options, settings: a ``RuntimeOptions``, or its fields one by one.

    Raises:
        UsageError: a setting is out of range.
        ModelError: a file is missing, unsound, or the head does not belong to the model.
        EngineError: llama.cpp's library is missing, unfit, or refuses.
        EnvironmentFault: sessions are to be compressed, and zstandard is not installed.
    """
    if options is not None and settings:
        raise UsageError("options and single settings were given", fix="give one or the other")
    try:
        chosen = options or RuntimeOptions(**settings)
    except TypeError as exc:
        raise UsageError("unknown setting", why=str(exc), fix="see RuntimeOptions") from exc
    store = None
    if sessions is not None:
        store = SessionStore(Path(sessions), cap_bytes=sessions_cap_bytes, compress=compress)
    head = draft
    if draft is not None and str(draft) not in ("none", "lookup"):
        head = resolve_model(str(draft), "head")
    return LLM(open_pair(resolve_model(str(model)), draft=head, options=chosen), store)


class LLM:
    """A loaded pair. Use it as a context manager, or ``close`` it."""

    def __init__(self, pair: Pair, store: SessionStore | None = None) -> None:
        self.pair = pair
        self.keeper = CacheKeeper(pair)
        self.speculator = Speculator(pair, self.keeper)
        self.lock = threading.RLock()
        self.store = store
        self._slots = [self.keeper.slot(seq) for seq in range(pair.options.sequences)]
        self._running: dict[int, weakref.ref[Stream]] = {}
        self._owners: dict[int, weakref.ref[Conversation]] = {}
        self._used: list[int] = list(range(len(self._slots)))
        self._pool: ThreadPoolExecutor | None = None

    # -- answers ---------------------------------------------------------------------------

    def stream(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Stream:
        """Start an answer to messages in OpenAI's form; nothing runs before it is iterated.

        Raises:
            UsageError: the messages do not fit the template, or not into the context.
            MachineBusy: all sequences have unfinished answers.
        """
        text = self.template.render(messages, tools=tools, thinking=thinking)
        return self.stream_text(text, sampling=sampling, max_tokens=max_tokens, stop=stop)

    def stream_text(
        self,
        prompt: str | list[int],
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        owner: Conversation | None = None,
        recall: tuple[int, list[int]] | None = None,
    ) -> Stream:
        """As ``stream``, after a prompt as text or tokens. Written control tokens are read.
        ``recall`` goes on with an answer: the draws that its sampler has made, and its tokens,
        with which the prompt ends."""
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        tokens = self._fitted(tokens)
        opened = self._opened_thought(prompt) if isinstance(prompt, str) else False
        with self.lock:
            slot = self._lease(tokens, owner)
            self._set_sampler(slot, sampling or Sampling(), tokens)
            if recall is not None and slot.sampler is not None:
                slot.sampler.detach()
                slot.sampler.recall(tokens, recall[0], len(recall[1]))
                if self.pair.device_sampling:
                    slot.sampler.attach(slot.seq)
            stream = Stream(
                self,
                slot,
                tokens,
                max_tokens=max(1, max_tokens if max_tokens is not None else self.pair.n_ctx),
                stop=stop,
                markup=self.markup,
                thinking=opened,
                before=recall[1] if recall is not None else [],
                on_end=self._release,
            )
            self._running[slot.seq] = weakref.ref(stream)
        return stream

    def answer(self, messages: Messages, **settings: Any) -> Answer:
        """The whole answer; settings as ``stream``'s."""
        with self.stream(messages, **settings) as stream:
            return stream.run()

    async def astream(self, messages: Messages, **settings: Any) -> AsyncIterator[Chunk]:
        """As ``stream``, for ``async for``; steps run in a thread. Leaving the loop cancels."""
        loop = asyncio.get_running_loop()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="browndwarf-decode")
        stream = await loop.run_in_executor(self._pool, lambda: self.stream(messages, **settings))
        try:
            while (chunk := await loop.run_in_executor(self._pool, next, stream, None)) is not None:
                yield chunk
        finally:
            stream.cancel()
            stream.close()

    async def aanswer(self, messages: Messages, **settings: Any) -> Answer:
        """As ``answer``, for ``await``."""
        return await asyncio.to_thread(self.answer, messages, **settings)

    def batch(self, prompts: Sequence[Messages], **settings: Any) -> list[Answer]:
        """Answers to several conversations that move in step, as many at once as there are
        sequences. Settings as ``stream``'s, for all of them."""
        waiting = list(enumerate(prompts))
        answers: dict[int, Answer] = {}
        running: list[tuple[int, Stream]] = []
        while waiting or running:
            while waiting and len(running) < len(self._slots):
                number, messages = waiting.pop(0)
                stream = self.stream(messages, **settings)
                stream.advance()
                running.append((number, stream))
            moving = [s for _, s in running if not s.done and not s.slot.ended]
            if moving:
                with self.lock:
                    self.speculator.step([s.slot for s in moving])
                for stream in moving:
                    stream.take()
            for number, stream in [r for r in running if r[1].done]:
                answers[number] = stream.answer
                running.remove((number, stream))
        return [answers[i] for i in range(len(prompts))]

    # -- conversations ---------------------------------------------------------------------

    def conversation(
        self,
        name: str | None = None,
        *,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
        reread: bool = False,
    ) -> Conversation:
        """A conversation that remembers its messages. With ``name`` it is kept on disk, and goes
        on from there if it exists; ``reread`` decodes it again where its saved state is damaged
        or does not fit, instead of refusing.

        Raises:
            UsageError: the name is not safe, or no folder for sessions was given.
            RunChanged, RunFormatError: the saved state does not fit, or is damaged.
        """
        talk = Conversation(self, name, system=system, tools=tools, thinking=thinking)
        if name is not None:
            talk.resume(reread=reread)
        return talk

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Everything that a saved state depends on."""
        pair, options = self.pair, self.pair.options
        head = fingerprint(pair.head_info.path) if pair.head_info else pair.kind
        version = self.pair.library.api.llama_version()
        return {
            "model": fingerprint(pair.info.path),
            "head": head,
            "context": f"{pair.n_ctx} tokens x {options.sequences}",
            "cache": f"{options.kv_k}/{options.kv_v}/{options.draft_kv}",
            "window": "full" if options.swa_full else "sliding",
            "flash attention": str(options.flash_attention),
            "engine": f"{pair.library.version} {version.decode() if version else ''}".strip(),
        }

    @cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template.

        Raises:
            UsageError: it has none.
        """
        vocab = self.pair.vocab
        return ChatTemplate(
            self.pair.model.metadata("tokenizer.chat_template"),
            bos=vocab.piece(vocab.bos).decode("utf-8", "replace"),
            eos=vocab.piece(vocab.eos).decode("utf-8", "replace"),
        )

    @cached_property
    def markup(self) -> Any:
        """How this model marks thoughts and tool calls."""
        return markup_of(self.pair.model.metadata("tokenizer.chat_template"))

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a prompt; the vocabulary's first token is added unless it is written."""
        vocab = self.pair.vocab
        tokens = vocab.tokenize(text)
        if vocab.adds_bos and tokens[:1] != [vocab.bos]:
            tokens.insert(0, vocab.bos)
        return tokens

    # -- slots -----------------------------------------------------------------------------

    def lease_for(self, owner: Conversation) -> Slot:
        """The slot of a conversation, its own or the least used idle one."""
        with self.lock:
            return self._lease([], owner)

    def slot_of(self, owner: Conversation) -> Slot | None:
        """The slot that holds this conversation now."""
        for seq, reference in self._owners.items():
            if reference() is owner:
                return self._slots[seq]
        return None

    def _lease(self, tokens: list[int], owner: Conversation | None) -> Slot:
        idle = [seq for seq in self._used if not self._busy(seq)]
        if not idle:
            raise MachineBusy(
                "all sequences have unfinished answers",
                why=f"the model was loaded with sequences={len(self._slots)}",
                fix="finish or close a stream, or load with more sequences",
            )
        slot = self.slot_of(owner) if owner is not None else None
        if slot is None or slot.seq not in idle:
            free = [s for s in idle if self._owner(s) is None]
            seq = max(free, key=lambda s: self._shared(s, tokens)) if free else idle[0]
            slot = self._slots[seq]
        if owner is not None:
            self._owners[slot.seq] = weakref.ref(owner)
        else:
            self._owners.pop(slot.seq, None)
        self._used.remove(slot.seq)
        self._used.append(slot.seq)
        return slot

    def _owner(self, seq: int) -> Conversation | None:
        reference = self._owners.get(seq)
        return reference() if reference is not None else None

    def _busy(self, seq: int) -> bool:
        reference = self._running.get(seq)
        stream = reference() if reference is not None else None
        return stream is not None and not stream.done

    def _shared(self, seq: int, tokens: list[int]) -> int:
        return common_prefix(self._slots[seq].tokens, tokens)

    def _release(self, stream: Stream) -> None:
        with self.lock:
            self._running.pop(stream.slot.seq, None)

    def _set_sampler(self, slot: Slot, settings: Sampling, tokens: list[int]) -> None:
        old = slot.sampler
        if old is not None and old.settings == settings and old.renew():
            old.learn(tokens)
            return
        # Settings that cannot be used raise here, and leave the slot the sampler that it has.
        made = Sampler(self.pair.target, self.pair.vocab, settings)
        if old is not None:
            old.close()
        slot.sampler = made
        if self.pair.device_sampling:
            slot.sampler.attach(slot.seq)
        slot.sampler.learn(tokens)

    def _fitted(self, tokens: list[int]) -> list[int]:
        """A prompt that is longer than the context, shortened in its middle where that is
        allowed."""
        room = self.pair.n_ctx - self.pair.n_max - 2
        if len(tokens) < room or not self.pair.options.context_shift:
            return tokens
        head = min(len(tokens), room // 4)
        return tokens[:head] + tokens[-(room // 2) :]

    def _opened_thought(self, prompt: str) -> bool:
        opening = self.markup.thinking[0].strip()
        return bool(opening) and prompt.rstrip().endswith(opening)

    # -- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """End running answers and free everything; a second call does nothing."""
        with self.lock:
            for reference in list(self._running.values()):
                stream = reference()
                if stream is not None:
                    stream.close()
            for slot in self._slots:
                if slot.sampler is not None:
                    slot.sampler.close()
                    slot.sampler = None
            self.pair.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
