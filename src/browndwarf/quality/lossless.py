"""Is speculation lossless here? Decode with and without it, and let the plain model judge.

Greedy: the answers must be token-identical. Where they part, the margin between the two tokens
decides: verify batches round differently from single steps, so a near tie may fall either way.
The bound for "near" is measured on the same model: its closest calls are evaluated once more in
batches of the verify size, and the bound is SAFETY times the largest shift of the gap seen. A
larger margin is a real mismatch. With a temperature the tokens are tested as draws from the plain
model's distribution (``sampled``).

Boundary: speaks to an ``Arms``, which starts servers (``arms``) or is a fake; one arm is up at a
time, so that a model that barely fits can be checked.

Example:
    >>> record = await check_lossless(arms, prompts, Settings(n_max=3))   # doctest: +SKIP
    >>> record.verdict                                                    # doctest: +SKIP
    'identical'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

import msgspec

from browndwarf.errors import CheckFailed, UsageError
from browndwarf.quality.partings import (
    Judge,
    Judged,
    Parting,
    Step,
    closest_calls,
    gap_shift,
    judge_greedy,
)
from browndwarf.quality.sampled import SampledTest, Tally, judge_sampled
from browndwarf.records import Record

NOISE_POSITIONS = 64
SAFETY = 2.0
#: Log-probabilities carry about this much of a float's rounding, in nats.
LEAST_BOUND = 1e-5

Progress = Callable[[str, int, int], None]


class Question(NamedTuple):
    """A prompt as the model sees it."""

    id: str
    tokens: tuple[int, ...]


class Written(NamedTuple):
    """A speculative answer: all its token ids, and how many were drafted and accepted."""

    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0


class Writer(Protocol):
    """A decoder with speculation."""

    async def write(
        self, prompt: Sequence[int], *, n: int, temperature: float, seed: int
    ) -> Written: ...


class PlainModel(Judge, Protocol):
    """The model without speculation; also tells what prompts and tokens look like."""

    async def encode(self, prompts: Sequence[object]) -> list[Question]: ...

    async def text(self, token: int) -> str: ...


class Arms(Protocol):
    """Starts each of the decoders of one model."""

    def plain(self) -> AbstractAsyncContextManager[PlainModel]: ...

    def speculative(self) -> AbstractAsyncContextManager[Writer]: ...

    def batched(self, size: int) -> AbstractAsyncContextManager[Judge]:
        """The plain model, evaluating prompts in batches of ``size`` tokens."""
        ...


class Settings(Record, frozen=True, kw_only=True):
    """What is decoded: ``tokens`` per answer; ``seeds`` answers a prompt with a temperature."""

    n_max: int
    tokens: int = 96
    temperature: float = 0.0
    seed: int = 1
    seeds: int = 16
    setup: str = ""


class LosslessRecord(Record, frozen=True, kw_only=True):
    """The outcome for one setup.

    Attributes:
        prompts, identical: answers compared (greedy: one a prompt), and token-identical ones.
        near_ties, mismatches: every parting of answers, by kind.
        bound: largest margin of a near tie in nats; None when nothing parted.
        noise_samples: positions that the bound was measured at.
        verdict: ``identical``, ``near-ties``, ``mismatch``; ``lossless``, ``lossy`` or
            ``inconclusive`` with a temperature; ``not-speculating`` when nothing was drafted.
    """

    prompts: int
    identical: int
    near_ties: tuple[Parting, ...]
    mismatches: tuple[Parting, ...]
    verdict: str
    settings: Settings
    tokens: int
    drafted: int
    accepted: int
    bound: float | None = None
    noise_max: float | None = None
    noise_samples: int = 0
    sampled: SampledTest | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against the setup."""
        return self.verdict in ("identical", "near-ties", "lossless")

    def require(self) -> None:
        """Raise CheckFailed unless the setup was found lossless."""
        if self.ok:
            return
        reasons = {
            "not-speculating": "nothing was drafted, so nothing was checked",
            "inconclusive": f"{self.tokens} tokens are too few for the test's power",
            "lossy": "the sampled tokens do not follow the model's distribution",
        }
        raise CheckFailed(
            f"speculation was not found lossless: {self.verdict}",
            why=reasons.get(self.verdict)
            or f"{len(self.mismatches)} tokens are no near ties (bound {self.bound} nats)",
            fix="try another build (`browndwarf doctor` lists known faults) or report the record",
        )


