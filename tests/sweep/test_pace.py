"""The machine's pace: probed, believed as far as it tells, evened out."""

from __future__ import annotations

import asyncio
import statistics
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from browndwarf.records import CellRecord
from browndwarf.sweep import cell as measuring
from browndwarf.sweep import pace as pacing
from browndwarf.sweep import probe
from browndwarf.sweep import run as walking
from browndwarf.sweep.analysis import analyse, configuration_of
from browndwarf.sweep.model import FactorModel
from browndwarf.sweep.pace import CurvePass, Pace, Tempo, evened_curve
from browndwarf.sweep.probe import ReferencePacer
from browndwarf.sweep.run import run_sweep
from browndwarf.sweep.served import Settings
from browndwarf.sweep.store import RunStore
from fake_sweep import FakeAnswer, FakeEngine, FakeQuiet, FakeServed, plan

GRID = {
    "target_type": ("Q4_0", "Q8_0"),
    "head_type": ("Q8_0", "Q4_K"),
    "n_max": (1, 2, 3),
}


@dataclass
class Machine:
    """Runs fast or 1.5 times slower, changing after every ``spell`` requests; its pacer feels it,
    or says the same thing whatever happens."""

    spell: int = 7
    telling: bool = True
    requests: int = 0

    @property
    def slowness(self) -> float:
        return 1.5 if self.requests // self.spell % 2 else 1.0

    async def take(self) -> float:
        noise = 1.0 + 0.03 * ((self.requests * 7919) % 5 - 2) / 2
        return 2.0 * noise * (self.slowness if self.telling else 1.0)


class MovingServed(FakeServed):
    machine: Machine

    async def complete(
        self, text: str, *, settings: Settings, n_predict: int, seed: int
    ) -> FakeAnswer:
        answer = await super().complete(text, settings=settings, n_predict=n_predict, seed=seed)
        answer.timings.predicted_ms *= self.machine.slowness
        self.machine.requests += 1
        return answer


@dataclass
class MovingEngine(FakeEngine):
    machine: Machine | None = None
    served: ClassVar[type[MovingServed]] = MovingServed

    @asynccontextmanager
    async def _serve(self, configuration):  # type: ignore[no-untyped-def]
        served = self.served(configuration, 1.0 + 0.2 * configuration.n_max)
        if configuration.target_type == "Q8_0":
            served.ms_per_step *= 1.3
        assert self.machine is not None
        served.machine = self.machine
        yield served


def sweep(
    directory: Path,
    machine: Machine,
    *,
    probed: bool,
    fast: bool,
    precision: float = 0.02,
    kind: type[MovingEngine] = MovingEngine,
) -> tuple[CellRecord, ...]:
    the_plan = msgspec.structs.replace(plan(**GRID), fast=fast, confirm=True)
    settings = msgspec.structs.replace(the_plan.settings, precision=precision)
    the_plan = msgspec.structs.replace(the_plan, settings=settings)
    engine = kind(machine=machine, pacer=machine if probed else None)
    with RunStore.create(directory, plan={}, identity={}) as store:
        return asyncio.run(run_sweep(the_plan, store, engine, FakeQuiet()))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells do not wait for the fast pace: the time of these machines goes by requests."""
    monkeypatch.setattr(measuring, "WAIT_S", 0.0)
    monkeypatch.setattr(walking, "EXPLORING_WAIT_S", 0.0)


def errors(fast: tuple[CellRecord, ...], full: tuple[CellRecord, ...]) -> list[float]:
    """Predictions of a fast run against a full one's evened figures, sorted."""
    model, pace = FactorModel(fast, {}), Pace(full)
    found = []
    for cell in full:
        made, rate = model.predict(configuration_of(cell), cell.workload), pace.rate(cell)
        if made is not None and rate is not None:
            even = (made.probe_ms / pace.reference) ** pace.exponent if made.probe_ms else 1.0
            found.append(abs(made.decode_tok_s * even / rate - 1))
    return sorted(found)


