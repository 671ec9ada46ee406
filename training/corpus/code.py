"""Small Python functions and classes, with names, operators and bodies that vary.

Boundary: Python only, one function or class an answer; the code is valid but is never run.
Output contract: a fenced block, alone or between two sentences.
"""

# ruff: noqa: E501  (a sentence template stays on one line)
from __future__ import annotations

import random

from training.corpus import words as w
from training.corpus.sample import Exchange, expand

_ARGS = "a b c x y n m k value count total size width height price score left right".split()
_LISTS = "items values numbers words names data rows points scores prices".split()
_OPS = {
    "+": "sum",
    "-": "difference",
    "*": "product",
    "/": "quotient",
    "%": "remainder",
    "//": "whole quotient",
}


def _function(rng: random.Random) -> tuple[str, str, str, str]:
    """Return name, what it does, code, a call of it."""
    a, b = rng.sample(_ARGS, 2)
    xs = rng.choice(_LISTS)
    item = rng.choice(("item", "x", "value", "v", "element"))
    n = rng.randint(2, 20)
    op, op_name = rng.choice(list(_OPS.items()))
    cmp_, cmp_name = rng.choice(((">", "greater than"), ("<", "less than"), (">=", "at least"), ("==", "equal to"), ("!=", "different from")))  # fmt: skip
    noun = rng.choice(w.OBJECTS)
    numbers = ", ".join(str(rng.randint(1, 50)) for _ in range(rng.randint(3, 5)))
    kind = rng.randrange(13)
    if kind == 0:
        name = rng.choice(
            (
                f"{op_name.split()[-1]}",
                f"get_{op_name.split()[-1]}",
                f"{noun}_{op_name.split()[-1]}",
                f"compute_{a}",
            )
        )
        return (
            name,
            f"returns the {op_name} of {a} and {b}",
            f"def {name}({a}, {b}):\n    return {a} {op} {b}",
            f"{name}({n}, {n // 2 + 1})",
        )
    if kind == 1:
        name = rng.choice(("total", f"sum_{xs}", f"add_{xs}", f"sum_of_{noun}s"))
        code = f"def {name}({xs}):\n    result = 0\n    for {item} in {xs}:\n        result += {item}\n    return result"
        return name, f"adds all {xs}", code, f"{name}([{numbers}])"
    if kind == 2:
        name = rng.choice((f"filter_{xs}", f"select_{xs}", f"keep_{noun}s"))
        code = f"def {name}({xs}):\n    return [{item} for {item} in {xs} if {item} {cmp_} {n}]"
        return name, f"keeps the {xs} that are {cmp_name} {n}", code, f"{name}([{numbers}])"
    if kind == 3:
        name = rng.choice((f"count_{xs}", f"count_{noun}s", "how_many"))
        code = f"def {name}({xs}):\n    count = 0\n    for {item} in {xs}:\n        if {item} {cmp_} {n}:\n            count += 1\n    return count"
        return name, f"counts the {xs} that are {cmp_name} {n}", code, f"{name}([{numbers}])"
    if kind == 4:
        name, word = rng.choice((("largest", "max"), ("smallest", "min")))
        name = rng.choice((name, f"{name}_{noun}", f"find_{word}"))
        sign = ">" if word == "max" else "<"
        code = f"def {name}({xs}):\n    best = {xs}[0]\n    for {item} in {xs}[1:]:\n        if {item} {sign} best:\n            best = {item}\n    return best"
        return (
            name,
            f"finds the {'largest' if word == 'max' else 'smallest'} of the {xs}",
            code,
            f"{name}([{numbers}])",
        )
    if kind == 5:
        check, text = rng.choice((("% 2 == 0", "even"), ("% 2 == 1", "odd"), ("> 0", "positive"), ("< 0", "negative"), (f"% {n} == 0", f"divisible by {n}")))  # fmt: skip
        name = f"is_{text.replace(' ', '_')}"
        return (
            name,
            f"checks if {a} is {text}",
            f"def {name}({a}):\n    return {a} {check}",
            f"{name}({n + 3})",
        )
    if kind == 6:
        name = rng.choice(("factorial", "fact"))
        code = f"def {name}({a}):\n    if {a} <= 1:\n        return 1\n    return {a} * {name}({a} - 1)"
        return name, f"computes the factorial of {a}", code, f"{name}({n % 9 + 2})"
    if kind == 7:
        method, text = rng.choice((("upper()", "upper case"), ("lower()", "lower case"), ("strip()", "no spaces around it"), ("title()", "title case")))  # fmt: skip
        name = rng.choice((f"format_{noun}", f"clean_{noun}", f"to_{method[:-2]}"))
        return (
            name,
            f"returns the text in {text}" if "case" in text else f"returns the text with {text}",
            f"def {name}(text):\n    return text.{method}",
            f'{name}("{noun}")',
        )
    if kind == 8:
        name = rng.choice((f"{noun}_area", "area", "rectangle_area"))
        code = f'def {name}({a}, {b}):\n    if {a} < 0 or {b} < 0:\n        raise ValueError("{noun} must be positive")\n    return {a} * {b}'
        return (
            name,
            f"computes an area from {a} and {b} and rejects negative values",
            code,
            f"{name}({n}, {n + 1})",
        )
    if kind == 9:
        name = rng.choice((f"double_{xs}", f"scale_{xs}", f"change_{xs}"))
        op2 = rng.choice("+-*")
        code = f"def {name}({xs}):\n    result = []\n    for {item} in {xs}:\n        result.append({item} {op2} {n})\n    return result"
        verb = {"+": f"adds {n} to", "-": f"subtracts {n} from", "*": f"multiplies by {n}"}[op2]
        return name, f"{verb} every one of the {xs}", code, f"{name}([{numbers}])"
    if kind == 10:
        name = rng.choice((f"print_{noun}s", "count_up", f"show_{noun}s"))
        code = f'def {name}({a}):\n    for i in range({a}):\n        print("{noun}", i)'
        return name, f"prints {noun} {a} times", code, f"{name}({n})"
    if kind == 11:
        name = rng.choice((f"make_{noun}", f"new_{noun}", f"create_{noun}"))
        key1, key2 = rng.sample(("name", "color", "price", "size", "owner", "weight"), 2)
        code = f'def {name}({key1}, {key2}):\n    return {{"{key1}": {key1}, "{key2}": {key2}}}'
        return (
            name,
            f"makes a dictionary with {key1} and {key2}",
            code,
            f'{name}("{rng.choice(w.COLORS)}", {n})',
        )
    cls = noun.capitalize()
    field, method = rng.sample(("name", "color", "price", "size", "owner", "weight"), 2)
    code = (
        f"class {cls}:\n    def __init__(self, {field}, {method}):\n        self.{field} = {field}\n"
        f"        self.{method} = {method}\n\n    def show(self):\n        print(self.{field}, self.{method})"
    )
    return (
        cls,
        f"has {field} and {method} and a method show",
        code,
        f'{cls}("{rng.choice(w.COLORS)}", {n})',
    )


