"""The server over the real runtime and the embedded pair, through a real socket."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browndwarf.decode.llm import LLM
from browndwarf.decode.server import build_app
from browndwarf.decode.server_runtime import LlmRuntime
from browndwarf.decode.server_thread import Serving, listening
from browndwarf.decode.server_worker import Worker
from browndwarf.engine.client import ChatCompletion, LlamaClient
from browndwarf.errors import RequestFailed
from browndwarf.models import demo

pytestmark = pytest.mark.engine

STORY = [{"role": "user", "content": "Tell me a story about a curious dog named Lena."}]
MORE = [{"role": "user", "content": "What is the name of the dog?"}]


def serving(llm: LLM, **settings: Any) -> Serving:
    worker = Worker(LlmRuntime(llm, **settings))
    return Serving(build_app(worker), listening("127.0.0.1", 0), worker)


async def ask(server: Serving, messages: list[Any], **settings: Any) -> ChatCompletion:
    extra = {key: settings.pop(key) for key in ("session", "response_format") if key in settings}
    async with LlamaClient(server.base_url.removesuffix("/v1")) as client:
        return await client.chat(messages, extra=extra, **settings)


async def test_answers_are_the_runtimes_own(loaded: Callable[..., LLM]) -> None:
    llm = loaded()
    wanted = llm.answer(STORY, max_tokens=60)
    item = next(p for p in demo.prompts() if p["id"] == "tools-02")
    called = llm.answer(item["messages"], tools=item["tools"], max_tokens=80)
    with serving(llm) as server:
        whole = await ask(server, STORY, max_tokens=60)
        streamed = await ask(server, STORY, max_tokens=60, stream=True)
        assert whole.text == streamed.text == wanted.text
        assert whole.finish_reason == streamed.finish_reason
        assert whole.timings.predicted_n == len(wanted.tokens)
        assert whole.timings.draft_n_accepted > 0
        assert streamed.timings.cache_n > whole.timings.cache_n
        for stream in (False, True):
            made = await ask(
                server, item["messages"], tools=item["tools"], max_tokens=80, stream=stream
            )
            assert made.finish_reason == "tool_calls"
            function = made.tool_calls[0]["function"]
            assert function["name"] == called.tool_calls[0].name == item["answer"]["name"]
            assert json.loads(function["arguments"]) == called.tool_calls[0].arguments
        # What cannot be used reaches nobody else.
        form = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
        with pytest.raises(RequestFailed):
            await ask(server, STORY, response_format=form)
        with pytest.raises(RequestFailed, match="1024"):
            await ask(server, [{"role": "user", "content": "word " * 3000}])
        assert (await ask(server, STORY, max_tokens=60)).text == wanted.text


async def test_a_conversation_goes_on_after_a_restart(
    loaded: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    item = next(p for p in demo.prompts() if p["id"] == "tools-02")
    llm = loaded(sessions=tmp_path)
    talk = llm.conversation()
    talk.say(STORY[0], max_tokens=40).run()
    wanted = talk.say(MORE[0], max_tokens=20).run()
    with serving(llm) as server:
        first = await ask(server, STORY, session="anna", max_tokens=40)
        await ask(server, MORE, max_tokens=5)  # another request takes the sequence between
        call = await ask(
            server, item["messages"], tools=item["tools"], session="ben", max_tokens=80
        )
    llm.close()
    assert first.raw["session"]["messages"] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["anna", "ben"]
    llm = loaded(sessions=tmp_path)
    with serving(llm) as server:
        again = await ask(server, MORE, session="anna", max_tokens=20)
        assert again.text == wanted.text
        assert again.timings.cache_n == wanted.stats.reused_tokens > 40
        usage = again.raw["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == again.timings.cache_n
        assert again.raw["session"]["messages"] == 4
        # In memory now, and sent whole, as most clients do.
        history = [*STORY, {"role": "assistant", "content": first.text}, *MORE]
        history += [{"role": "assistant", "content": again.text}, *MORE]
        third = await ask(server, history, session="anna", max_tokens=10)
        assert third.timings.cache_n > again.timings.cache_n
        assert third.raw["session"]["messages"] == 6
        # A result finds its call by the name that the client was told.
        result = {"role": "tool", "tool_call_id": call.tool_calls[0]["id"], "content": "3416"}
        done = await ask(server, [result], tools=item["tools"], session="ben", max_tokens=40)
        assert done.raw["session"]["messages"] == len(item["messages"]) + 3
        talk = llm.conversation("ben")
        assert talk.messages[-3]["tool_calls"][0]["id"] == result["tool_call_id"]
    llm.close()
    other = loaded(sessions=tmp_path, n_ctx=2048)
    with serving(other) as server:
        with pytest.raises(RequestFailed, match="409"):
            await ask(server, MORE, session="anna", max_tokens=5)
        with pytest.raises(RequestFailed, match="400"):
            await ask(server, MORE, session="../anna", max_tokens=5)
    with serving(other, reread=True) as server:
        read = await ask(server, MORE, session="anna", max_tokens=5)
        assert (read.timings.cache_n, read.raw["session"]["messages"]) == (0, 8)


async def test_a_conversation_that_another_program_changed_is_taken_from_disk(
    loaded: Callable[..., LLM], tmp_path: Path
) -> None:
    llm, other = loaded(sessions=tmp_path), loaded(sessions=tmp_path)
    assert other.store is not None
    with serving(llm) as server:
        await ask(server, STORY, session="anna", max_tokens=10)
        talk = other.conversation("anna")
        talk.say("And then?", max_tokens=5).run()
        talk.save()
        again = await ask(server, MORE, session="anna", max_tokens=5)
        assert again.raw["session"]["messages"] == 6
        assert other.conversation("anna").messages[2]["content"] == "And then?"
        other.store.delete("anna")
        fresh = await ask(server, MORE, session="anna", max_tokens=5)
        assert fresh.raw["session"]["messages"] == 2
