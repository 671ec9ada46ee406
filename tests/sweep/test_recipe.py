"""A recipe's header says what was checked, and what was not."""

from __future__ import annotations

from typing import Any

import pytest

from browndwarf import cli
from browndwarf.sweep.recipe import Recipe
from browndwarf.sweep.smoke import Smoke

SMOKE = Smoke(drafted=30, accepted=20, long_prompt_tokens=512, same_answer=True, problems=())


def recipe(**changed: Any) -> Recipe:
    fields: dict[str, Any] = {
        "label": "Q4_0 + Q4_K n_max 3",
        "commands": {"sh": "llama-server"},
        "argv": ("llama-server",),
        "decode_tok_s": 100.0,
        "speedup": (1.3, 1.2, 1.4),
        "verdict": "faster",
        "by_workload": {},
        "engine": "0.5",
        "machine": "a CPU",
        "run": "runs/a",
        "measured": "today",
        "synthetic": False,
        "smoke": SMOKE,
        "lossless": "identical against plain decoding (8 of 8 equal)",
    }
    return Recipe(**{**fields, **changed})


def checked(made: Recipe) -> str:
    (line,) = (line for line in made.header if line.startswith("checked:"))
    return line


def test_every_check_that_was_made_is_named() -> None:
    line = checked(recipe())
    assert "20 of 30 draft tokens accepted" in line
    assert "identical against plain decoding" in line
    assert line.endswith("not checked: quality")


def test_what_was_not_checked_is_named() -> None:
    assert "losslessness (--gate)" in checked(recipe(lossless=None))
    assert checked(recipe(lossless=None, smoke=None)) == (
        "checked: nothing; not checked: the command itself (smoke test skipped), quality, "
        "losslessness (--gate)"
    )


def test_a_plain_server_needs_no_lossless_check() -> None:
    assert "losslessness" not in checked(recipe(lossless=None, verdict="baseline"))


def test_synthetic_figures_are_said_first() -> None:
    assert recipe(synthetic=True).header[1].startswith("SYNTHETIC")


def test_the_gate_needs_the_smoke_test(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["recipe", "nowhere", "--gate", "--no-smoke"]) == 2
    assert "--no-smoke" in capsys.readouterr().err
