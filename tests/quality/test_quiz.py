"""Graders are mechanical and safe, sets are checked beforehand, setups compared in pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from browndwarf.engine.client import LlamaClient
from browndwarf.errors import RequestFailed, UsageError
from browndwarf.quality import codecheck, graders, questions
from browndwarf.quality.graders import Answer, grade
from browndwarf.quality.quiz import (
    Graded,
    HttpAsker,
    QuizRecord,
    Reply,
    compare_quiz,
    run_quiz,
)

RIGHT_AND_WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"kind": "number", "answer": 7312}, "It is 7,312.", "It is 7313"),
    ({"kind": "number", "answer": 0.5, "tolerance": 0.01}, "about 0.499", "none at all"),
    ({"kind": "text", "all": ["went"], "none": ["goed"]}, "He WENT.", "He goed, not went"),
    ({"kind": "text", "any": ["red", "crimson"]}, "It is red", "It is reddish"),
    ({"kind": "exact", "answer": "Das Haus ist alt"}, " das haus ist alt. ", "Das Haus"),
    ({"kind": "regex", "pattern": r"^\d{4}$"}, "2024", "the year 2024"),
    ({"kind": "json", "equals": [2, 4]}, "```json\n[2, 4]\n```", "[2, 4"),
    ({"kind": "json", "keys": ["a"]}, '{"a": 1, "b": 2}', "[1]"),
    ({"kind": "form", "lines": 2, "case": "upper"}, "ELBE\nPO", "Elbe\nPo"),
    ({"kind": "form", "words": 3}, "one two three", "one two"),
    (
        {"kind": "code", "function": "f", "cases": [[[2], 4], [[3], 9]]},
        "```python\ndef f(n):\n    return n * n\n```",
        "def f(n):\n    return n + n",
    ),
]


@pytest.mark.parametrize(("spec", "right", "wrong"), RIGHT_AND_WRONG)
def test_a_grader_knows_right_from_wrong(spec: dict[str, Any], right: str, wrong: str) -> None:
    graders.check(spec, "here")
    assert grade(spec, Answer(right)) == ""
    assert grade(spec, Answer(wrong))


def test_a_tool_call_needs_the_name_and_exactly_these_arguments() -> None:
    spec = {"kind": "tool_call", "name": "f", "arguments": {"a": 1}}
    assert grade(spec, Answer("", (("f", '{"a": 1}'),))) == ""
    for calls in ((), (("g", '{"a": 1}'),), (("f", '{"a": 2}'),), (("f", "{"),), (("f", ""),) * 2):
        assert grade(spec, Answer("", calls))


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "regex", "pattern": "(unclosed"},
        {"kind": "regex", "pattern": 7},
        {"kind": "guess"},
        {"kind": "number"},
        {"kind": "number", "answer": "many"},
        {"kind": "text"},
        {"kind": "exact", "answer": "x", "ansver": "y"},
        {"kind": "code", "function": "f", "cases": [[1, 2]]},
        "number",
    ],
)
def test_a_faulty_grader_is_refused_before_anything_is_asked(spec: object) -> None:
    with pytest.raises(UsageError):
        graders.check(spec, "question 1")


@pytest.mark.parametrize(
    "body",
    [
        "    import os\n    return 1",
        "    return ().__class__",
        "    return open('/etc/passwd').read()",
        "    return eval('1')",
        "    return __import__('os')",
        "    return 'a'.format(1)",
        "    return [0] * 10 ** 9",
        "    return 'x' * 10 ** 8",
        "    return 9 ** 9 ** 9",
        "    while True:\n        pass",
        "    return f(n)",
        "    return 1 / 0",
        "    return sorted(n, key=len)",
        "    return [x for x in range(10 ** 9)]",
        "    x = [0]\n    for i in range(99):\n        x = x + x\n    return x",
    ],
)
def test_code_that_leaves_the_small_language_is_a_wrong_answer(body: str) -> None:
    with pytest.raises(codecheck.Unsupported):
        codecheck.call(f"def f(n):\n{body}\n", "f", [1])


def test_ordinary_code_runs_like_python() -> None:
    source = """
def is_prime(n):
    if n < 2:
        return False
    d = 2
    while d * d <= n:
        if n % d == 0:
            return False
        d += 1
    return True

def primes(limit):
    \"\"\"Primes below a limit.\"\"\"
    found = []
    for i in range(limit):
        if not is_prime(i):
            continue
        found.append(i)
    return found

