"""Speculation changes the speed and nothing else: on the real engine, with all kinds of heads."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from browndwarf.decode.drafter import ChainedDrafter
from browndwarf.decode.llm import LLM
from browndwarf.decode.sampling import Sampling
from browndwarf.decode.slot import Slot
from browndwarf.engine.native import live_pointers
from browndwarf.errors import UsageError
from browndwarf.models import demo
from decode.chained_model import write_chained

pytestmark = pytest.mark.engine

Loaded = Callable[..., LLM]
NEAR_TIE = 0.05
"""Logits closer than this may change places when a batch has another size. Of the demo model two
logits differ by 1 or more nearly always; rounding moves them by some hundredths."""


def generate(
    llm: LLM, prompts: list[list[int]], tokens: int, **settings: object
) -> list[list[int]]:
    made = []
    for prompt in prompts:
        with llm.stream_text(prompt, max_tokens=tokens, **settings) as stream:  # type: ignore[arg-type]
            made.append(list(stream.run().tokens))
    return made


def chat_prompts(llm: LLM, count: int) -> list[list[int]]:
    found = []
    for item in demo.prompts()[:: max(1, len(demo.prompts()) // count)][:count]:
        text = llm.template.render(
            item["messages"], tools=item.get("tools"), thinking=item.get("thinking", False)
        )
        found.append(llm.tokenize(text))
    return found


def assert_same(
    plain: LLM, prompts: list[list[int]], one: list[list[int]], other: list[list[int]]
) -> None:
    """Equal token by token, or parted at a near tie of the plain model's logits."""
    for prompt, a, b in zip(prompts, one, other, strict=True):
        if a == b:
            continue
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        assert margin(plain, prompt + a[:at], a[at], b[at]) < NEAR_TIE, (at, a[at], b[at])


def margin(llm: LLM, tokens: list[int], one: int, other: int) -> float:
    slot = llm._slots[0]
    llm.keeper.clear(slot)
    llm.keeper.prefill(slot, tokens)
    logits = llm.pair.target.logits(llm.keeper.last_row)
    assert {one, other} == set(np.argsort(logits)[-2:].tolist()), "they are not the best two"
    return abs(float(logits[one] - logits[other]))


class Oracle:
    """Wraps a drafter: its guesses are the right tokens, but for some that are spoilt, so that
    every length of acceptance and of rollback happens."""

    def __init__(self, inner: object, start: int, right: list[int]) -> None:
        self.inner, self.start, self.right = inner, start, right
        self.chance = random.Random(5)

    def draft(self, slots: list[Slot], n: int) -> None:
        self.inner.draft(slots, n)  # type: ignore[attr-defined]
        for slot in slots:
            at = len(slot.tokens) - self.start
            for i, token in enumerate(self.right[at : at + len(slot.draft)]):
                slot.draft[i] = token if self.chance.random() < 0.7 else (token + 1) % 1000

    def settle(self, slot: Slot) -> None:
        self.inner.settle(slot)  # type: ignore[attr-defined]


@pytest.mark.parametrize("n_max", [1, 2, 3, 4])
def test_greedy_answers_are_those_of_the_target_alone(loaded: Loaded, n_max: int) -> None:
    plain = loaded(draft="none", backend_sampling=False)
    fast = loaded(n_max=n_max)
    prompts = chat_prompts(plain, 8)
    assert_same(plain, prompts, generate(plain, prompts, 48), generate(fast, prompts, 48))


@pytest.mark.parametrize("draft", ["lookup", None])
def test_other_ways_to_draft_change_nothing(loaded: Loaded, draft: str | None) -> None:
    plain = loaded(draft="none", backend_sampling=False)
    prompts = chat_prompts(plain, 6)
    other = loaded(draft=draft or demo.HEAD, n_max=4, p_min=0.6, adaptive=draft is None)
    assert_same(plain, prompts, generate(plain, prompts, 40), generate(other, prompts, 40))