_CLASSICS = (
    ("adds two numbers|returns the sum of two numbers", "add", "def {f}(a, b):\n    return a + b", "{f}(2, 3)"),
    ("multiplies two numbers|returns the product of two numbers", "multiply", "def {f}(a, b):\n    return a * b", "{f}(2, 3)"),
    ("reverses a string|returns a string backwards", "reverse", "def {f}(text):\n    return text[::-1]", '{f}("hello")'),
    ("checks if a word is a palindrome|checks for palindromes", "is_palindrome", "def {f}(text):\n    return text == text[::-1]", '{f}("level")'),
    ("computes the nth Fibonacci number|returns a Fibonacci number", "fibonacci", "def {f}(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a", "{f}(10)"),
    ("computes the factorial of a number|returns the factorial of n", "factorial", "def {f}(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result", "{f}(5)"),
    ("checks if a number is prime|tests whether a number is prime", "is_prime", "def {f}(n):\n    if n < 2:\n        return False\n    for i in range(2, n):\n        if n % i == 0:\n            return False\n    return True", "{f}(7)"),
    ("finds the largest number in a list|returns the maximum of a list", "find_max", "def {f}(numbers):\n    best = numbers[0]\n    for x in numbers:\n        if x > best:\n            best = x\n    return best", "{f}([3, 1, 2])"),
    ("computes the average of a list|returns the mean of a list", "average", "def {f}(numbers):\n    return sum(numbers) / len(numbers)", "{f}([1, 2, 3])"),
    ("counts the vowels in a text|returns the number of vowels", "count_vowels", 'def {f}(text):\n    return sum(1 for c in text if c in "aeiou")', '{f}("hello")'),
    ("prints hello world|says hello to the world", "hello", 'def {f}():\n    print("Hello, world!")', "{f}()"),
    ("checks if a number is even|tests whether a number is even", "is_even", "def {f}(n):\n    return n % 2 == 0", "{f}(4)"),
    ("sorts a list|returns a sorted list", "sort_list", "def {f}(items):\n    return sorted(items)", "{f}([3, 1, 2])"),
    ("greets a person|says hello to a person", "greet", 'def {f}(name):\n    return "Hello, " + name', '{f}("Mia")'),
)  # fmt: skip


