"""A saved plan: whole on disk, refused when it is something else; legal types; roles; alphas."""

from __future__ import annotations

from pathlib import Path

import pytest

from browndwarf.errors import StorageError, UsageError
from browndwarf.models.gguf import Tensor
from browndwarf.plan.legal import DEFAULT_TYPES, legal_types, parse_types
from browndwarf.plan.probe import Measured, pooled
from browndwarf.plan.quantization import QuantizationPlan, TensorChoice, WeightsBudget
from browndwarf.plan.roles import group_of, role_of


def a_plan() -> QuantizationPlan:
    return QuantizationPlan(
        source="m.gguf",
        source_fingerprint="sha256:00",
        base_type="Q4_K",
        tensors=(
            TensorChoice(
                name="blk.0.ffn_up.weight", type="Q3_K", elements=256, bytes=110, device=True,
                loss=0.1,
            ),
            TensorChoice(
                name="output_norm.weight", type="F32", elements=4, bytes=16, device=True, loss=0.0,
                chosen=False,
            ),
        ),
        device_bytes=126,
        file_bytes=126,
        bits_per_weight=3.9,
        predicted_loss=0.1,
        budget=WeightsBudget(weights_mib=1.0),
    )  # fmt: skip


def test_a_plan_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    a_plan().save(path)
    assert QuantizationPlan.load(path) == a_plan()
    assert a_plan().types == {"blk.0.ffn_up.weight": "Q3_K"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no quantization plan"),
        ("[1, 2]", "no quantization plan"),
        ('{"schema": "browndwarf/plan/1"}', "no quantization plan"),
        ('{"schema": "browndwarf/quantization-plan/2"}', "another version"),
        ('{"schema": "browndwarf/quantization-plan/1"}', "damaged"),
    ],
)
def test_something_else_is_refused_in_words(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=says) as caught:
        QuantizationPlan.load(path)
    assert "--quantize" in caught.value.fix


def test_a_missing_plan_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="could not read"):
        QuantizationPlan.load(tmp_path / "none.json")


def test_rows_that_fill_no_block_of_256_have_types_with_blocks_of_32() -> None:
    narrow = Tensor("blk.0.ffn_up.weight", "F16", (96, 8), 0, 96 * 16)
    assert set(legal_types(narrow, DEFAULT_TYPES, covered=True)) == {"IQ4_NL", "Q5_0", "Q8_0"}
    odd = Tensor("blk.0.ffn_up.weight", "F16", (100, 8), 0, 1600)
    assert legal_types(odd, DEFAULT_TYPES, covered=True) == ("F16",)


def test_types_that_want_an_imatrix_need_one_for_that_tensor() -> None:
    wide = Tensor("blk.0.ffn_up.weight", "F16", (256, 8), 0, 4096)
    without = legal_types(wide, DEFAULT_TYPES, covered=False)
    assert set(DEFAULT_TYPES) - set(without) == {"IQ2_S", "IQ3_XXS"}


def test_types_are_read_in_either_case_and_mixes_are_refused() -> None:
    assert parse_types("q3_k, Q4_K,q3_k") == ("Q3_K", "Q4_K")
    for text in ("Q4_K_M", "", "F16", "Q9"):
        with pytest.raises(UsageError):
            parse_types(text)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("blk.3.ffn_down_exps.weight", "ffn_down"),
        ("blk.3.attn_v.weight", "attn_v"),
        ("output.weight", "output"),
        ("per_layer_token_embd.weight", "embedding"),
        ("blk.48.nextn.eh_proj.weight", "nextn"),
    ],
)
def test_roles(name: str, role: str) -> None:
    assert role_of(name, tied=False) == role


def test_a_tied_embedding_is_the_output() -> None:
    assert role_of("token_embd.weight", tied=True) == "output"
    assert role_of("token_embd.weight", tied=False) == "embedding"
    assert group_of("blk.0.ffn_up.weight", layers=8, tied=True) == "ffn_up/early"
    assert group_of("blk.7.ffn_up.weight", layers=8, tied=True) == "ffn_up/late"


def test_a_noisy_alpha_is_drawn_to_its_role_and_a_clear_one_stands() -> None:
    def bands(error: float) -> dict[str, Measured]:
        return {
            f"r/{band}": Measured(kld=kld, error=error, noise=1.0)
            for band, kld in (("early", 0.2), ("middle", 1.0), ("late", 1.8))
        }

    clear, noisy = pooled(bands(0.001)), pooled(bands(5.0))
    assert clear["r/early"] == pytest.approx(0.2, rel=0.01)
    assert noisy["r/early"] == pytest.approx(1.0, rel=0.01)
    assert clear["r"] == noisy["r"] == pytest.approx(1.0)


def test_a_group_below_the_noise_still_counts() -> None:
    found = pooled(
        {
            "a/early": Measured(kld=-0.1, error=0.01, noise=1.0),
            "b/early": Measured(kld=1.0, error=0.01, noise=1.0),
        }
    )
    assert found["a/early"] > 0
