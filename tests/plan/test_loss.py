"""The error table with the real quantizers, and the plans and alphas that are made of it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from browndwarf.engine.locate import Build
from browndwarf.engine.native_quant import load_quantizer
from browndwarf.errors import CheckFailed, Interrupted, UsageError
from browndwarf.models import demo
from browndwarf.models.ggml_types import GGML_TYPES
from browndwarf.models.gguf import ModelInfo, read_model
from browndwarf.models.rows import locate_tensors, sample_rows
from browndwarf.models.synthetic import PairShape, write_hybrid, write_pair
from browndwarf.plan import errorwork, probe
from browndwarf.plan.errorwork import Job, measure
from browndwarf.plan.loss import ErrorTable, Floats
from browndwarf.plan.planner import Material, gather, retyped
from browndwarf.plan.probe import Divergence
from browndwarf.plan.quantization import Objective, WeightsBudget
from browndwarf.plan.setup import Setup
from browndwarf.plan.sizes import target_weights
from browndwarf.units import MIB

pytestmark = pytest.mark.engine

NAME = "blk.0.ffn_down.weight"


class Matrix:
    """An imatrix of made-up weights for some tensors."""

    def __init__(self, entries: dict[str, Floats]) -> None:
        self.entries = entries

    def weights(self, name: str, columns: int | None = None) -> Floats | None:
        return self.entries.get(name)


@pytest.fixture(scope="module")
def target(engine_build: Build) -> ModelInfo:
    return read_model(demo.TARGET)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "IQ4_XS", "Q2_K", "Q5_0"])
def test_quantizing_and_back_has_the_size_and_the_error_of_its_type(
    kind: str, engine_build: Build
) -> None:
    quantizer, type_ = load_quantizer(), GGML_TYPES[kind]
    rows = np.random.default_rng(1).standard_normal((4, 512), dtype=np.float32)
    packed = quantizer.quantize(rows, type_.number)
    assert packed.shape == (4, 512 // type_.block * type_.bytes)
    back = quantizer.dequantize(packed, type_.number, 512)
    error = float(np.square(back - rows).sum() / np.square(rows).sum())
    # A uniform quantizer of n bits loses about 6 dB a bit; scales take some of the bits.
    assert 4.0 ** -(type_.bits_per_element + 2) < error < 4.0 ** -(type_.bits_per_element - 1.5)


def test_f16_is_exact_to_its_eleven_bits(engine_build: Build) -> None:
    rows = np.random.default_rng(1).standard_normal((4, 100), dtype=np.float32)
    back = load_quantizer().dequantize(load_quantizer().quantize(rows, 1), 1, 100)
    assert back == pytest.approx(rows, rel=2**-11, abs=1e-7)


def test_what_would_end_the_process_is_refused(engine_build: Build) -> None:
    quantizer = load_quantizer()
    with pytest.raises(UsageError, match="blocks"):
        quantizer.quantize(np.ones((1, 96), np.float32), GGML_TYPES["Q4_K"].number)
    with pytest.raises(UsageError, match="importance"):
        quantizer.quantize(np.ones((1, 256), np.float32), GGML_TYPES["IQ1_S"].number)
    with pytest.raises(UsageError, match="does not fit"):
        quantizer.quantize(np.ones((1, 256), np.float32), 12, np.ones(255, np.float32))


def test_the_error_is_weighed_noise_over_weighed_signal(target: ModelInfo) -> None:
    place = locate_tensors(target)[NAME]
    weights = np.linspace(0.1, 9, place.columns, dtype=np.float32)[None, :]
    found = measure(Job(place, ("Q3_K",), 16, weights, weights)).errors["Q3_K"]
    quantizer, number = load_quantizer(), GGML_TYPES["Q3_K"].number
    ((_, packed),) = sample_rows(place, per_tensor=16)
    rows = quantizer.dequantize(packed, place.number, place.columns)
    back = quantizer.dequantize(quantizer.quantize(rows, number, weights[0]), number, place.columns)
    expected = (weights * (back - rows) ** 2).sum() / (weights * rows**2).sum()
    assert found == pytest.approx(float(expected), rel=1e-4)


def test_each_expert_is_quantized_with_its_own_weights(target: ModelInfo) -> None:
    place = locate_tensors(target)[NAME]
    half = replace(place, rows=place.rows // 2, matrices=2)
    rising = np.linspace(0.01, 9, place.columns, dtype=np.float32)
    both = np.stack([rising, rising[::-1]])
    own = measure(Job(half, ("Q2_K",), 32, both, both)).errors["Q2_K"]
    swapped = measure(Job(half, ("Q2_K",), 32, both[::-1], both)).errors["Q2_K"]
    assert own < swapped


def test_the_tied_output_is_weighed_by_the_norm_before_it(target: ModelInfo) -> None:
    table = ErrorTable(target, Matrix({NAME: np.ones((1, 256), np.float32)}))
    found = table.measure({"token_embd.weight": ["Q4_K"], NAME: ["Q4_K", "Q8_0"]}, workers=1)
    assert table.proxied == {"token_embd.weight": "output_norm squared"}
    assert found[NAME]["Q8_0"] == 0.0  # the source's own type: it is copied
    assert found[NAME]["Q4_K"] == pytest.approx(0.005, rel=0.3)
    assert table.covered(NAME)
    assert not table.covered("blk.1.ffn_down.weight")


def test_two_processes_find_what_one_does_and_the_cache_keeps_it(
    target: ModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {f"blk.{i}.ffn_up.weight": ["Q3_K", "Q6_K"] for i in range(4)}
    alone = ErrorTable(target, sample=32).measure(wanted, workers=1)
    monkeypatch.setattr(errorwork, "_START_UP", 0.0)
    shares: list[float] = []
    table = ErrorTable(target, folder=tmp_path, sample=32)
    assert table.measure(wanted, workers=2, on_progress=shares.append) == alone
    assert shares[-1] == pytest.approx(1.0)
    again = ErrorTable(target, folder=tmp_path, sample=32)
    assert again.measure(wanted) == alone
    assert again.results == []
    next(tmp_path.iterdir()).write_bytes(b"{damaged")
    assert ErrorTable(target, folder=tmp_path, sample=32).measure(wanted, workers=1) == alone


def test_a_cancelled_table_keeps_what_was_finished(target: ModelInfo, tmp_path: Path) -> None:
    cancel = threading.Event()
    table = ErrorTable(target, folder=tmp_path, sample=16)
    wanted = {f"blk.{i}.ffn_up.weight": ["Q8_0", "Q3_K"] for i in range(3)}
    with pytest.raises(Interrupted):
        table.measure(wanted, workers=1, on_progress=lambda _: cancel.set(), cancel=cancel)
    again = ErrorTable(target, folder=tmp_path, sample=16)
    again.measure(wanted, workers=1)
    assert len(again.results) == 2


@pytest.fixture(scope="module")
def material(
    engine_build: Build, target: ModelInfo, tmp_path_factory: pytest.TempPathFactory
) -> Material:
    return gather(
        engine_build,
        ErrorTable(target, folder=tmp_path_factory.mktemp("errors"), sample=8),
        Setup(target=target),
        types=("Q2_K", "Q3_K", "Q4_K", "Q6_K"),
        mixes=("Q4_K_M",),
        workers=1,
    )


def test_a_plan_fills_its_budget_and_says_what_the_rules_of_the_budget_say(
    material: Material,
) -> None:
    outcome = material.plan(WeightsBudget(weights_mib=9.0), {}, "equal")
    plan = outcome.plan
    assert 0.999 * 9 * MIB <= plan.device_bytes <= 9 * MIB
    quantized = retyped(material.model, plan.types)
    assert target_weights(Setup(target=quantized)).device == plan.device_bytes
    assert outcome.bound <= plan.predicted_loss
    assert plan.file_bytes == sum(t.bytes for t in plan.tensors) == quantized.weight_bytes
    (stock,) = plan.stock
    assert stock.ours is not None
    assert stock.ours < stock.predicted_loss
    assert {t.name for t in plan.tensors if not t.chosen} >= {"output_norm.weight"}


def test_more_bytes_never_cost_more_loss(material: Material) -> None:
    losses = [
        material.plan(WeightsBudget(weights_mib=mib), {}, "equal").plan.predicted_loss
        for mib in (6.0, 8.0, 10.0, 20.0)
    ]
    assert losses == sorted(losses, reverse=True)


def test_a_budget_below_the_smallest_possible_names_the_smallest(material: Material) -> None:
    least = material.plan(WeightsBudget(weights_mib=20.0), {}, "equal").smallest
    with pytest.raises(CheckFailed, match="no choice") as caught:
        material.plan(WeightsBudget(weights_mib=1.0), {}, "equal")
    assert str(least) in caught.value.why
    exact = material.plan(WeightsBudget(weights_mib=least / MIB), {}, "equal").plan
    assert exact.device_bytes == least


def test_speed_is_bought_with_little_loss(material: Material) -> None:
    def times(tensor: object, kind: str) -> float:
        return {"Q2_K": 1.0, "Q3_K": 3.0, "Q4_K": 1.0, "Q6_K": 2.0}[kind]

    budget = WeightsBudget(weights_mib=9.0)
    found = {
        objective: material.plan(budget, {}, "equal", times=times, objective=objective)
        for objective in get_args(Objective)
    }
    quality = found["quality"]
    assert found["speed"].time_ms <= found["balanced"].time_ms < quality.time_ms
    for objective, most in (("balanced", 1.1), ("speed", 1.5)):
        assert found[objective].plan.predicted_loss <= most * quality.plan.predicted_loss
        assert found[objective].plan.device_bytes <= 9 * MIB
        assert found[objective].quality is not None


def test_calibration_recovers_the_alphas_that_made_the_divergence(material: Material) -> None:
    def truth(name: str) -> float:
        return 5.0 if "ffn_down" in name else 1.0

    def divergence(types: dict[str, str]) -> Divergence:
        noise = sum(truth(n) * material.errors[n][kind] for n, kind in types.items())
        return Divergence(mean=0.001 + noise, error=1e-9)

    table = ErrorTable(material.model, sample=8)
    saved: list[int] = []
    found = probe.calibrate(
        material, table, divergence, budget_s=60,  # type: ignore[arg-type]
        save=lambda c: saved.append(len(c.measured)),
    )  # fmt: skip
    alphas = found.alphas({NAME: "ffn_down/early", "blk.9.attn_q.weight": "attn_q/middle"})
    assert alphas[NAME] == pytest.approx(5.0, rel=0.01)
    assert alphas["blk.9.attn_q.weight"] == pytest.approx(1.0, rel=0.01)
    assert not found.missing
    assert saved == sorted(saved)


def test_a_file_without_data_is_measured_on_random_rows(
    engine_build: Build, tmp_path: Path
) -> None:
    path, _ = write_pair(tmp_path, PairShape(layers=4, width=256, drafter_width=128))
    place = locate_tensors(read_model(path))["blk.0.ffn_up.weight"]
    with path.open("r+b") as handle:
        handle.seek(place.offset)
        handle.write(bytes(place.rows * place.row_bytes))
    table = ErrorTable(read_model(path))
    found = table.measure({place.name: ["Q4_K"]}, workers=1)
    assert found[place.name]["Q4_K"] == pytest.approx(0.005, rel=0.3)
    assert table.proxied == {place.name: "no data: random rows"}


def test_copies_in_the_processors_layout_count_on_a_cpu(material: Material) -> None:
    setup = material.setup.with_(backend="cpu", repack=frozenset({"avx2"}))
    here = replace(material, setup=setup)
    budget = WeightsBudget(weights_mib=12.0, limit_mib=16.0)
    plan = here.plan(budget, {}, "equal").plan
    held = target_weights(setup.with_(target=retyped(here.model, plan.types))).device
    assert plan.device_bytes < held <= 12 * MIB
    assert held > 0.95 * 12 * MIB
    exact = here.plan(WeightsBudget(weights_mib=9.0), {}, "equal").plan
    assert exact.device_bytes > 0.999 * 9 * MIB


def test_an_untied_embedding_costs_no_device_bytes_but_has_a_cap(
    engine_build: Build, tmp_path: Path
) -> None:
    path = write_hybrid(tmp_path / "h.gguf")
    table = ErrorTable(read_model(path), sample=4)
    setup = Setup(target=read_model(path), draft=True)
    hybrid = gather(engine_build, table, setup, types=("Q4_K", "Q8_0"), mixes=(), workers=1)
    rich = hybrid.plan(WeightsBudget(weights_mib=4.5), {}, "equal").plan
    assert rich.types["token_embd.weight"] == "Q8_0"
    assert not next(t for t in rich.tensors if t.name == "token_embd.weight").device
    size = hybrid.model.by_name["token_embd.weight"].elements // 256 * 144
    poor = hybrid.plan(WeightsBudget(weights_mib=4.5), {}, "equal", host_cap=size).plan
    assert poor.types["token_embd.weight"] == "Q4_K"
    assert poor.device_bytes == rich.device_bytes
    with pytest.raises(CheckFailed, match="stay in RAM"):
        hybrid.plan(WeightsBudget(weights_mib=4.5), {}, "equal", host_cap=size - 1)
