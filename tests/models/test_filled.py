"""Random weights written as blocks: valid values, the right layout, whole files or none."""

from __future__ import annotations

import errno
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from browndwarf.engine.client import LlamaClient
from browndwarf.engine.locate import Build
from browndwarf.engine.options import ServerOptions
from browndwarf.engine.process import LlamaServer
from browndwarf.errors import DiskFull, UsageError
from browndwarf.models import filled
from browndwarf.models.ggml_types import GGML_TYPES
from browndwarf.models.gguf import read_model
from browndwarf.models.gguf_read import read_header
from browndwarf.models.hollow import SHAPES, HollowShape

TINY = "gemma4-tiny"
QWEN = HollowShape(
    "qwen35", 4, 256, 512, 4, (2, 2), (64, 64), 2048, recurrent_every=4, nextn=1, tied=False
)  # fmt: skip
QWEN_MOE = HollowShape(
    "qwen35moe", 4, 256, 256, 4, (2, 2), (64, 64), 2048, recurrent_every=4, nextn=1, tied=False,
    experts=8, experts_used=2, expert_ff=256,
)  # fmt: skip
QUANTIZED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
             "Q6_K", "IQ4_XS"]  # fmt: skip


@pytest.mark.parametrize("name", QUANTIZED)
def test_blocks_decode_to_weights_of_a_fresh_model(name: str) -> None:
    raw = np.frombuffer(filled._tile(name, np.random.default_rng(1)), np.uint8)
    blocks = raw[: GGML_TYPES[name].bytes * 999].reshape(1, -1)
    weights = dequantize(blocks, gguf.GGMLQuantizationType[name])
    assert np.isfinite(weights).all()
    assert abs(float(weights.mean())) < 0.004
    assert 0.01 < float(weights.std()) < 0.04


def test_a_shape_is_written_with_the_types_that_were_asked_for(tmp_path: Path) -> None:
    target, head = tmp_path / "t.gguf", tmp_path / "h.gguf"
    filled.write_shape(target, TINY, "Q4_0")
    filled.write_shape(head, TINY, "Q8_0", role="head")
    made = read_model(target)
    assert made.by_name["blk.0.ffn_up.weight"].type == "Q4_0"
    assert made.by_name["token_embd.weight"].type == "Q6_K"
    assert read_model(head).is_head
    assert sorted(p.name for p in tmp_path.iterdir()) == ["h.gguf", "t.gguf"]


def test_no_two_layers_and_no_two_rows_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    filled.write_shape(path, TINY, "Q4_0")
    header, data = read_header(path), path.read_bytes()
    rows = []
    for layer in range(2):
        tensor = next(t for t in header.tensors if t.name == f"blk.{layer}.ffn_up.weight")
        row = tensor.bytes // tensor.shape[1]
        at = header.data_offset + tensor.offset
        rows += [data[at + i * row : at + (i + 1) * row] for i in range(tensor.shape[1])]
    assert len(set(rows)) == len(rows)


def test_a_copy_has_the_header_and_the_norms_of_its_source(tmp_path: Path) -> None:
    source, copy = tmp_path / "s.gguf", tmp_path / "c.gguf"
    filled.write_shape(source, TINY, "Q8_0", seed=1)
    filled.write_copy(source, copy, seed=2)
    header = read_header(source)
    old, new = source.read_bytes(), copy.read_bytes()
    assert len(old) == len(new)
    assert old[: header.data_offset] == new[: header.data_offset]
    for tensor in header.tensors:
        at = header.data_offset + tensor.offset
        same = old[at : at + tensor.bytes] == new[at : at + tensor.bytes]
        assert same is (tensor.type == "F32"), tensor.name


def test_a_header_alone_is_enough_for_a_copy(tmp_path: Path) -> None:
    source, copy = tmp_path / "s.gguf", tmp_path / "c.gguf"
    filled.write_shape(source, TINY, "Q8_0")
    size = source.stat().st_size
    with source.open("r+b") as handle:
        handle.truncate(read_header(source).data_offset)
    filled.write_copy(source, copy)
    assert copy.stat().st_size == size
    assert read_model(copy).architecture == "gemma4"


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(filled, "_fill", full)
    with pytest.raises(DiskFull):
        filled.write_shape(tmp_path / "t.gguf", TINY, "Q4_0")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shape", "type_name", "role", "said"),
    [
        ("gemma4-13b", "Q4_0", "target", "gemma4-12b"),
        (TINY, "IQ1_S", "target", "Q4_K"),
        ("qwen35-9b", "Q8_0", "head", "no separate drafter"),
    ],
)
def test_what_cannot_be_made_is_said_before_anything_is_written(
    tmp_path: Path, shape: str, type_name: str, role: filled.Role, said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        filled.write_shape(tmp_path / "t.gguf", shape, type_name, role=role)
    error = caught.value
    assert said in " ".join((error.what, error.why, error.fix))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["gemma", "qwen", "qwen-moe"])
async def test_llama_server_drafts_with_random_blocks(
    kind: str, engine_build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = tmp_path / "t.gguf", tmp_path / "h.gguf"
    if kind == "gemma":
        filled.write_shape(target, TINY, "Q4_K")
        filled.write_shape(head, TINY, "Q8_0", role="head")
    else:
        monkeypatch.setitem(SHAPES, "qwen-tiny", QWEN if kind == "qwen" else QWEN_MOE)
        filled.write_shape(target, "qwen-tiny", "Q8_0")
    options = ServerOptions(
        model=str(target),
        draft=str(head) if kind == "gemma" else None,
        spec_type="draft-mtp",
        n_max=2,
        ctx=256,
        threads=1,
        synth_rates=(0.9, 0.8),
    )
    async with (
        LlamaServer(engine_build, options, log_path=tmp_path / "s.log") as server,
        LlamaClient(server.base_url) as client,
    ):
        answer = await client.completion("a small boat", n_predict=24, ignore_eos=True, seed=1)
    assert answer.timings.predicted_n == 24
    assert answer.timings.draft_n_accepted > 0
