"""Sampled rows: where they lie, how many, and what happens when the file ends too early."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from browndwarf.errors import BadModelFile, ModelNotFound
from browndwarf.models import rows as rows_module
from browndwarf.models.gguf import read_model
from browndwarf.models.rows import Place, locate_tensors, sample_rows
from gguf_files import tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A matrix of F16 whose rows hold their own number, and a tensor of three experts."""
    path = tmp_path / "m.gguf"
    out = GGUFWriter(str(path), "llama")
    for key, value in tiny().items():
        if isinstance(value, int) and not isinstance(value, bool):
            out.add_uint32(key, value)
    plain = np.repeat(np.arange(40, dtype=np.float16)[:, None], 64, axis=1)
    out.add_tensor("blk.0.attn_q.weight", plain)
    experts = np.arange(3 * 20 * 64, dtype=np.float32).reshape(3, 20, 64)
    out.add_tensor("blk.0.ffn_up_exps.weight", experts)
    out.add_tensor("output_norm.weight", np.ones(64, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def test_rows_lie_at_even_distances(model: Path) -> None:
    place = locate_tensors(read_model(model))["blk.0.attn_q.weight"]
    ((matrix, packed),) = sample_rows(place, per_tensor=10)
    assert matrix == 0
    assert packed.view(np.float16)[:, 0].tolist() == [2, 6, 10, 14, 18, 22, 26, 30, 34, 38]


def test_a_short_matrix_is_read_whole(model: Path) -> None:
    place = locate_tensors(read_model(model))["blk.0.attn_q.weight"]
    ((_, packed),) = sample_rows(place, per_tensor=1000)
    assert packed.view(np.float16)[:, 0].tolist() == list(range(40))


def test_every_expert_has_its_share(model: Path) -> None:
    place = locate_tensors(read_model(model))["blk.0.ffn_up_exps.weight"]
    assert (place.matrices, place.rows, place.columns) == (3, 20, 64)
    blocks = list(sample_rows(place, per_tensor=30))
    assert [matrix for matrix, _ in blocks] == [0, 1, 2]
    first = [packed.view(np.float32)[:, 0] // 64 for _, packed in blocks]
    assert [len(rows) for rows in first] == [10, 10, 10]
    assert first[2].tolist() == [41, 43, 45, 47, 49, 51, 53, 55, 57, 59]


def test_a_vector_is_one_row(model: Path) -> None:
    place = locate_tensors(read_model(model))["output_norm.weight"]
    assert (place.columns, place.rows, place.matrices) == (64, 1, 1)


def test_large_samples_come_in_blocks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_ELEMENTS", 64 * 16)
    place = locate_tensors(read_model(model))["blk.0.attn_q.weight"]
    assert [len(packed) for _, packed in sample_rows(place, per_tensor=40)] == [16, 16, 8]


def test_a_file_that_shrank_is_a_bad_model(model: Path) -> None:
    place = locate_tensors(read_model(model))["blk.0.ffn_up_exps.weight"]
    with model.open("r+b") as handle:
        handle.truncate(place.offset + 100)
    with pytest.raises(BadModelFile, match="ends inside"):
        list(sample_rows(place, per_tensor=8))
    model.unlink()
    with pytest.raises(ModelNotFound):
        list(sample_rows(place, per_tensor=8))


@given(st.integers(1, 3000), st.integers(1, 300), st.integers(1, 400))
def test_a_sample_is_never_empty_and_never_larger_than_the_matrix(
    rows: int, matrices: int, wanted: int
) -> None:
    place = Place("t", Path("m"), 0, "F16", 32, rows, matrices)
    count = place.sampled_rows(wanted)
    assert 1 <= count <= rows
    assert count * matrices >= min(wanted, rows * matrices) or count == rows