def _quiet(stage: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


async def check_lossless(
    arms: Arms,
    prompts: Sequence[object],
    settings: Settings,
    *,
    on_progress: Progress = _quiet,
) -> LosslessRecord:
    """Decode all prompts with speculation, and judge every token by the plain model.

    Args:
        prompts: whatever ``PlainModel.encode`` understands.

    Raises:
        UsageError: there is nothing to decode.
        ServerError: a server failed.
    """
    if not prompts:
        raise UsageError("no prompts to check", fix="name a workload or a file with prompts")
    async with arms.plain() as plain:
        questions = await plain.encode(prompts)
    seeds = settings.seeds if settings.temperature > 0 else 1
    # A seed of its own for each answer: with a shared one the answers' draws would correlate,
    # and the test's variance would be wrong.
    asked = [question for question in questions for _ in range(seeds)]
    jobs = [(question, settings.seed + i) for i, question in enumerate(asked)]
    answers: list[Written] = []
    async with arms.speculative() as writer:
        for i, (question, seed) in enumerate(jobs):
            on_progress("speculative", i, len(jobs))
            answers.append(
                await writer.write(
                    question.tokens,
                    n=settings.tokens,
                    temperature=settings.temperature,
                    seed=seed,
                )
            )
    if settings.temperature > 0:
        return await _sampled(arms, jobs, answers, settings, on_progress)
    return await _greedy(arms, questions, answers, settings, on_progress)


async def _greedy(
    arms: Arms,
    questions: Sequence[Question],
    answers: Sequence[Written],
    settings: Settings,
    on_progress: Progress,
) -> LosslessRecord:
    judged: list[Judged] = []
    async with arms.plain() as plain:
        for i, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            on_progress("plain", i, len(questions))
            judged.append(
                await judge_greedy(
                    plain, question.id, question.tokens, answer.tokens, limit=settings.tokens
                )
            )
        partings = [
            await _named(plain, parting, settings.setup) for j in judged for parting in j.partings
        ]
    bound = noise_max = None
    samples = 0
    if partings:
        ways = [(q.tokens, j.plain) for q, j in zip(questions, judged, strict=True)]
        noise = await _noise(arms, ways, settings.n_max + 1, on_progress)
        noise_max, samples = max(noise, default=0.0), len(noise)
        bound = max(LEAST_BOUND, SAFETY * noise_max)
        partings = [parting.classified(bound) for parting in partings]
    near = tuple(p for p in partings if p.kind == "near-tie")
    real = tuple(p for p in partings if p.kind != "near-tie")
    drafted = sum(a.drafted for a in answers)
    verdict = "mismatch" if real else "near-ties" if near else "identical"
    return LosslessRecord(
        prompts=len(questions),
        identical=sum(not j.partings for j in judged),
        near_ties=near,
        mismatches=real,
        verdict=verdict if drafted or real else "not-speculating",
        settings=settings,
        tokens=sum(len(a.tokens) for a in answers),
        drafted=drafted,
        accepted=sum(a.accepted for a in answers),
        bound=bound,
        noise_max=noise_max,
        noise_samples=samples,
    )


async def _named(plain: PlainModel, parting: Parting, setup: str) -> Parting:
    """With the tokens' texts."""
    texts = [
        "" if token is None else await plain.text(token)
        for token in (parting.plain, parting.speculative)
    ]
    return msgspec.structs.replace(
        parting, plain_text=texts[0], speculative_text=texts[1], setup=setup
    )


async def _noise(
    arms: Arms,
    ways: Sequence[tuple[Sequence[int], Sequence[Step]]],
    batch: int,
    on_progress: Progress,
) -> list[float]:
    """Shifts of the closest calls' gaps between single steps and batches, in nats."""
    samples = closest_calls(ways, batch=batch, count=NOISE_POSITIONS)
    shifts: list[float] = []
    if not samples:
        return shifts
    async with arms.batched(batch) as judge:
        for i, sample in enumerate(samples):
            on_progress("rounding noise", i, len(samples))
            steps = await judge.steps(sample.prefix, n=1, temperature=0.0, seed=0)
            shift = gap_shift(sample, steps[0]) if steps else None
            if shift is not None:
                shifts.append(shift)
    return shifts


async def _sampled(
    arms: Arms,
    jobs: Sequence[tuple[Question, int]],
    answers: Sequence[Written],
    settings: Settings,
    on_progress: Progress,
) -> LosslessRecord:
    tally = Tally()
    async with arms.plain() as plain:
        for i, ((question, seed), answer) in enumerate(zip(jobs, answers, strict=True)):
            on_progress("plain", i, len(jobs))
            await judge_sampled(
                plain,
                question.tokens,
                answer.tokens,
                temperature=settings.temperature,
                seed=seed,
                tally=tally,
            )
    test = tally.test(settings.temperature)
    drafted = sum(a.drafted for a in answers)
    return LosslessRecord(
        prompts=len(answers),
        identical=test.identical,
        near_ties=(),
        mismatches=(),
        verdict=test.verdict if drafted or test.verdict == "lossy" else "not-speculating",
        settings=settings,
        tokens=test.tokens,
        drafted=drafted,
        accepted=sum(a.accepted for a in answers),
        sampled=test,
    )
