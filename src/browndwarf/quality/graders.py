"""Mechanical graders: does an answer hold what the question asked for?

Each grader is a kind with its parameters; ``check`` finds faults in the parameters before
anything is asked, ``grade`` looks at one answer and says why it is wrong. Nothing of an answer is
executed; code goes through ``codecheck``.

    number     {answer, tolerance}        the last number in the text
    text       {all, any, none}           words or phrases, whole words, case ignored
    exact      {answer}                   the text, but for case, spaces and a final full stop
    regex      {pattern}                  searched in the text (at most 4,000 characters of it)
    json       {equals, keys}             a JSON value in the text, equal or with these keys
    form       {lines, words, starts, ends, case}   limits on the text's shape
    code       {function, cases}          a Python function with [[arguments], result] cases
    tool_call  {name, arguments}          exactly one call, with these arguments

Example:
    >>> grade({"kind": "number", "answer": 42}, Answer("That makes 42."))
    ''
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from browndwarf.errors import UsageError
from browndwarf.quality import codecheck

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FENCE = re.compile(r"```[\w+-]*\n(.*?)```", re.DOTALL)
_LONGEST = 4000

Spec = Mapping[str, Any]


class Answer(NamedTuple):
    """What came back: the text without its reasoning, and the tool calls' (name, arguments)."""

    text: str
    calls: tuple[tuple[str, str], ...] = ()


def check(spec: object, where: str) -> None:
    """Look at a grader's parameters.

    Raises:
        UsageError: an unknown kind, a missing or odd parameter, an invalid expression.
    """
    if not isinstance(spec, dict) or spec.get("kind") not in _GRADERS:
        raise UsageError(
            f"{where} has no known grader", why=f"known kinds are {', '.join(sorted(_GRADERS))}"
        )
    kind = spec["kind"]
    needed, allowed = _PARAMETERS[kind]
    unknown = set(spec) - allowed - needed - {"kind"}
    missing = needed - set(spec)
    if unknown or missing or (not needed and not set(spec) & allowed):
        raise UsageError(
            f"{where}: a {kind} grader takes other parameters",
            why=f"missing {sorted(missing)}, unknown {sorted(unknown)}",
            fix=f"needed: {sorted(needed)}; possible: {sorted(allowed)}",
        )
    if kind == "regex":
        try:
            re.compile(spec["pattern"])
        except (re.error, TypeError) as exc:
            raise UsageError(
                f"{where}: the expression {spec['pattern']!r} is invalid", why=str(exc)
            ) from exc
    if kind == "number" and not isinstance(spec["answer"], int | float):
        raise UsageError(f"{where}: the answer {spec['answer']!r} is no number")
    if kind == "code" and not all(
        isinstance(c, list) and len(c) == 2 and isinstance(c[0], list) for c in spec["cases"]
    ):
        raise UsageError(f"{where}: a case is [[arguments], result]")


def grade(spec: Spec, answer: Answer) -> str:
    """Why the answer is wrong; an empty text when it is right."""
    return _GRADERS[spec["kind"]](spec, answer)


def _number(spec: Spec, answer: Answer) -> str:
    found = _NUMBER.findall(answer.text)
    if not found:
        return "no number"
    value = float(found[-1].replace(",", ""))
    near = abs(value - spec["answer"]) <= spec.get("tolerance", 0)
    return "" if near else f"{found[-1]} instead of {spec['answer']}"


def _holds(text: str, phrase: str) -> bool:
    pattern = rf"(?<!\w){re.escape(phrase)}(?!\w)"
    return re.search(pattern, text, re.IGNORECASE) is not None


def _text(spec: Spec, answer: Answer) -> str:
    for phrase in spec.get("all", ()):
        if not _holds(answer.text, phrase):
            return f"{phrase!r} is missing"
    for phrase in spec.get("none", ()):
        if _holds(answer.text, phrase):
            return f"{phrase!r} must not be there"
    choices = spec.get("any", ())
    if choices and not any(_holds(answer.text, phrase) for phrase in choices):
        return f"none of {', '.join(choices)}"
    return ""


