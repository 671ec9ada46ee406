"""A fast sweep: factors, predictions, and the same winner from a few cells."""

from __future__ import annotations

import asyncio
import itertools
import math
from pathlib import Path

import msgspec
import pytest

from browndwarf.records import CellRecord
from browndwarf.sweep.analysis import analyse, configuration_of
from browndwarf.sweep.model import FactorModel, Profile, added_cost, relative_cost
from browndwarf.sweep.planned import SweepPlan
from browndwarf.sweep.run import run_sweep
from browndwarf.sweep.search import estimates, next_step
from browndwarf.sweep.space import Configuration
from browndwarf.sweep.store import RunStore
from fake_sweep import FakeEngine, FakeQuiet, FakeServed, plan

GRID = {
    "target_type": ("Q4_0", "Q8_0"),
    "head_type": ("Q8_0", "Q6_K", "Q4_K", "Q2_K"),
    "n_max": (1, 2, 3, 4, 5, 6),
    "kv": ("f16", "q8_0"),
}


def sweep(directory: Path, the_plan: SweepPlan, engine: FakeEngine) -> tuple[CellRecord, ...]:
    exists = (directory / "run.sqlite").exists()
    make = RunStore.open if exists else RunStore.create
    store = make(directory) if exists else RunStore.create(directory, plan={}, identity={})
    with store:
        return asyncio.run(run_sweep(the_plan, store, engine, FakeQuiet()))


def fast(**axes: object) -> SweepPlan:
    return msgspec.structs.replace(plan(**(GRID | axes)), fast=True, confirm=True)


def slow_drafts(served: FakeServed) -> None:
    """A cycle costs 1 ms and 0.2 ms a draft; on Q8_0 twice of it."""
    double = 2.0 if served.configuration.target_type == "Q8_0" else 1.0
    served.ms_per_step = double * (1.0 + 0.2 * served.configuration.n_max)


def test_a_fast_sweep_finds_the_full_sweeps_winner_in_few_cells(tmp_path: Path) -> None:
    full_plan = msgspec.structs.replace(plan(**GRID), confirm=True)
    full = sweep(tmp_path / "full", full_plan, FakeEngine(spoil=slow_drafts))
    engine = FakeEngine(spoil=slow_drafts)
    quick = sweep(tmp_path / "fast", fast(), engine)
    assert full_plan.grid_cells == 4 * 26 * 2
    measured = [c for c in quick if c.status == "ok" and not c.role.startswith("confirm")]
    assert len(measured) <= 0.15 * full_plan.grid_cells
    best, rival = analyse(full).winner, analyse(quick).winner
    assert best is not None
    assert rival is not None
    assert rival.configuration.n_max == best.configuration.n_max == 1
    assert rival.speed == pytest.approx(best.speed)


