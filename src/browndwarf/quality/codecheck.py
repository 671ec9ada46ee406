"""Run a model's small Python function without running Python code that a model wrote.

The text is parsed, and a tree walker evaluates a small, closed part of the language: functions,
assignments, ``if``, ``for``, ``while``, arithmetic, comparisons, subscripts, comprehensions, a
few builtins and a few methods of strings, lists and dictionaries. There are no imports, no
attributes but those methods, no access to names of the interpreter; steps and sizes are limited.
Whatever lies outside is Unsupported, which counts as a wrong answer.

Example:
    >>> call("def twice(n):\\n    return 2 * n", "twice", [21])
    42
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MOST_STEPS = 200_000
#: Of a text or a collection; one operation can multiply two of them.
MOST_SIZE = 10_000

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_BUILTINS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (len, sum, min, max, abs, sorted, str, int, float, bool, list, tuple, set, dict)
} | {f.__name__: f for f in (reversed, enumerate, zip, any, all, round, ord, chr)}
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        "lower upper strip split join replace startswith endswith count find isdigit isalpha "
        "isupper islower title".split()
    ),
    list: frozenset("append pop extend index count reverse sort insert".split()),
    dict: frozenset("get keys values items".split()),
    set: frozenset("add union intersection".split()),
}


class Unsupported(Exception):
    """The code lies outside of what is evaluated, or fails there."""


class _Return(Exception):
    pass


class _Break(Exception):
    pass


class _Continue(Exception):
    pass


def call(source: str, function: str, arguments: Sequence[Any]) -> Any:
    """The value of ``function(*arguments)`` in a module's source.

    Raises:
        Unsupported: for every fault of the code, of whatever kind.
    """
    try:
        tree = ast.parse(source)
        functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        if function not in functions:
            raise Unsupported(f"there is no function {function}")
        return _Walker(functions).call(functions[function], list(arguments))
    except Unsupported:
        raise
    except (Exception, RecursionError) as exc:
        raise Unsupported(f"{type(exc).__name__}: {exc}") from exc


class _Walker:
    def __init__(self, functions: Mapping[str, ast.FunctionDef]) -> None:
        self._functions = functions
        self._steps = 0

    def call(self, function: ast.FunctionDef, values: list[Any]) -> Any:
        a = function.args
        names = [arg.arg for arg in a.args]
        if a.vararg or a.kwarg or a.kwonlyargs or a.posonlyargs:
            raise Unsupported("only plain parameters")
        defaults = [self.value(d, {}) for d in a.defaults]
        missing = len(names) - len(values)
        if missing < 0 or missing > len(defaults):
            raise Unsupported("wrong number of arguments")
        local = dict(zip(names, values + defaults[len(defaults) - missing :], strict=True))
        try:
            self.block(function.body, local)
        except _Return as result:
            return result.args[0]
        return None

    def block(self, body: Sequence[ast.stmt], local: dict[str, Any]) -> None:
        for statement in body:
            self._tick()
            self.statement(statement, local)

    def statement(self, node: ast.stmt, local: dict[str, Any]) -> None:
        match node:
            case ast.Return():
                raise _Return(self.value(node.value, local) if node.value else None)
            case ast.Assign():
                value = self.value(node.value, local)
                for target in node.targets:
                    self.assign(target, value, local)
            case ast.AnnAssign() if node.value is not None:
                self.assign(node.target, self.value(node.value, local), local)
            case ast.AugAssign():
                old = self.value(_as_load(node.target), local)
                self.assign(
                    node.target, self._binary(node.op, old, self.value(node.value, local)), local
                )
            case ast.Expr():
                self.value(node.value, local)
            case ast.If():
                self.block(node.body if self.value(node.test, local) else node.orelse, local)
            case ast.While():
                while self.value(node.test, local):
                    if self._once(node.body, local):
                        return
            case ast.For():
                for item in self._items(self.value(node.iter, local)):
                    self.assign(node.target, item, local)
                    if self._once(node.body, local):
                        return
            case ast.Pass():
                pass
            case ast.Break():
                raise _Break
            case ast.Continue():
                raise _Continue
            case _:
                raise Unsupported(f"no {type(node).__name__}")

    def _once(self, body: Sequence[ast.stmt], local: dict[str, Any]) -> bool:
        """One pass of a loop; whether it was left."""
        self._tick()
        try:
            self.block(body, local)
        except _Break:
            return True
        except _Continue:
            pass
        return False

    def assign(self, target: ast.expr, value: Any, local: dict[str, Any]) -> None:
        match target:
            case ast.Name():
                local[target.id] = value
            case ast.Tuple() | ast.List():
                parts = list(self._items(value))
                if len(parts) != len(target.elts):
                    raise Unsupported("wrong number of values")
                for part, item in zip(target.elts, parts, strict=True):
                    self.assign(part, item, local)
            case ast.Subscript():
                self.value(target.value, local)[self.value(target.slice, local)] = value
            case _:
                raise Unsupported(f"no assignment to {type(target).__name__}")

    def value(self, node: ast.expr, local: dict[str, Any]) -> Any:
        self._tick()
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                if node.id in local:
                    return local[node.id]
                raise Unsupported(f"no name {node.id}")
            case ast.BinOp():
                return self._binary(
                    node.op, self.value(node.left, local), self.value(node.right, local)
                )
            case ast.UnaryOp():
                inner = self.value(node.operand, local)
                return not inner if isinstance(node.op, ast.Not) else -inner
            case ast.BoolOp():
                stop = isinstance(node.op, ast.Or)
                result = None
                for part in node.values:
                    result = self.value(part, local)
                    if bool(result) is stop:
                        break
                return result
            case ast.Compare():
                left = self.value(node.left, local)
                for op, part in zip(node.ops, node.comparators, strict=True):
                    right = self.value(part, local)
                    if not _COMPARE[type(op)](left, right):
                        return False
                    left = right
                return True
            case ast.IfExp():
                return self.value(node.body if self.value(node.test, local) else node.orelse, local)
            case ast.List() | ast.Tuple() | ast.Set():
                parts = [self.value(part, local) for part in node.elts]
                kinds = {ast.List: list, ast.Tuple: tuple, ast.Set: set}
                return kinds[type(node)](parts)
            case ast.Dict():
                keys = [self.value(k, local) for k in node.keys if k is not None]
                return dict(zip(keys, [self.value(v, local) for v in node.values], strict=True))
            case ast.Subscript():
                return self.value(node.value, local)[self.value(node.slice, local)]
            case ast.Slice():
                ends = (node.lower, node.upper, node.step)
                return slice(*(self.value(e, local) if e else None for e in ends))
            case ast.ListComp() | ast.GeneratorExp():
                return self._comprehension(node, local)
            case ast.SetComp():
                return set(self._comprehension(node, local))
            case ast.Call():
                return self._call(node, local)
            case _:
                raise Unsupported(f"no {type(node).__name__}")

    def _comprehension(
        self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, local: dict[str, Any]
    ) -> list[Any]:
        if len(node.generators) != 1:
            raise Unsupported("only one loop in a comprehension")
        loop, inner, made = node.generators[0], dict(local), []
        for item in self._items(self.value(loop.iter, local)):
            self.assign(loop.target, item, inner)
            if all(self.value(test, inner) for test in loop.ifs):
                made.append(self.value(node.elt, inner))
        return made

    def _call(self, node: ast.Call, local: dict[str, Any]) -> Any:
        values = [self.value(argument, local) for argument in node.args]
        if node.keywords:
            raise Unsupported("no keyword arguments")
        if isinstance(node.func, ast.Name):
            name = node.func.id
            if name in self._functions:
                return self.call(self._functions[name], values)
            if name == "range":
                made = range(*values)
                return _sized(made)
            if name in _BUILTINS:
                return _sized(_BUILTINS[name](*values))
            raise Unsupported(f"no function {name}")
        if isinstance(node.func, ast.Attribute):
            owner, name = self.value(node.func.value, local), node.func.attr
            if name in _METHODS.get(type(owner), frozenset()):
                return _sized(getattr(owner, name)(*values))
            raise Unsupported(f"no method {name} of {type(owner).__name__}")
        raise Unsupported("no such call")

    def _binary(self, op: ast.operator, a: Any, b: Any) -> Any:
        if isinstance(op, ast.Pow):
            if not (isinstance(a, int | float) and isinstance(b, int | float)) or abs(b) > 64:
                raise Unsupported("powers only of numbers, and up to 64")
            return _sized(a**b)
        if isinstance(op, ast.Mult):
            sizes = [len(x) for x in (a, b) if isinstance(x, str | list | tuple)]
            counts = [x for x in (a, b) if isinstance(x, int)]
            if sizes and counts and sizes[0] * max(counts[0], 0) > MOST_SIZE:
                raise Unsupported("too large")
        if type(op) not in _BINARY or (isinstance(op, ast.Mod) and isinstance(a, str)):
            raise Unsupported(f"no {type(op).__name__}")
        return _sized(_BINARY[type(op)](a, b))

    def _items(self, value: Any) -> Any:
        for item in value:
            self._tick()
            yield item

    def _tick(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise Unsupported(f"more than {MOST_STEPS} steps")


def _sized(value: Any) -> Any:
    """The value, unless it is too large to go on with."""
    if isinstance(value, str | list | tuple | set | dict | range) and len(value) > MOST_SIZE:
        raise Unsupported("too large")
    if isinstance(value, int) and value.bit_length() > 4096:
        raise Unsupported("too large")
    return value


def _as_load(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Name | ast.Subscript):
        return target
    raise Unsupported(f"no assignment to {type(target).__name__}")