def _plain(text: str) -> str:
    return " ".join(text.split()).strip(" .!\"'").casefold()


def _exact(spec: Spec, answer: Answer) -> str:
    right = _plain(answer.text) == _plain(str(spec["answer"]))
    return "" if right else f"not exactly {spec['answer']!r}"


def _regex(spec: Spec, answer: Answer) -> str:
    found = re.search(spec["pattern"], answer.text[-_LONGEST:])
    return "" if found else f"nothing matches {spec['pattern']!r}"


def _json(spec: Spec, answer: Answer) -> str:
    fence = _FENCE.search(answer.text)
    try:
        value = json.loads(fence[1] if fence else answer.text.strip())
    except ValueError as exc:
        return f"no JSON: {exc}"
    if "equals" in spec and value != spec["equals"]:
        return f"{json.dumps(value)} instead of {json.dumps(spec['equals'])}"
    missing = [
        key for key in spec.get("keys", ()) if not isinstance(value, dict) or key not in value
    ]
    return f"keys missing: {', '.join(missing)}" if missing else ""


def _form(spec: Spec, answer: Answer) -> str:
    text = answer.text.strip()
    lines = [line for line in text.splitlines() if line.strip()]
    case = spec.get("case")
    if "lines" in spec and len(lines) != spec["lines"]:
        return f"{len(lines)} lines instead of {spec['lines']}"
    if "words" in spec and len(text.split()) != spec["words"]:
        return f"{len(text.split())} words instead of {spec['words']}"
    if "starts" in spec and not text.startswith(spec["starts"]):
        return f"does not start with {spec['starts']!r}"
    if "ends" in spec and not text.endswith(spec["ends"]):
        return f"does not end with {spec['ends']!r}"
    if case and (not text or text != (text.upper() if case == "upper" else text.lower())):
        return f"not all {case} case"
    return ""


def _code(spec: Spec, answer: Answer) -> str:
    fence = _FENCE.search(answer.text)
    source = fence[1] if fence else answer.text
    for arguments, wanted in spec["cases"]:
        try:
            got = codecheck.call(source, spec["function"], arguments)
        except codecheck.Unsupported as exc:
            return str(exc)
        if got != wanted:
            return f"{spec['function']}{tuple(arguments)} gives {got!r} instead of {wanted!r}"
    return ""


def _tool_call(spec: Spec, answer: Answer) -> str:
    if len(answer.calls) != 1:
        return f"{len(answer.calls)} tool calls instead of one"
    name, text = answer.calls[0]
    try:
        arguments = json.loads(text or "{}")
    except ValueError as exc:
        return f"the arguments are no JSON: {exc}"
    if name != spec["name"]:
        return f"calls {name} instead of {spec['name']}"
    right = arguments == spec["arguments"]
    return "" if right else f"arguments {text} instead of {json.dumps(spec['arguments'])}"


_GRADERS: dict[str, Callable[[Spec, Answer], str]] = {
    "number": _number,
    "text": _text,
    "exact": _exact,
    "regex": _regex,
    "json": _json,
    "form": _form,
    "code": _code,
    "tool_call": _tool_call,
}
# Kind -> (needed parameters, further ones); where none is needed, one of the further ones is.
_PARAMETERS: dict[str, tuple[set[str], set[str]]] = {
    "number": ({"answer"}, {"tolerance"}),
    "text": (set(), {"all", "any", "none"}),
    "exact": ({"answer"}, set()),
    "regex": ({"pattern"}, set()),
    "json": (set(), {"equals", "keys"}),
    "form": (set(), {"lines", "words", "starts", "ends", "case"}),
    "code": ({"function", "cases"}, set()),
    "tool_call": ({"name", "arguments"}, set()),
}
