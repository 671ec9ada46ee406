"""The page of a sweep: what it says, of whatever run, and that nobody's names can harm it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest

from browndwarf.errors import RequestFailed, RunFormatError
from browndwarf.report.reading import read
from browndwarf.report.rows import configurations, memory_table
from browndwarf.sweep.analysis import configuration_of, grid
from browndwarf.sweep.events import CellDone, Event
from browndwarf.sweep.space import Configuration
from browndwarf.sweep.store import RunStore, read_run
from browndwarf.sweep.workload import Workload
from fake_sweep import FakeEngine, FakeQuiet, FakeServed, plan
from report.made_runs import (
    Steady,
    Stop,
    confirmed,
    create,
    fast,
    make,
    model,
    page_of,
    reading_of,
    slow_drafts,
    tags_of,
    text_of,
)

HOSTILE = '"><img src=x onerror=alert(1)><script>alert(2)</script>'


def rows_of(page: str) -> list[str]:
    return [text_of(row) for row in re.findall(r"<tr.*?</tr>", page, re.DOTALL)]


def stop_after(count: int) -> object:
    seen: list[Event] = []

    def listen(event: Event) -> None:
        if isinstance(event, CellDone):
            seen.append(event)
            if len(seen) == count:
                raise Stop

    return listen


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without the extra, which also makes a test quick."""
    monkeypatch.setitem(sys.modules, "altair", None)


def test_the_headline_holds_winner_speed_interval_and_baseline(
    tmp_path: Path, no_charts: None
) -> None:
    page = page_of(make(tmp_path / "r", confirmed()))
    said = re.search("<h1>(.*?)</h1>", page)
    assert said is not None
    assert said[1].startswith("Q4_0 + Q6_K n1 is the fastest: 1818.2 tok/s, 1.82 times")
    assert "(95% interval 1.82 to 1.82) Q4_0 + no MTP at 1000.0 tok/s" in said[1]


def test_every_measured_configuration_has_a_row_and_one_is_the_winner(
    tmp_path: Path, no_charts: None
) -> None:
    directory = make(tmp_path / "r", confirmed(head_type=("Q6_K", "Q4_K"), n_max=(1, 2, 3)))
    page = page_of(directory)
    labels = {configuration_of(c).label() for c in reading_of(directory).measured}
    assert len(labels) == 7
    for label in labels:
        row = next(r for r in rows_of(page) if r.strip().startswith(f"{label} "))
        assert "tok/s" not in row
        assert re.search(r"\d ±\d", row)
    assert page.count('class="tag"') == 1


def test_predicted_ones_say_so(tmp_path: Path, no_charts: None) -> None:
    directory = make(tmp_path / "r", fast(), engine=FakeEngine(spoil=slow_drafts))
    reading = reading_of(directory)
    rows = [row for group in configurations(reading) for row in group.rows]
    measured = {configuration_of(c).label() for c in reading.measured}
    predicted = [row for row in rows if row.label not in measured]
    assert predicted
    assert all(row.how == row.verdict == "predicted" for row in predicted)
    assert all(figure.predicted for row in predicted for figure in row.figures)
    page = page_of(directory)
    for row in predicted:
        assert any(r.strip().startswith(row.label) and "predicted" in r for r in rows_of(page))


def test_a_row_of_both_says_which_figure_is_which(tmp_path: Path, no_charts: None) -> None:
    directory = make(tmp_path / "r", fast(), engine=FakeEngine(spoil=slow_drafts))
    rows = [row for group in configurations(reading_of(directory)) for row in group.rows]
    partly = [row for row in rows if row.how == "measured in part"]
    assert partly
    assert all({f.predicted for f in row.figures} == {True, False} for row in partly)


def test_what_was_measured_is_shown_also_without_a_baseline_to_compare_it_with(
    tmp_path: Path, no_charts: None
) -> None:
    """A fast sweep measures the baseline on one workload before it confirms."""
    view = read_run(make(tmp_path / "r", fast(), engine=FakeEngine(spoil=slow_drafts)))
    reading = read(msgspec.structs.replace(view, cells=tuple(grid(view.cells))))
    compared = {s.label: set(s.by_workload) for s in reading.verdict.standings}
    measured: dict[str, set[str]] = {}
    for cell in reading.measured:
        measured.setdefault(configuration_of(cell).label(), set()).add(cell.workload)
    assert any(measured[label] > compared[label] for label in compared)
    rows = {row.label: row for group in configurations(reading) for row in group.rows}
    for label, names in measured.items():
        shown = zip(reading.workloads, rows[label].figures, strict=True)
        assert names == {name for name, figure in shown if "±" in figure.text}


