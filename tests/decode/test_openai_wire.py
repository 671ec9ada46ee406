"""OpenAI's requests and answers: what is understood, what is refused, and that nothing crashes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from browndwarf.decode.answer import Chunk, ToolCall
from browndwarf.decode.openai_reply import Kept, Reply, fault_of, timings_of, too_long
from browndwarf.decode.openai_wire import Ask, Defaults, joined, read_chat, read_completion
from browndwarf.decode.result import Answer, Reason
from browndwarf.decode.sampling import Sampling
from browndwarf.decode.server_metrics import Counters, exposition
from browndwarf.engine.wire import Timings, spec_counters
from browndwarf.errors import (
    DiskFull,
    EngineError,
    Interrupted,
    MachineBusy,
    RunChanged,
    UsageError,
)
from decode.fake_runtime import STATS

HI = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> Ask:
    return read_chat(json.dumps({"messages": HI, **fields}).encode(), Defaults())


# -- requests ------------------------------------------------------------------------------


def test_all_settings_arrive() -> None:
    ask = chat(
        temperature=1,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=3,
        frequency_penalty=0.5,
        max_tokens=9,
        max_completion_tokens=5,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True},
        chat_template_kwargs={"enable_thinking": True},
        session="anna",
    )
    assert ask.sampling == Sampling(
        temperature=1.0, top_p=0.9, top_k=40, min_p=0.05, seed=3, frequency_penalty=0.5
    )
    assert (ask.max_tokens, ask.stop, ask.session) == (5, ("a", "b"), "anna")
    assert ask.stream
    assert ask.usage
    assert ask.thinking


def test_what_a_request_does_not_say_comes_from_the_server() -> None:
    defaults = Defaults(Sampling(temperature=0.7, top_k=20), thinking=True)
    body = b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": null, "top_k": -1}'
    ask = read_chat(body, defaults, "from the header")
    assert ask.sampling == Sampling(temperature=0.7, top_k=0)
    assert ask.thinking
    assert ask.session == "from the header"
    assert ask.max_tokens is None
    assert not ask.stream


def test_fields_of_other_servers_are_ignored() -> None:
    ask = chat(model="gpt-4o", user="me", cache_prompt=False, logprobs=True, metadata={"a": [1]})
    assert ask.messages == HI


def test_text_comes_in_parts_too() -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    ask = chat(messages=[{"role": "user", "content": parts, "cache_control": {}}])
    assert ask.messages == [{"role": "user", "content": "Hi\nthere"}]


def test_a_tool_turn_is_handed_on_as_templates_take_it() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"id": "c1", "type": "function", "function": function}
    ask = chat(
        messages=[
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ],
        tools=[{"type": "function", "function": {"name": "add", "parameters": {}}}],
        tool_choice="auto",
    )
    made = ask.messages[1]["tool_calls"][0]
    assert made == {**call, "function": {"name": "add", "arguments": {"a": 1}}}
    assert ask.messages[1]["content"] == ""
    assert ask.messages[2] == {"role": "tool", "content": "3", "tool_call_id": "c1"}
    assert ask.tools is not None


@pytest.mark.parametrize("written", ["{a: 1", "[1]", "null"])
def test_arguments_that_are_no_object_stay_as_the_model_wrote_them(written: str) -> None:
    call = {"function": {"name": "add", "arguments": written}}
    ask = chat(messages=[*HI, {"role": "assistant", "tool_calls": [call]}])
    assert ask.messages[1]["tool_calls"][0]["function"]["arguments"] == written


def test_without_tools_the_model_does_not_see_them() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert chat(tools=tools, tool_choice="none").tools is None
    assert chat(tools=[]).tools is None
    assert chat(tools=tools).tools == tools


def test_json_answers_become_a_schema() -> None:
    assert chat(response_format={"type": "text"}).sampling.json_schema is None
    assert chat(response_format={"type": "json_object"}).sampling.json_schema == {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    assert chat(response_format=form).sampling.json_schema == {"type": "integer"}


@pytest.mark.parametrize(("seed", "taken"), [(-1, None), (2**32 + 4, 5), (0, 0)])
def test_seeds_of_any_size_are_taken(seed: int, taken: int | None) -> None:
    assert chat(seed=seed).sampling.seed == taken


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": "Hi"}, "$.messages"),
        ({"messages": [{"content": "Hi"}]}, "role"),
        ({"temperature": "warm"}, "$.temperature"),
        ({"temperature": -1}, "temperature cannot be -1"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "$.max_tokens"),
        ({"n": 2}, "one answer"),
        ({"stream": "yes"}, "$.stream"),
        ({"stop": [1]}, "$.stop"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": ["add"]}, "$.tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "a certain function"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        chat(**fields)
    assert said in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'"x"', b"{" * 100_000, b"[" * 10**6])
def test_what_is_no_request_is_refused(body: bytes) -> None:
    for read in (read_chat, read_completion):
        with pytest.raises(UsageError):
            read(body, Defaults())


def test_a_completion_takes_text_or_tokens() -> None:
    def completion(prompt: Any, **fields: Any) -> Ask:
        return read_completion(json.dumps({"prompt": prompt, **fields}).encode(), Defaults())

    assert completion("Once").prompt == "Once"
    assert completion(["Once"]).prompt == "Once"
    assert completion([5, 6]).prompt == [5, 6]
    for prompt, fields in ((["a", "b"], {}), ([1, "b"], {}), ("a", {"session": "anna"})):
        with pytest.raises(UsageError):
            completion(prompt, **fields)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    "messages prompt tools tool_choice temperature top_p top_k min_p seed max_tokens n stop stream "
    "stream_options response_format chat_template_kwargs session role content tool_calls function "
    "name arguments type text json_schema schema tool_call_id".split()
)
NEARLY = st.recursive(
    JSON, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=6)
)


@given(NEARLY, NEARLY)
def test_no_json_crashes_the_translation(whole: Any, message: Any) -> None:
    known = whole if isinstance(whole, dict) else {}
    bodies = (whole, {"prompt": "a", **known}, {"messages": HI, **known}, {"messages": [message]})
    for body in bodies:
        for read in (read_chat, read_completion):
            try:
                ask = read(json.dumps(body).encode(), Defaults())
            except UsageError:
                continue
            assert isinstance(ask, Ask)


@given(st.binary(max_size=60))
def test_no_bytes_crash_the_translation(body: bytes) -> None:
    for read in (read_chat, read_completion):
        with pytest.raises(UsageError):
            read(body, Defaults())


# -- conversations -------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Hi"}
ANSWERED = {"role": "assistant", "content": "Hello."}
MORE = {"role": "user", "content": "And now?"}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "c"}


@pytest.mark.parametrize(
    ("kept", "sent", "wanted"),
    [
        ([], [SYSTEM, ASKED], [SYSTEM, ASKED]),
        ([SYSTEM, ASKED, ANSWERED], [MORE], [SYSTEM, ASKED, ANSWERED, MORE]),
        ([SYSTEM, ASKED, ANSWERED], [SYSTEM, MORE], [SYSTEM, ASKED, ANSWERED, MORE]),
        ([SYSTEM, ASKED, ANSWERED], [RESULT], [SYSTEM, ASKED, ANSWERED, RESULT]),
        # A client that sends everything, one that asks again, and one that edited the answer.
        ([ASKED, ANSWERED], [ASKED, ANSWERED, MORE], [ASKED, ANSWERED, MORE]),
        ([ASKED, ANSWERED], [ASKED], [ASKED]),
        ([ASKED, ANSWERED], [MORE, ANSWERED, MORE], [MORE, ANSWERED, MORE]),
    ],
)
def test_a_conversation_goes_on_or_is_sent_whole(
    kept: list[Any], sent: list[Any], wanted: list[Any]
) -> None:
    assert joined(kept, sent) == wanted


def test_another_system_message_replaces_the_kept_one() -> None:
    other = {"role": "system", "content": "Be long."}
    assert joined([SYSTEM, ASKED, ANSWERED], [other, MORE]) == [other, ASKED, ANSWERED, MORE]


# -- answers -------------------------------------------------------------------------------


def answer(reason: Reason = "end", *calls: ToolCall, text: str = "Hello") -> Answer:
    return Answer(text, "hm", calls, reason, (1, 2), STATS)


@pytest.mark.parametrize(
    ("reason", "calls", "finish"),
    [
        ("end", (), "stop"),
        ("stop", (), "stop"),
        ("length", (), "length"),
        ("context", (), "length"),
        ("end", (ToolCall("add", {}),), "tool_calls"),
        ("length", (ToolCall("add", {}),), "length"),
    ],
)
def test_finish_reasons(reason: Reason, calls: tuple[ToolCall, ...], finish: str) -> None:
    reply = Reply(Ask(), "m").whole(answer(reason, *calls), None)
    assert reply["choices"][0]["finish_reason"] == finish


def test_a_whole_answer_has_openais_form() -> None:
    ask = Ask(ident="ab" * 16)
    body = Reply(ask, "m", created=5).whole(
        answer("end", ToolCall("add", {"a": 2**70}), text=""), Kept("anna", 4, 100)
    )
    message = body["choices"][0]["message"]
    assert message["content"] is None
    assert message["reasoning_content"] == "hm"
    call = message["tool_calls"][0]
    assert call["id"] == "call_" + "ab" * 8 + "_0"
    assert json.loads(call["function"]["arguments"]) == {"a": 2**70}
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 9,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert body["session"] == {"name": "anna", "messages": 4, "bytes": 100}
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 5, "m")
    assert Kept("anna", 4, problem="full").body()["problem"] == "full"


def test_timings_are_those_that_our_client_reads() -> None:
    timings = msgspec.convert(timings_of(STATS), Timings)
    assert (timings.cache_n, timings.prompt_n, timings.prompt_ms) == (4, 3, 500.0)
    assert (timings.predicted_n, timings.predicted_ms) == (9, 2000.0)
    assert (timings.draft_n, timings.draft_n_accepted, timings.cycles) == (9, 4, STATS.steps)
    assert timings.decode_tok_s == STATS.tok_s == 4.0


def test_plain_completions_have_text() -> None:
    ask = Ask(prompt="Once", stream=True)
    reply = Reply(ask, "m")
    assert reply.opening() == b""
    event = json.loads(reply.piece(Chunk(" upon"), None)[6:])
    assert event["choices"] == [{"index": 0, "text": " upon", "finish_reason": None}]
    whole = Reply(Ask(prompt="Once"), "m").whole(answer(), None, " upon a time")
    assert whole["choices"][0]["text"] == " upon a time"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (UsageError("a"), 400, "invalid_request_error"),
        (RunChanged("a"), 409, "invalid_request_error"),
        (MachineBusy("a"), 503, "server_error"),
        (Interrupted("a"), 503, "server_error"),
        (DiskFull("a"), 500, "server_error"),
        (EngineError("a", why="b", fix="c"), 500, "server_error"),
    ],
)
def test_errors_have_openais_form(error: Any, status: int, kind: str) -> None:
    fault = fault_of(error)
    inner = fault.body()["error"]
    assert (fault.status, inner["type"]) == (status, kind)
    assert {"message", "type", "param", "code"} <= set(inner)
    assert json.loads(fault.event().removeprefix(b"data: ")) == fault.body()


def test_a_prompt_that_is_too_long_is_told_with_figures() -> None:
    inner = too_long(70, 64).body()["error"]
    assert inner["code"] == "context_length_exceeded"
    assert (inner["n_prompt_tokens"], inner["n_ctx"]) == (70, 64)
    assert "70" in inner["message"]


def test_counters_are_those_that_our_client_reads() -> None:
    counters = Counters()
    assert spec_counters(exposition(counters, busy=False, waiting=0)).drafts == 0
    counters.add(STATS)
    counters.add(STATS)
    read = spec_counters(exposition(counters, busy=True, waiting=3))
    assert (read.drafts, read.draft_tokens, read.accepted) == (8, 18, 8)
    assert read.per_position == (4, 2, 2)
