"""Perplexity and divergence: parsing, the cache of logits, comparisons, bad input."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from browndwarf.engine.locate import Build
from browndwarf.errors import DiskFull, UsageError
from browndwarf.models import demo
from browndwarf.quality import divergence
from browndwarf.quality.divergence import KldRecord, base_bytes, compare_kld, wrong_base
from browndwarf.quality.perplexity import (
    Listener,
    PplRecord,
    Run,
    chunk_losses,
    compare_ppl,
    measure_ppl,
    unroll,
)

LINES = ["perplexity: 1.70 seconds per pass - ETA 0.10 minutes", "[1]7.3891,[2]20.0855,"]


def ppl_record(losses: tuple[float, ...], **changes: Any) -> PplRecord:
    record = PplRecord(
        ppl=8.0,
        error=0.5,
        run=Run(),
        model="m",
        model_fingerprint="f",
        text_sha="t",
        engine_sha="e",
        chunk_losses=losses,
        seconds=1.0,
    )
    return msgspec.structs.replace(record, **changes)


def kld_record(means: tuple[float, ...], **changes: Any) -> KldRecord:
    record = KldRecord(
        mean=sum(means) / len(means),
        error=0.0,
        p99=None,
        p999=None,
        maximum=None,
        same_top=1.0,
        same_top_error=0.0,
        ppl=8.0,
        ppl_error=0.5,
        run=Run(),
        reference_kv="f16",
        model="m",
        model_fingerprint="f",
        reference="r",
        reference_fingerprint="rf",
        text_sha="t",
        engine_sha="e",
        chunk_means=means,
        seconds=1.0,
    )
    return msgspec.structs.replace(record, **changes)


def test_losses_of_chunks_follow_from_the_running_estimates() -> None:
    assert chunk_losses(LINES) == pytest.approx((2.0, 4.0), abs=1e-4)
    assert chunk_losses(["[1]nan,"]) == ()
    assert unroll([1.0, 2.0, 2.0]) == (1.0, 3.0, 2.0)


def test_pairing_finds_a_cost_far_below_the_records_own_errors() -> None:
    base = ppl_record((1.0, 2.0, 3.0, 2.5))
    other = ppl_record((1.012, 2.014, 3.013, 2.513))
    compared = compare_ppl(base, other)
    assert compared.verdict == "worse"
    assert compared.change == pytest.approx(0.0131, abs=1e-4)
    assert compared.sentence.startswith("worse by 1.31% ± ")
    assert compare_ppl(other, base).verdict == "better"
    assert compare_ppl(base, base).verdict == "within error"


def test_noise_is_within_error() -> None:
    base = ppl_record((1.0, 2.0, 3.0, 2.5))
    assert compare_ppl(base, ppl_record((1.1, 1.9, 3.1, 2.42))).verdict == "within error"


def test_one_chunk_is_compared_by_the_tools_own_errors() -> None:
    compared = compare_ppl(ppl_record((2.0,)), ppl_record((2.1,), ppl=8.1))
    assert not compared.paired
    assert compared.verdict == "within error"


@pytest.mark.parametrize(
    "changes", [{"text_sha": "other"}, {"run": Run(ctx=1024)}, {"chunk_losses": (1.0,)}]
)
def test_unlike_records_are_not_compared(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="cannot be compared"):
        compare_ppl(ppl_record((1.0, 2.0)), ppl_record((1.0, 2.0), **changes))


def test_divergences_below_the_saved_resolution_are_equal() -> None:
    near = compare_kld(kld_record((0.0, 0.0, 0.0)), kld_record((1e-5, 2e-5, 1e-5)))
    far = compare_kld(kld_record((0.0, 0.0, 0.0)), kld_record((0.01, 0.012, 0.011)))
    assert near.verdict == "within error"
    assert far.verdict == "worse"
    assert kld_record((-1e-6, -1e-6)).is_zero
    assert not kld_record((0.01, 0.01)).is_zero


def test_wrong_base_logits_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "x.logits"
    size = base_bytes(n_chunks=2, ctx=16, vocab=10)
    header = (16, 10, 2)
    good = struct.pack("<8sIii", b"_logits_", *header).ljust(size, b"\0")
    path.write_bytes(good)
    assert wrong_base(path, size=size, header=header) is None
    for content in (good[:-1], b"GGUF" + good[4:], good[:5], b""):
        path.write_bytes(content)
        assert wrong_base(path, size=size, header=header)
    path.write_bytes(struct.pack("<8sIii", b"_logits_", 16, 11, 2).ljust(size, b"\0"))
    assert "vocabulary" in str(wrong_base(path, size=size, header=header))
    assert wrong_base(tmp_path / "none", size=size, header=header)


def test_logits_that_cannot_fit_are_refused_before_anything_runs(
    tmp_path: Path, fake_build: Callable[..., Build]
) -> None:
    text = tmp_path / "t.txt"
    text.write_text("x")
    with pytest.raises(DiskFull, match="do not fit") as caught:
        divergence.ensure_base(
            fake_build(),
            demo.TARGET,
            text,
            Run(),
            size=1 << 60,
            header=(512, 1000, 1 << 30),
            folder=tmp_path / "cache",
        )
    assert "--chunks" in caught.value.fix
    assert not list((tmp_path / "cache").iterdir())


def test_a_missing_text_is_a_usage_error(tmp_path: Path, fake_build: Callable[..., Build]) -> None:
    with pytest.raises(UsageError, match="no text"):
        measure_ppl(fake_build(), demo.TARGET, tmp_path / "none.txt", Run())


def test_a_text_shorter_than_two_chunks_is_told_with_numbers(
    tmp_path: Path, fake_build: Callable[..., Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fakes import behave

    monkeypatch.setenv("FAKE_LLAMA", behave(stdout="[1, 2, 3, 4, 5]")["FAKE_LLAMA"])
    text = tmp_path / "t.txt"
    text.write_text("a few words")
    with pytest.raises(UsageError, match="too short") as caught:
        measure_ppl(fake_build(), demo.TARGET, text, Run(ctx=512))
    assert "it has 5 tokens; two chunks need 1024" in caught.value.why


def test_the_tools_estimate_is_passed_on() -> None:
    heard: list[str] = []
    listener = Listener(heard.append)
    for line in ("perplexity: 1.70 seconds per pass - ETA ", "0.10 minutes", "[1]7.3891,"):
        listener(line)
    assert heard == ["about 0.10 minutes left"]
