"""``plan --quantize`` on the embedded target: the document, the file, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from browndwarf.cli import run
from browndwarf.engine.locate import Build
from browndwarf.plan.quantization import QuantizationPlan
from browndwarf.units import MIB

FEW = ["--types", "Q2_K,Q4_K,Q6_K", "--probe", "equal"]
SMALL = ["--vram", "13MiB", "--context-overhead", "0", "--margin", "0", "--ctx", "256"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.mark.engine
def test_the_types_fill_what_the_budget_leaves(
    engine_build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "plan.json"
    code = run(["plan", "demo", *SMALL, "--quantize", *FEW, "--output", str(saved), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 0
    assert document["schema"] == "browndwarf/plan/1"
    budget, found = document["budget"], document["quantization"]
    assert budget["fits"]
    weights = next(line["mib"] for line in budget["lines"] if line["name"] == "weights")
    assert weights == pytest.approx(found["device_bytes"] / MIB, abs=0.01)
    assert budget["free_mib"] < 0.01 * weights
    assert {t["type"] for t in found["tensors"] if t["chosen"]} <= {"Q2_K", "Q4_K", "Q6_K"}
    assert [s["type"] for s in found["stock"]] == ["Q4_K_M", "Q4_K_S", "IQ4_XS", "Q3_K_M"]
    plan = QuantizationPlan.load(saved)
    assert plan.device_bytes == found["device_bytes"]
    assert plan.budget.limit_mib == 13.0


@pytest.mark.engine
def test_a_budget_too_small_says_the_smallest_and_ends_with_1(
    engine_build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "demo", "--quantize", *FEW, "--device-bytes", "1000000"]) == 1
    said = capsys.readouterr().err
    assert "no choice of types fits" in said
    assert "bytes)" in said


@pytest.mark.engine
def test_people_are_shown_roles_and_stock_mixes(
    engine_build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "demo", "--quantize", *FEW, "--device-bytes", str(9 * MIB)]) == 0
    shown = capsys.readouterr()
    for words in ("ffn_down", "Q4_K_M", "bits per weight", "one more GiB", "predicted loss"):
        assert words in shown.out
    assert "the source is Q8_0 already" in shown.err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--quantize", "--types", "Q4_K_M"], "no type for a tensor"),
        (["--quantize", "--probe", "guessed"], "--probe guessed is unknown"),
        (["--quantize", "--objective", "size"], "--objective size is unknown"),
        (["--quantize", "--probe-time", "soon"], "not a duration"),
        (["--quantize", "--output", "/"], "is a folder"),
        (["--types", "Q4_K"], "--types needs --quantize"),
        (["--output", "x.json"], "--output needs --quantize"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_work(
    more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "demo", *SMALL, *more]) == 2
    assert says in capsys.readouterr().err.replace("\n", " ")