def _classic(rng: random.Random) -> Exchange:
    does, name, body, call = rng.choice(_CLASSICS)
    does = rng.choice(does.split("|"))
    coined = rng.random() < 0.3
    name = f"{name}_{rng.choice(w.OBJECTS)}" if coined else name
    called = f" [called|named] {name}" if coined or rng.random() < 0.3 else ""
    infinitive = does.split()[0]
    ask = expand(
        rng,
        f"[Write|Give me|Please write|Create|I need] a [Python function|function|Python function]{called} that {does}[.|]",
    )
    if not coined and rng.random() < 0.3:
        root = infinitive[:-1] if infinitive[-3:] != "hes" else infinitive
        root = {"multiplie": "multiply"}.get(root, root)
        rest = does.partition(" ")[2]
        ask = expand(rng, f"[Write|Give me] a Python function to {root} {rest}[.|]")
    block = (
        f"```python\n{body.format(f=name)}"
        + (f"\n\nprint({call.format(f=name)})" if rng.random() < 0.4 else "")
        + "\n```"
    )
    before = expand(rng, f"[Here is the function:|This function {does}:|Sure:]")
    return Exchange(ask, f"{before}\n\n{block}", f"A function that {does}.", key=ask)


def code(rng: random.Random) -> Exchange:
    """A request for a function, answered with a fenced block."""
    if rng.random() < 0.25:
        return _classic(rng)
    name, does, body, call = _function(rng)
    is_class = body.startswith("class")
    if not is_class and rng.random() < 0.3:
        head, _, rest = body.partition("\n")
        body = f'{head}\n    """{does[0].upper()}{does[1:]}."""\n{rest}'
    noun = "class" if is_class else "function"
    if is_class:
        ask = expand(rng, "[Write|Define|Create] a Python class {n} that {d}.", n=name, d=does)
    else:
        ask = expand(
            rng, "[Write|Give me|Please write|Create] a [Python function|function] "
            "[{n}|called {n}|named {n}] that {d}.", n=name, d=does,
        )  # fmt: skip
        if rng.random() < 0.25:
            ask = expand(
                rng,
                "[I need a Python function that {d}. Call it {n}.|How do I write a function {n} that {d}?]",
                n=name,
                d=does,
            )
    shown = f"\n\nprint({call})" if rng.random() < 0.45 else ""
    block = f"```python\n{body}{shown}\n```"
    form = rng.random()
    if form < 0.2:
        ask += expand(rng, " [Only the code.|Code only, please.|No explanation.]")
        reply = block
    else:
        before = expand(
            rng, "[Here is the {k}:|Here is {n}:|This {k} {d}:|Sure:]", k=noun, n=name, d=does
        )
        after = expand(
            rng,
            "[||\n\nThe {k} {d}.|\n\nCall it like this: {c}.|\n\nYou can test it with {c}.]",
            k=noun,
            d=does,
            c=call,
        )
        reply = f"{before}\n\n{block}{after}"
    return Exchange(ask, reply, f"A {noun} {name} that {does}.", key=f"{name} {does}")
