"""From the command line's words to a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from browndwarf.cli import requests
from browndwarf.errors import UsageError
from browndwarf.sweep import workload
from browndwarf.sweep.space import Axes

DEFAULTS = {
    "target_types": "as-is", "head_types": None, "n_max": "1,2", "p_min": None, "layers": "all",
    "kv": "f16", "draft_kv": None, "ctx": "4096", "parallel": "1", "ubatch": None,
    "backend_sampling": "off", "threads": None, "extra": [],
}  # fmt: skip


def axes(**more: object) -> Axes:
    return requests.axes(**{**DEFAULTS, **more})  # type: ignore[arg-type]


def test_lists_become_axes() -> None:
    made = axes(n_max="0, 2,2", ctx="4k,16k", kv="f16,q8_0:Q4_0", layers="all,40", p_min="0,0.5")
    assert made.n_max == (0, 2)
    assert made.ctx == (4096, 16384)
    assert made.kv == ("f16", "q8_0:q4_0")
    assert made.layers == (None, 40)
    assert made.p_min == (0.0, 0.5)


def test_any_other_option_is_an_axis_too() -> None:
    assert axes(extra=["poll=0,50"]).extra == (("poll", ("0", "50")),)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("n_max", "x", "n_max x"),
        ("n_max", "", "empty list"),
        ("kv", "q9", "q9 is no KV cache type"),
        ("layers", "most", "neither"),
        ("parallel", "0", "positive"),
        ("p_min", "2", "no probability"),
        ("backend_sampling", "maybe", "neither on nor off"),
        ("extra", ["poll"], "not NAME=v1,v2"),
        ("extra", ["=3"], "not NAME=v1,v2"),
        ("extra", ["ctx=1,2"], "option of its own"),
        ("extra", ["-np=1,2"], "option of its own"),
    ],
)
def test_what_makes_no_sense_is_said_at_once(name: str, value: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        axes(**{name: value})


@pytest.mark.parametrize(
    ("rates", "text"), [(".8", "n_max goes to 2"), (".5,.8", "rise"), ("2,1", "no probability")]
)
def test_synthetic_rates_are_checked(rates: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        requests._rates(rates, 2)


@pytest.mark.parametrize("name", workload.PACKAGED)
def test_packaged_workloads_have_eight_different_prompts(name: str) -> None:
    prompts = workload.packaged(name).prompts
    assert len({str(p.messages) for p in prompts}) == len(prompts) == 8


def test_a_users_text_file_is_split_at_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(b"first prompt\r\nstill first\r\n\r\n\r\nsecond\n")
    made = workload.load(str(path))
    assert [p.messages[0]["content"] for p in made.prompts] == [
        "first prompt\nstill first",
        "second",
    ]
    assert made.name == "mine"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "holds no prompt"),
        (b'{"prompt": "a"}\n{"prompt": ', "line 2"),
        (b'{"prompt": "a", "messages": [{"role": "user"}]}', "exactly one"),
        (b'["a"]', "line 1"),
        (b"\xff\xfe", "line 1"),
    ],
)
def test_a_broken_jsonl_names_the_line(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        workload.load(str(path))
    assert text in str(caught.value)


def test_a_missing_workload_lists_the_packaged_ones() -> None:
    with pytest.raises(UsageError, match="no workload") as caught:
        workload.load("poetry")
    assert "prose" in caught.value.why


def test_a_workloads_fingerprint_follows_its_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("one")
    first = workload.load(str(path)).fingerprint
    path.write_text("two")
    assert workload.load(str(path)).fingerprint != first