def words(text):
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return [k for k, v in counts.items() if v > 1][::-1]
"""
    assert codecheck.call(source, "primes", [20]) == [2, 3, 5, 7, 11, 13, 17, 19]
    assert codecheck.call(source, "words", ["A b a B c"]) == ["b", "a"]


def test_the_packaged_set_covers_what_it_promises() -> None:
    made = questions.general()
    wanted = "arithmetic code instructions json language logic tool-call long-context"
    areas = {q.area.replace(" ", "-") for q in made}
    assert areas == set(wanted.split())
    assert len(made) >= 8


def test_a_needle_lies_in_a_long_context() -> None:
    question = next(q for q in questions.general() if q.filler)
    text = question.turns[0]["content"]
    assert question.filler is not None
    assert question.filler.needle in text
    assert len(text.split()) > 1000


def test_the_embedded_pair_has_a_set_of_its_own() -> None:
    made = questions.demo()
    assert {"arithmetic", "tools", "chat", "retrieval"} <= {q.area for q in made}
    assert len(made) > 30


def test_user_sets_come_in_yaml_and_jsonl(tmp_path: Path) -> None:
    row = {"id": "q", "prompt": "What is 1 + 1?", "grader": {"kind": "number", "answer": 2}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "a.yaml").write_text(
        "- id: q\n  prompt: What is 1 + 1?\n  grader: {kind: number, answer: 2}\n"
    )
    assert questions.load(str(tmp_path / "a.jsonl")) == questions.load(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", "{"),
        ("a.jsonl", ""),
        ("a.jsonl", '{"id": "q", "grader": {"kind": "exact", "answer": "x"}}'),
        ("a.jsonl", '{"id": "q", "prompt": "p", "grader": {"kind": "regex", "pattern": "("}}'),
        ("a.jsonl", '{"id": "q", "prompt": "p", "grader": {"kind": "exact", "answer": 1}}\n' * 2),
        ("a.yaml", "- id: ["),
        ("a.yaml", "id: q"),
        ("a.yaml", "- !!python/object/apply:os.system [true]"),
        ("missing.jsonl", None),
    ],
)
def test_a_faulty_set_is_a_usage_error(tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError):
        questions.load(str(tmp_path / name))


def outcomes(*right: bool) -> QuizRecord:
    return QuizRecord(
        questions=tuple(
            Graded(id=f"q{i}", area="a", ok=ok, thinking=False) for i, ok in enumerate(right)
        )
    )


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ([True] * 8, [True] * 8, "too few questions to tell"),
        ([True] * 8, [False] * 5 + [True] * 3, "too few questions to tell"),
        ([True] * 8, [False] * 6 + [True] * 2, "worse"),
        ([False] * 8, [True] * 8, "better"),
        ([True] * 4 + [False] * 4, [False] * 4 + [True] * 4, "no difference seen"),
    ],
)
def test_a_comparison_says_no_more_than_its_pairs_do(
    first: list[bool], second: list[bool], verdict: str
) -> None:
    assert compare_quiz(outcomes(*first), outcomes(*second)).verdict == verdict


class Fixed:
    """Answers every question with the same text; fails at the third if asked to."""

    def __init__(self, fail: bool = False) -> None:
        self.fail, self.asked = fail, 0

    async def ask(self, question: questions.Question, *, thinking: bool | None) -> Reply:
        self.asked += 1
        if self.fail and self.asked == 3:
            raise RequestFailed("the connection was cut")
        return Reply(text="7312", finish="stop")


async def test_a_score_is_the_share_of_right_answers() -> None:
    record = await run_quiz(Fixed(), questions.general(), thinking=(False, True))
    assert len(record.questions) == 32
    assert record.right == 2
    assert record.score == 2 / 32


async def test_an_endpoint_that_dies_is_no_wrong_answer() -> None:
    with pytest.raises(RequestFailed, match="after 2 of 16 answers"):
        await run_quiz(Fixed(fail=True), questions.general())


@pytest.mark.parametrize("fault", ["error-event", "cut", "status", "not-json"])
async def test_streamed_errors_end_the_quiz(fault: str, unused_tcp_port: int) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if fault == "status":
            return web.json_response({"error": {"message": "overloaded"}}, status=503)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"delta": {"content": "73"}}]}\n\n')
        if fault == "error-event":
            await response.write(b'data: {"error": {"message": "out of memory"}}\n\n')
        elif fault == "not-json":
            await response.write(b"data: oops\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
        async with LlamaClient(f"http://127.0.0.1:{unused_tcp_port}") as client:
            with pytest.raises(RequestFailed, match="after 0 of 16"):
                await run_quiz(HttpAsker(client, model="m"), questions.general())
    finally:
        await runner.cleanup()
