"""The budget's formulas against known truth, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from browndwarf.engine.options import ServerOptions
from browndwarf.errors import UsageError
from browndwarf.models.gguf import ModelInfo, read_model
from browndwarf.models.hollow import SHAPES, write_hollow, write_hollow_head
from browndwarf.plan.compute import ComputeSizes, FittedCompute
from browndwarf.plan.gate import BudgetGate
from browndwarf.plan.limits import limit_from_free, limit_from_size
from browndwarf.plan.memory import max_context, plan_memory
from browndwarf.plan.remedies import make_plan
from browndwarf.plan.setup import Setup, setup_from_options
from browndwarf.plan.sizes import (
    draft_kv_bytes,
    flash_scratch_bytes,
    head_weights,
    kv_bytes,
    recurrent_bytes,
    target_weights,
)
from browndwarf.units import GIB, MIB
from gguf_files import hollow_pair


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelInfo, ModelInfo]:
    """The full 12B shape, headers only, with its drafter."""
    folder = tmp_path_factory.mktemp("12b")
    write_hollow(folder / "t.gguf", SHAPES["gemma4-12b"])
    write_hollow_head(folder / "h.gguf", SHAPES["gemma4-12b"])
    return read_model(folder / "t.gguf"), read_model(folder / "h.gguf")


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    """A hybrid of 8 layers with a head inside."""
    target, _ = hollow_pair(tmp_path_factory.mktemp("qwen"), "qwen35-9b", layers=8)
    return read_model(target)


class Constant:
    """A compute source with a slope: base + ctx/1024 MiB."""

    def __init__(self, base: float = 100.0) -> None:
        self.base = base
        self.calls = 0

    def sizes(self, setups: Sequence[Setup]) -> list[ComputeSizes]:
        self.calls += 1
        return [
            ComputeSizes(self.base + s.n_ctx / 1024 * s.ubatch / 512, 10.0 * s.draft, "test", True)
            for s in setups
        ]


@pytest.mark.parametrize(
    ("options", "mib"),
    [
        ({"n_ctx": 4096}, 544),
        ({"n_ctx": 4096, "kv": "q8_0"}, 289),
        ({"n_ctx": 16384}, 736),
        ({"n_ctx": 16384, "kv": "q8_0"}, 391),
        ({"n_ctx": 4096, "parallel": 4, "unified": True}, 1344),
        ({"n_ctx": 4096, "parallel": 4, "unified": True, "kv": "q8_0"}, 714),
        ({"n_ctx": 16384, "parallel": 4, "unified": True}, 1696),
        ({"n_ctx": 16384, "parallel": 4, "unified": True, "kv": "q8_0"}, 901),
        ({"n_ctx": 16384, "parallel": 4}, 2176),
        ({"n_ctx": 4096, "ubatch": 2048}, 1024 - 64 + 64 + 0),
        ({"n_ctx": 16384, "swa_full": True}, 256 + 5120),
        ({"n_ctx": 16384, "ubatch": 256}, 256 + 400),
    ],
)
def test_kv_of_gemma_12b_is_what_servers_logged(
    gemma: tuple[ModelInfo, ModelInfo], options: dict[str, object], mib: int
) -> None:
    """Measured on a GPU build, MiB, rounded."""
    kv = str(options.pop("kv", "f16"))
    made = kv_bytes(Setup(target=gemma[0], kv_k=kv, kv_v=kv, **options))  # type: ignore[arg-type]
    assert round((made.full + made.sliding) / MIB) == mib


def test_tied_embeddings_are_kept_twice_on_a_gpu_and_once_on_a_cpu(
    gemma: tuple[ModelInfo, ModelInfo],
) -> None:
    """The input side stays on the host, the output side is a copy on the device."""
    target, head = gemma
    embedding = target.by_name["token_embd.weight"].bytes
    setup = Setup(target=target, head=head, draft=True)
    assert target_weights(setup).device == target.weight_bytes
    assert target_weights(setup).host == embedding
    cpu = setup.with_(backend="cpu")
    padding = target_weights(cpu).device - target.weight_bytes
    assert 0 <= padding < 32 * len(target.tensors)
    assert target_weights(cpu).host == 0
    assert head_weights(setup).device == head.weight_bytes
    assert head_weights(setup.with_(draft=False)).device == 0


def test_layers_that_stay_in_ram_take_their_cache_with_them(
    gemma: tuple[ModelInfo, ModelInfo],
) -> None:
    """-ngl 25 is the output and the last 24 of 48 layers."""
    whole, half = Setup(target=gemma[0]), Setup(target=gemma[0], gpu_layers=25)
    assert [half.on_device(i) for i in (23, 24, 47)] == [False, True, True]
    assert kv_bytes(half).full * 2 == kv_bytes(whole).full
    assert kv_bytes(half).host == kv_bytes(half).full + kv_bytes(half).sliding
    assert target_weights(half).device < target_weights(whole).device


def test_rejected_drafts_of_a_hybrid_cost_a_state_each(qwen: ModelInfo) -> None:
    """Slots x (1 + n_max) x (r + s) x 4 bytes x recurrent layers; drafting off, one state."""
    one = 6 * (24576 + 524288) * 4
    setup = Setup(target=qwen, draft=True, n_max=3, parallel=2)
    assert recurrent_bytes(setup) == 2 * 4 * one
    assert recurrent_bytes(setup.with_(draft=False)) == 2 * one


def test_a_head_inside_keeps_a_cache_of_its_own_in_its_own_type(qwen: ModelInfo) -> None:
    """f16 whatever the target's type is; and its weights load only when drafting."""
    setup = Setup(target=qwen, draft=True, n_ctx=8192, kv_k="q4_0", kv_v="q4_0")
    assert draft_kv_bytes(setup) == 8192 * (4 * 256 * 2) * 2
    assert draft_kv_bytes(setup.with_(draft_kv_k="q8_0")) < draft_kv_bytes(setup)
    without = setup.with_(draft=False)
    assert draft_kv_bytes(without) == 0
    assert target_weights(without).device < target_weights(setup).device


