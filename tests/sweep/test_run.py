"""A sweep over a fake engine: order, resume, faults, marks, overhead."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from browndwarf.errors import MachineBusy, ServerCrashed
from browndwarf.records import CellRecord
from browndwarf.sweep import cell as measuring
from browndwarf.sweep.analysis import analyse
from browndwarf.sweep.events import CellDone, Event, Finished, Started
from browndwarf.sweep.planned import SweepPlan
from browndwarf.sweep.run import run_sweep
from browndwarf.sweep.store import RunStore
from fake_sweep import FakeEngine, FakeQuiet, FakeServed, plan


def sweep(
    directory: Path,
    the_plan: SweepPlan,
    engine: FakeEngine,
    quiet: FakeQuiet | None = None,
    events: list[Event] | None = None,
) -> tuple[CellRecord, ...]:
    exists = (directory / "run.sqlite").exists()
    store = RunStore.open(directory) if exists else RunStore.create(directory, plan={}, identity={})
    listen = events.append if events is not None else (lambda _: None)
    with store:
        return asyncio.run(run_sweep(the_plan, store, engine, quiet or FakeQuiet(), listen))


def test_the_baseline_comes_first_and_again_at_the_end(tmp_path: Path) -> None:
    cells = sweep(tmp_path / "r", plan(), FakeEngine())
    assert [(c.role, c.n_max) for c in cells if c.workload == "prose"] == [
        ("baseline", 0),
        ("mtp", 1),
        ("mtp", 2),
        ("baseline-again", 0),
    ]


def test_one_server_serves_all_workloads(tmp_path: Path) -> None:
    engine = FakeEngine()
    sweep(tmp_path / "r", plan(), engine)
    assert len(engine.started) == 4


def test_figures_come_from_the_raw_timings(tmp_path: Path) -> None:
    cells = sweep(tmp_path / "r", plan(), FakeEngine())
    cell = next(c for c in cells if c.n_max == 1 and c.workload == "prose")
    assert cell.acceptance is not None
    assert cell.decode_tok_s is not None
    assert cell.acceptance.rate == pytest.approx(1.0)
    assert cell.acceptance.per_position == pytest.approx((1.0,))
    assert cell.accepted_length == pytest.approx(2.0)
    assert cell.cycle_ms == pytest.approx(1.1)
    assert cell.decode_tok_s.runs == pytest.approx((20 / 11e-3,) * 3)
    assert len(cell.traces) == 6


def test_the_winner_is_chosen_by_speed_with_its_interval(tmp_path: Path) -> None:
    verdict = analyse(sweep(tmp_path / "r", plan(), FakeEngine()))
    assert verdict.winner is not None
    assert verdict.winner.configuration.n_max == 1
    assert verdict.winner.word == "faster"
    assert verdict.winner.speedup.mean == pytest.approx(2 / 1.1)
    assert verdict.baseline is not None
    assert not verdict.baseline.configuration.speculative


def test_a_resumed_sweep_measures_only_what_is_missing(tmp_path: Path) -> None:
    events: list[Event] = []

    class Stop(Exception):
        pass

    seen = 0

    def spoil(served: FakeServed) -> None:
        nonlocal seen
        seen += 1
        if seen == 3:
            raise Stop

    with pytest.raises(Stop):
        sweep(tmp_path / "r", plan(), FakeEngine(spoil=spoil))
    engine = FakeEngine()
    cells = sweep(tmp_path / "r", plan(), engine, events=events)
    assert events[0] == Started(total=8, done=4)
    assert len(engine.started) == 2
    assert len({c.id for c in cells}) == len(cells) == 8


def test_a_resumed_grid_may_grow(tmp_path: Path) -> None:
    sweep(tmp_path / "r", plan(), FakeEngine())
    engine = FakeEngine()
    cells = sweep(tmp_path / "r", plan(n_max=(1, 2, 3)), engine)
    assert [c.n_max for c in engine.started] == [3]
    assert len(cells) == 10


def test_a_server_that_dies_costs_its_own_cells_only(tmp_path: Path) -> None:
    def spoil(served: FakeServed) -> None:
        if served.configuration.n_max == 1:
            served.fail_at = 9  # the warm-up and the first workload pass

    cells = sweep(tmp_path / "r", plan(), FakeEngine(spoil=spoil))
    failed = [c for c in cells if c.status == "failed"]
    assert [(c.n_max, c.workload) for c in failed] == [(1, "code")]
    assert failed[0].error is not None
    assert failed[0].error["kind"] == "ServerCrashed"


def test_failed_cells_are_tried_again_on_resume(tmp_path: Path) -> None:
    dead = ServerCrashed("died")
    first = sweep(
        tmp_path / "r", plan(), FakeEngine(fail_start=lambda c: dead if c.n_max else None)
    )
    assert sum(c.status == "failed" for c in first) == 4
    second = sweep(tmp_path / "r", plan(), FakeEngine())
    assert {c.status for c in second} == {"ok"}
    assert len(second) == 8


def test_what_cannot_fit_is_recorded_without_a_start(tmp_path: Path) -> None:
    engine = FakeEngine(misfit=lambda c: {"what": "needs 9 GiB"} if c.n_max == 2 else None)
    cells = sweep(tmp_path / "r", plan(), engine)
    assert {c.n_max for c in cells if c.status == "does-not-fit"} == {2}
    assert 2 not in {c.n_max for c in engine.started}


def test_silent_non_speculation_is_a_failure(tmp_path: Path) -> None:
    def spoil(served: FakeServed) -> None:
        served.drafts_nothing = True

    cells = sweep(tmp_path / "r", plan(), FakeEngine(spoil=spoil))
    assert {c.status for c in cells if c.head_type} == {"failed"}
    assert {c.status for c in cells if not c.head_type} == {"ok"}


def test_a_head_whose_drafts_are_rubbish_cannot_win(tmp_path: Path) -> None:
    def spoil(served: FakeServed) -> None:
        served.accept = False
        served.ms_per_step = 0.1 if served.configuration.n_max else 1.0

    cells = sweep(tmp_path / "r", plan(), FakeEngine(spoil=spoil))
    assert all("low-acceptance" in c.marks for c in cells if c.head_type)
    winner = analyse(cells).winner
    assert winner is not None
    assert not winner.configuration.speculative


def test_cached_prompts_are_marked_and_cannot_win(tmp_path: Path) -> None:
    def spoil(served: FakeServed) -> None:
        served.cache_n = 3

    verdict = analyse(sweep(tmp_path / "r", plan(), FakeEngine(spoil=spoil)))
    assert verdict.winner is None


def test_a_busy_machine_stops_the_sweep_before_it_measures(tmp_path: Path) -> None:
    engine = FakeEngine()
    with pytest.raises(MachineBusy):
        sweep(tmp_path / "r", plan(), engine, FakeQuiet(MachineBusy("busy")))
    assert not engine.started


def test_cells_disturbed_by_others_cannot_win(tmp_path: Path) -> None:
    cells = sweep(tmp_path / "r", plan(), FakeEngine(), FakeQuiet(disturbed=True))
    assert all("busy" in c.marks for c in cells)
    assert analyse(cells).winner is None


def test_drift_of_the_baseline_is_seen(tmp_path: Path) -> None:
    starts = 0

    def spoil(served: FakeServed) -> None:
        nonlocal starts
        starts += 1
        if starts == 4:
            served.ms_per_step *= 1.5

    verdict = analyse(sweep(tmp_path / "r", plan(), FakeEngine(spoil=spoil)))
    assert [d.beyond_noise for d in verdict.drifts] == [True]


def test_several_slots_are_kept_full(tmp_path: Path) -> None:
    cells = sweep(tmp_path / "r", plan(parallel=(4,)), FakeEngine())
    assert {len(c.traces) for c in cells} == {3 * 8}
    assert {c.status for c in cells} == {"ok"}


def test_a_death_under_several_slots_is_one_failure(tmp_path: Path) -> None:
    def spoil(served: FakeServed) -> None:
        served.fail_at = 3

    cells = sweep(tmp_path / "r", plan(parallel=(4,)), FakeEngine(spoil=spoil))
    assert {c.error["kind"] for c in cells if c.error} == {"ServerCrashed"}
    assert {c.status for c in cells} == {"failed"}


def test_progress_counts_up_and_ends(tmp_path: Path) -> None:
    events: list[Event] = []
    sweep(tmp_path / "r", plan(), FakeEngine(), events=events)
    done = [e for e in events if isinstance(e, CellDone)]
    assert [e.done for e in done] == list(range(1, 9))
    assert done[-1].eta_s == 0
    assert isinstance(events[-1], Finished)
    assert 0 <= events[-1].overhead_share <= 1


def test_the_best_are_confirmed_side_by_side_in_both_orders(tmp_path: Path) -> None:
    the_plan = msgspec.structs.replace(plan(n_max=(1, 2, 3, 4)), confirm=True)
    engine = FakeEngine()
    cells = sweep(tmp_path / "r", the_plan, engine)
    assert [c.n_max for c in engine.started[6:]] == [0, 1, 2, 3, 3, 2, 1, 0]
    winner = analyse(cells).winner
    assert winner is not None
    assert winner.confirmed
    assert winner.configuration.n_max == 1
    assert len({c.id for c in cells}) == len(cells) == 2 * (6 + 8)


def test_a_lucky_cell_of_the_grid_does_not_survive_confirmation(tmp_path: Path) -> None:
    """n_max 4 looks fast once, while the machine happens to be quick."""
    starts = 0

    def spoil(served: FakeServed) -> None:
        nonlocal starts
        starts += 1
        if served.configuration.n_max == 4 and starts <= 6:
            served.ms_per_step = 0.5

    the_plan = msgspec.structs.replace(plan(n_max=(1, 2, 3, 4)), confirm=True)
    verdict = analyse(sweep(tmp_path / "r", the_plan, FakeEngine(spoil=spoil)))
    assert verdict.winner is not None
    assert verdict.winner.configuration.n_max == 1


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    the_plan = msgspec.structs.replace(plan(), confirm=True)
    first = sweep(tmp_path / "r", the_plan, FakeEngine())
    engine = FakeEngine()
    assert sweep(tmp_path / "r", the_plan, engine) == first
    assert not engine.started


def test_a_disturbed_cell_is_measured_again(tmp_path: Path) -> None:
    quiet = FakeQuiet(disturbed=True, disturbances=2)
    cells = sweep(tmp_path / "r", plan(), FakeEngine(), quiet)
    assert [c.attempts for c in cells[:3]] == [2, 1, 1]
    assert not any("busy" in c.marks for c in cells)


def test_repeats_that_differ_wildly_are_marked(tmp_path: Path) -> None:
    def spoil(served: FakeServed) -> None:
        served.slow_every = 3

    cells = sweep(tmp_path / "r", plan(), FakeEngine(spoil=spoil))
    assert all("unsteady" in c.marks and c.attempts == 3 for c in cells)


def repeats(cells: Sequence[CellRecord]) -> list[int]:
    return [len({t.repeat for t in c.traces}) for c in cells]


def scattered(served: FakeServed) -> None:
    served.slow_every = 5


def asked(repeats: int, precision: float = 0.02) -> SweepPlan:
    settings = msgspec.structs.replace(plan().settings, repeats=repeats, precision=precision)
    return msgspec.structs.replace(plan(), settings=settings)


def test_cells_whose_repeats_agree_are_not_repeated_more_often(tmp_path: Path) -> None:
    assert set(repeats(sweep(tmp_path / "r", asked(3), FakeEngine()))) == {3}


def test_scattered_cells_are_repeated_until_their_mean_is_known(tmp_path: Path) -> None:
    engine = FakeEngine(spoil=scattered)
    assert set(repeats(sweep(tmp_path / "a", asked(3), engine))) == {12}
    some = repeats(sweep(tmp_path / "b", asked(3, precision=0.15), engine))
    assert all(3 < n < 12 for n in some)


@pytest.mark.parametrize("settings", [(3, 0.0), (2, 0.02), (1, 0.02)])
def test_nothing_is_added_to_what_was_asked_for(
    tmp_path: Path, settings: tuple[int, float]
) -> None:
    cells = sweep(tmp_path / "r", asked(*settings), FakeEngine(spoil=scattered))
    assert set(repeats(cells)) == {settings[0]}


def test_long_cells_are_not_repeated_more_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "LONG_S", 0.1)
    cells = sweep(tmp_path / "r", asked(3), FakeEngine(spoil=scattered))
    assert set(repeats(cells)) == {3}


def test_the_interval_holds_what_each_confirming_pass_saw(tmp_path: Path) -> None:
    """A machine that changes between the passes makes the verdict less sure."""
    starts = 0

    def spoil(served: FakeServed) -> None:
        nonlocal starts
        starts += 1
        if starts == 7 and not served.configuration.speculative:
            served.ms_per_step *= 1.4  # the baseline of pass b, the last server

    the_plan = msgspec.structs.replace(plan(n_max=(1,)), confirm=True)
    verdict = analyse(sweep(tmp_path / "r", the_plan, FakeEngine(spoil=spoil)))
    winner = verdict.winner
    assert winner is not None
    assert winner.confirmed
    assert winner.speedup.low <= 2 / 1.1 + 1e-9
    assert winner.speedup.high >= 1.4 * 2 / 1.1 - 1e-9
    assert any(d.beyond_noise for d in verdict.drifts)


def test_a_full_run_that_was_confirmed_is_not_confirmed_anew(tmp_path: Path) -> None:
    """The confirming passes must not change who is confirmed."""
    starts = 0

    def spoil(served: FakeServed) -> None:
        nonlocal starts
        starts += 1
        if starts > 6:  # everything looks different in the passes
            served.ms_per_step = 3.0 - 0.4 * served.configuration.n_max

    the_plan = msgspec.structs.replace(plan(n_max=(1, 2, 3, 4)), confirm=True)
    sweep(tmp_path / "r", the_plan, FakeEngine(spoil=spoil))
    engine = FakeEngine()
    sweep(tmp_path / "r", the_plan, engine)
    assert not engine.started


def test_where_the_user_allows_a_busy_machine_the_best_disturbed_one_wins(tmp_path: Path) -> None:
    for fast in (False, True):
        the_plan = msgspec.structs.replace(plan(), confirm=True, allow_busy=True, fast=fast)
        cells = sweep(tmp_path / str(fast), the_plan, FakeEngine(), FakeQuiet(disturbed=True))
        winner = analyse(cells, allow_busy=True).winner
        assert winner is not None
        assert winner.confirmed
        assert winner.configuration.n_max == 1
        assert set(winner.by_workload) == {"prose", "code"}


def test_a_disturbed_pass_is_left_out_where_the_other_was_quiet(tmp_path: Path) -> None:
    """Someone compiles while the baseline of pass a is measured: pass b speaks alone."""
    the_plan = msgspec.structs.replace(plan(n_max=(1,)), confirm=True, allow_busy=True)
    cells = sweep(tmp_path / "r", the_plan, FakeEngine())
    quiet = analyse(cells, allow_busy=True).winner
    assert quiet is not None

    def slowed(cell: CellRecord) -> CellRecord:
        if cell.role != "confirm-a" or cell.head_type is not None:
            return cell
        traces = tuple(
            msgspec.structs.replace(t, predicted_ms=t.predicted_ms * 5) for t in cell.traces
        )
        return msgspec.structs.replace(cell, marks=("busy",), traces=traces)

    winner = analyse([slowed(c) for c in cells], allow_busy=True).winner
    assert winner is not None
    assert winner.speedup.mean == pytest.approx(quiet.speedup.mean, rel=0.05)
    assert winner.speedup.high < 1.5 * quiet.speedup.mean
