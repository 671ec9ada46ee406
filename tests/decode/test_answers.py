"""Templates, markup, the choice of n_max and prompt lookup, without an engine."""

from __future__ import annotations

import doctest
import importlib
import json
import random
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from browndwarf.decode.adaptive import Chooser
from browndwarf.decode.answer import GEMMA, PLAIN, TAGS, AnswerParser, markup_of, parse_call
from browndwarf.decode.chat import ChatTemplate
from browndwarf.decode.lookup import Lookup
from browndwarf.decode.sampling import Sampling
from browndwarf.errors import UsageError
from browndwarf.models import demo

WRITTEN = (
    "<|channel>thought\nI need the sum.\n<channel|>Let me see. "
    '<|tool_call>call:add{a:1,b:[2,{c:<|"|>x, }y<|"|>}],d:true}<tool_call|> Done.<turn|>'
)


def parse(text: str, cuts: list[int], markup: object = GEMMA) -> AnswerParser:
    parser = AnswerParser(markup)  # type: ignore[arg-type]
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    shown = []
    for start, end in pairwise(edges):
        shown += parser.feed(text[start:end])
    shown += parser.finish()
    assert "".join(c.text for c in shown if c.kind == "text") == parser.text
    assert "".join(c.text for c in shown if c.kind == "thinking") == parser.thought
    return parser


@given(st.lists(st.integers(0, 500), max_size=8))
def test_an_answer_reads_the_same_however_it_is_cut(cuts: list[int]) -> None:
    parser = parse(WRITTEN, cuts)
    assert parser.text == "Let me see.  Done."
    assert parser.thought == "I need the sum.\n"
    assert [c.name for c in parser.calls] == ["add"]
    assert parser.calls[0].arguments == {"a": 1, "b": [2, {"c": "x, }y"}], "d": True}


@given(st.text(alphabet='<|>channel toul_{}:\n"', max_size=80), st.lists(st.integers(0, 99)))
def test_any_text_can_be_read(text: str, cuts: list[int]) -> None:
    for markup in (GEMMA, TAGS, PLAIN):
        whole, cut = parse(text, [], markup), parse(text, cuts, markup)
        assert (whole.text, whole.thought, whole.calls) == (cut.text, cut.thought, cut.calls)
    assert parse(text, cuts, PLAIN).text == text


def test_tags_and_json_calls_are_read() -> None:
    call = json.dumps({"name": "add", "arguments": {"a": [1, None]}})
    parser = parse(f"<think>hm</think>Yes<tool_call>{call}</tool_call>", [3, 9, 30], TAGS)
    assert (parser.thought, parser.text) == ("hm", "Yes")
    assert parser.calls[0].arguments == {"a": [1, None]}
    assert parser.calls[0].as_message()["function"]["name"] == "add"


@pytest.mark.parametrize(
    "written",
    ["", "call:", "call:f{", "call:f{a:}", "call:f{a:1", "{]", "[1]", '{"name": 3', "x" * 99],
)
def test_malformed_calls_are_kept_as_written(written: str) -> None:
    assert parse_call(written, GEMMA, 0).arguments == {"raw": written}


def test_an_unfinished_call_is_text() -> None:
    parser = parse("Well <|tool_call>call:f{a:", [])
    assert parser.text == "Well <|tool_call>call:f{a:"
    assert not parser.calls


def test_markup_is_told_by_the_template() -> None:
    assert markup_of(demo.CHAT_TEMPLATE.read_text()) is GEMMA
    assert markup_of("... <think> ...") is TAGS
    assert markup_of("{{ messages }}") is PLAIN


def test_the_demo_template_takes_a_whole_conversation() -> None:
    template = ChatTemplate(demo.CHAT_TEMPLATE.read_text(), bos="<bos>")
    call = parse_call("call:add{a:1}", GEMMA, 0)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": [call.as_message()]},
        {"role": "tool", "tool_call_id": call.id, "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds."}}]
    text = template.render(messages, tools=tools)
    assert text.startswith("<bos><|turn>system\nBe brief.")
    assert "call:add{a:1}" in text
    assert "response:add" in text


@pytest.mark.parametrize(
    "source",
    [
        "",
        "{% for %}",
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_bad_templates_are_usage_errors(source: str) -> None:
    with pytest.raises(UsageError):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_templates_cannot_reach_out() -> None:
    for source in (
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.listdir('/') }}",
        "{{ strftime_now.__globals__ }}",
    ):
        try:
            shown = ChatTemplate(source).render([{"role": "user", "content": "x"}])
        except UsageError:
            continue
        assert shown == ""


def test_unknown_roles_are_refused() -> None:
    with pytest.raises(UsageError):
        ChatTemplate("x").render([{"role": "wizard", "content": "x"}])


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1},
        {"top_p": 2},
        {"seed": -1},
        {"grammar": "root ::= x", "json_schema": {}},
        {"min_p": -0.1},
        {"repeat_penalty": 0},
    ],
)
def test_impossible_sampling_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Sampling(**settings)  # type: ignore[arg-type]


def simulate(n: int | None, rates: list[float], base: float, step: float, steps: int) -> float:
    """Tokens per second of a machine whose step costs base + n x step, with these conditional
    acceptances; ``n`` None lets a chooser decide."""
    chance = random.Random(11)
    chooser = Chooser(len(rates))
    seconds, tokens = 0.0, 0
    for _ in range(steps):
        drafted = chooser.choose() if n is None else n
        accepted = 0
        while accepted < drafted and chance.random() < rates[accepted]:
            accepted += 1
        cost = (base + drafted * step) * chance.uniform(0.97, 1.03)
        chooser.record(drafted, drafted=drafted, accepted=accepted, seconds=cost)
        seconds += cost
        tokens += 1 + accepted
    return tokens / seconds


@pytest.mark.parametrize(
    ("rates", "base", "step"),
    [
        ([0.80, 0.68, 0.80, 0.81], 8.0, 2.0),
        ([0.95, 0.95, 0.95, 0.95], 10.0, 1.0),
        ([0.40, 0.30, 0.30, 0.20], 5.0, 2.5),
        ([0.88, 0.85, 0.73, 0.70], 1.0, 0.44),
    ],
)
def test_the_adaptive_choice_is_within_two_percent_of_the_best(
    rates: list[float], base: float, step: float
) -> None:
    best = max(simulate(n, rates, base, step, 4000) for n in range(1, 5))
    assert simulate(None, rates, base, step, 4000) > 0.98 * best


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 5))
def test_lookup_repeats_what_followed(tokens: list[int], n: int) -> None:
    grown, fresh = Lookup(), Lookup()
    for end in range(len(tokens)):
        grown.draft(tokens[:end], n)
    draft = grown.draft(tokens, n)
    assert draft == fresh.draft(tokens, n)
    assert len(draft) <= n
    if draft:
        pattern = [*tokens[-2:], draft[0]]
        assert any(tokens[i : i + 3] == pattern for i in range(len(tokens) - 2))


@pytest.mark.parametrize(
    "module", ["answer", "chat", "lookup", "options", "sampling", "state_layout"]
)
def test_examples_in_docstrings_hold(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"browndwarf.decode.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_package_stays_light() -> None:
    code = (
        "import sys, browndwarf; assert not {'numpy', 'msgspec', 'jinja2', 'llama_cpp'} & "
        "set(sys.modules); browndwarf.load; assert 'llama_cpp' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