def test_an_assistant_keeps_no_cache(gemma: tuple[ModelInfo, ModelInfo]) -> None:
    """It reads the target's."""
    assert draft_kv_bytes(Setup(target=gemma[0], head=gemma[1], draft=True)) == 0


def test_flash_attention_unpacks_a_quantized_cache_on_cuda_only(
    gemma: tuple[ModelInfo, ModelInfo],
) -> None:
    """One full layer's K and V at f16: 2 x 512 x 16384 x 2 bytes."""
    setup = Setup(target=gemma[0], n_ctx=16384, kv_k="q8_0", kv_v="q8_0")
    assert flash_scratch_bytes(setup) == 2 * 512 * 16384 * 2
    assert flash_scratch_bytes(setup.with_(kv_k="f16", kv_v="f16")) == 0
    assert flash_scratch_bytes(setup.with_(backend="cpu")) == 0


def test_impossible_settings_are_refused_before_anything_starts(
    gemma: tuple[ModelInfo, ModelInfo],
) -> None:
    """As llama.cpp would refuse them, with exit code 2."""
    with pytest.raises(UsageError, match="no type for a KV cache"):
        Setup(target=gemma[0], kv_k="q6_k")
    with pytest.raises(UsageError, match="flash attention"):
        Setup(target=gemma[0], kv_v="q8_0", flash_attention=False)
    with pytest.raises(UsageError, match="parallel"):
        Setup(target=gemma[0], parallel=0)


def test_the_lines_add_up_and_each_names_its_source(gemma: tuple[ModelInfo, ModelInfo]) -> None:
    """The document has the promised keys."""
    setup = Setup(target=gemma[0], head=gemma[1], draft=True, n_ctx=16384)
    budget = plan_memory(setup, limit_from_size(8 * GIB, backend="cuda"), Constant())
    body = budget.as_json()
    assert sum(line["mib"] for line in body["lines"]) == pytest.approx(body["total_mib"], abs=0.1)
    assert all(line["source"] for line in body["lines"])
    names = [line["name"] for line in body["lines"]]
    assert names == [
        "weights", "kv_full", "kv_sliding", "draft_weights", "draft_kv", "compute",
        "draft_compute", "context", "margin",
    ]  # fmt: skip
    assert body["fits"] is (body["total_mib"] <= body["limit_mib"])


def test_the_largest_context_fits_and_the_next_one_does_not(
    gemma: tuple[ModelInfo, ModelInfo],
) -> None:
    """For several limits and slots; a step is 256 tokens a slot."""
    for mib, parallel in ((7600, 1), (9000, 1), (12000, 4)):
        limit = limit_from_free(mib * MIB, "test")
        setup = Setup(target=gemma[0], parallel=parallel)
        longest = max_context(setup, limit, Constant())
        assert longest > 0
        assert plan_memory(setup.with_(n_ctx=longest), limit, Constant()).fits
        longer = setup.with_(n_ctx=longest + 256 * parallel)
        assert not plan_memory(longer, limit, Constant()).fits
    assert max_context(Setup(target=gemma[0]), limit_from_free(MIB, "test"), Constant()) == 0
    huge = limit_from_free(2**50, "test")
    assert max_context(Setup(target=gemma[0]), huge, Constant()) == 262144


