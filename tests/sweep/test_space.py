"""The grid: groups, baselines, identities."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from browndwarf.errors import UsageError
from browndwarf.sweep.space import Axes, Configuration, cell_id


def test_every_group_has_one_baseline_without_speculation() -> None:
    axes = Axes(target_type=("Q4_0", "Q8_0"), head_type=("Q6_K",), kv=("f16", "q8_0"))
    groups = axes.groups()
    assert [g.label for g in groups] == ["Q4_0", "Q4_0 kv=q8_0", "Q8_0", "Q8_0 kv=q8_0"]
    for group in groups:
        assert not group.baseline.speculative
        assert {c.baseline() for c in group.candidates} == {group.baseline}


def test_none_and_zero_are_the_baseline_and_not_measured_twice() -> None:
    axes = Axes(target_type=("Q4_0",), head_type=("none", "Q6_K"), n_max=(0, 1, 2))
    assert [c.n_max for c in axes.groups()[0].candidates] == [1, 2]


def test_any_server_option_can_be_an_axis() -> None:
    axes = Axes(target_type=("a",), head_type=("b",), n_max=(1,), extra=(("poll", ("0", "50")),))
    assert [g.label for g in axes.groups()] == ["a poll=0", "a poll=50"]


def test_an_axis_given_twice_is_refused() -> None:
    axes = Axes(target_type=("a",), extra=(("poll", ("0",)), ("poll", ("1",))))
    with pytest.raises(UsageError, match="twice"):
        axes.groups()


def test_kv_may_differ_for_keys_and_values() -> None:
    assert Configuration(target_type="a", kv="q8_0:q4_0").kv_pair == ("q8_0", "q4_0")
    assert Configuration(target_type="a", kv="q8_0").kv_pair == ("q8_0", "q8_0")


settings = st.builds(
    Configuration,
    target_type=st.sampled_from(["Q4_0", "Q8_0"]),
    head_type=st.sampled_from(["Q6_K", "Q2_K"]),
    n_max=st.integers(1, 8),
    p_min=st.sampled_from([None, 0.0, 0.5]),
    kv=st.sampled_from(["f16", "q8_0", "q8_0:q4_0"]),
    ctx=st.sampled_from([2048, 4096]),
    parallel=st.integers(1, 4),
)


@given(settings, settings)
def test_ids_are_equal_exactly_for_equal_settings(a: Configuration, b: Configuration) -> None:
    same = cell_id(a, "prose", "mtp") == cell_id(b, "prose", "mtp")
    assert same == (a == b)
    assert re.fullmatch(r"[\w.\-]+", cell_id(a, "prose", "mtp")), "usable as a file name"


@given(settings)
def test_labels_name_every_setting_off_its_default(a: Configuration) -> None:
    assert ("ctx=2048" in a.label()) == (a.ctx == 2048)
    assert ("p_min" in a.label()) == (a.p_min is not None)
