"""What a finished sweep tells people."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from browndwarf.cli import sweep_view, tables
from browndwarf.errors import RequestFailed
from browndwarf.records import CellRecord
from browndwarf.sweep.analysis import analyse
from browndwarf.sweep.laws import check
from browndwarf.sweep.run import run_sweep
from browndwarf.sweep.store import RunStore
from fake_sweep import FakeEngine, FakeQuiet, FakeServed, plan


def sweep(
    path: Path, spoil: Callable[[FakeServed], None], **axes: object
) -> tuple[CellRecord, ...]:
    the_plan = msgspec.structs.replace(plan(**axes), confirm=True)
    with RunStore.create(path, plan={}, identity={}) as store:
        engine = FakeEngine(spoil=spoil)
        return asyncio.run(run_sweep(the_plan, store, engine, FakeQuiet()))


def slower(served: FakeServed) -> None:
    served.ms_per_step = 1.0 + 2.0 * served.configuration.n_max


def test_the_winner_is_named_with_its_interval(tmp_path: Path) -> None:
    text = tables.story(analyse(sweep(tmp_path / "r", lambda _: None)))[0]
    assert text.startswith("Fastest: Q4_0 + Q6_K n1")
    assert "1.82x its baseline (1.82 to 1.82)" in text


def test_a_loss_is_called_a_loss(tmp_path: Path) -> None:
    text = tables.story(analyse(sweep(tmp_path / "r", slower)))[0]
    assert "MTP does not pay here" in text


def test_nothing_is_said_about_mtp_that_was_never_measured(tmp_path: Path) -> None:
    def broken(served: FakeServed) -> None:
        if served.configuration.speculative:
            raise RequestFailed("no", why="the head is damaged")

    cells = sweep(tmp_path / "r", broken)
    text = tables.story(analyse(cells))[0]
    assert "nothing is said about MTP" in text
    assert "does not pay" not in text
    assert "the head is damaged" in tables.failures(cells)[0]


def test_rubbish_drafts_are_explained(tmp_path: Path) -> None:
    def rubbish(served: FakeServed) -> None:
        served.accept = False

    cells = sweep(tmp_path / "r", rubbish)
    assert any("hardly belongs" in line for line in tables.marks(cells))
    assert "nothing is said about MTP" in tables.story(analyse(cells))[0]


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("n_max", [(1, 2), (1, 40)])
def test_the_table_keeps_its_figures_in_any_width(
    tmp_path: Path, width: int, n_max: tuple[int, ...]
) -> None:
    verdict = analyse(sweep(tmp_path / "r", lambda _: None, n_max=n_max))
    console = Console(width=width, record=True, quiet=False, file=(tmp_path / "out").open("w"))
    console.print(tables.standings_table(verdict, ["prose", "code"], width=width))
    console.file.close()
    text = (tmp_path / "out").read_text()
    winner = verdict.winner
    assert winner is not None
    if width >= 80:
        assert "1.82" in text
        assert f"{winner.speed:.0f}" in text


def test_a_single_run_has_no_spread_to_show(tmp_path: Path) -> None:
    base = plan()
    settings = msgspec.structs.replace(base.settings, repeats=1, prompts=1)
    with RunStore.create(tmp_path / "r", plan={}, identity={}) as store:
        one = msgspec.structs.replace(base, settings=settings)
        cells = asyncio.run(run_sweep(one, store, FakeEngine(), FakeQuiet()))
    console = Console(width=140, record=True, file=io.StringIO())
    verdict = analyse([c for c in cells if c.role != "baseline-again"])
    console.print(tables.standings_table(verdict, ["prose", "code"], width=140))
    text = console.export_text() + "\n".join(tables.story(verdict))
    assert "one run: no spread" in text
    assert "inf" not in text


def test_findings_and_a_changing_machine_are_told(tmp_path: Path) -> None:
    cells = sweep(tmp_path / "r", lambda _: None)
    laws = check(cells)
    lines = sweep_view.law_lines(laws)
    assert len(lines) == 1 + len(laws)
    assert any("add --layers" in line and "not measured: not" not in line for line in lines)
    pace = analyse(cells).pace
    assert sweep_view.pace_line(pace) == []
