"""Sweeps without a download: what is asked for, which files, and that everything says so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from browndwarf.cli import requests, tables
from browndwarf.errors import UsageError
from browndwarf.models.gguf import read_model
from browndwarf.sweep import synthetic
from browndwarf.sweep.planned import SweepPlan
from browndwarf.sweep.run import run_sweep
from browndwarf.sweep.sources import variant_path
from browndwarf.sweep.store import RunStore, csv_bytes
from fake_sweep import FakeEngine, FakeQuiet, plan

TINY = "gemma4-tiny"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BROWNDWARF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "synthetic"


def asked(shape: str, rates: str | None = ".8,.5", **changes: Any) -> SweepPlan:
    words: dict[str, Any] = {
        "target_types": "as-is", "head_types": None, "n_max": "1,2", "p_min": None,
        "layers": "all", "kv": "f16", "draft_kv": None, "ctx": "1024", "parallel": "1",
        "ubatch": None, "backend_sampling": "off", "threads": None, "extra": (),
    }  # fmt: skip
    axes = requests.axes(**{k: changes.pop(k, v) for k, v in words.items()})
    return requests.plan(
        None, changes.pop("draft", None), axes, synthetic=shape, workloads="prose", prompts=2,
        repeats=2, tokens=16, seed=1, temperature=0.0, natural_end=True, rates=rates,
        allow_busy=True, llama_dir=None, docker=None,
    )  # fmt: skip


def test_a_shape_brings_its_head_and_default_types(cache: Path) -> None:
    made = asked(TINY)
    assert made.axes.target_type == ("Q4_K",)
    assert made.axes.head_type == ("Q8_0",)
    assert Path(made.model) == cache / f"{TINY}-target-Q4_K.gguf"
    assert Path(str(made.draft)) == cache / f"{TINY}-head-Q8_0.gguf"
    assert made.settings.synthetic
    assert made.settings.ignore_eos
    assert not cache.exists()


def test_a_hybrid_shape_carries_its_head(cache: Path) -> None:
    made = asked("qwen35-9b")
    assert made.draft is None
    assert made.axes.head_type == ("embedded",)


def test_missing_files_are_made_once_and_other_types_lie_beside_them(cache: Path) -> None:
    made = asked(TINY, target_types="Q4_0,Q8_0")
    assert made.synthetic is not None
    told: list[str] = []
    synthetic.ensure(made.synthetic, made.model, made.draft, told.append)
    synthetic.ensure(made.synthetic, made.model, made.draft, told.append)
    assert told == [f"synthetic {TINY}-target-Q4_0", f"synthetic {TINY}-head-Q8_0"]
    source = synthetic.source_of(made.synthetic, made.model, "target")
    assert source is not None
    assert source.type == "Q4_0"
    other = variant_path(source, "Q8_0", "sha")
    assert other == cache / f"{TINY}-target-Q8_0.gguf"
    synthetic.write(source, other, "Q8_0")
    assert read_model(other).by_name["blk.0.ffn_up.weight"].type == "Q8_0"


def test_a_header_of_a_file_is_a_shape_too(cache: Path) -> None:
    made = asked("demo")
    assert made.synthetic is not None
    assert made.draft is not None
    synthetic.ensure(made.synthetic, made.model, made.draft, lambda _: None)
    real, fake = (
        read_model(str(made.synthetic.model)),
        read_model(made.model),
    )
    assert fake.type_bytes == real.type_bytes
    assert fake.path.read_bytes() != real.path.read_bytes()
    assert synthetic.source_of(made.synthetic, made.model, "target") is None


@pytest.mark.parametrize(
    ("shape", "changes", "said"),
    [
        (TINY, {"rates": None}, "--rates"),
        (TINY, {"rates": ".8"}, "n_max goes to 2"),
        (TINY, {"draft": "demo"}, "leave --draft out"),
        (TINY, {"target_types": "IQ1_S"}, "choose one of"),
        ("gemma4-13b", {}, "gemma4-12b"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(
    shape: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        asked(shape, **changes)
    error = caught.value
    assert said in " ".join((error.what, error.why, error.fix))


def test_rates_may_come_from_a_run(tmp_path: Path) -> None:
    with RunStore.create(tmp_path / "r", plan={}, identity={}) as store:
        asyncio.run(run_sweep(plan(), store, FakeEngine(), FakeQuiet()))
    # The fake accepts every first token and no second one.
    assert asked(TINY, rates=str(tmp_path / "r")).synth_rates == (1.0, 0.0)
    with pytest.raises(UsageError, match="2 positions"):
        asked(TINY, rates=str(tmp_path / "r"), n_max="1,2,3")


def test_records_and_tables_say_that_it_is_synthetic(tmp_path: Path) -> None:
    base = plan()
    settings = msgspec.structs.replace(base.settings, synthetic=True)
    the_plan = msgspec.structs.replace(base, settings=settings, fast=True)
    with RunStore.create(tmp_path / "r", plan={}, identity={}) as store:
        cells = asyncio.run(run_sweep(the_plan, store, FakeEngine(), FakeQuiet()))
    assert {c.status for c in cells} == {"ok", "predicted"}
    assert all(c.synthetic for c in cells)
    header, first = csv_bytes(cells).decode().splitlines()[:2]
    assert dict(zip(header.split(","), first.split(","), strict=True))["synthetic"] == "True"
    lines = tables.synthetic_lines(msgspec.to_builtins(asked(TINY)))
    assert "random weights in the shape of gemma4-tiny" in lines[0]
    assert "0.80 0.50" in lines[1]
    assert tables.synthetic_lines(msgspec.to_builtins(base)) == []