@pytest.mark.parametrize("backend", [True, False], ids=["device", "host"])
def test_the_same_seed_samples_the_same_tokens(loaded: Loaded, backend: bool) -> None:
    sampling = Sampling(temperature=0.8, top_p=0.95, top_k=40, min_p=0.02, seed=3)
    plain = loaded(draft="none", backend_sampling=backend)
    prompts = chat_prompts(plain, 4)
    wanted = generate(plain, prompts, 40, sampling=sampling)
    for n_max in (1, 3):
        fast = loaded(n_max=n_max, backend_sampling=backend)
        made = generate(fast, prompts, 40, sampling=sampling)
        # A draw that falls between two tokens may fall to the other side by rounding.
        assert sum(a == b for a, b in zip(wanted, made, strict=True)) >= len(prompts) - 1


def test_speculation_keeps_the_distribution(loaded: Loaded) -> None:
    plain = loaded(draft="none", backend_sampling=False)
    fast = loaded(n_max=3)
    prompt = chat_prompts(plain, 8)[3]
    counts = []
    for llm in (plain, fast):
        seen: dict[tuple[int, ...], int] = {}
        for seed in range(120):
            sampling = Sampling(temperature=1.0, seed=seed)
            key = tuple(generate(llm, [prompt], 3, sampling=sampling)[0])
            seen[key] = seen.get(key, 0) + 1
        counts.append(seen)
    every = set(counts[0]) | set(counts[1])
    distance = sum(abs(counts[0].get(k, 0) - counts[1].get(k, 0)) for k in every) / 240
    # The seeds are the same, so the draws are; only rounding may move a few.
    assert distance < 0.05


def test_penalties_and_bias_are_those_of_plain_decoding(loaded: Loaded) -> None:
    sampling = Sampling(repeat_penalty=1.3, presence_penalty=0.4, bias=((10, 3.0), (11, -100.0)))
    plain = loaded(draft="none")
    prompts = chat_prompts(plain, 4)
    wanted = generate(plain, prompts, 40, sampling=sampling)
    made = generate(loaded(n_max=3), prompts, 40, sampling=sampling)
    assert sum(a == b for a, b in zip(wanted, made, strict=True)) >= len(prompts) - 1
    assert not any(11 in tokens for tokens in made)


def test_a_grammar_holds_under_speculation(loaded: Loaded) -> None:
    grammar = 'root ::= "yes, " ("red" | "blue") " and " [0-9]+ "."'
    llm = loaded(n_max=3)
    import re

    for prompt in chat_prompts(llm, 4):
        for temperature in (0.0, 1.2):
            sampling = Sampling(grammar=grammar, temperature=temperature, seed=1)
            with llm.stream_text(prompt, sampling=sampling, max_tokens=40) as stream:
                answer = stream.run()
            assert re.fullmatch(r"yes, (red|blue) and [0-9]+\.?", answer.text), answer.text


def test_a_json_schema_gives_json_of_that_form(loaded: Loaded) -> None:
    import json

    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
    llm = loaded(n_max=2)
    answer = llm.answer(
        [{"role": "user", "content": "Give me JSON."}],
        sampling=Sampling(json_schema=schema),
        max_tokens=80,
    )
    assert answer.reason == "end"
    assert set(json.loads(answer.text)) == {"name", "ok"}


@pytest.mark.parametrize(
    "bad", [Sampling(grammar="root ::= ("), Sampling(json_schema={"type": "nonsense"})]
)
def test_sampling_that_cannot_be_used_leaves_the_sequence_as_it_was(
    loaded: Loaded, bad: Sampling
) -> None:
    llm = loaded(n_max=2)
    prompts = chat_prompts(llm, 1)
    good = Sampling(temperature=0.8, seed=3)
    wanted = generate(llm, prompts, 20, sampling=good)
    owned = live_pointers()
    with pytest.raises(UsageError):
        generate(llm, prompts, 20, sampling=bad)
    assert live_pointers() == owned
    assert generate(llm, prompts, 20, sampling=good) == wanted


