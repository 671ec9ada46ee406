"""Ask a quiz through any OpenAI-compatible endpoint, grade it, compare two setups.

Boundary: speaks to an ``Asker``; ``HttpAsker`` binds it to the HTTP client. An endpoint that
fails ends the quiz: a lost answer is no wrong answer.

The comparison is paired: only questions that one setup got right and the other did not tell
anything (McNemar's exact test). With fewer than six of them no outcome could be significant.

Example:
    >>> record = await run_quiz(asker, general(), thinking=False)        # doctest: +SKIP
    >>> f"{record.right}/{len(record.questions)}"                        # doctest: +SKIP
    '14/16'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from browndwarf.engine.client import LlamaClient
from browndwarf.errors import RequestFailed, ServerError, ServerHung, UsageError
from browndwarf.quality.chances import mcnemar
from browndwarf.quality.graders import Answer, grade
from browndwarf.quality.questions import Question
from browndwarf.records import Record

ALPHA = 0.05
#: The smallest number of one-sided differences that McNemar's test calls significant.
LEAST_DISCORDANT = next(n for n in range(1, 100) if mcnemar(n, 0) < ALPHA)
MAX_TOKENS = {False: 512, True: 4096}


class Graded(Record, frozen=True, kw_only=True):
    """One question's outcome; ``why`` says what is wrong with the answer."""

    id: str
    area: str
    ok: bool
    thinking: bool | None
    why: str = ""
    answer: str = ""
    finish: str = ""


class QuizRecord(Record, frozen=True, kw_only=True):
    """All outcomes of one setup; ``score`` is the share that was right."""

    questions: tuple[Graded, ...]
    model: str = ""

    @property
    def right(self) -> int:
        """Questions answered rightly."""
        return sum(q.ok for q in self.questions)

    @property
    def score(self) -> float:
        """Share of right answers."""
        return self.right / len(self.questions)


class QuizComparison(Record, frozen=True, kw_only=True):
    """Two setups on the same questions.

    Attributes:
        lost, won: questions that only the first, or only the second, got right.
        verdict: ``worse``, ``better``, ``no difference seen`` or ``too few questions to tell``.
    """

    questions: int
    lost: tuple[str, ...]
    won: tuple[str, ...]
    p: float
    verdict: str

    @property
    def sentence(self) -> str:
        """For people."""
        text = f"{self.verdict}: {len(self.lost)} lost, {len(self.won)} won of {self.questions}"
        if self.verdict == "too few questions to tell":
            return f"{text}; fewer than {LEAST_DISCORDANT} differences can't be significant"
        return f"{text} (p = {self.p:.2g})"


class Reply(Record, frozen=True, kw_only=True):
    """One answer of an endpoint; ``calls`` are (name, JSON arguments)."""

    text: str
    calls: tuple[tuple[str, str], ...] = ()
    finish: str = ""


class Asker(Protocol):
    """An endpoint that answers one chat; ``thinking`` None says nothing about it."""

    async def ask(self, question: Question, *, thinking: bool | None) -> Reply: ...


class HttpAsker:
    """An OpenAI-compatible endpoint. Greedy; thinking through ``chat_template_kwargs``."""

    def __init__(self, client: LlamaClient, *, model: str = "", max_tokens: int = 0) -> None:
        self._client, self._model, self._max_tokens = client, model, max_tokens

    async def ask(self, question: Question, *, thinking: bool | None) -> Reply:
        """One streamed chat completion."""
        limit = question.max_tokens or self._max_tokens or MAX_TOKENS[thinking is not False]
        done = await self._client.chat(
            question.turns,
            tools=list(question.tools) or None,
            max_tokens=limit,
            temperature=0.0,
            stream=True,
            chat_template_kwargs=None if thinking is None else {"enable_thinking": thinking},
            extra={"model": self._model} if self._model else None,
        )
        calls = [c.get("function") or {} for c in done.tool_calls]
        return Reply(
            text=done.text,
            calls=tuple((str(c.get("name", "")), str(c.get("arguments", ""))) for c in calls),
            finish=done.finish_reason,
        )


async def run_quiz(
    asker: Asker,
    questions: Sequence[Question],
    *,
    thinking: Sequence[bool | None] = (False,),
    model: str = "",
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> QuizRecord:
    """Ask every question in every mode of thinking.

    Raises:
        RequestFailed, ServerHung: the endpoint failed; says after how many answers.
    """
    graded: list[Graded] = []
    total = len(questions) * len(thinking)
    for mode in thinking:
        for question in questions:
            on_progress(len(graded), total)
            try:
                reply = await asker.ask(question, thinking=mode)
            except (RequestFailed, ServerHung) as exc:
                raise _failed(exc, question, len(graded), total) from exc
            why = grade(question.grader, Answer(reply.text, reply.calls))
            if why and reply.finish == "length":
                why += " (cut at the token limit)"
            graded.append(
                Graded(
                    id=question.id,
                    area=question.area,
                    ok=not why,
                    thinking=mode,
                    why=why,
                    answer=reply.text,
                    finish=reply.finish,
                )
            )
    return QuizRecord(questions=tuple(graded), model=model)


def _failed(exc: ServerError, question: Question, done: int, total: int) -> ServerError:
    return type(exc)(
        f"the endpoint failed at question {question.id!r}, after {done} of {total} answers",
        why=f"{exc.what}: {exc.why}" if exc.why else exc.what,
        fix=exc.fix or "a lost answer is not counted as wrong; run the quiz again",
    )


def compare_quiz(first: QuizRecord, second: QuizRecord) -> QuizComparison:
    """Is the second setup worse than the first on the same questions?

    Raises:
        UsageError: the records share no question.
    """
    a = {(q.id, q.thinking): q.ok for q in first.questions}
    b = {(q.id, q.thinking): q.ok for q in second.questions}
    common = [key for key in a if key in b]
    if not common:
        raise UsageError(
            "the two quizzes share no question",
            fix="ask both setups the same --questions with the same --thinking",
        )
    lost = tuple(key[0] for key in common if a[key] and not b[key])
    won = tuple(key[0] for key in common if b[key] and not a[key])
    p = mcnemar(len(lost), len(won))
    if p < ALPHA:
        verdict = "worse" if len(lost) > len(won) else "better"
    elif len(lost) + len(won) < LEAST_DISCORDANT:
        verdict = "too few questions to tell"
    else:
        verdict = "no difference seen"
    return QuizComparison(questions=len(common), lost=lost, won=won, p=p, verdict=verdict)