def median(values: list[float]) -> float:
    return values[len(values) // 2]


def test_a_machine_of_two_speeds_is_predicted_with_its_probe_and_not_without(
    tmp_path: Path,
) -> None:
    with_probe = errors(
        sweep(tmp_path / "a", Machine(), probed=True, fast=True),
        sweep(tmp_path / "b", Machine(spell=11), probed=True, fast=False),
    )
    without = errors(
        sweep(tmp_path / "c", Machine(), probed=False, fast=True),
        sweep(tmp_path / "d", Machine(spell=11), probed=False, fast=False),
    )
    assert len(with_probe) > 20
    assert median(with_probe) < 0.02 < median(without)


def test_speedups_and_order_do_not_follow_the_machine(tmp_path: Path) -> None:
    verdict = analyse(sweep(tmp_path / "r", Machine(spell=5), probed=True, fast=False))
    assert verdict.pace.exponent == pytest.approx(1.0, abs=0.15)
    assert verdict.pace.span == pytest.approx(1.5, abs=0.15)
    for standing in verdict.standings:
        n = standing.configuration.n_max
        true = 2.0 / (1.0 + 0.2 * n) if n else 1.0
        assert standing.speedup.mean == pytest.approx(true, rel=0.08)
    assert not any(d.beyond_noise for d in verdict.drifts)


class UnevenServed(MovingServed):
    """Slow spells cost the Q8_0 target less."""

    async def complete(
        self, text: str, *, settings: Settings, n_predict: int, seed: int
    ) -> FakeAnswer:
        slow = self.machine.slowness > 1
        answer = await super().complete(text, settings=settings, n_predict=n_predict, seed=seed)
        if slow and self.configuration.target_type == "Q8_0":
            answer.timings.predicted_ms *= 1.5 ** (0.6 - 1.0)
        return answer


class UnevenEngine(MovingEngine):
    served = UnevenServed


def test_kinds_of_work_follow_the_probe_each_in_its_own_way(tmp_path: Path) -> None:
    cells = sweep(
        tmp_path / "r", Machine(spell=13), probed=True, fast=False, kind=UnevenEngine, precision=0
    )
    evened = Pace(cells)
    exponents = {
        name: statistics.median(evened.exponent_of(c) for c in cells if c.target_type == name)
        for name in ("Q4_0", "Q8_0")
    }
    assert exponents["Q4_0"] == pytest.approx(1.0, abs=0.15)
    assert exponents["Q8_0"] == pytest.approx(0.6, abs=0.15)


def test_a_probe_that_tells_nothing_changes_nothing(tmp_path: Path) -> None:
    cells = sweep(tmp_path / "r", Machine(telling=False), probed=True, fast=False)
    pace = Pace(cells)
    assert pace.span < 1.02
    for cell in cells:
        assert cell.decode_tok_s is not None
        assert pace.rate(cell) == pytest.approx(cell.decode_tok_s.mean, rel=0.02)


def test_cells_without_a_probe_stay_as_they_are(tmp_path: Path) -> None:
    cells = sweep(tmp_path / "r", Machine(), probed=False, fast=False)
    pace = Pace(cells)
    assert (pace.exponent, pace.span) == (0.0, 1.0)
    assert [pace.cycle_ms(c) for c in cells] == [c.cycle_ms for c in cells]
    assert [pace.rates(c) for c in cells] == [c.decode_tok_s.runs for c in cells if c.decode_tok_s]


def test_every_request_says_what_the_probe_said(tmp_path: Path) -> None:
    cells = sweep(tmp_path / "r", Machine(), probed=True, fast=True)
    measured = [c for c in cells if c.status == "ok"]
    assert all(1.9 < t.probe_ms < 3.2 for c in measured for t in c.traces)
    predicted = [c.predicted for c in cells if c.predicted is not None]
    assert predicted
    assert all(p.probe_ms == pytest.approx(2.5, abs=0.6) for p in predicted)


def test_a_change_of_pace_is_no_unsteady_cell(tmp_path: Path) -> None:
    probed = sweep(tmp_path / "a", Machine(spell=2), probed=True, fast=False, precision=0)
    blind = sweep(tmp_path / "b", Machine(spell=2), probed=False, fast=False, precision=0)
    assert not any("unsteady" in c.marks for c in probed)
    assert any("unsteady" in c.marks for c in blind)


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


def test_the_probe_answers_with_a_median_and_is_not_asked_too_often(clock: list[float]) -> None:
    answers = iter([9.0, 1.0, 1.2, 1.1, 1.0, 5.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    asked = 0

    async def step() -> float:
        nonlocal asked
        asked += 1
        clock[0] += 0.001
        return next(answers)

    pacer = ReferencePacer(step, clock=lambda: clock[0])

    async def ask() -> float:
        return await pacer.take()

    assert asyncio.run(ask()) == pytest.approx(1.15)
    assert asyncio.run(ask()) == pytest.approx(1.15)
    assert asked == probe.STEPS
    clock[0] += probe.FRESH_S
    assert asyncio.run(ask()) == 2.0


def test_a_probe_on_a_crawling_machine_gives_up_early(clock: list[float]) -> None:
    async def step() -> float:
        clock[0] += 1.0
        return 1000.0

    pacer = ReferencePacer(step, clock=lambda: clock[0])
    asyncio.run(pacer.take())
    assert clock[0] == 1.0


@dataclass
class Passing(Machine):
    """A machine whose spells pass while it is asked."""

    asked: int = 0

    async def take(self) -> float:
        self.asked += 1
        return await super().take()

    @property
    def slowness(self) -> float:
        return 1.5 if (self.requests + self.asked) // self.spell % 2 else 1.0


def test_a_cell_waits_for_the_fast_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "WAIT_S", 30.0)
    monkeypatch.setattr(pacing, "WAIT_STEP_S", 0.0)
    waited = sweep(tmp_path / "a", Passing(spell=60), probed=True, fast=False)
    slow = [t for c in waited for t in c.traces if t.probe_ms > 2.4]
    all_of_them = [t for c in waited for t in c.traces]
    # Only the very first may not know better.
    assert len(slow) < len(all_of_them) / 20


def test_requests_of_a_slow_spell_are_set_aside_where_others_ran_fast(tmp_path: Path) -> None:
    cells = sweep(tmp_path / "r", Machine(spell=5), probed=True, fast=False)
    evened = Pace(cells)
    for cell in cells:
        probes = [t.probe_ms for t in cell.traces]
        if sum(ms < 2.3 for ms in probes) >= len(probes) / 2:
            n = cell.n_max if cell.head_type else 0
            true = (1.0 + 0.2 * n) * (1.3 if cell.target_type == "Q8_0" else 1.0)
            assert evened.cycle_ms(cell) == pytest.approx(true, rel=0.07)


@dataclass
class Waking(Machine):
    """Slow for its first requests, then fast for good."""

    wakes_after: int = 40

    @property
    def slowness(self) -> float:
        return 1.5 if self.requests < self.wakes_after else 1.0


def test_what_ran_slow_is_measured_again_when_the_machine_has_become_fast(tmp_path: Path) -> None:
    cells = sweep(tmp_path / "r", Waking(), probed=True, fast=False)
    evened = Pace(cells)
    again = [c for c in cells if c.attempts > 1]
    assert again
    assert not any(evened.slow(c) for c in cells)
    first = next(c for c in cells if c.role == "baseline")
    assert first.attempts == 2
    assert first.cycle_ms == pytest.approx(1.0, rel=0.01)


def test_who_wants_to_be_quick_gets_no_second_try(tmp_path: Path) -> None:
    cells = sweep(tmp_path / "r", Waking(), probed=True, fast=False, precision=0)
    assert {c.attempts for c in cells} == {1}


def test_a_second_try_that_is_slower_changes_nothing(tmp_path: Path) -> None:
    """The machine is slow for two configurations in the middle, and again at the end."""

    @dataclass
    class Relapsing(Machine):
        @property
        def slowness(self) -> float:
            return 1.0 if self.requests < 100 or 148 <= self.requests < 205 else 1.5

    cells = sweep(tmp_path / "r", Relapsing(), probed=True, fast=False)
    evened = Pace(cells)
    slow = [c for c in cells if not c.role.startswith("confirm") and evened.slow(c)]
    assert slow
    assert all(c.attempts == 2 for c in slow)


class Answers:
    """A pacer that says what it is told, and a clock that goes with it."""

    def __init__(self, *answers: float) -> None:
        self.left, self.now, self.slept = list(answers), 0.0, 0

    async def take(self) -> float:
        self.now += 0.02
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1

    def tempo(self) -> Tempo:
        return Tempo(self, clock=lambda: self.now, sleep=self.sleep)


def test_a_tempo_learns_the_fast_pace_and_waits_for_it() -> None:
    answers = Answers(1.5, 1.0, 1.02, 1.5, 1.5, 1.04)
    tempo = answers.tempo()

    async def ask() -> list[tuple[float, float]]:
        return [await tempo.settle() for _ in range(4)]

    said = asyncio.run(ask())
    # The first answer is all that is known, so it passes for fast.
    assert [answer for answer, _ in said] == [1.5, 1.0, 1.02, 1.04]
    assert answers.slept == 2
    assert said[-1][1] == pytest.approx(3 * 0.02 + 2 * pacing.WAIT_STEP_S)


def test_a_tempo_gives_up_on_a_machine_that_stays_slow() -> None:
    answers = Answers(*[1.0] * 20, 1.5)
    tempo = answers.tempo()

    async def ask() -> tuple[float, float]:
        for _ in range(20):
            await tempo.take()
        return await tempo.settle(3.0)

    answer, spent = asyncio.run(ask())
    assert answer == 1.5
    assert 3.0 <= spent < 3.3


def test_what_is_always_slow_becomes_the_pace() -> None:
    answers = Answers(1.0, 1.5)
    tempo = answers.tempo()

    async def ask() -> None:
        for _ in range(pacing.REMEMBERED):
            await tempo.take()
        await tempo.settle()

    asyncio.run(ask())
    assert answers.slept == 0


def test_a_batch_curve_is_that_of_the_fast_pace_where_enough_passes_had_it() -> None:
    fast = [CurvePass((1.0, 1.5, 2.0), 2.0, 2.0)] * 3
    # At the slow pace the shape is another one, and a spell began within the last.
    slow = [CurvePass((1.8, 2.4, 3.0), 3.0, 3.0)] * 4
    bent = CurvePass((1.0, 1.5, 3.0), 2.0, 3.0)
    assert evened_curve([*fast, *slow, bent], 2.3) == pytest.approx((1.0, 1.5, 2.0))
    assert evened_curve(slow, 2.3) == pytest.approx((1.8, 2.4, 3.0))
    assert evened_curve([]) == ()


def test_a_batch_curve_without_a_steady_pace_is_evened_out() -> None:
    passes = [CurvePass((f, 1.5 * f, 2.0 * f), 2.0 * f, 2.0 * f) for f in (1.0, 1.5, 1.5, 1.0)]
    curve = evened_curve(passes)
    assert [ms / curve[0] for ms in curve] == pytest.approx([1.0, 1.5, 2.0])