def test_memory_is_listed_in_the_order_in_which_it_was_measured(tmp_path: Path) -> None:
    view = read_run(make(tmp_path / "r", confirmed()))
    cells = tuple(
        msgspec.structs.replace(cell, memory={"rss": float(place)})
        for place, cell in enumerate(view.cells)
    )
    table = memory_table(read(msgspec.structs.replace(view, cells=cells)))
    assert table is not None
    assert [label for label, _ in table.rows] == [
        "Q4_0 + no MTP",
        "Q4_0 + Q6_K n1",
        "Q4_0 + Q6_K n2",
    ]
    assert table.rows[0][1] == ("0",), "of its first cell"


def test_names_of_users_cannot_become_markup(tmp_path: Path) -> None:
    base = confirmed()
    workloads = (Workload(name=HOSTILE, prompts=base.workloads[0].prompts), base.workloads[1])
    hostile = msgspec.structs.replace(base, workloads=workloads, model=HOSTILE, llama_dir=HOSTILE)

    def broken(configuration: Configuration) -> RequestFailed | None:
        return (
            RequestFailed(HOSTILE, why=HOSTILE, fix=HOSTILE) if configuration.n_max == 2 else None
        )

    directory = make(
        tmp_path / "<b>run", hostile, models=(model(HOSTILE, HOSTILE),),
        engine=FakeEngine(fail_start=broken),
    )  # fmt: skip
    (directory / "recipe.sh").write_text(f"#!/bin/sh\n# {HOSTILE}\n")
    page = page_of(directory)
    seen = tags_of(page)
    assert HOSTILE in text_of(page)
    assert not seen.tags & {"script", "img", "b", "iframe", "object", "link", "a"}
    assert not [name for name, _ in seen.attributes if name.startswith("on")]


def test_nothing_is_loaded_and_nothing_runs(tmp_path: Path) -> None:
    page = page_of(make(tmp_path / "r", confirmed(), engine=FakeEngine(pacer=Steady())))
    seen = tags_of(page)
    assert not [n for n, _ in seen.attributes if n in {"src", "href", "xlink:href", "srcset"}]
    assert not seen.tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert "http:" not in page
    assert "https:" not in page
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_charts_are_named_for_who_cannot_see_them(tmp_path: Path) -> None:
    page = page_of(make(tmp_path / "r", confirmed(), engine=FakeEngine(pacer=Steady())))
    assert page.count("<svg") == page.count('role="img"') == 5
    names = [value for name, value in tags_of(page).attributes if name == "aria-label"]
    assert len(names) == 5
    assert all(len(name) > 20 for name in names)
    assert "the best is Q4_0 Q6_K n1 at 1.82" in names[0]
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_without_the_extra_there_are_all_tables_and_a_hint(tmp_path: Path, no_charts: None) -> None:
    page = page_of(make(tmp_path / "r", confirmed()))
    assert "<svg" not in page
    assert "pip install 'browndwarf[report]'" in text_of(page)
    for title in ("All configurations", "checked here", "Drift", "Memory", "How it was measured"):
        assert title in page


def test_a_synthetic_run_says_it_above_all_figures(tmp_path: Path, no_charts: None) -> None:
    base = plan()
    settings = msgspec.structs.replace(base.settings, synthetic=True)
    made_up = msgspec.structs.replace(base, settings=settings, synth_rates=(0.8, 0.5))
    page = page_of(make(tmp_path / "r", made_up))
    assert page.index("SYNTHETIC acceptance (0.80 0.50)") < page.index("<main>")


@pytest.mark.parametrize("allowed", [False, True])
def test_a_disturbed_run_says_so(tmp_path: Path, no_charts: None, allowed: bool) -> None:
    busy = msgspec.structs.replace(plan(), allow_busy=allowed)
    text = text_of(page_of(make(tmp_path / "r", busy, quiet=FakeQuiet(disturbed=True))))
    assert "Disturbed. 8 cells marked busy: other programs used the machine" in text
    assert ("Busy ones may win all the same" in text) is allowed
    assert ("is the fastest" in text) is allowed
    assert ("No configuration can be recommended" in text) is not allowed


def test_a_run_in_which_all_failed_says_why_and_what_next(tmp_path: Path, no_charts: None) -> None:
    fault = RequestFailed("the server died", why="signal 11", fix="look at the log")
    directory = make(tmp_path / "r", plan(), engine=FakeEngine(fail_start=lambda _: fault))
    text = text_of(page_of(directory))
    assert "No cell has a figure." in text
    assert "the server died signal 11 look at the log 8:" in text
    assert "No configuration won, so there is no command." in text
    assert "Not finished" not in text


def test_what_does_not_fit_is_listed_with_its_next_step(tmp_path: Path, no_charts: None) -> None:
    misfit = {"kind": "DeviceError", "what": "4 GiB too much", "why": "w", "fix": "--kv q8_0"}
    engine = FakeEngine(misfit=lambda c: misfit if c.n_max == 2 else None)
    text = text_of(page_of(make(tmp_path / "r", plan(), engine=engine)))
    assert "does-not-fit 4 GiB too much w --kv q8_0 2:" in text


