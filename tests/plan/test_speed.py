"""Costs of types: measured once, kept, and turned into the time of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browndwarf.engine.locate import Build
from browndwarf.engine.toolparse import BenchRow
from browndwarf.errors import ToolFailed
from browndwarf.models.gguf import Tensor, read_model
from browndwarf.plan import speed
from browndwarf.plan.speed import batch_times, measure_costs
from gguf_files import hollow_pair


def rows(*samples: int) -> list[BenchRow]:
    return [BenchRow(n_prompt=4, n_gen=0, samples_ns=samples)]


def test_a_type_is_timed_once_by_its_fastest_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_build: Callable[..., Build]
) -> None:
    timed: list[str] = []

    def bench(build: Build, model: Path, **_: Any) -> list[BenchRow]:
        timed.append(model.stem)
        assert read_model(model).type_bytes[model.stem] > 1_000_000
        return rows(9_000_000, 6_000_000)

    monkeypatch.setattr(speed, "bench", bench)
    build = fake_build()
    first = measure_costs(build, ["Q4_K", "Q8_0"], batch=4, device="cpu", folder=tmp_path)
    assert first["Q4_K"] == pytest.approx(6 / 117, rel=0.2)
    assert measure_costs(build, ["Q8_0"], batch=4, device="cpu", folder=tmp_path) == {
        "Q8_0": first["Q8_0"]
    }
    assert timed == ["Q4_K", "Q8_0"]
    measure_costs(build, ["Q8_0"], batch=4, device="another", folder=tmp_path)
    assert timed[2:] == ["Q8_0"]


def test_no_time_is_an_error(
    monkeypatch: pytest.MonkeyPatch, fake_build: Callable[..., Build]
) -> None:
    monkeypatch.setattr(speed, "bench", lambda *_, **__: [])
    with pytest.raises(ToolFailed, match="Q4_K"):
        measure_costs(fake_build(), ["Q4_K"], batch=4, device="cpu")


def test_a_batch_reads_only_the_experts_that_it_uses(tmp_path: Path) -> None:
    path, _ = hollow_pair(tmp_path, "gemma4-26b-a4b", layers=6)
    times = batch_times(read_model(path), {"Q4_K": 0.5, "Q8_0": 1.0}, batch=4)
    experts = Tensor("blk.0.ffn_up_exps.weight", "Q4_K", (256, 1000, 128), 0, 0)
    plain = Tensor("blk.0.ffn_up.weight", "Q4_K", (256, 1000), 0, 0)
    assert times(experts, "Q4_K") == pytest.approx(0.5 * 32.768 * 4 * 8 / 128)
    assert times(plain, "Q4_K") == pytest.approx(0.5 * 0.256)
    assert times(plain, "F16") == pytest.approx(1.0 * 16 / 8.5 * 0.256)


@pytest.mark.engine
def test_the_real_bench_can_run_what_is_timed(engine_build: Build) -> None:
    costs = measure_costs(engine_build, ["Q4_0"], batch=2, device="cpu", layers=0, threads=1)
    assert 0.001 < costs["Q4_0"] < 10
