"""Every metric equals the truth of the mock's timetable; definitions hold at their edges."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from browndwarf.bench.answers import judge
from browndwarf.bench.metrics import (
    PointRecord,
    Slo,
    Window,
    burst_starts,
    parse_slo,
    request_figures,
    summarize,
)
from browndwarf.bench.mock import Script
from browndwarf.bench.traces import Trace, make_trace
from browndwarf.errors import UsageError
from virtual import feed


def trace(script: Script, *, cut_at: float | None = None, id: int = 0) -> Trace:
    exchange = feed(script, cut_at=cut_at)
    return make_trace(
        exchange,
        judge(exchange),
        id=id,
        point=1,
        prompt_id=f"p{id}",
        scheduled_s=0.0,
        origin_s=0.0,
    )


def point(*scripts: Script, window: Window | None = None, slo: Slo | None = None) -> PointRecord:
    traces = [trace(script, id=i) for i, script in enumerate(scripts)]
    return summarize(traces, window=window or Window(0.0, 10.0), slo=slo, point=1)


SHAPES = [
    {"burst": 1},
    {"burst": 3},
    {"burst": 3, "first": 3},
    {"burst": 4, "bundled": True},
    {"burst": 4, "bundled": True, "first": 4, "timings": False},
    {"burst": 4, "bundled": True, "usage": "every", "timings": False},
    {"burst": 2, "reasoning": 10},
    {"burst": 2, "role_first": False},
    {"burst": 3, "timings": False},
    {"burst": 3, "usage": "none"},
    {"burst": 3, "usage": "none", "timings": False},
    {"burst": 3, "usage": "wrong"},
    {"burst": 3, "crlf": True, "comments": True, "split": True, "text": "ü "},
    {"burst": 3, "headers_s": 0.2, "ttft_s": 0.3},
    {"burst": 5, "step_s": 0.15},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()))
def test_every_metric_equals_the_truth(shape: dict[str, object]) -> None:
    """Within a microsecond, since no clock of ours runs."""
    script = msgspec.structs.replace(Script(tokens=64, ttft_s=0.1, step_s=0.02), **shape)
    truth = script.truth
    found = point(script)
    assert found.completed == 1
    assert found.ttft_ms["p50"] == pytest.approx(truth["ttft_s"] * 1e3, abs=0.01)
    assert found.tpot_ms["p50"] == pytest.approx(truth["tpot_s"] * 1e3, rel=1e-4)
    assert found.tpot_pooled_ms == pytest.approx(truth["tpot_s"] * 1e3, rel=1e-4)
    assert found.step_gap_ms["p50"] == pytest.approx(truth["step_gap_s"] * 1e3, rel=1e-4)
    assert found.longest_stall_ms == pytest.approx(truth["step_gap_s"] * 1e3, rel=1e-3)
    assert found.tokens_per_step == pytest.approx(truth["tokens_per_step"], rel=1e-6)
    assert found.output_tokens == pytest.approx(64)
    assert found.decode_tok_s == pytest.approx(6.4)
    assert found.e2e_ms["p50"] == pytest.approx(truth["last_s"] * 1e3, abs=0.01)


def test_a_median_of_token_gaps_would_be_meaningless_here() -> None:
    """Tokens of one step come back to back: most gaps between events are zero."""
    events = trace(Script(tokens=61, burst=3, step_s=0.02)).event_us
    gaps = [b - a for a, b in itertools.pairwise(events)]
    assert np.median(gaps) == 0
    assert point(Script(tokens=61, burst=3, step_s=0.02)).step_gap_ms["p50"] == pytest.approx(20)


def test_acceptance_comes_from_the_servers_own_counts() -> None:
    found = point(Script(tokens=31, burst=3), Script(tokens=31, burst=3))
    assert found.acceptance is not None
    assert found.acceptance.drafted == 60
    assert found.acceptance.accepted == 40
    assert found.accepted_length == pytest.approx(3.0)


def test_without_usage_tokens_come_from_timings_then_from_events_and_it_says_so() -> None:
    assert trace(Script(tokens=9, usage="none")).n_from == "timings"
    counted = trace(Script(tokens=9, usage="none", timings=False))
    assert (counted.n, counted.n_from, counted.marks) == (9, "events", ("no-usage",))


def test_wrong_usage_is_found_out() -> None:
    """Against the server's timings; and where it is below the number of events."""
    found = trace(Script(tokens=9, usage="wrong"))
    assert (found.n, found.n_from, found.marks) == (9, "timings", ("wrong-usage",))


