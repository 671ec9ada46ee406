"""Quiz questions: the packaged sets, and a user's own in JSONL or YAML.

A question has ``id``, ``area``, a ``prompt`` or ``messages``, a ``grader`` (see ``graders``), and
may have ``tools``, ``max_tokens`` and ``filler`` (a needle hidden in made-up text of some words).
The general set asks what any instruct model of a few billion parameters can do; the embedded pair
has a set of its own, made from its held-out prompts, since it knows nothing outside them.

Example:
    >>> sorted({q.area for q in general()})[:3]
    ['arithmetic', 'code', 'instructions']
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from browndwarf.errors import UsageError
from browndwarf.quality import graders

_PLACES = ("harbour", "market", "bridge", "garden", "station", "library", "hill", "square")
_THINGS = ("boats", "carts", "birds", "lanterns", "stones", "letters", "baskets", "chairs")


class Filler(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Made-up text around a needle, which stands at the share ``at`` of it."""

    words: int
    needle: str
    at: float = 0.5

    def text(self) -> str:
        """The same text at every call."""
        rng = random.Random(self.needle)
        sentences: list[str] = []
        count = 0
        while count < self.words:
            sentence = (
                f"Near the {rng.choice(_PLACES)} there were {rng.randrange(2, 99)} "
                f"{rng.choice(_THINGS)}, and somebody counted them twice."
            )
            sentences.append(sentence)
            count += len(sentence.split())
        sentences.insert(int(len(sentences) * min(max(self.at, 0.0), 1.0)), self.needle)
        return " ".join(sentences)


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question; exactly one of ``prompt`` and ``messages`` is given."""

    id: str
    grader: dict[str, Any]
    area: str = "other"
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    filler: Filler | None = None
    max_tokens: int | None = None

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The messages to send."""
        if self.prompt is None:
            return list(self.messages)
        text = f"{self.filler.text()}\n\n{self.prompt}" if self.filler else self.prompt
        return [{"role": "user", "content": text}]


def general() -> tuple[Question, ...]:
    """The packaged set for instruct models."""
    data = resources.files("browndwarf.quality").joinpath("questions.jsonl").read_bytes()
    return _checked(_jsonl(data, "questions.jsonl"), "questions.jsonl")


def demo() -> tuple[Question, ...]:
    """Those of the embedded pair's held-out prompts that have a right answer."""
    from browndwarf.models import demo as pair

    return tuple(
        Question(
            id=row["id"],
            area=row["workload"],
            messages=tuple(row["messages"]),
            tools=tuple(row.get("tools") or ()),
            grader=_demo_grader(row["answer"], row["workload"]),
        )
        for row in pair.prompts()
        if "answer" in row
    )


def _demo_grader(answer: Any, workload: str) -> dict[str, Any]:
    if isinstance(answer, dict):
        return {"kind": "tool_call", "name": answer["name"], "arguments": answer["arguments"]}
    if workload == "arithmetic":
        return {"kind": "number", "answer": float(answer)}
    return {"kind": "text", "all": [str(answer)]}


def load(text: str) -> tuple[Question, ...]:
    """A set by name (``general``, ``demo``) or from a user's file.

    Raises:
        UsageError: no such file, or a question in it is faulty.
    """
    if text in ("general", "demo"):
        return general() if text == "general" else demo()
    path = Path(text)
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise UsageError(
            f"no questions at {text}",
            why=exc.strerror or str(exc),
            fix="give a .jsonl or .yaml file, or one of the words general and demo",
        ) from exc
    if path.suffix.lower() in (".yaml", ".yml"):
        return _checked(_yaml(data, text), text)
    return _checked(_jsonl(data, text), text)


def _jsonl(data: bytes, source: str) -> Iterable[tuple[str, object]]:
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            try:
                yield f"line {number} of {source}", msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                raise UsageError(f"line {number} of {source} is no JSON", why=str(exc)) from exc


def _yaml(data: bytes, source: str) -> Iterable[tuple[str, object]]:
    import yaml

    try:
        rows = yaml.safe_load(data)
    except yaml.YAMLError as exc:
        raise UsageError(f"{source} is no YAML", why=str(exc)) from exc
    if not isinstance(rows, list):
        raise UsageError(f"{source} holds no list of questions", fix="start each with `- id: ...`")
    return [(f"question {number} of {source}", row) for number, row in enumerate(rows, 1)]


def _checked(rows: Iterable[tuple[str, object]], source: str) -> tuple[Question, ...]:
    questions = []
    for where, row in rows:
        try:
            question = msgspec.convert(row, Question)
        except msgspec.ValidationError as exc:
            raise UsageError(f"{where} is no question", why=str(exc)) from exc
        if (question.prompt is None) != bool(question.messages):
            raise UsageError(f"{where}: exactly one of prompt and messages is needed")
        graders.check(question.grader, where)
        questions.append(question)
    twice = [name for name, count in Counter(q.id for q in questions).items() if count > 1]
    if twice:
        raise UsageError(f"{source} has two questions called {twice[0]!r}")
    if not questions:
        raise UsageError(f"{source} holds no question")
    return tuple(questions)
