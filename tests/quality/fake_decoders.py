"""Decoders over a small made-up language model, exact and fast: one lossless, one broken.

The model's logits are a deterministic function of the last two tokens. The writer drafts with a
blurred copy of the model and verifies by sampling the model's own token at every position, as
llama.cpp does. The broken one accepts the next wrong draft token whenever 50 tokens have passed.

Example:
    arms = FakeArms(broken=True, seed=3)
    record = await check_lossless(arms, PROMPTS, Settings(n_max=3))
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache

from browndwarf.quality.lossless import Question, Written
from browndwarf.quality.partings import Step

VOCAB = 40
PROMPTS: tuple[object, ...] = tuple(range(24))
WRONG_EVERY = 50


@cache
def logits(context: tuple[int, int], blur: float) -> tuple[float, ...]:
    """Of the next token. ``blur`` makes another, similar model."""
    model = random.Random(f"model {context}")
    other = random.Random(f"drafter {context}")
    return tuple(model.gauss(0, 5.0) + blur * other.gauss(0, 1.0) for _ in range(VOCAB))


@cache
def logprobs(context: tuple[int, int], temperature: float, noise: float) -> tuple[float, ...]:
    values = logits(context, 0.0)
    if noise:
        rounding = random.Random(f"rounding {context}")
        values = tuple(v + noise * rounding.uniform(-1, 1) for v in values)
    scale = temperature or 1.0
    top = max(values) / scale
    total = math.log(math.fsum(math.exp(v / scale - top) for v in values)) + top
    return tuple(v / scale - total for v in values)


@cache
def candidates(
    context: tuple[int, int], temperature: float, noise: float
) -> tuple[tuple[int, float], ...]:
    pairs = enumerate(logprobs(context, temperature, noise))
    return tuple(sorted(pairs, key=lambda pair: -pair[1])[:16])


def draw(context: tuple[int, int], temperature: float, noise: float, rng: random.Random) -> int:
    """The model's own token."""
    if temperature == 0:
        return candidates(context, 0.0, noise)[0][0]
    return min(bisect(cumulative(context, temperature, noise), rng.random()), VOCAB - 1)


@cache
def cumulative(context: tuple[int, int], temperature: float, noise: float) -> list[float]:
    shares = (math.exp(p) for p in logprobs(context, temperature, noise))
    return list(itertools.accumulate(shares))


def last_two(tokens: Sequence[int]) -> tuple[int, int]:
    return tokens[-2], tokens[-1]


class FakeModel:
    """Writer and judge. ``noise`` stands for another rounding of the same model.

    ``coupled``: writer and judge use one random number a token from the same seed, as llama.cpp
    does; otherwise their numbers have nothing in common.
    """

    def __init__(
        self,
        *,
        broken: bool,
        seed: int,
        noise: float = 0.0,
        drafts: bool = True,
        coupled: bool = True,
    ) -> None:
        self.broken, self.noise, self.drafts, self.coupled = broken, noise, drafts, coupled
        self._seed = seed
        self._since_wrong = random.Random(f"phase {seed}").randrange(WRONG_EVERY)

    async def encode(self, prompts: Sequence[object]) -> list[Question]:
        made = random.Random("prompts")
        return [Question(f"p{i}", tuple(made.randrange(VOCAB) for _ in range(4))) for i in prompts]

    async def text(self, token: int) -> str:
        return f"<{token}>"

    async def steps(
        self, prefix: Sequence[int], *, n: int, temperature: float, seed: int
    ) -> tuple[Step, ...]:
        rng = random.Random(seed)
        tokens, made = list(prefix), []
        for _ in range(n):
            context = last_two(tokens)
            token = draw(context, temperature, self.noise, rng)
            made.append(Step(token, candidates(context, temperature, self.noise)))
            tokens.append(token)
        return tuple(made)

    async def write(
        self, prompt: Sequence[int], *, n: int, temperature: float, seed: int
    ) -> Written:
        rng = random.Random(seed if self.coupled else f"{self._seed} {seed}")
        tokens, drafted, accepted = list(prompt), 0, 0
        while len(tokens) < len(prompt) + n:
            draft = self._draft(tokens) if self.drafts else []
            drafted += len(draft)
            for guess in [*draft, None]:
                if len(tokens) == len(prompt) + n:
                    break
                token = draw(last_two(tokens), temperature, self.noise, rng)
                self._since_wrong += 1
                if self.broken and self._since_wrong >= WRONG_EVERY and guess not in (None, token):
                    token, self._since_wrong = guess, 0
                tokens.append(token)
                if guess is None or token != guess:
                    break
                accepted += 1
        return Written(tuple(tokens[len(prompt) :]), drafted, accepted)

    def _draft(self, tokens: Sequence[int]) -> list[int]:
        made = list(tokens)
        for _ in range(3):
            values = logits(last_two(made), 0.3)
            made.append(values.index(max(values)))
        return made[len(tokens) :]


class FakeArms:
    """Arms of the fake. ``noise`` is the rounding of batches, in logits."""

    def __init__(
        self,
        *,
        broken: bool = False,
        seed: int = 0,
        noise: float = 0.0,
        drafts: bool = True,
        coupled: bool = True,
    ) -> None:
        self.up: list[str] = []
        self._plain = FakeModel(broken=False, seed=seed)
        self._batched = FakeModel(broken=False, seed=seed, noise=noise)
        self._writer = FakeModel(
            broken=broken, seed=seed, noise=noise, drafts=drafts, coupled=coupled
        )

    @asynccontextmanager
    async def _arm(self, name: str, model: FakeModel) -> AsyncIterator[FakeModel]:
        assert not self.up, "two servers at a time need twice the memory"
        self.up.append(name)
        try:
            yield model
        finally:
            self.up.remove(name)

    def plain(self):  # type: ignore[no-untyped-def]
        return self._arm("plain", self._plain)

    def speculative(self):  # type: ignore[no-untyped-def]
        return self._arm("speculative", self._writer)

    def batched(self, size: int):  # type: ignore[no-untyped-def]
        return self._arm(f"batched {size}", self._batched)
