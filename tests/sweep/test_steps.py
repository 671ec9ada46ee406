"""What a plain step costs, and how it grows with the context."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from browndwarf.records import CellRecord, RequestTrace
from browndwarf.sweep.analysis import configuration_of
from browndwarf.sweep.model import FactorModel
from browndwarf.sweep.pace import Pace
from browndwarf.sweep.planned import SweepPlan
from browndwarf.sweep.run import run_sweep
from browndwarf.sweep.space import Configuration
from browndwarf.sweep.steps import Steps, depth_of
from browndwarf.sweep.store import RunStore
from browndwarf.sweep.workload import Prompt, Workload, depth_estimate, for_steps
from fake_sweep import FakeEngine, FakeQuiet, FakeServed, plan

GRID = {
    "target_type": ("Q4_0", "Q8_0"),
    "head_type": ("Q8_0", "Q4_K"),
    "n_max": (1, 2, 3, 4),
    "kv": ("f16", "q8_0"),
}


def workload(name: str, tokens: int) -> Workload:
    return Workload(name=name, prompts=(Prompt(id=name, prompt="abcd" * tokens),))


def growing(served: FakeServed) -> None:
    """A quantized cache costs less for each token in it; each drafted token looks at it too."""
    half = 0.5 if served.configuration.kv == "q8_0" else 1.0
    n = served.configuration.n_max
    served.ms_per_step = 4.0 + 0.6 * n
    served.growth = 1e-3 * (half + 0.1 * n)


def sweep(directory: Path, *, fast: bool, tokens: tuple[int, ...]) -> tuple[CellRecord, ...]:
    texts = tuple(workload(f"w{n}", n) for n in tokens)
    the_plan: SweepPlan = msgspec.structs.replace(plan(**GRID), workloads=texts, fast=fast)
    with RunStore.create(directory, plan={}, identity={}) as store:
        engine = FakeEngine(spoil=growing)
        return asyncio.run(run_sweep(the_plan, store, engine, FakeQuiet()))


def test_long_contexts_are_predicted_from_few_cells(tmp_path: Path) -> None:
    tokens = (100, 4000, 16000)
    fast = sweep(tmp_path / "fast", fast=True, tokens=tokens)
    full = sweep(tmp_path / "full", fast=False, tokens=tokens)
    assert sum(c.status == "ok" for c in fast) < 0.4 * len(full)
    predicted = {c.id: c.predicted for c in fast if c.predicted is not None}
    errors = [
        abs(made.decode_tok_s / cell.decode_tok_s.mean - 1)
        for cell in full
        if (made := predicted.get(cell.id)) is not None and cell.decode_tok_s is not None
    ]
    assert len(errors) > 60
    assert sorted(errors)[len(errors) // 2] < 0.03
    assert max(errors) < 0.12


def test_alike_workloads_need_one_plain_step(tmp_path: Path) -> None:
    fast = sweep(tmp_path / "fast", fast=True, tokens=(100, 300, 900))
    plain = [c for c in fast if c.status == "ok" and c.role == "baseline"]
    assert {c.workload for c in plain} == {"w100"}


def test_steps_are_measured_where_prompts_differ_most() -> None:
    texts = [workload(f"w{n}", n) for n in (500, 100, 8000, 2000)]
    assert for_steps(texts) == ("w500", "w8000")
    assert for_steps(texts[:2]) == ("w500",)
    assert depth_estimate(texts[2]) == 8000
    spoken = Prompt(messages=({"role": "user", "content": "x" * 400},))
    assert depth_estimate(Workload(name="m", prompts=(spoken,))) == 100


def cell(configuration: Configuration, depth: int, ms: float) -> CellRecord:
    trace = RequestTrace(
        prompt_id="p",
        repeat=0,
        prompt_n=depth - 50,
        prompt_ms=1.0,
        predicted_n=100,
        predicted_ms=99 * ms,
        draft_n=0,
        draft_accepted=0,
        cache_n=0,
        ttft_s=0.0,
        total_s=0.0,
        stop="limit",
        text_sha="",
    )
    return CellRecord(
        id=f"{configuration.label()}{depth}",
        status="ok",
        options=configuration.as_dict(),
        target_type=configuration.target_type,
        head_type=None,
        n_max=0,
        workload=f"w{depth}",
        role="baseline",
        group=configuration.group_label(),
        cycle_ms=ms,
        traces=(trace,),
    )


def test_growth_adds_up_like_every_other_effect() -> None:
    a, b, c, d = [g.baseline for g in plan(kv=("f16", "q8_0"), layers=(None, 40)).axes.groups()]
    cells = [
        cell(base, depth, ms)
        for base, low, high in ((a, 10.0, 14.0), (b, 11.0, 13.0), (c, 30.0, 44.0))
        for depth, ms in ((1000, low), (5000, high))
    ]
    steps = Steps(cells, Pace(cells))
    assert depth_of(cells[0]) == 1000
    assert steps.growth(a) == pytest.approx(1e-3)
    assert steps.growth(b) == pytest.approx(0.5e-3)
    assert configuration_of(cells[-1]) == c
    assert steps.growth(d) == pytest.approx(3.0e-3)
    assert steps.ms(d, depth=1000.0) == pytest.approx(31.0)
    assert steps.ms(d, depth=5000.0) == pytest.approx(43.0)
    assert not steps.measured(d)
    assert FactorModel(cells, {}).predict(a, "w5000").decode_tok_s == pytest.approx(1e3 / 14)


def test_a_context_never_makes_a_step_cheaper() -> None:
    base = plan().axes.groups()[0].baseline
    cells = [cell(base, 1000, 10.0), cell(base, 5000, 9.0)]
    steps = Steps(cells, Pace(cells))
    assert steps.growth(base) == 0.0
    assert steps.ms(base, depth=9000.0) == steps.ms(base)