@pytest.mark.parametrize("n_max", [1, 2, 3, 4])
@pytest.mark.parametrize("rollback", [True, False], ids=["rollback", "checkpoint"])
def test_recurrent_targets_undo_rejected_drafts(
    loaded: Loaded, hybrid: Path, n_max: int, rollback: bool
) -> None:
    plain = loaded(hybrid, "none", backend_sampling=False)
    prompts = [plain.tokenize("hello there my friend, tell me about the sea")]
    wanted = generate(plain, prompts, 60)
    fast = loaded(hybrid, None, n_max=n_max, recurrent_rollback=rollback)
    assert fast.pair.kind == "nextn"
    assert_same(plain, prompts, wanted, generate(fast, prompts, 60))
    inner = fast.speculator._drafter
    fast.speculator._drafter = Oracle(inner, len(prompts[0]), wanted[0])  # type: ignore[assignment]
    fast.keeper.clear(fast._slots[0])
    made = generate(fast, prompts, 60)
    assert sum(fast._slots[0].tally.accepted) > 10
    assert_same(plain, prompts, wanted, made)


def test_the_driver_of_chained_heads_drafts_as_the_single_one_does(
    loaded: Loaded, hybrid: Path
) -> None:
    """With one layer the two must agree."""
    llm = loaded(hybrid, None, n_max=1)
    prompts = [llm.tokenize("hello there my friend, tell me about the sea")]
    guesses: list[list[int]] = []
    for chained in (False, True):
        if chained:
            llm.pair.kind = "chained"
            assert llm.pair.head is not None
            llm.speculator._drafter = ChainedDrafter(llm.pair, llm.pair.head)
        llm.keeper.clear(llm._slots[0])
        drafter, made = llm.speculator._drafter, []
        assert drafter is not None
        real = drafter.draft

        def note(
            slots: list[Slot],
            n: int,
            real: Callable[[list[Slot], int], None] = real,
            made: list[int] = made,
        ) -> None:
            real(slots, n)
            made += slots[0].draft

        drafter.draft = note  # type: ignore[method-assign]
        guesses.append(made)
        guesses.append(generate(llm, prompts, 40)[0])
    assert guesses[1] == guesses[3]
    assert sum(a == b for a, b in zip(guesses[0], guesses[2], strict=True)) > 30


@pytest.mark.parametrize("n_max", [1, 2, 3, 4])
def test_chained_heads_change_nothing(loaded: Loaded, tmp_path: Path, n_max: int) -> None:
    model = write_chained(tmp_path / "chained.gguf", heads=3)
    plain = loaded(model, "none", backend_sampling=False)
    prompts = [plain.tokenize("hello there my friend, tell me about the sea")]
    wanted = generate(plain, prompts, 60)
    fast = loaded(model, None, n_max=n_max)
    assert fast.pair.kind == "chained"
    assert fast.pair.n_max == min(n_max, 3)
    assert_same(plain, prompts, wanted, generate(fast, prompts, 60))
    inner = fast.speculator._drafter
    fast.speculator._drafter = Oracle(inner, len(prompts[0]), wanted[0])  # type: ignore[assignment]
    fast.keeper.clear(fast._slots[0])
    made = generate(fast, prompts, 60)
    assert sum(fast._slots[0].tally.accepted) > 10
    assert_same(plain, prompts, wanted, made)


def test_conversations_that_move_together_do_not_mix(loaded: Loaded) -> None:
    llm = loaded(n_max=3, sequences=3)
    prompts = [item["messages"] for item in demo.prompts("prose")[:5]]
    together = llm.batch(prompts, max_tokens=40)
    alone = loaded(draft="none", backend_sampling=False)
    tokens = [alone.tokenize(alone.template.render(p)) for p in prompts]
    wanted = generate(alone, tokens, 40)
    assert_same(alone, tokens, wanted, [list(a.tokens) for a in together])


def test_statistics_add_up(loaded: Loaded) -> None:
    llm = loaded(n_max=3)
    answer = llm.answer([{"role": "user", "content": "Tell me a story."}], max_tokens=60)
    stats = answer.stats
    assert stats.tokens == len(answer.tokens)
    assert stats.tokens == 1 + stats.steps + sum(stats.accepted)
    assert list(stats.accepted) == sorted(stats.accepted, reverse=True)
    assert 0 < stats.acceptance <= 1
    assert stats.tok_s > 0
    assert stats.decode_s >= stats.verify_s > 0
