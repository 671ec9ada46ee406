"""The command that asks for the same sweep again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

from browndwarf import cli
from browndwarf.cli import requests, sweeping
from browndwarf.errors import BrowndwarfError
from browndwarf.report.reproduce import command, why_not
from browndwarf.sweep.planned import SweepPlan
from browndwarf.sweep.workload import packaged
from fake_sweep import plan
from report.made_runs import model


def understood(text: str, monkeypatch: pytest.MonkeyPatch) -> SweepPlan:
    """The plan that the command line makes of a command."""
    plans: list[SweepPlan] = []

    def start(the_plan: SweepPlan, *_: Any, **__: Any) -> None:
        plans.append(the_plan)
        raise BrowndwarfError("far enough")

    monkeypatch.setattr(sweeping, "start", start)
    words = shlex.split(text)
    assert words[:2] == ["browndwarf", "sweep"]
    assert cli.run(words[1:]) == 3
    assert plans, text
    return plans[0]


def asked(model: str | None, draft: str | None, **changes: Any) -> SweepPlan:
    words: dict[str, Any] = {
        "target_types": "as-is", "head_types": "Q8_0,Q4_K", "n_max": "1,2", "p_min": None,
        "layers": "all", "kv": "f16", "draft_kv": None, "ctx": "1024", "parallel": "1",
        "ubatch": None, "backend_sampling": "off", "threads": None, "extra": (),
    }  # fmt: skip
    axes = requests.axes(**{k: changes.pop(k, v) for k, v in words.items()})
    settings: dict[str, Any] = {
        "workloads": "prose", "prompts": 2, "repeats": 3, "tokens": 16, "seed": 1,
        "temperature": 0.0, "natural_end": False, "rates": None, "allow_busy": False,
        "llama_dir": None, "docker": None,
    }  # fmt: skip
    return requests.plan(model, draft, axes, **(settings | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fast": True, "budget_s": 600.0, "natural_end": True},
        {"p_min": "0,0.5", "layers": "all,4", "kv": "f16,q8_0:q4_0", "draft_kv": "q8_0"},
        {"ubatch": "64,128", "threads": "1,2", "parallel": "1,2", "backend_sampling": "off,on"},
        {"extra": ("poll=0,50",), "allow_busy": True, "try_anyway": True, "docker": "an/image"},
        {"repeats": 5, "precision": 0.005, "tokens": 20, "seed": 7, "temperature": 0.7},
        {"rates": ".8,.5", "workloads": "prose,code", "llama_dir": "/some where/bin"},
    ],
    ids=str,
)
def test_it_is_understood_as_the_same_plan(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = asked("demo", None, **changes)
    text = command(wanted)
    assert text is not None
    assert understood(text, monkeypatch) == wanted
    assert text.startswith("browndwarf sweep demo --target-types")
    assert "--draft " not in text


def test_a_named_file_stays_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("my model.gguf", "head.gguf"):
        (tmp_path / name).write_bytes(b"")
    wanted = asked(str(tmp_path / "my model.gguf"), str(tmp_path / "head.gguf"))
    text = command(wanted)
    assert text is not None
    assert understood(text, monkeypatch) == wanted


def test_a_synthetic_shape_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = asked(None, None, synthetic="gemma4-tiny", rates=".8,.5", target_types="Q4_K")
    text = command(wanted)
    assert text is not None
    assert understood(text, monkeypatch) == wanted


def test_the_files_own_type_is_left_as_it_is() -> None:
    """Another spelling would have it made anew."""
    base = msgspec.structs.replace(
        plan(target_type=("Q4_0", "Q8_0")), workloads=(packaged("prose"),)
    )
    assert "--target-types as-is,Q8_0" in (command(base, (model(),)) or "")


def test_prompts_of_a_file_cannot_be_told() -> None:
    assert command(plan()) is None
    assert "the prompts of prose, code came from a file" in why_not(plan())
