"""Sizes, counts and durations as people write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from browndwarf.errors import UsageError
from browndwarf.units import (
    GIB,
    MIB,
    format_bytes,
    format_duration,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_share,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * GIB),
        ("8GB", 8 * GIB),
        ("8g", 8 * GIB),
        ("7.5 GiB", 15 * GIB // 2),
        ("512MiB", 512 * MIB),
        ("100", 100),
        ("100B", 100),
    ],
)
def test_sizes_are_binary(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_a_bare_number_takes_the_default_unit() -> None:
    assert parse_bytes("512", default_unit="m") == 512 * MIB


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8 apples", "1e3", "nan"])
def test_what_is_no_size_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        parse_bytes(text)


@given(st.text(max_size=12))
def test_no_text_breaks_the_parsers(text: str) -> None:
    for parse in (parse_bytes, parse_count, parse_duration):
        with contextlib.suppress(UsageError):
            assert parse(text) >= 0


def test_k_is_1024_tokens() -> None:
    assert parse_count("16k") == 16384


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("10m", 600), ("1h30m", 5400), ("250ms", 0.25), ("1.5s", 1.5)]
)
def test_durations_add_up(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@given(st.integers(0, 2**45))
def test_formatted_sizes_read_back_within_rounding(n_bytes: int) -> None:
    assert parse_bytes(format_bytes(n_bytes)) == pytest.approx(n_bytes, rel=0.06, abs=1)


def test_durations_read_naturally() -> None:
    assert [format_duration(s) for s in (0.25, 42, 75, 7380, float("inf"))] == [
        "0.25s",
        "42s",
        "1m 15s",
        "2h 03m",
        "?",
    ]


@pytest.mark.parametrize(
    ("text", "share"), [("2%", 0.02), (" 0.5 ", 0.5), ("0", 0.0), ("100%", 1.0)]
)
def test_shares_are_percent_or_fractions(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "two", "2", "-1%", "nan", "101%", "%"])
def test_what_is_no_share_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_share(text)