def test_remedies_come_in_rank_order_and_say_whether_they_suffice(
    gemma: tuple[ModelInfo, ModelInfo],
) -> None:
    """Slots first, layers last; a fitting setup has none."""
    setup = Setup(target=gemma[0], head=gemma[1], draft=True, n_ctx=16384, parallel=4)
    limit = limit_from_size(8 * GIB, backend="cuda")
    answer = make_plan(setup, limit, Constant())
    kinds = [remedy.what.split()[0] for remedy in answer.remedies]
    order = ["parallel", "ubatch", "KV", "context", "head", "target", "layers"]
    assert list(dict.fromkeys(kinds)) == [kind for kind in order if kind in kinds]
    assert kinds[0] == "parallel"
    assert kinds[-1] == "layers"
    first = answer.remedies[0]
    assert first.frees_mib == pytest.approx(2176 - 736)
    for remedy in answer.remedies:
        if remedy.options:
            changed = plan_memory(setup.with_(**remedy.options), limit, Constant())
            assert changed.fits is remedy.enough
    assert answer.together[0] == "parallel 1"
    roomy = make_plan(setup, limit_from_size(80 * GIB, backend="cuda"), Constant())
    assert roomy.budget.fits
    assert roomy.remedies == ()


def test_all_compute_buffers_of_a_plan_are_asked_for_in_few_questions(
    gemma: tuple[ModelInfo, ModelInfo],
) -> None:
    """A question costs a round trip to the worker; one per remedy would be slow."""
    source = Constant()
    make_plan(Setup(target=gemma[0], parallel=4), limit_from_size(8 * GIB, backend="cuda"), source)
    assert source.calls <= 6


def test_options_of_a_server_become_the_setup_it_would_have(
    gemma: tuple[ModelInfo, ModelInfo],
) -> None:
    """Context 0 is the model's own; no draft without a speculation type."""
    target, head = gemma
    options = ServerOptions(model="t", draft="h", ctx=0, n_max=2, kv_k="q8_0", parallel=2)
    setup = setup_from_options(options, target, head, backend="cuda")
    assert (setup.n_ctx, setup.draft, setup.n_max, setup.kv_k) == (262144, True, 2, "q8_0")
    plain = ServerOptions(model="t", draft="h", spec_type="none")
    assert setup_from_options(plain, target, head, backend="cuda").head is None


def test_the_fitted_estimate_is_near_what_the_engine_says(
    gemma: tuple[ModelInfo, ModelInfo],
) -> None:
    """Known truth of the 12B shape: 134 and 61 MiB at 4096, 542 with a micro-batch of 2048."""
    setup = Setup(target=gemma[0], head=gemma[1], draft=True, n_ctx=4096, n_max=2)
    small, large = FittedCompute().sizes([setup, setup.with_(ubatch=2048)])
    assert small.target_mib == pytest.approx(134, rel=0.3)
    assert small.draft_mib == pytest.approx(61, rel=0.3)
    assert large.target_mib == pytest.approx(542, rel=0.3)
    assert not small.exact


def test_the_gate_refuses_with_figures_and_is_silent_when_it_does_not_know(
    gemma: tuple[ModelInfo, ModelInfo], tmp_path: Path
) -> None:
    """A file that is still to be made is no reason."""
    limit = limit_from_size(8 * GIB, backend="cuda")
    with BudgetGate(limit, "cuda", compute=Constant()) as gate:
        path, head = str(gemma[0].path), str(gemma[1].path)
        refusal = gate(ServerOptions(model=path, draft=head, ctx=131072))
        assert refusal is not None
        assert "of 8192 MiB" in refusal["what"]
        assert "weights 6638" in refusal["why"]
        assert gate(ServerOptions(model=path, ctx=4096)) is None
        assert gate(ServerOptions(model=str(tmp_path / "later.gguf"))) is None


def test_weights_that_a_cpu_repacks_count_twice(tmp_path: Path) -> None:
    """The mapped file stays; Q4_K is copied with AVX2, and so is a tied embedding of its type."""
    target, _ = hollow_pair(tmp_path, "llama-8b", layers=2)
    info = read_model(target)
    plain = Setup(target=info, backend="cpu")
    packed = plain.with_(repack=frozenset({"avx2"}))
    copies = sum(t.bytes for t in info.tensors if t.type == "Q4_K")
    mapped = target_weights(packed).device - copies
    assert target_weights(plain).device == pytest.approx(info.weight_bytes, abs=1024)
    assert 0 < mapped <= info.weight_bytes
    assert target_weights(packed.with_(mapped=False)).device == info.weight_bytes
    arm = plain.with_(repack=frozenset({"asimddp"}), mapped=False)
    assert target_weights(arm).device == info.weight_bytes