def test_a_warm_prefix_cache_is_marked() -> None:
    found = point(Script(tokens=5, cached=8))
    assert found.marks == {"cache-hit": 1}
    assert found.prompt_tokens == 16


def test_prefill_speed_says_whose_clock_it_is() -> None:
    ours = point(Script(tokens=5, timings=False, ttft_s=0.1))
    theirs = point(Script(tokens=5, ttft_s=0.1))
    assert (ours.prefill_from, theirs.prefill_from) == ("client", "server")
    assert ours.prefill_tok_s == pytest.approx(160)
    assert theirs.prefill_tok_s == pytest.approx(160)


def test_requests_cut_by_the_time_cap_count_for_throughput_only() -> None:
    script = Script(tokens=100, burst=2, ttft_s=0.1, step_s=0.1)
    whole = trace(Script(tokens=11, burst=2, ttft_s=0.1, step_s=0.1))
    part = trace(script, cut_at=0.55, id=1)
    found = summarize([whole, part], window=Window(0.0, 0.55, True), point=1)
    assert (found.completed, found.truncated, found.errors) == (1, 1, {})
    # Until 0.55 s each has its first token and four steps of two.
    assert found.output_tokens == pytest.approx(18)
    assert found.ttft_ms["p50"] == pytest.approx(100, abs=0.01)
    assert len(part.event_us) == 9


def test_cut_requests_with_bundled_events_count_at_the_rate_of_the_others() -> None:
    script = Script(tokens=41, burst=4, bundled=True, ttft_s=0.0, step_s=0.1, timings=False)
    found = summarize(
        [trace(script), trace(script, cut_at=0.55, id=1)], window=Window(0.0, 2.0), point=1
    )
    assert found.output_tokens == pytest.approx(41 + 6 * 41 / 11)


def test_tokens_outside_the_window_do_not_count() -> None:
    script = Script(tokens=11, ttft_s=0.1, step_s=0.1)
    found = point(script, window=Window(0.0, 0.55))
    assert found.output_tokens == pytest.approx(5)


def test_errors_are_counted_by_class_with_examples_and_spoil_no_latency() -> None:
    found = point(
        Script(tokens=9, ttft_s=0.1),
        Script(tokens=9, fault="error-in-stream", ttft_s=0.9),
        Script(tokens=9, fault="error-in-stream", ttft_s=0.9),
        Script(tokens=9, fault="http-500"),
    )
    assert found.errors == {"error-in-stream": 2, "http-500": 1}
    assert found.error_rate == 0.75
    assert "scripted" in found.error_examples["error-in-stream"][0]
    assert found.ttft_ms["p99"] == pytest.approx(100, abs=0.01)


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    slow, quick = Script(tokens=9, ttft_s=0.5), Script(tokens=9, ttft_s=0.1)
    found = point(slow, quick, quick, slo=parse_slo("ttft=200ms,tpot=50ms"))
    assert found.goodput == {"requests_s": pytest.approx(0.2), "share": pytest.approx(2 / 3)}


def test_a_request_whose_tokens_all_came_at_once_has_no_tpot() -> None:
    figures = request_figures(trace(Script(tokens=4, first=4)))
    assert figures.tpot_s is None
    assert figures.decode_tokens == 0


def test_bursts_are_parted_by_the_servers_number_of_steps_where_it_is_known() -> None:
    """A step that came late, and a burst whose reading was delayed, don't mislead."""
    at = np.array([0.0, 0.010, 0.0101, 0.020, 0.024, 0.0241, 0.030])
    assert burst_starts(at, steps=3).tolist() == [0, 1, 3, 6]
    assert burst_starts(at).tolist() == [0, 1, 3, 4, 6]


def test_no_token_no_figures() -> None:
    empty = summarize([], window=Window(0.0, 0.0), point=1)
    assert empty.completed == 0
    assert empty.decode_tok_s == 0
    assert empty.ttft_ms == {}


@pytest.mark.parametrize("text", ["", "ttft", "ttft=soon", "speed=1s"])
def test_odd_service_levels_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_slo(text)
