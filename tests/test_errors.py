"""Errors carry what, why, next; the tree decides exit codes."""

from __future__ import annotations

import inspect
import pickle

import pytest

from browndwarf import errors

TREE = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, errors.BrowndwarfError)
]


@pytest.mark.parametrize("kind", TREE, ids=lambda k: k.__name__)
def test_every_error_is_drawn_in_the_docstring(kind: type[errors.BrowndwarfError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("kind", TREE, ids=lambda k: k.__name__)
def test_every_error_survives_pickling(kind: type[errors.BrowndwarfError]) -> None:
    back = pickle.loads(pickle.dumps(kind("a", why="b", fix="c")))
    assert (type(back), back.what, back.why, back.fix) == (kind, "a", "b", "c")


def test_exit_codes_follow_the_tree() -> None:
    codes = {kind.__name__: kind.exit_code for kind in TREE}
    assert codes["UsageError"] == 2
    assert codes["CheckFailed"] == 1
    assert codes["Interrupted"] == 130
    others = set(codes.values()) - {1, 2, 130}
    assert others == {3}


def test_text_says_what_why_and_next() -> None:
    assert str(errors.DiskFull("full", why="no space", fix="free some")) == (
        "full\nWhy: no space\nNext: free some"
    )
