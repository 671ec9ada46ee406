"""What a stream holds, whatever way it was cut, and the class of every fault."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browndwarf.bench.answers import judge, parse_answer
from browndwarf.bench.framing import Dechunker, Exchange, Pieces
from browndwarf.bench.mock import Script, timetable
from virtual import feed


def body(script: Script) -> Pieces:
    """The payload of a timetable, chunked framing undone."""
    dechunker = Dechunker()
    for at_s, data in timetable(script)[1:]:
        dechunker.feed(at_s, data)
    return dechunker.pieces


def test_the_event_that_names_the_role_carries_no_text() -> None:
    answer = parse_answer(body(Script(tokens=3, role_first=True)))
    assert answer.events == 5  # role, three tokens, the last with usage
    assert len(answer.at_s) == 3


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_counts_as_first_text_and_the_answer_is_told_apart(key: str) -> None:
    script = Script(tokens=10, reasoning=4, reasoning_key=key, ttft_s=0.5, step_s=0.1)
    answer = parse_answer(body(script))
    assert answer.at_s[0] == 0.5
    assert answer.answer_s == pytest.approx(0.9)


def test_tool_call_arguments_are_text() -> None:
    event = (
        b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":'
        b'{"arguments":"{\\"a\\""}}]}}]}\n\n'
    )
    assert parse_answer([(1.0, event)]).text_lengths == [4]


def test_an_event_has_the_time_of_its_last_byte() -> None:
    data = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
    answer = parse_answer([(1.0, data[:10]), (2.0, data[10:-2]), (3.0, data[-2:])])
    assert answer.at_s == [3.0]


@pytest.mark.parametrize("line", [b"data: [1, 2]", b"data: {", b"data: 7", b'data: {"choices": 3}'])
def test_an_event_that_is_no_object_is_a_bad_event(line: bytes) -> None:
    assert parse_answer([(0.0, line + b"\n\n")]).fault == "bad-event"


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        (Script(tokens=9, fault="error-in-stream"), "error-in-stream"),
        (Script(tokens=9, fault="bad-event"), "bad-event"),
        (Script(tokens=9, fault="incomplete"), "incomplete"),
        (Script(tokens=9, fault="no-text"), "no-text"),
        (Script(tokens=9, fault="http-500"), "http-500"),
        (Script(tokens=9, fault="rate-limited"), "rate-limited"),
        (Script(tokens=9, fault="reset"), "reset"),
        (Script(tokens=9, fault="hang"), "reset"),
        (Script(tokens=9), ""),
        (Script(tokens=9, crlf=True, comments=True, split=True, text="ü"), ""),
    ],
)
def test_every_fault_lands_in_its_class(script: Script, fault: str) -> None:
    answer = judge(feed(script))
    assert answer.fault == fault, answer.detail


def test_an_error_as_the_whole_body_of_a_200_is_an_error() -> None:
    exchange = Exchange(0.0, status=200, pieces=[(0.1, b'{"error": {"message": "no"}}')])
    assert judge(exchange).fault == "error-in-stream"
    assert "no" in judge(exchange).detail


def test_an_answer_that_is_no_stream_is_told() -> None:
    exchange = Exchange(0.0, status=200, pieces=[(0.1, b"<html>")])
    assert judge(exchange).fault == "not-a-stream"


def test_a_cut_after_the_last_event_loses_nothing() -> None:
    done = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\ndata: [DONE]\n\n'
    exchange = Exchange(0.0, status=200, pieces=[(0.1, done)], fault="reset")
    assert judge(exchange).fault == ""


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_way_of_cutting_the_bytes_changes_what_they_say(data: st.DataObject) -> None:
    script = Script(
        tokens=data.draw(st.integers(1, 12)),
        burst=data.draw(st.integers(1, 4)),
        crlf=data.draw(st.booleans()),
        comments=data.draw(st.booleans()),
        text=data.draw(st.sampled_from(["a", "ü", "漢字", "🙂 "])),
    )
    raw = b"".join(part for _, part in timetable(script)[1:])
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=20)))
    dechunker = Dechunker()
    for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        dechunker.feed(0.0, raw[start:stop])
    assert dechunker.done
    whole, cut = parse_answer(body(script)), parse_answer(dechunker.pieces)
    assert cut.text_lengths == whole.text_lengths
    assert cut.usage == whole.usage
    assert cut.fault == ""


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=8))
def test_rubbish_never_raises(parts: list[bytes]) -> None:
    judge(Exchange(0.0, status=200, pieces=[(0.0, part) for part in parts]))
