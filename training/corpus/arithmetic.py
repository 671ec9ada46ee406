"""Sums with a written scratch-pad (thinking) and the same sums answered at once.

Boundary: whole numbers; the largest operand has four digits. Digits are single tokens.
Output contract: the scratch-pad is always right, and its last line is the result.

Example:
    >>> add_by_hand(47, 85)[-1]
    'Result: 132.'
"""

# ruff: noqa: E501  (a sentence template stays on one line)
from __future__ import annotations

import random
from dataclasses import dataclass

from training.corpus import words as w
from training.corpus.sample import Exchange, expand

_PLACES = ("Ones", "Tens", "Hundreds", "Thousands", "Ten thousands")
_SIGN = {"add": "+", "subtract": "-", "multiply": "*"}
_WORD = {"add": "plus", "subtract": "minus", "multiply": "times"}


@dataclass(frozen=True, slots=True)
class Problem:
    """One operation on two numbers."""

    operation: str
    a: int
    b: int

    @property
    def result(self) -> int:
        """The right answer."""
        if self.operation == "add":
            return self.a + self.b
        return self.a - self.b if self.operation == "subtract" else self.a * self.b

    @property
    def scratch(self) -> list[str]:
        """The written working."""
        if self.operation == "add":
            return add_by_hand(self.a, self.b)
        if self.operation == "subtract":
            return subtract_by_hand(self.a, self.b)
        return multiply_by_hand(self.a, self.b)


def _digits(number: int, count: int) -> list[int]:
    return [number // 10**i % 10 for i in range(count)]


def add_by_hand(a: int, b: int) -> list[str]:
    """Add column by column from the ones, with the carry spoken."""
    count, carry, lines = max(len(str(a)), len(str(b))), 0, []
    for i, (x, y) in enumerate(zip(_digits(a, count), _digits(b, count), strict=True)):
        total = x + y + carry
        terms = f"{x} + {y}" + (f" + {carry}" if carry else "")
        lines.append(f"{_PLACES[i]}: {terms} = {total}, write {total % 10}, carry {total // 10}.")
        carry = total // 10
    if carry:
        lines.append(f"{_PLACES[count]}: write {carry}.")
    return [*lines, f"Result: {a + b}."]


def subtract_by_hand(a: int, b: int) -> list[str]:
    """Subtract column by column from the ones, with the borrow spoken; needs a >= b."""
    count, borrow, lines = len(str(a)), 0, []
    for i, (x, y) in enumerate(zip(_digits(a, count), _digits(b, count), strict=True)):
        left = x - y - borrow
        terms = f"{x} - {y}" + (" - 1" if borrow else "")
        borrow = int(left < 0)
        digit = left + 10 * borrow
        lines.append(f"{_PLACES[i]}: {terms} = {left}, write {digit}, borrow {borrow}.")
    return [*lines, f"Result: {a - b}."]


def multiply_by_hand(a: int, b: int) -> list[str]:
    """Multiply a by every digit of b and add the parts; b has one or two digits."""
    lines, parts = [], []
    for i, digit in enumerate(_digits(b, len(str(b)))):
        carry, written = 0, []
        for x in _digits(a, len(str(a))):
            total = x * digit + carry
            extra = f" + {carry}" if carry else ""
            written.append(
                f"{x} * {digit}{extra} = {total}, write {total % 10}, carry {total // 10}"
            )
            carry = total // 10
        parts.append(a * digit * 10**i)
        lines.append("; ".join(written) + f". Part: {parts[-1]}.")
    if len(parts) == 2:
        lines.append(f"Add {parts[0]} and {parts[1]}.")
        lines += add_by_hand(parts[0], parts[1])[:-1]
    return [*lines, f"Result: {a * b}."]


def draw(rng: random.Random) -> Problem:
    """Draw a problem; short ones are as likely as long ones."""
    operation = rng.choices(("add", "subtract", "multiply"), (0.45, 0.30, 0.25))[0]
    if operation == "multiply":
        if rng.random() < 0.3:
            return Problem(operation, rng.randint(2, 12), rng.randint(2, 9))
        if rng.random() < 0.65:
            return Problem(operation, rng.randint(11, 999), rng.randint(2, 9))
        return Problem(operation, rng.randint(11, 99), rng.randint(11, 99))
    sizes = rng.choices((1, 2, 3, 4), (0.1, 0.4, 0.35, 0.15), k=2)
    a, b = (rng.randint(10 ** (n - 1), 10**n - 1) for n in sizes)
    if operation == "subtract" and a < b:
        a, b = b, a
    return Problem(operation, a, b)


def _question(rng: random.Random, p: Problem) -> str:
    slots = {"a": p.a, "b": p.b, "s": _SIGN[p.operation], "w": _WORD[p.operation], "o": p.operation}
    if rng.random() < 0.18:
        who, thing = (
            rng.choice(w.NAMES),
            rng.choice(("coins", "books", "apples", "stones", "letters", "keys")),
        )
        stories = {
            "add": "{who} has {a} {thing} and [gets|finds|buys] {b} more. How many {thing} [does {who} have now|are there now]?",
            "subtract": "{who} has {a} {thing} and [loses|gives away|sells] {b}. How many {thing} are left?",
            "multiply": "{who} has {a} boxes with {b} {thing} in each box. How many {thing} are there?",
        }  # fmt: skip
        return expand(rng, stories[p.operation], who=who, thing=thing, **slots)
    return expand(
        rng, "[What is {a} {w} {b}?|What is {a} {s} {b}?|Compute {a} {s} {b}.|Calculate {a} {s} {b}.|"
        "How much is {a} {w} {b}?|{a} {s} {b} = ?|Please {o} {x}.|{a} {s} {b}|Solve {a} {s} {b}.]",
        x={"add": f"{p.a} and {p.b}", "subtract": f"{p.b} from {p.a}", "multiply": f"{p.a} by {p.b}"}[p.operation],
        **slots,
    )  # fmt: skip


def arithmetic(rng: random.Random) -> Exchange:
    """One sum; its thought is the scratch-pad."""
    p = draw(rng)
    expression = f"{p.a} {_SIGN[p.operation]} {p.b}"
    question = _question(rng, p)
    if rng.random() < 0.15:
        question += expand(
            rng, " [Answer with the number only.|Just the number, please.|Give only the result.]"
        )
        reply = str(p.result)
    else:
        reply = expand(
            rng, "[The answer is {r}.|{e} = {r}.|{e} is {r}.|The result is {r}.]", e=expression, r=p.result
        )  # fmt: skip
    thought = "\n".join([f"{expression}.", *p.scratch])
    return Exchange(question, reply, thought, key=expression, answer=str(p.result))
