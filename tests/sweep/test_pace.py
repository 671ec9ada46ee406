"""The machine's pace: probed, believed as far as it tells, evened out."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from browndwarf.records import CellRecord
from browndwarf.sweep import probe
from browndwarf.sweep.analysis import analyse, configuration_of
from browndwarf.sweep.model import FactorModel
from browndwarf.sweep.pace import Pace
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

    @asynccontextmanager
    async def _serve(self, configuration):  # type: ignore[no-untyped-def]
        served = MovingServed(configuration, 1.0 + 0.2 * configuration.n_max)
        if configuration.target_type == "Q8_0":
            served.ms_per_step *= 1.3
        assert self.machine is not None
        served.machine = self.machine
        yield served


def sweep(directory: Path, machine: Machine, *, probed: bool, fast: bool) -> tuple[CellRecord, ...]:
    the_plan = msgspec.structs.replace(plan(**GRID), fast=fast, confirm=True)
    engine = MovingEngine(machine=machine, pacer=machine if probed else None)
    with RunStore.create(directory, plan={}, identity={}) as store:
        return asyncio.run(run_sweep(the_plan, store, engine, FakeQuiet()))


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
    assert median(with_probe) < 0.05 < median(without)


def test_speedups_and_order_do_not_follow_the_machine(tmp_path: Path) -> None:
    verdict = analyse(sweep(tmp_path / "r", Machine(spell=5), probed=True, fast=False))
    assert verdict.pace.exponent == pytest.approx(1.0, abs=0.15)
    assert verdict.pace.span == pytest.approx(1.5, abs=0.15)
    for standing in verdict.standings:
        n = standing.configuration.n_max
        true = 2.0 / (1.0 + 0.2 * n) if n else 1.0
        assert standing.speedup.mean == pytest.approx(true, rel=0.08)
    assert not any(d.beyond_noise for d in verdict.drifts)


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
    probed = sweep(tmp_path / "a", Machine(spell=2), probed=True, fast=False)
    blind = sweep(tmp_path / "b", Machine(spell=2), probed=False, fast=False)
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
