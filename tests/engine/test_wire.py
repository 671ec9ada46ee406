"""Whatever a server sends is read right or refused with an error of ours."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from browndwarf.engine import wire
from browndwarf.engine.wire import SpecCounters, Timings
from browndwarf.errors import RequestFailed

# As a current build answered, with n_max 3.
REAL = {
    "timings": {
        "cache_n": 0,
        "prompt_n": 5,
        "prompt_ms": 16.007,
        "predicted_n": 40,
        "predicted_ms": 399.182,
        "predicted_per_second": 97.6997960829897,
        "draft_n": 48,
        "draft_n_accepted": 23,
    }
}


def test_derived_figures_match_the_servers_own() -> None:
    timings = wire.parse_timings(REAL)
    assert timings.decode_tok_s == pytest.approx(97.6997960829897)
    assert timings.steps == 17
    assert timings.cycles == 16  # the server's own count of drafts for this request
    assert timings.accepted_length == pytest.approx(1 + 23 / 16)
    assert timings.accepted_length / timings.cycle_ms * 1000 == pytest.approx(timings.decode_tok_s)


def test_without_drafts_every_token_is_a_cycle() -> None:
    timings = Timings(predicted_n=11, predicted_ms=100.0)
    assert timings.cycles == 10
    assert timings.accepted_length == 1.0
    assert math.isnan(timings.acceptance_rate)


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_tokens_have_no_rate(n: int) -> None:
    timings = Timings(predicted_n=n)
    for value in (timings.cycle_ms, timings.decode_tok_s, timings.accepted_length):
        assert math.isnan(value)


def test_timings_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(RequestFailed, match="make no sense"):
        wire.parse_timings({"timings": {"predicted_n": "many"}})
    assert wire.parse_timings({}) == Timings()


METRICS = """# HELP llamacpp:spec_decode_num_drafts_total x
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 10
llamacpp:spec_decode_num_draft_tokens_total 30
llamacpp:spec_decode_num_accepted_tokens_total 12
llamacpp:prompt_tokens_seconds 501.203
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 5
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 3
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 4
"""


def test_counters_are_read_by_position() -> None:
    counters = wire.spec_counters(METRICS)
    assert counters == SpecCounters(drafts=10, draft_tokens=30, accepted=12, per_position=(5, 4, 3))
    assert counters.rates == (0.5, 0.4, 0.3)
    assert counters - SpecCounters() == counters
    assert (counters - counters).rates == ()


@given(st.text())
def test_any_metrics_text_is_survived(text: str) -> None:
    wire.spec_counters(text)


@given(st.lists(st.integers(0, 10**9), max_size=9), st.integers(0, 10**9))
def test_counters_written_are_counters_read(per_position: list[int], drafts: int) -> None:
    name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
    text = f"llamacpp:spec_decode_num_drafts_total {drafts}\n" + "".join(
        f'{name}{{position="{i}"}} {n}\n' for i, n in enumerate(per_position)
    )
    counters = wire.spec_counters(text)
    assert counters.per_position == tuple(per_position)
    assert counters.drafts == drafts


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text().filter(lambda key: key != "error"), JSON, max_size=4)


@given(st.lists(OBJECTS, max_size=6), st.data())
def test_a_stream_may_be_cut_anywhere_into_chunks(
    objects: list[dict[str, object]], data: st.DataObject
) -> None:
    body = b": ping\n\n" + b"".join(
        b"data: " + json.dumps(item).encode() + b"\n\n" for item in objects
    )
    body += b"data: [DONE]\n\n"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(body) - 1), max_size=9)))
    edges = [0, *cuts, len(body)]
    chunks = [(float(i), body[a:b]) for i, (a, b) in enumerate(pairwise(edges))]
    events = wire.parse_stream(chunks)
    assert [event.data for event in events] == objects
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)


@given(st.binary())
def test_any_bytes_in_a_stream_are_read_or_refused(data: bytes) -> None:
    try:
        wire.parse_stream([(0.0, data), (1.0, b"\ndata: " + data)])
    except RequestFailed as exc:
        assert exc.why  # noqa: PT017


def test_a_last_event_without_a_line_end_counts() -> None:
    assert wire.parse_stream([(1.0, b'data: {"a": 1}')])[0].data == {"a": 1}


@pytest.mark.parametrize(
    "line",
    [
        b'data: {"error": {"code": 500, "message": "Compute error.", "type": "server_error"}}\n',
        b'error: {"code": 500, "message": "Compute error.", "type": "server_error"}\n',
    ],
)
def test_an_error_inside_a_stream_is_raised(line: bytes) -> None:
    with pytest.raises(RequestFailed, match="error 500"):
        wire.parse_stream([(0.0, line)])


@given(JSON)
def test_any_props_and_error_bodies_are_survived(value: object) -> None:
    assert wire.error_from_body(500, value).what
    if isinstance(value, dict):
        wire.parse_props(value)
