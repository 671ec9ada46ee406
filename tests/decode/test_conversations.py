"""Conversations, sessions on disk and cancellation, on the real engine."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from browndwarf.decode.llm import LLM
from browndwarf.decode.options import RuntimeOptions
from browndwarf.decode.sampling import Sampling
from browndwarf.engine.native import live_pointers
from browndwarf.errors import HeadMismatch, MachineBusy, RunChanged, RunFormatError, UsageError
from browndwarf.models import demo, synthetic

pytestmark = pytest.mark.engine

Loaded = Callable[..., LLM]
STORY = "Tell me a story about a curious dog named Lena."


def test_a_conversation_goes_on_in_another_process_without_reading_again(
    loaded: Loaded, tmp_path: Path
) -> None:
    first = loaded(sessions=tmp_path)
    talk = first.conversation("anna", system="Be brief.")
    talk.say(STORY, max_tokens=60).run()
    saved = talk.save()
    assert not saved.appended
    wanted = talk.say("What is the name of the dog?", max_tokens=30).run()
    first.close()
    second = loaded(sessions=tmp_path)
    again = second.conversation("anna")
    assert again.messages == talk.messages[:-2]
    made = again.say("What is the name of the dog?", max_tokens=30).run()
    assert made.tokens == wanted.tokens
    assert made.stats.reused_tokens == wanted.stats.reused_tokens > 60


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_cut_answer_goes_on_as_if_it_had_not_been_cut(
    loaded: Loaded, tmp_path: Path, temperature: float
) -> None:
    sampling = Sampling(temperature=temperature, seed=5, repeat_penalty=1.05)
    llm = loaded(sessions=tmp_path)
    whole = llm.conversation().say(STORY, sampling=sampling, max_tokens=50).run()
    talk = llm.conversation("anna")
    talk.say(STORY, sampling=sampling, max_tokens=20).run()
    talk.save()
    llm.close()
    other = loaded(sessions=tmp_path)
    again = other.conversation("anna")
    rest = again.extend(max_tokens=30).run()
    assert rest.tokens == whole.tokens[20:]
    assert again.messages[-1]["content"] == whole.text
    if whole.reason == "length":
        again.extend(max_tokens=500).run()
    with pytest.raises(UsageError):
        again.extend()
    with pytest.raises(UsageError):
        other.conversation().extend()


@pytest.mark.parametrize("kind", ["assistant", "nextn"])
def test_a_restored_state_is_the_saved_one(loaded: Loaded, hybrid: Path, kind: str) -> None:
    nextn = kind == "nextn"
    llm = loaded(hybrid, None, n_max=2) if nextn else loaded(n_max=2)
    slot = llm._slots[0]
    with llm.stream_text("hello my friend, tell me about the sea", max_tokens=40) as stream:
        stream.run()
    kept = llm.keeper.capture(slot)
    assert set(kept.states) == ({"target", "head"} if nextn else {"target"})
    prompt = kept.tokens + llm.pair.vocab.tokenize(" and then")
    with llm.stream_text(prompt, max_tokens=30) as stream:
        wanted = stream.run()
    llm.keeper.restore(slot, kept)
    with llm.stream_text(prompt, max_tokens=30) as stream:
        made = stream.run()
    assert made.tokens == wanted.tokens
    assert made.stats.reused_tokens == kept.kept
    if not nextn:
        assert made.stats.accepted == wanted.stats.accepted


def test_conversations_that_share_a_sequence_save_their_own_states(
    loaded: Loaded, tmp_path: Path
) -> None:
    llm = loaded(sessions=tmp_path)
    texts = ("Hello", "Tell me about the sea and the wind.", "What is the capital of Thailand?")
    talks = [llm.conversation(name, system="Be brief.") for name in ("anna", "ben")]
    for i in range(8):
        talk = talks[i % 3 % 2]
        talk.say(texts[i % 3], max_tokens=8 + 40 * (i % 2)).run()
        talk.save()
        assert llm.store is not None
        loaded_again = llm.store.load(talk.name or "", llm.fingerprint)
        assert loaded_again.messages == talk.messages
        slot = llm.slot_of(talk)
        assert slot is not None
        assert loaded_again.tokens == slot.tokens


def test_other_settings_are_refused_and_read_again_on_request(
    loaded: Loaded, tmp_path: Path
) -> None:
    llm = loaded(sessions=tmp_path)
    talk = llm.conversation("anna")
    talk.say("Hello", max_tokens=20).run()
    talk.save()
    llm.close()
    for settings in ({"n_ctx": 2048}, {"draft": "none"}, {"kv_k": "q8_0"}):
        other = loaded(sessions=tmp_path, **settings)
        with pytest.raises(RunChanged):
            other.conversation("anna")
        again = other.conversation("anna", reread=True)
        assert again.messages == talk.messages
        assert again.say("Thank you.", max_tokens=10).run().stats.reused_tokens == 0
        other.close()


def test_a_damaged_session_is_refused_and_read_again_on_request(
    loaded: Loaded, tmp_path: Path
) -> None:
    llm = loaded(sessions=tmp_path)
    talk = llm.conversation("anna")
    talk.say("Hello", max_tokens=20).run()
    talk.save()
    data = next((tmp_path / "anna").glob("data-*"))
    content = bytearray(data.read_bytes())
    content[-100] ^= 4
    data.write_bytes(content)
    with pytest.raises(RunFormatError):
        llm.conversation("anna")
    assert llm.conversation("anna", reread=True).messages == talk.messages


def test_a_cancelled_answer_leaves_a_conversation_that_goes_on(loaded: Loaded) -> None:
    llm = loaded()
    talk = llm.conversation()
    with talk.say(STORY) as stream:
        for i, _ in enumerate(stream):
            if i == 3:
                stream.cancel()
    assert stream.answer.reason == "cancelled"
    assert talk.messages[-1]["content"] == stream.answer.text
    assert talk.say("What is the capital of Thailand?", max_tokens=30).run().reason in (
        "end",
        "length",
    )


def test_a_fault_in_mid_step_leaves_a_consistent_state(loaded: Loaded, hybrid: Path) -> None:
    for llm in (loaded(n_max=3), loaded(hybrid, None, n_max=3)):
        llm.pair.vocab.is_end = lambda token: False  # type: ignore[method-assign]
        prompt = llm.tokenize("hello my friend, tell me about the sea")
        with llm.stream_text(prompt, max_tokens=30) as stream:
            wanted = stream.run().tokens
        for place in ("_verify", "_accept", "_settle", "_keep_rows"):
            real = getattr(llm.speculator, place)
            calls = 0

            def fail(*args: object, real: object = real, **settings: object) -> object:
                nonlocal calls
                calls += 1
                if calls == 5:
                    raise KeyboardInterrupt
                return real(*args, **settings)  # type: ignore[operator]

            setattr(llm.speculator, place, fail)
            with pytest.raises(KeyboardInterrupt), llm.stream_text(prompt, max_tokens=30) as broken:
                broken.run()
            setattr(llm.speculator, place, real)
            with llm.stream_text(prompt, max_tokens=30) as stream:
                assert stream.run().tokens == wanted


@pytest.mark.slow
def test_a_conversation_that_outgrows_its_context_keeps_going(loaded: Loaded, hybrid: Path) -> None:
    for llm in (
        loaded(n_ctx=256, context_shift=True),
        loaded(n_ctx=256, context_shift=True, swa_full=True),
        loaded(hybrid, None, n_ctx=256, context_shift=True),
    ):
        llm.pair.vocab.is_end = lambda token: False  # type: ignore[method-assign]
        with llm.stream_text("hello my friend", max_tokens=400) as stream:
            answer = stream.run()
        assert len(answer.tokens) == 400
        assert answer.reason == "length"
        assert len(llm._slots[0].tokens) <= 256
    fixed = loaded(n_ctx=256)
    fixed.pair.vocab.is_end = lambda token: False  # type: ignore[method-assign]
    with fixed.stream_text("hello my friend", max_tokens=600) as stream:
        assert stream.run().reason == "context"


def test_more_streams_than_sequences_are_refused(loaded: Loaded) -> None:
    llm = loaded(sequences=1)
    first = llm.stream([{"role": "user", "content": "Hello"}])
    with pytest.raises(MachineBusy):
        llm.stream([{"role": "user", "content": "Hello"}])
    first.close()
    llm.answer([{"role": "user", "content": "Hello"}], max_tokens=5)


def test_streams_in_turns_do_not_mix(loaded: Loaded) -> None:
    llm = loaded(sequences=2)
    prompts = [[{"role": "user", "content": text}] for text in (STORY, "Give me JSON.")]
    alone = [llm.answer(p, max_tokens=40).text for p in prompts]
    streams = [llm.stream(p, max_tokens=40) for p in prompts]
    while not all(stream.done for stream in streams):
        for stream in streams:
            next(stream, None)
    assert [stream.answer.text for stream in streams] == alone


async def test_async_streams_give_the_same_text(loaded: Loaded) -> None:
    llm = loaded()
    messages = [{"role": "user", "content": STORY}]
    wanted = llm.answer(messages, max_tokens=40)
    chunks = [chunk.text async for chunk in llm.astream(messages, max_tokens=40)]
    assert "".join(chunks) == wanted.text
    stream = llm.astream(messages, max_tokens=40)
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    assert (await llm.aanswer(messages, max_tokens=40)).text == wanted.text
    await asyncio.sleep(0)


def test_stop_strings_end_an_answer_and_are_not_shown(loaded: Loaded) -> None:
    llm = loaded()
    answer = llm.answer([{"role": "user", "content": STORY}], stop=["curious"], max_tokens=60)
    assert answer.reason == "stop"
    assert answer.text.endswith("a ")


def test_tools_are_called_and_their_results_taken(loaded: Loaded) -> None:
    item = next(p for p in demo.prompts() if p.get("tools"))
    llm = loaded()
    talk = llm.conversation(tools=item["tools"])
    talk.messages += item["messages"][:-1]
    answer = talk.say(item["messages"][-1], max_tokens=80).run()
    if answer.tool_calls:
        call = answer.tool_calls[0]
        assert "raw" not in call.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
        assert talk.say(result, max_tokens=40).run().text


def test_wrong_heads_and_settings_are_refused(loaded: Loaded, tmp_path: Path) -> None:
    target, head = synthetic.write_pair(tmp_path)
    with pytest.raises(HeadMismatch):
        loaded(demo.TARGET, head)
    with pytest.raises(UsageError):
        loaded(demo.HEAD)
    with pytest.raises(UsageError):
        RuntimeOptions(n_ctx=1)
    with pytest.raises(UsageError):
        loaded(nonsense=1)
    assert target.exists()


def test_nothing_leaks_over_many_turns(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    llm = loaded(n_ctx=512, n_max=2, sessions=tmp_path, context_shift=True)
    process = psutil.Process()

    def turns(count: int) -> None:
        for i in range(count):
            talk = llm.conversation("anna")
            with talk.say("Hello", max_tokens=6, sampling=Sampling(temperature=0.5)) as stream:
                for n, _ in enumerate(stream):
                    if i % 3 == 0 and n:
                        stream.cancel()
            if len(talk.messages) > 20:
                llm.store.delete("anna")  # type: ignore[union-attr]
            else:
                talk.save()

    turns(20)
    gc.collect()
    pointers, before = live_pointers(), process.memory_info().rss
    turns(40)
    gc.collect()
    assert live_pointers() == pointers
    assert process.memory_info().rss < 1.05 * before


def test_closing_frees_everything(loaded: Loaded) -> None:
    gc.collect()
    before = live_pointers()
    llm = loaded(sequences=2, p_min=0.3)
    llm.answer([{"role": "user", "content": "Hello"}], max_tokens=5)
    assert live_pointers() != before
    llm.close()
    llm.close()
    assert live_pointers() == before
