"""Synthetic models are reproducible, have the shapes they promise, and llama-server drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFReader

from browndwarf.engine.client import LlamaClient
from browndwarf.engine.locate import Build
from browndwarf.engine.options import ServerOptions
from browndwarf.engine.process import LlamaServer
from browndwarf.models.synthetic import HybridShape, PairShape, write_hybrid, write_pair

ENV = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
SMALL = PairShape(layers=4, width=256, drafter_width=128, drafter_ff=128, ff=256)


def tensors(path: Path) -> dict[str, tuple[int, ...]]:
    return {t.name: tuple(int(n) for n in t.shape) for t in GGUFReader(str(path)).tensors}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = write_pair(tmp_path / "a", SMALL, seed=3)
    again = write_pair(tmp_path / "b", SMALL, seed=3)
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in again]
    other = write_pair(tmp_path / "b", SMALL, seed=4)
    assert first[0].read_bytes() != other[0].read_bytes()


def test_the_drafter_fits_its_target(tmp_path: Path) -> None:
    target, head = (tensors(path) for path in write_pair(tmp_path, SMALL))
    assert target["token_embd.weight"] == (256, SMALL.vocab)
    assert head["token_embd.weight"] == (128, SMALL.vocab)
    assert head["nextn.pre_projection.weight"] == (2 * 256, 128)
    assert head["nextn.post_projection.weight"] == (128, 256)
    assert not any("attn_k" in name for name in head)


def test_the_nextn_block_comes_after_the_trunk(tmp_path: Path) -> None:
    shape = HybridShape(layers=4)
    names = tensors(write_hybrid(tmp_path / "m.gguf", shape))
    assert names["blk.4.nextn.eh_proj.weight"] == (2 * shape.width, shape.width)
    assert "blk.0.ssm_out.weight" in names
    assert "blk.3.attn_q.weight" in names
    without = tensors(write_hybrid(tmp_path / "n.gguf", shape, nextn=False))
    assert not any("nextn" in name or name.startswith("blk.4") for name in without)


@pytest.mark.parametrize("settings", [{"layers": 6}, {"drafter_width": 512}])
def test_shapes_that_llama_cpp_refuses_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"layers|wide"):
        PairShape(**settings)


def test_a_vocabulary_below_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        write_pair(tmp_path, PairShape(layers=4, vocab=256))


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["pair", "hybrid"])
async def test_llama_server_drafts_with_both_kinds_of_head(
    kind: str, engine_build: Build, tmp_path: Path
) -> None:
    if kind == "pair":
        target, head = write_pair(tmp_path, SMALL)
        options = ServerOptions(
            model=str(target), draft=str(head), n_max=3, ctx=256, threads=1,
            synth_rates=(0.9, 0.8, 0.7),
        )  # fmt: skip
    else:
        model = write_hybrid(tmp_path / "hybrid.gguf")
        options = ServerOptions(
            model=str(model), spec_type="draft-mtp", n_max=3, ctx=256, threads=1,
            synth_rates=(0.9, 0.8, 0.7),
        )  # fmt: skip
    server = LlamaServer(engine_build, options, log_path=tmp_path / "server.log", env=ENV)
    async with server, LlamaClient(server.base_url) as client:
        answer = await client.completion("hello", n_predict=200, ignore_eos=True, stream=False)
    assert answer.timings.predicted_n == 200
    assert answer.timings.draft_n > 0
    assert 0 < answer.timings.draft_n_accepted < answer.timings.draft_n
