"""Where a speculative decoder's tokens part from the plain model's, and by how much.

The plain model is the judge of every token: it decodes from the same prompt, and where the two
part it goes on from the *speculative* prefix, so that one near tie does not hide what comes
after it. A parting records both tokens and the margin between them: the difference of their
log-probabilities in the plain model, which is the difference of their logits.

Boundary: knows token ids and log-probabilities, no server.

Example:
    >>> step = Step(7, ((7, -0.1), (3, -2.4)))
    >>> round(step.margin(3), 3), step.margin(99)
    (2.3, None)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from browndwarf.records import Record

#: Partings examined in one answer; more say nothing new about a decoder.
MOST_PARTINGS = 8


class Step(NamedTuple):
    """One decoded token and the most probable candidates, best first, as (id, log-probability)."""

    token: int
    top: tuple[tuple[int, float], ...]

    def margin(self, other: int) -> float | None:
        """How far ``other`` lies below this token, in nats; None if it is not among the top."""
        known = dict(self.top)
        if other not in known or self.token not in known:
            return None
        return known[self.token] - known[other]

    @property
    def gap(self) -> float | None:
        """Distance of the two best candidates in nats; None where fewer are known."""
        return self.top[0][1] - self.top[1][1] if len(self.top) > 1 else None


class Judge(Protocol):
    """The model without speculation. ``steps`` may end early, at an end-of-generation token."""

    async def steps(
        self, prefix: Sequence[int], *, n: int, temperature: float, seed: int
    ) -> tuple[Step, ...]: ...


class Parting(Record, frozen=True, kw_only=True):
    """One place where the decoders part.

    Attributes:
        position: of the token in the answer, from 0.
        plain, speculative: token ids; None for an answer that ended where the other went on.
        margin: in nats, under the plain model; None when the speculative token is not even
            among its best candidates.
        kind: ``near-tie`` or ``mismatch``, once the bound is known.
    """

    prompt_id: str
    position: int
    plain: int | None
    speculative: int | None
    plain_text: str = ""
    speculative_text: str = ""
    margin: float | None = None
    kind: str = "mismatch"
    setup: str = ""

    def classified(self, bound: float) -> Parting:
        """With its kind: a near tie has a margin of at most ``bound`` nats."""
        near = self.margin is not None and self.margin <= bound
        return Parting(
            **{
                **{name: getattr(self, name) for name in self.__struct_fields__},
                "kind": "near-tie" if near else "mismatch",
            }
        )


class Judged(NamedTuple):
    """An answer's partings, and the plain model's steps on its own way (the first request)."""

    partings: tuple[Parting, ...]
    plain: tuple[Step, ...]


async def judge_greedy(
    judge: Judge, prompt_id: str, prompt: Sequence[int], answer: Sequence[int], *, limit: int
) -> Judged:
    """Compare one greedy answer with the plain model, token by token.

    Args:
        answer: what the speculative decoder emitted, its end-of-generation token included.
        limit: tokens that it was asked for.
    """
    partings: list[Parting] = []
    first: tuple[Step, ...] | None = None
    at = 0
    while at < limit and len(partings) < MOST_PARTINGS:
        steps = await judge.steps([*prompt, *answer[:at]], n=limit - at, temperature=0.0, seed=0)
        first = steps if first is None else first
        parted = _first_difference([s.token for s in steps], answer[at:])
        if parted is None:
            break
        step = steps[parted] if parted < len(steps) else None
        token = answer[at + parted] if at + parted < len(answer) else None
        partings.append(
            Parting(
                prompt_id=prompt_id,
                position=at + parted,
                plain=step.token if step else None,
                speculative=token,
                margin=step.margin(token) if step is not None and token is not None else None,
            )
        )
        if token is None or step is None:
            break
        at += parted + 1
        if at >= len(answer):
            # The answer ended with the very token that parted (an early end): nothing follows.
            break
    return Judged(tuple(partings), first or ())


def _first_difference(plain: Sequence[int], speculative: Sequence[int]) -> int | None:
    pairs = itertools.zip_longest(plain, speculative)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


class Sample(NamedTuple):
    """A position to measure the rounding noise at: its prefix, and the plain model's step."""

    prefix: tuple[int, ...]
    step: Step


def closest_calls(
    ways: Sequence[tuple[Sequence[int], Sequence[Step]]], *, batch: int, count: int
) -> list[Sample]:
    """The positions with the smallest gaps, where a prefix fills whole batches.

    There a verify batch of that size and a single step round differently and it matters.
    """
    found: list[tuple[float, Sample]] = []
    for prompt, steps in ways:
        tokens = [s.token for s in steps]
        for i, step in enumerate(steps):
            # Step 0 comes out of the prompt pass, which both decoders do alike.
            if i and step.gap is not None and (len(prompt) + i) % batch == 0:
                found.append((step.gap, Sample((*prompt, *tokens[:i]), step)))
    found.sort(key=lambda pair: pair[0])
    return [sample for _, sample in found[:count]]


def gap_shift(sample: Sample, batched: Step) -> float | None:
    """How far the gap of the plain model's two best moved in a batch, in nats."""
    (best, best_p), (second, second_p) = sample.step.top[:2]
    known = dict(batched.top)
    if best not in known or second not in known:
        return None
    return abs((known[best] - known[second]) - (best_p - second_p))
