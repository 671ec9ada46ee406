"""A broken verifier is caught every time, a correct one passes every time, near ties are told."""

from __future__ import annotations

from typing import Any

import pytest

from browndwarf.errors import CheckFailed, UsageError
from browndwarf.quality.lossless import LEAST_BOUND, Settings, check_lossless
from browndwarf.quality.partings import Parting, Step, judge_greedy
from browndwarf.quality.sampled import Tally
from quality.fake_decoders import PROMPTS, FakeArms, FakeModel, draw, last_two

GREEDY = Settings(n_max=3, tokens=100)
SAMPLED = Settings(n_max=3, tokens=100, temperature=1.0, seeds=9)
MANY: dict[str, Any] = {"n_max": 3, "tokens": 100, "temperature": 1.0, "seeds": 30}
RUNS = range(20)


@pytest.mark.parametrize("run", RUNS)
async def test_one_wrong_token_in_fifty_is_caught_greedy(run: int) -> None:
    record = await check_lossless(FakeArms(broken=True, seed=run), PROMPTS, GREEDY)
    assert record.verdict == "mismatch"
    with pytest.raises(CheckFailed, match="lossless"):
        record.require()


@pytest.mark.parametrize("run", RUNS)
async def test_one_wrong_token_in_fifty_is_caught_sampled(run: int) -> None:
    record = await check_lossless(FakeArms(broken=True, seed=run), PROMPTS, SAMPLED)
    assert record.verdict == "lossy"
    assert record.sampled is not None
    assert record.sampled.sign_p < 1e-12


@pytest.mark.parametrize("run", range(4))
async def test_it_is_caught_without_common_random_numbers_given_more_tokens(run: int) -> None:
    arms = FakeArms(broken=True, seed=run, coupled=False)
    record = await check_lossless(arms, PROMPTS, Settings(**MANY, seed=run))
    assert record.verdict == "lossy"
    assert record.sampled is not None
    assert record.sampled.p < 1e-4


@pytest.mark.parametrize("run", RUNS)
async def test_a_correct_verifier_passes_greedy(run: int) -> None:
    record = await check_lossless(FakeArms(seed=run), PROMPTS, GREEDY)
    assert record.verdict == "identical"
    assert record.identical == record.prompts == len(PROMPTS)
    assert 0 < record.accepted < record.drafted
    record.require()


@pytest.mark.parametrize("run", RUNS)
async def test_a_correct_verifier_passes_sampled(run: int) -> None:
    record = await check_lossless(FakeArms(seed=run), PROMPTS, SAMPLED)
    assert record.verdict == "lossless"
    assert record.identical == record.prompts


@pytest.mark.parametrize("run", RUNS)
async def test_a_correct_verifier_passes_without_common_random_numbers(run: int) -> None:
    record = await check_lossless(FakeArms(seed=run, coupled=False), PROMPTS, SAMPLED)
    assert record.verdict == "lossless"
    assert record.sampled is not None
    assert record.sampled.power_plausible > 0.95
    assert record.sampled.power_implausible > 0.95
    assert record.identical == 0, "the fake's random numbers come in another order"


async def test_the_sampled_test_keeps_its_level() -> None:
    """p is uniform when nothing is wrong: about a tenth of 60 runs lie below 0.1."""
    below = 0
    for run in range(60):
        settings = Settings(n_max=3, tokens=60, temperature=1.0, seeds=2, seed=1 + 100 * run)
        record = await check_lossless(FakeArms(seed=run, coupled=False), PROMPTS, settings)
        assert record.sampled is not None
        below += record.sampled.p < 0.1
    assert 1 <= below <= 14


async def test_rounding_that_flips_near_ties_is_no_mismatch() -> None:
    """Noise of 0.1 flips some tokens; its bound is measured on the model and covers them."""
    prompts = tuple(range(60))
    record = await check_lossless(FakeArms(noise=0.1), prompts, GREEDY)
    assert record.verdict == "near-ties"
    assert record.near_ties
    assert record.bound is not None
    assert record.noise_samples > 16
    assert max(p.margin or 0 for p in record.near_ties) <= record.bound < 0.5
    record.require()


async def test_a_broken_verifier_does_not_hide_behind_noise() -> None:
    record = await check_lossless(FakeArms(broken=True, noise=0.1), PROMPTS, GREEDY)
    assert record.verdict == "mismatch"
    assert len(record.mismatches) > 10


async def test_a_parting_names_position_tokens_and_margin() -> None:
    record = await check_lossless(FakeArms(broken=True, seed=1), PROMPTS, GREEDY)
    parting = record.mismatches[0]
    assert parting.plain != parting.speculative
    assert parting.plain_text == f"<{parting.plain}>"
    assert parting.margin is None or parting.margin > LEAST_BOUND
    assert 0 <= parting.position < 100


async def test_all_partings_of_an_answer_are_found_not_only_the_first() -> None:
    model = FakeModel(broken=False, seed=0)
    prompt = [1, 2, 3, 4]
    answer = [s.token for s in await model.steps(prompt, n=40, temperature=0.0, seed=0)]
    wrong_at = (5, 20)
    for at in wrong_at:
        answer[at] = (answer[at] + 1) % 40
        while len(answer) > at + 1:
            answer.pop()
        while len(answer) < 40:
            answer.append(draw(last_two([*prompt, *answer]), 0.0, 0.0, None))  # type: ignore[arg-type]
    judged = await judge_greedy(model, "p", prompt, answer, limit=40)
    assert [p.position for p in judged.partings] == list(wrong_at)


async def test_an_answer_that_ends_too_early_is_a_mismatch() -> None:
    model = FakeModel(broken=False, seed=0)
    answer = [s.token for s in await model.steps([1, 2, 3], n=10, temperature=0.0, seed=0)]
    judged = await judge_greedy(model, "p", [1, 2, 3], answer[:6], limit=10)
    assert judged.partings[0].position == 6
    assert judged.partings[0].speculative is None
    assert judged.partings[0].classified(10.0).kind == "mismatch"


async def test_a_server_that_drafts_nothing_proves_nothing() -> None:
    record = await check_lossless(FakeArms(drafts=False), PROMPTS, GREEDY)
    assert record.verdict == "not-speculating"
    with pytest.raises(CheckFailed) as caught:
        record.require()
    assert "nothing was drafted" in caught.value.why


async def test_too_few_tokens_are_inconclusive_not_lossless() -> None:
    settings = Settings(n_max=3, tokens=10, temperature=1.0, seeds=1)
    record = await check_lossless(FakeArms(coupled=False), PROMPTS[:4], settings)
    assert record.verdict == "inconclusive"
    assert record.sampled is not None
    assert record.sampled.power_plausible < 0.8


async def test_no_prompts_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        await check_lossless(FakeArms(), (), GREEDY)


def test_a_token_that_the_model_cannot_emit_is_lossy_at_once() -> None:
    tally = Tally()
    for _ in range(400):
        tally.add(Step(1, ((1, -0.693147), (2, -0.693147))), token=1 if _ % 2 else 2)
    tally.add(Step(1, ((1, -0.693147), (2, -0.693147))), token=3)
    assert tally.test(1.0).verdict == "lossy"


def test_a_margin_at_the_bound_is_a_near_tie() -> None:
    parting = Parting(prompt_id="p", position=0, plain=1, speculative=2, margin=0.01)
    assert parting.classified(0.01).kind == "near-tie"
    assert parting.classified(0.009).kind == "mismatch"
