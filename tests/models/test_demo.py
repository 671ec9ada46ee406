"""The demo pair is whole, says what it is, and speaks Gemma 4's format to llama-server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from jinja2.sandbox import ImmutableSandboxedEnvironment

from browndwarf.engine.client import LlamaClient
from browndwarf.engine.locate import Build
from browndwarf.engine.options import ServerOptions
from browndwarf.engine.process import LlamaServer
from browndwarf.errors import BadModelFile
from browndwarf.models import demo

ENV = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "City name"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Oslo"}},
}
LOOP: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": "", "reasoning_content": "I need it.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": '{"temperature": 3}'},
]


def render(messages: list[dict[str, Any]], **settings: Any) -> str:
    template = ImmutableSandboxedEnvironment().from_string(demo.CHAT_TEMPLATE.read_text())
    settings = {"add_generation_prompt": True, "bos_token": "<bos>", **settings}
    return str(template.render(messages=messages, **settings))


def test_the_released_files_are_whole_and_small() -> None:
    demo.verify()
    assert demo.TARGET.stat().st_size + demo.HEAD.stat().st_size <= 24 * 2**20


def test_a_changed_file_is_named(tmp_path: Path) -> None:
    for name in demo.checksums():
        shutil.copy(demo.FOLDER / name, tmp_path / name)
    demo.verify(tmp_path)
    with (tmp_path / "mtp-F16.gguf").open("r+b") as stream:
        stream.seek(2_000_000)
        stream.write(b"x")
    with pytest.raises(BadModelFile, match=r"mtp-F16\.gguf is not the released file"):
        demo.verify(tmp_path)
    (tmp_path / "target-Q8_0.gguf").unlink()
    with pytest.raises(BadModelFile, match=r"target-Q8_0\.gguf is missing"):
        demo.verify(tmp_path)


@pytest.mark.parametrize("path", [demo.TARGET, demo.HEAD], ids=["target", "head"])
def test_the_files_say_what_they_are(path: Path) -> None:
    fields = GGUFReader(str(path)).fields
    assert str(fields["general.name"].contents()).startswith("browndwarf demo")
    assert fields["general.license"].contents() == "apache-2.0"
    assert fields["general.description"].contents()
    assert fields["tokenizer.chat_template"].contents() == demo.CHAT_TEMPLATE.read_text()


def test_there_are_twelve_prompts_of_every_workload() -> None:
    for workload in ("prose", "code", "json", "chat", "arithmetic", "tools"):
        prompts = demo.prompts(workload)
        assert len(prompts) >= 12
        assert all(p["messages"][-1]["role"] == "user" for p in prompts)
    assert len({p["id"] for p in demo.prompts()}) == len(demo.prompts())
    assert all(p["tools"] for p in demo.prompts("tools"))
    assert {p["thinking"] for p in demo.prompts("arithmetic")} == {True, False}


def test_history_continues_what_was_generated_when_thinking_is_off() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    first = render(messages, enable_thinking=False)
    messages += [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Bye"}]
    assert render(messages, enable_thinking=False).startswith(first + "Hello!<turn|>\n")
    calling = render(LOOP[:2], tools=[WEATHER], enable_thinking=False)
    called = '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>'
    assert render(LOOP, tools=[WEATHER], enable_thinking=False).startswith(calling + called)


def test_thinking_opens_the_system_turn_and_is_dropped_from_past_turns() -> None:
    text = render(LOOP, tools=[WEATHER], enable_thinking=True)
    assert "<|turn>system\n<|think|>\nBe brief.<|tool>declaration:get_weather{" in text
    assert "<|channel>thought\nI need it.\n<channel|><|tool_call>" in text
    assert text.endswith('response:get_weather{value:<|"|>{"temperature": 3}<|"|>}<tool_response|>')
    past = [*LOOP, {"role": "assistant", "content": "3."}, {"role": "user", "content": "Thanks"}]
    text = render(past, tools=[WEATHER], enable_thinking=True)
    assert "I need it." not in text
    assert text.endswith("<|turn>user\nThanks<turn|>\n<|turn>model\n")


@pytest.mark.engine
async def test_llama_server_agrees_with_the_template_and_parses_the_answers(
    engine_build: Build, tmp_path: Path
) -> None:
    options = ServerOptions(
        model=str(demo.TARGET), draft=str(demo.HEAD), n_max=3, ctx=1024, threads=1
    )
    log = tmp_path / "server.log"
    server = LlamaServer(engine_build, options, log_path=log, env=ENV)
    sent = json.loads(json.dumps(LOOP))
    function = sent[2]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    async with server, LlamaClient(server.base_url) as client:
        for thinking in (True, False):
            switch = {"enable_thinking": thinking}
            theirs = await client.apply_template(sent, [WEATHER], chat_template_kwargs=switch)
            ours = render(LOOP, tools=[WEATHER], **switch)
            assert theirs.removeprefix("<bos>") == ours.removeprefix("<bos>")
            call = await client.chat(
                sent[:2], tools=[WEATHER], max_tokens=80, chat_template_kwargs=switch
            )
            assert call.finish_reason == "tool_calls"
            assert call.tool_calls[0]["function"]["name"] == "get_weather"
            assert json.loads(call.tool_calls[0]["function"]["arguments"]) == {"city": "Oslo"}
            assert bool(call.reasoning) == thinking
            asked = [{"role": "user", "content": "What is 47 plus 85?"}]
            answer = await client.chat(asked, max_tokens=200, chat_template_kwargs=switch)
            assert "132" in answer.text
            assert ("Ones: 7 + 5 = 12" in answer.reasoning) == thinking
            assert answer.timings.draft_n_accepted > answer.timings.draft_n / 2
    assert "outdated gemma4 chat template" not in log.read_text()