def test_cells_that_were_not_run_are_predicted(tmp_path: Path) -> None:
    cells = sweep(tmp_path / "fast", fast(), FakeEngine(spoil=slow_drafts))
    predicted = {c.id: c for c in cells if c.status == "predicted"}
    full_plan = msgspec.structs.replace(plan(**GRID), confirm=False)
    truth = sweep(tmp_path / "full", full_plan, FakeEngine(spoil=slow_drafts))
    errors = []
    for cell in truth:
        if cell.id in predicted and cell.decode_tok_s is not None:
            prediction = predicted[cell.id].predicted
            assert prediction is not None
            errors.append(abs(prediction.decode_tok_s / cell.decode_tok_s.mean - 1))
            assert prediction.low < cell.decode_tok_s.mean < prediction.high
    assert len(errors) > 100
    assert sorted(errors)[len(errors) // 2] < 0.05


def test_a_fast_run_can_go_on_as_a_full_one(tmp_path: Path) -> None:
    first = sweep(tmp_path / "r", fast(), FakeEngine(spoil=slow_drafts))
    kept = {c.id: c for c in first if c.status == "ok"}
    full_plan = msgspec.structs.replace(fast(), fast=False)
    cells = sweep(tmp_path / "r", full_plan, FakeEngine(spoil=slow_drafts))
    assert {c.status for c in cells} == {"ok"}
    assert {c.id: c for c in cells if c.id in kept} == kept


def test_a_killed_fast_run_goes_on_where_it_was(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    starts = 0

    def dying(served: FakeServed) -> None:
        nonlocal starts
        starts += 1
        slow_drafts(served)
        if starts == 5:
            raise Stop

    with pytest.raises(Stop):
        sweep(tmp_path / "r", fast(), FakeEngine(spoil=dying))
    rest = FakeEngine(spoil=slow_drafts)
    resumed = sweep(tmp_path / "r", fast(), rest)
    whole = FakeEngine(spoil=slow_drafts)
    straight = sweep(tmp_path / "s", fast(), whole)
    assert {c.id for c in resumed} == {c.id for c in straight}
    assert len(rest.started) == len(whole.started) - 4


def test_a_head_that_fails_does_not_stop_the_search(tmp_path: Path) -> None:
    from browndwarf.errors import ServerCrashed

    dead = ServerCrashed("died")
    engine = FakeEngine(
        spoil=slow_drafts, fail_start=lambda c: dead if c.head_type == "Q8_0" else None
    )
    winner = analyse(sweep(tmp_path / "r", fast(), engine)).winner
    assert winner is not None
    assert winner.configuration.head_type != "Q8_0"


def test_nothing_is_asked_twice(tmp_path: Path) -> None:
    the_plan = fast()
    cells = sweep(tmp_path / "r", the_plan, FakeEngine(spoil=slow_drafts))
    assert next_step(the_plan.axes, ["prose", "code"], cells, {}) is None
    ranked = estimates(the_plan.axes, ["prose", "code"], cells, {})
    assert len(ranked) == 4 * 25
    assert ranked == sorted(ranked, key=lambda e: -e.speed)


def test_predictions_need_their_factors() -> None:
    assert FactorModel([], {}).predict(plan().axes.groups()[0].baseline, "prose") is None


def test_a_profile_goes_on_falling_beyond_what_was_measured() -> None:
    profile = Profile(accepted=(80.0, 60.0), tried=(100.0, 100.0))
    lengths = [profile.length(n)[0] for n in range(1, 6)]
    gains = [b - a for a, b in itertools.pairwise(lengths)]
    assert gains == sorted(gains, reverse=True)
    assert lengths[1] == pytest.approx(2.4, abs=0.02)


def test_an_idle_cycle_at_the_end_weighs_on_short_answers() -> None:
    counts = {"accepted": (90.0, 80.0), "tried": (100.0, 100.0)}
    plain, _ = Profile(**counts).tokens_per_cycle(2)
    assert plain == Profile(**counts).length(2)[0]
    long, _ = Profile(**counts, tokens=500.0, idle=1.0).tokens_per_cycle(2)
    short, _ = Profile(**counts, tokens=25.0, idle=1.0).tokens_per_cycle(2)
    assert long == pytest.approx(plain, rel=0.01)
    # 25 tokens in 25 / L cycles, and one more.
    assert short == pytest.approx(25 / (25 / plain + 1))


def test_a_batch_adds_what_it_took_longer_in_the_benchmark() -> None:
    assert added_cost((2.0, 3.0, 4.5), 3, 10.0) == pytest.approx(2.5)
    assert added_cost((2.0, 3.0), 1, 10.0) == 0.0
    assert added_cost(None, 3, 10.0) == pytest.approx(5.0)


def test_each_group_is_measured_at_both_ends_of_n_max(tmp_path: Path) -> None:
    cells = sweep(tmp_path / "r", fast(), FakeEngine(spoil=slow_drafts))
    explored = [c for c in cells if c.status == "ok" and c.role == "mtp"]
    ends: dict[str, set[int]] = {}
    for cell in explored:
        ends.setdefault(cell.group, set()).add(cell.n_max)
    assert len(ends) == 3  # the first, another target, another cache
    assert all({1, 6} <= seen for seen in ends.values())


def test_a_bent_curve_is_followed_where_it_was_measured(tmp_path: Path) -> None:
    """n_max 3 is dearer than a straight line says, as a batch of four often is: by 12%."""

    def bent(served: FakeServed) -> None:
        n = served.configuration.n_max
        served.ms_per_step = 1.0 + 0.2 * n + (0.2 if n == 3 else 0.0)

    the_plan = msgspec.structs.replace(plan(n_max=(1, 2, 3, 4, 5, 6)), confirm=False)
    cells = sweep(tmp_path / "r", the_plan, FakeEngine(spoil=bent))
    model = FactorModel(cells, {})
    for cell in cells:
        if cell.role == "mtp":
            made = model.cycle_ms(configuration_of(cell))
            assert made == pytest.approx(model.took_ms(cell), rel=0.05)


def test_batch_costs_beyond_the_curve_go_on_in_its_last_step() -> None:
    assert relative_cost((1.0, 1.5, 2.0), 5) == pytest.approx(3.0)
    assert relative_cost((2.0, 3.0), 2) == pytest.approx(1.5)
    assert relative_cost(None, 1) == 1.0


#: Cycle costs c (in base decodes) that people published, by n_max: close to linear.
PUBLISHED = {
    "Qwen3.6-35B-A3B Q4, 890M Vulkan": {1: 1.69, 2: 2.17, 3: 2.68, 4: 3.20, 6: 4.09},
    "Qwen3.8-27B Q4_K_M, V100": {1: 1.36, 2: 1.75, 3: 2.18, 4: 2.54, 6: 3.55},
    "Qwen3.8-27B UD-Q4, RTX 3090": {2: 1.64, 3: 1.87, 4: 2.13},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_cycle_costs_have_the_models_shape(name: str, tmp_path: Path) -> None:
    """Fitted on the ends, the model's T(n) meets the points between within 6%."""
    costs = PUBLISHED[name]
    ends = (min(costs), max(costs))
    cells = []
    for n in (0, *ends):
        base = plan(n_max=(n or 1,)).axes.groups()[0]
        configuration = base.candidates[0] if n else base.baseline
        cells.append(
            CellRecord(
                id=str(n),
                status="ok",
                options=configuration.as_dict(),
                target_type="Q4_0",
                head_type="Q6_K" if n else None,
                n_max=n,
                workload="prose",
                role="mtp" if n else "baseline",
                group=configuration.group_label(),
                cycle_ms=10 * costs[n] if n else 10.0,
            )
        )
    # The shape is linear in n, so verify and draft cost cannot be told apart: a flat curve does.
    model = FactorModel(cells, {cells[0].group: tuple([10.0] * 9)})
    for n, cost in costs.items():
        made = model.cycle_ms(plan(n_max=(n,)).axes.groups()[0].candidates[0])
        assert made is not None
        assert math.isclose(made / 10, cost, rel_tol=0.06), (n, made / 10, cost)
    assert configuration_of(cells[0]).target_type == "Q4_0"


GPU_GRID = {
    "target_type": ("Q4_0",),
    "n_max": (1, 2, 3, 4),
    "layers": (None, 45, 43),
    "backend_sampling": (False, True),
}


def added_costs(served: FakeServed) -> None:
    """Every setting adds its own milliseconds to a cycle, as on a GPU."""
    c = served.configuration
    step = 6.8 + {None: 0.0, 45: 9.0, 43: 14.0}[c.layers]
    step += 1.1 * (c.kv == "q8_0") - 0.35 * c.backend_sampling
    served.ms_per_step = step + c.n_max * (2.0 - 0.4 * c.backend_sampling) + 0.3 * (c.n_max > 0)


def test_a_grid_of_many_groups_is_told_from_a_star_of_them(tmp_path: Path) -> None:
    the_plan = msgspec.structs.replace(fast(**GPU_GRID), workloads=plan().workloads[:1])
    cells = sweep(tmp_path / "fast", the_plan, FakeEngine(spoil=added_costs))
    grid = sum(len(group.candidates) + 1 for group in the_plan.axes.groups())
    explored = [c for c in cells if c.status == "ok" and not c.role.startswith("confirm")]
    assert grid == 204
    assert len(explored) <= 0.1 * grid
    assert sum(c.status == "predicted" for c in cells) + len(explored) >= grid - 4
    errors = []
    for cell in cells:
        if cell.predicted is not None:
            truth = FakeServed(configuration_of(cell), 1.0)
            added_costs(truth)
            # The fake accepts one draft of every cycle.
            rate = 1e3 * (2 if cell.head_type else 1) / truth.ms_per_step
            errors.append(abs(cell.predicted.decode_tok_s / rate - 1))
    assert sorted(errors)[len(errors) // 2] < 0.03
    assert sorted(errors)[int(0.9 * len(errors))] < 0.06


def test_where_the_first_group_does_not_fit_the_star_is_drawn_elsewhere(tmp_path: Path) -> None:
    def misfit(c: Configuration) -> dict[str, str] | None:
        too_much = c.layers is None and c.speculative
        return (
            {"kind": "DoesNotFit", "what": "too much", "why": "", "fix": ""} if too_much else None
        )

    the_plan = msgspec.structs.replace(fast(**GPU_GRID), workloads=plan().workloads[:1])
    engine = FakeEngine(spoil=added_costs, misfit=misfit)
    cells = sweep(tmp_path / "r", the_plan, engine)
    assert not [c for c in engine.started if misfit(c)]
    speculative = [c for c in cells if c.status == "predicted" and c.head_type]
    assert speculative
    # Nothing that cannot fit is predicted, and what fits is.
    assert not [c for c in speculative if configuration_of(c).layers is None]
    assert {configuration_of(c).layers for c in speculative} == {45, 43}
    verdict = analyse(cells)
    assert verdict.winner is not None
    assert not verdict.winner.configuration.speculative or verdict.winner.configuration.layers


def test_a_disturbed_cell_does_not_enter_the_model(tmp_path: Path) -> None:
    cells = sweep(tmp_path / "r", fast(), FakeEngine(spoil=slow_drafts))
    measured = [c for c in cells if c.status == "ok"]
    victim = next(c for c in measured if c.head_type is not None)
    assert victim.cycle_ms is not None
    slow = msgspec.structs.replace(victim, marks=("busy",), cycle_ms=50 * victim.cycle_ms)
    asked = next(c for c in cells if c.status == "predicted" and c.head_type == "Q6_K")
    configuration = configuration_of(asked)
    spoiled = [slow if c is victim else c for c in measured]
    left_out = [c for c in measured if c is not victim]
    found = FactorModel(spoiled, {}).predict(configuration, "prose")
    assert found == FactorModel(left_out, {}).predict(configuration, "prose")
    # With the user's leave it counts, and then it shows.
    assert FactorModel(spoiled, {}, allow_busy=True).predict(configuration, "prose") != found
