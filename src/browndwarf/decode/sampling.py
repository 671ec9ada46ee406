"""How the target chooses a token: the user's settings, and a sampler made of llama.cpp's own.

Speculation never changes the choice: the target samples at every position with this sampler and
a draft is kept where it agrees, so the distribution is the target's own, and the same seed gives
the same tokens as plain decoding as long as the engine's numbers agree. Temperature 0 is greedy.

The order of the steps is bias, penalties, top-k, top-p, min-p, temperature, draw. A grammar filters
what the others chose.

Example:
    >>> Sampling(temperature=0.7, top_p=0.9, seed=1).greedy
    False
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from browndwarf.engine.native_context import Decoder
from browndwarf.engine.native_sampler import Chain, Grammar
from browndwarf.engine.native_vocab import Vocab
from browndwarf.errors import UsageError

_NO_SEED = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of one answer.

    ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. Penalties look at the last ``penalty_last``
    tokens. ``bias`` adds to the logits of single tokens. ``grammar`` is GBNF; ``json_schema`` is
    a schema as JSON text or as a mapping, and only one of the two may be given. Without ``seed``
    every answer differs.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last: int = 64
    seed: int | None = None
    bias: tuple[tuple[int, float], ...] = ()
    grammar: str | None = None
    json_schema: Any = field(default=None, hash=False)

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_k", 0, 2**31 - 1),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repeat_penalty", 1e-3, 100.0),
            ("frequency_penalty", -100.0, 100.0),
            ("presence_penalty", -100.0, 100.0),
            ("penalty_last", 0, 2**20),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise UsageError(
                    f"{name} cannot be {value}", why=f"it is from {low} to {high}", fix="change it"
                )
        if self.seed is not None and not 0 <= self.seed < _NO_SEED:
            raise UsageError(f"the seed cannot be {self.seed}", fix="use 0 to 4294967294")
        if self.grammar is not None and self.json_schema is not None:
            raise UsageError("a grammar and a JSON schema were given", fix="give one of them")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens matter."""
        return self.penalty_last > 0 and (
            self.repeat_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    @property
    def constrained(self) -> bool:
        """Whether a grammar filters."""
        return self.grammar is not None or self.json_schema is not None

    @property
    def on_device(self) -> bool:
        """Whether the device can sample: everything but penalties and grammars."""
        return not (self.penalized or self.constrained)


class Sampler:
    """``Sampling`` composed for one sequence. Owns C objects: close it, after detaching it."""

    def __init__(self, decoder: Decoder, vocab: Vocab, settings: Sampling) -> None:
        library = decoder.context.model.library
        self.settings = settings
        self.seed = random.randrange(_NO_SEED) if settings.seed is None else settings.seed
        self.draws = 0
        self.attached_to: int | None = None
        self._decoder = decoder
        grammar = settings.grammar
        if settings.json_schema is not None:
            grammar = _schema_grammar(library, settings.json_schema)
        self._grammar = Grammar(library, vocab, grammar) if grammar is not None else None
        self.chain = _chain(library, vocab.size, settings, self.seed)
        self._plain_greedy = settings.greedy and settings.on_device and not settings.bias

    def attach(self, seq: int) -> None:
        """Let the device sample for ``seq``, if the settings and the engine allow it."""
        if self.settings.on_device and self._decoder.attach(seq, self.chain.pointer):
            self.attached_to = seq

    def detach(self) -> None:
        """Undo ``attach``; before ``close``."""
        if self.attached_to is not None:
            self._decoder.attach(self.attached_to, None)
            self.attached_to = None

    def choose(self, row: int) -> int:
        """The target's token at a row of the batch that was just decoded. Rows go in order, and
        none may be asked for after one that was not accepted."""
        self.draws += 1
        if self._plain_greedy:
            if self.attached_to is not None:
                return self._decoder.sampled(row)
            return int(self._decoder.logits(row).argmax())
        if self._grammar is not None:
            return self._grammar.sample(self.chain, self._decoder, row)
        return self.chain.sample(self._decoder, row)

    def renew(self) -> bool:
        """Begin another answer with the same settings; False where that takes a new sampler."""
        if self._grammar is not None or (self.settings.seed is None and not self.settings.greedy):
            return False
        self.draws = 0
        self.chain.reset()
        return True

    def recall(self, tokens: list[int], draws: int, produced: int) -> None:
        """Take the state of a sampler that has made ``draws`` choices; of ``tokens``, which it
        has learned, the last ``produced`` are of the answer that goes on."""
        self.draws = draws
        if not self.settings.greedy:
            self.chain.draw(draws)
        if self._grammar is not None:
            for token in tokens[len(tokens) - produced :]:
                self._grammar.accept(token)

    def learn(self, tokens: list[int]) -> None:
        """Let penalties see tokens that came before."""
        if self.settings.penalized:
            for token in tokens[-self.settings.penalty_last :]:
                self.chain.accept(token)

    def close(self) -> None:
        """Detach and free."""
        self.detach()
        self.chain.close()
        if self._grammar is not None:
            self._grammar.close()


def _chain(library: Any, n_vocab: int, s: Sampling, seed: int) -> Chain:
    chain = Chain(library)
    if s.bias:
        chain.bias(n_vocab, dict(s.bias))
    if s.penalized:
        chain.penalties(
            n_vocab, s.penalty_last, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
        )
    if s.greedy:
        return chain.greedy()
    if s.top_k:
        chain.top_k(s.top_k)
    if s.top_p < 1.0:
        chain.top_p(s.top_p)
    if s.min_p > 0.0:
        chain.min_p(s.min_p)
    return chain.temperature(s.temperature).dist(seed)


def _schema_grammar(library: Any, schema: Any) -> str:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        return str(library.grammar_of_schema(text))
    except Exception as exc:
        raise UsageError(
            "the JSON schema cannot be used", why=str(exc), fix="check it, or give a grammar"
        ) from exc
