"""Drawings: what is in them, and that they can stand in a page. Points: what they say."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from browndwarf.report import charts, points
from browndwarf.report.figures import figures
from browndwarf.report.points import Accepted, Cycle, Probe, Ratio, Speed
from browndwarf.report.reading import read
from browndwarf.sweep.pace import FAST
from browndwarf.sweep.store import read_run
from fake_sweep import FakeEngine, FakeQuiet, plan
from report.made_runs import Steady, confirmed, fast, make, reading_of, slow_drafts

RATIOS = [
    Ratio("Q4_0", "Q6_K n1", 1.2, 1.1, 1.3, "faster", "confirmed"),
    Ratio("Q4_0", "Q6_K n2", 0.9, 0.8, 0.95, "slower", "measured"),
    Ratio("Q8_0", "Q6_K n1", 1.0, None, None, "inconclusive", "not counted"),
]
SPEEDS = [
    Speed("Q4_0", "Q6_K", "prose", 1, 100.0, 98.0, 103.0, "measured"),
    Speed("Q4_0", "Q4_K", "prose", 2, 110.0, 90.0, 130.0, "predicted"),
    Speed("Q4_0", "Q4_K", "code", 1, 120.0, 119.0, 121.0, "not counted"),
    Speed("Q4_0", "", "prose", 0, 80.0, 80.0, 80.0, "baseline"),
    Speed("Q4_0", "", "code", 0, 82.0, 75.0, 90.0, "predicted baseline"),
]
HOSTILE = "<script>alert('x')</script>\"&"


def words(svg: str) -> set[str]:
    """All texts in a drawing, which must be well-formed."""
    return {text for element in ElementTree.fromstring(svg).iter() if (text := element.text)}


def drawn() -> dict[str, str]:
    return {
        "speedups": charts.speedups(RATIOS),
        "speeds": charts.speeds(SPEEDS),
        "acceptances": charts.acceptances([Accepted("Q6_K", "prose", 1, 0.8)]),
        "cycles": charts.cycles(
            [Cycle("Q4_0", "Q6_K", n, 2.0 + n, k) for n in (1, 2) for k in ("measured", "model")]  # type: ignore[arg-type]
        ),
        "probes": charts.probes([Probe(0.1, 2.0, "fast"), Probe(0.2, 3.0, "slow")], 2.3),
    }


def test_drawings_hold_their_labels() -> None:
    made = drawn()
    assert {"Q6_K n1", "Q6_K n2", "Q4_0", "Q8_0", "faster", "slower"} <= words(made["speedups"])
    assert {"prose", "code", "n_max", "tok/s", "Q6_K", "Q4_K"} <= words(made["speeds"])
    assert {"prose", "Q6_K", "100%"} <= words(made["acceptances"])
    assert {"Q4_0", "ms per cycle", "n_max"} <= words(made["cycles"])
    assert {"fast", "slow", "ms per probe"} <= words(made["probes"])


def test_drawings_can_stand_side_by_side_in_a_page() -> None:
    """No names that another drawing could have too, no scripts, nothing to load; colours that the
    page may change."""
    for name, svg in drawn().items():
        themed = charts.themed(svg)
        assert not re.search(r"\sid=|url\(|href|<script|<image|<style|xmlns", themed), name
        colours = set(re.findall(r'(?:fill|stroke)="([^"]*)"', themed)) - {"none", "transparent"}
        assert colours, name
        assert all(colour.startswith("var(--c-") for colour in colours), (name, colours)


def test_no_name_becomes_markup() -> None:
    rows = [Ratio(HOSTILE, HOSTILE, 1.2, 1.1, 1.3, "faster", "confirmed")]
    assert HOSTILE in words(charts.speedups(rows))
    speed = Speed(HOSTILE, HOSTILE, HOSTILE, 1, 100.0, 98.0, 103.0, "measured")
    assert HOSTILE in words(charts.speeds([speed]))


def test_measured_and_predicted_look_different() -> None:
    one = [Speed("g", "h", "w", 1, 100.0, 90.0, 110.0, kind) for kind in ("measured", "predicted")]  # type: ignore[arg-type]
    measured, predicted = (charts.speeds([speed]) for speed in one)
    dot = f'fill="{charts.SERIES[0]}"'
    assert measured.count(dot) == predicted.count(dot) + 1
    assert 'stroke-width="6"' in predicted
    assert 'stroke-width="6"' not in measured


def test_every_panel_has_its_own_axis_and_the_line_at_one_is_inside() -> None:
    rows = [Accepted("Q6_K", f"w{i}", 1, 0.8) for i in range(charts.COLUMNS + 1)]
    texts = [e.text for e in ElementTree.fromstring(charts.acceptances(rows)).iter()]
    assert texts.count("position of the draft token") == charts.COLUMNS + 1
    far = charts.speedups([Ratio("g", "h n1", 1.5, 1.4, 1.6, "faster", "confirmed")])
    line = re.search(r'transform="translate\(([\d.]+),[^>]*stroke-dasharray', far)
    assert line is not None
    assert 5 < float(line[1]) < 150


def test_more_heads_than_colours_still_differ() -> None:
    count = len(charts.SERIES) + 1
    rows = [Accepted(f"H{i}", "prose", 1, 0.5) for i in range(count)]
    assert {f"H{i}" for i in range(count)} <= words(charts.acceptances(rows))


def test_speed_ups_come_group_by_group_and_fastest_first(tmp_path: Path) -> None:
    engine = FakeEngine(spoil=slow_drafts)
    reading = reading_of(
        make(tmp_path / "r", confirmed(target_type=("Q8_0", "Q4_0")), engine=engine)
    )
    rows = points.ratios(reading)
    assert [row.group for row in rows] == ["Q4_0", "Q4_0", "Q8_0", "Q8_0"]
    for group in ("Q4_0", "Q8_0"):
        means = [row.mean for row in rows if row.group == group]
        assert means == sorted(means, reverse=True)
    assert {row.shown for row in rows} == {"confirmed", "measured"}


def test_a_single_run_has_no_ends(tmp_path: Path) -> None:
    """As long as the baseline was not measured a second time."""
    base = plan()
    settings = msgspec.structs.replace(base.settings, repeats=1, prompts=1)
    view = read_run(make(tmp_path / "r", msgspec.structs.replace(base, settings=settings)))
    once = tuple(cell for cell in view.cells if cell.role != "baseline-again")
    assert len(once) < len(view.cells)
    rows = points.ratios(read(msgspec.structs.replace(view, cells=once)))
    assert [row.label for row in rows] == ["Q6_K n1", "Q6_K n2"]
    assert all(row.low is None and row.high is None for row in rows)
    assert rule_marks(charts.speedups(rows)) == 1, "the dashed line alone"
    twice = points.ratios(read(view))
    assert all(row.low is not None and row.high is not None for row in twice)
    assert rule_marks(charts.speedups(twice)) == 3


def rule_marks(svg: str) -> int:
    """How many straight lines stand for data."""
    groups = re.findall(r'<g class="mark-rule role-mark.*?</g>', svg, re.DOTALL)
    return sum(group.count("<line") for group in groups)


def test_speeds_are_measured_or_predicted_and_never_both(tmp_path: Path) -> None:
    reading = reading_of(make(tmp_path / "r", fast(), engine=FakeEngine(spoil=slow_drafts)))
    for group in reading.groups:
        rows = points.speeds(reading, group)
        places = {k: {(r.head, r.workload, r.n_max) for r in rows if r.kind == k}
                  for k in ("measured", "predicted")}  # fmt: skip
        assert places["predicted"]
        assert not places["measured"] & places["predicted"]
        assert len(places["measured"] | places["predicted"]) == 2 * 4 * 2
        baselines = [r for r in rows if r.kind.endswith("baseline")]
        assert [r.workload for r in baselines] == ["prose", "code"]
        assert all(r.low <= r.tok_s <= r.high for r in rows)


def test_the_models_line_runs_through_what_was_measured(tmp_path: Path) -> None:
    reading = reading_of(make(tmp_path / "r", fast(), engine=FakeEngine(spoil=slow_drafts)))
    rows = points.cycles(reading, "Q4_0")
    line = {(r.head, r.n_max): r.ms for r in rows if r.kind == "model"}
    assert len(line) == 8
    for row in rows:
        if row.kind == "measured" and row.n_max:
            assert row.ms == pytest.approx(line[row.head, row.n_max], rel=0.05)


def test_the_pace_is_drawn_only_where_it_was_probed(tmp_path: Path) -> None:
    without = reading_of(make(tmp_path / "a", plan()))
    assert points.probes(without) == ()
    assert math.isinf(points.fast_limit(without))
    probed = reading_of(make(tmp_path / "b", plan(), engine=FakeEngine(pacer=Steady())))
    rows = points.probes(probed)
    assert rows
    assert points.fast_limit(probed) == pytest.approx(FAST * 2.0, rel=0.02)
    assert {row.pace for row in rows} == {"fast"}
    assert "The machine's pace" not in [f.title for f in figures(without)]
    assert "The machine's pace" in [f.title for f in figures(probed)]


def test_where_all_is_disturbed_no_pace_is_known(tmp_path: Path) -> None:
    busy = FakeQuiet(disturbed=True)
    directory = make(tmp_path / "r", plan(), engine=FakeEngine(pacer=Steady()), quiet=busy)
    reading = reading_of(directory)
    assert any(trace.probe_ms for cell in reading.measured for trace in cell.traces)
    assert points.probes(reading) == ()
    assert "The machine's pace" not in [f.title for f in figures(reading)]


def test_many_probes_are_thinned_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = reading_of(make(tmp_path / "b", plan(), engine=FakeEngine(pacer=Steady())))
    every = points.probes(reading)
    monkeypatch.setattr(points, "MOST_PROBES", 10)
    few = points.probes(reading)
    assert len(few) <= 10
    assert few[0] == every[0]


def test_several_slots_have_no_cycles(tmp_path: Path) -> None:
    reading = reading_of(make(tmp_path / "r", plan(parallel=(2,))))
    assert points.cycles(reading, reading.groups[0]) == ()
    assert figures(reading)