def test_a_run_without_any_cell_is_a_page_too(tmp_path: Path) -> None:
    create(tmp_path / "r", confirmed()).close()
    text = text_of(page_of(tmp_path / "r"))
    assert "No cell has a figure yet." in text
    assert "Not finished. Cells measured so far: 0." in text


@pytest.mark.parametrize("the_plan", [confirmed(), fast()], ids=["full", "fast"])
def test_a_run_is_unfinished_until_its_last_confirming_cell(
    tmp_path: Path, no_charts: None, the_plan: object
) -> None:
    assert isinstance(the_plan, type(plan()))
    whole = make(tmp_path / "whole", the_plan, engine=FakeEngine(spoil=slow_drafts))
    assert not reading_of(whole).unfinished
    measured = len(reading_of(whole).measured)
    for count in range(1, measured, 3):
        directory = make(
            tmp_path / f"r{count}", the_plan, engine=FakeEngine(spoil=slow_drafts),
            listen=stop_after(count),  # type: ignore[arg-type]
        )  # fmt: skip
        assert reading_of(directory).unfinished, f"{count} of {measured} cells"
    text = text_of(page_of(tmp_path / "r1"))
    assert "Not finished. Cells measured so far: 1." in text
    assert "browndwarf sweep --resume" in text


def test_a_fast_run_that_goes_on_as_a_full_one_is_unfinished_again(tmp_path: Path) -> None:
    directory = make(tmp_path / "r", fast(), engine=FakeEngine(spoil=slow_drafts))
    full = msgspec.structs.replace(fast(), fast=False)
    with RunStore.open(directory) as store:
        store.set_meta("plan", msgspec.to_builtins(full))
    assert reading_of(directory).unfinished


def test_a_run_can_be_read_while_it_is_written(tmp_path: Path, no_charts: None) -> None:
    whole = reading_of(make(tmp_path / "whole", confirmed()))
    with create(tmp_path / "r", confirmed()) as store:
        for count, cell in enumerate(whole.cells, 1):
            store.save(cell)
            assert f"Cells measured so far: {count}." in text_of(page_of(tmp_path / "r")) or (
                count == len(whole.cells)
            )
    assert "Not finished" not in text_of(page_of(tmp_path / "r"))


def test_few_repeats_are_called_quick(tmp_path: Path, no_charts: None) -> None:
    base = plan()
    settings = msgspec.structs.replace(base.settings, repeats=1, prompts=1)
    quick = msgspec.structs.replace(base, settings=settings)
    text = text_of(page_of(make(tmp_path / "r", quick)))
    assert "Quick. Each cell was measured once" in text
    assert "inf" not in re.findall(r"\binf\b", text)


def test_a_loss_is_a_loss_in_the_headline(tmp_path: Path, no_charts: None) -> None:
    def slower(served: FakeServed) -> None:
        served.ms_per_step = 1.0 + 2.0 * served.configuration.n_max

    page = page_of(make(tmp_path / "r", confirmed(), engine=FakeEngine(spoil=slower)))
    said = re.search("<h1>(.*?)</h1>", page)
    assert said is not None
    assert "MTP does not pay here" in said[1]


def test_the_recipe_is_shown_and_an_old_one_is_called_old(tmp_path: Path, no_charts: None) -> None:
    directory = make(tmp_path / "r", confirmed())
    assert "browndwarf recipe" in text_of(page_of(directory))
    (directory / "recipe.sh").write_text("exec llama-server -m m.gguf\n")
    (directory / "recipe.json").write_text('{"label": "Q4_0 + Q6_K n1"}')
    text = text_of(page_of(directory))
    assert "exec llama-server -m m.gguf" in text
    assert "winner is" not in text
    (directory / "recipe.json").write_text('{"label": "Q4_0 + Q6_K n2"}')
    text = text_of(page_of(directory))
    assert "This is for Q4_0 + Q6_K n2; the run's winner is Q4_0 + Q6_K n1 now" in text


def test_models_go_by_name_and_fingerprint_and_not_by_folder(
    tmp_path: Path, no_charts: None
) -> None:
    page = page_of(make(tmp_path / "r", plan()))
    assert "a model: gemma4, Q4_0, 1.00 GiB, file m.gguf, fingerprint sha256:0123" in page
    assert "somebody" not in page
    assert "llama.cpp b9999 (abc1234)" in page


def test_a_plan_of_another_version_is_refused_with_reason(tmp_path: Path) -> None:
    RunStore.create(tmp_path / "r", plan={"model": 3}, identity={}).close()
    with pytest.raises(RunFormatError) as caught:
        reading_of(tmp_path / "r")
    assert caught.value.why
    assert caught.value.fix
