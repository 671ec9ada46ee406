"""Importance matrices: what is read, and what is told of files that are none."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from browndwarf.errors import BadModelFile, BrowndwarfError, ModelNotFound
from browndwarf.models.gguf import ModelInfo, read_model
from browndwarf.models.imatrix import check_imatrix, read_imatrix
from gguf_files import gguf, tensor, tiny
from quantizing import IMATRIX_KEYS as KEYS
from quantizing import Entries, imatrix_bytes


def model(path: Path, tensors: dict[str, tuple[int, ...]]) -> ModelInfo:
    offset, table = 0, []
    for name, shape in tensors.items():
        table.append(tensor(name, shape, 0, offset))
        offset += -(-4 * int(np.prod(shape)) // 32) * 32
    path.write_bytes(gguf(tiny(), table, offset))
    return read_model(path)


FINITE = st.floats(0, 2.0**99, width=32)
ENTRIES = st.dictionaries(
    st.text("abkl.019_", min_size=1, max_size=12),
    st.tuples(st.integers(1, 4), st.integers(1, 6)).flatmap(
        lambda size: st.tuples(
            st.lists(
                st.lists(FINITE, min_size=size[1], max_size=size[1]),
                min_size=size[0],
                max_size=size[0],
            ),
            st.lists(st.integers(0, 1000).map(float), min_size=size[0], max_size=size[0]),
        )
    ),
    max_size=4,
)


@given(ENTRIES)
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, entries: Entries
) -> None:
    path = tmp_path_factory.mktemp("im") / "i.gguf"
    path.write_bytes(imatrix_bytes(entries))
    if not any(count > 0 for _, counts in entries.values() for count in counts):
        with pytest.raises(BadModelFile, match="is empty"):
            read_imatrix(path)
        return
    read = read_imatrix(path)
    assert read.entries.keys() == entries.keys()
    for name, (sums, counts) in entries.items():
        entry = read.entries[name]
        assert entry.values.tolist() == np.array(sums, np.float32).tolist()
        assert entry.counts.tolist() == counts
        weights = read.weights(name)
        if not any(counts):
            assert weights is None
            continue
        assert weights is not None
        for row, sum_row, count in zip(weights, entry.values, counts, strict=True):
            expected = sum_row / np.float32(count) if count else np.ones_like(sum_row)
            assert row.tolist() == expected.tolist()


SOUND = imatrix_bytes({"blk.0.ffn_down.weight": ([[1.0] * 40, [2.0] * 40], [3.0, 4.0])})


@given(st.integers(0, len(SOUND) - 1), st.binary(max_size=4))
def test_damaged_files_are_told_and_never_crash(
    tmp_path_factory: pytest.TempPathFactory, at: int, junk: bytes
) -> None:
    path = tmp_path_factory.mktemp("im") / "i.gguf"
    for raw in (SOUND[:at], SOUND[:at] + junk + SOUND[at + len(junk) :]):
        path.write_bytes(raw)
        with contextlib.suppress(BrowndwarfError):
            read_imatrix(path)


def test_the_facts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "i.gguf"
    path.write_bytes(SOUND)
    read = read_imatrix(path)
    assert read.datasets == ("a.txt", "b.txt")
    assert (read.chunk_count, read.chunk_size) == (7, 512)
    assert read.weights("blk.1.ffn_down.weight") is None
    many = [f"part-{i}.txt" for i in range(200)]
    path.write_bytes(imatrix_bytes({"t": ([[1.0]], [1.0])}, **{"imatrix.datasets": many}))
    assert read_imatrix(path).datasets == tuple(many)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "empty"),
        (imatrix_bytes({}), "empty"),
        (imatrix_bytes({"t": ([[1.0]], [0.0])}), "empty"),
        (SOUND[:-70], "truncated"),
        (gguf(tiny(), [tensor("token_embd.weight", (64, 100))], 25600), "no importance matrix"),
        (imatrix_bytes({"t": ([[1.0]], [1.0])}, **{"imatrix.chunk_size": None}), "not a sound"),
        (imatrix_bytes({"t": ([[float("nan")]], [1.0])}), "not a sound"),
        (imatrix_bytes({"t": ([[-1.0]], [1.0])}), "not a sound"),
        (gguf(KEYS, [tensor("t.in_sum2", (8,))], 32), "not a sound"),
        (gguf(KEYS, [tensor("t.in_sum2", (8,), 1), tensor("t.counts", (1,))], 32), "not a sound"),
        (struct.pack("<ii", 140, 19) + b"blk.0.attn_k.weight" + bytes(64), "older format"),
        (b"just some text", "not a GGUF"),
    ],
)
def test_what_is_no_importance_matrix_is_told_apart(tmp_path: Path, raw: bytes, words: str) -> None:
    path = tmp_path / "i.dat"
    path.write_bytes(raw)
    with pytest.raises(BadModelFile, match=words) as caught:
        read_imatrix(path)
    assert caught.value.fix
    if words == "older format":
        assert "--output-format gguf" in caught.value.fix


def test_places_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        read_imatrix(tmp_path / "none")
    with pytest.raises(BadModelFile, match="directory"):
        read_imatrix(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(BadModelFile, match="no regular file"):
            read_imatrix(tmp_path / "pipe")


def test_coverage_names_what_is_missing_and_rarely_chosen_experts(tmp_path: Path) -> None:
    info = model(
        tmp_path / "m.gguf",
        {
            "token_embd.weight": (4, 10),
            "blk.0.attn_norm.weight": (4,),
            "blk.0.attn_q.weight": (4, 8),
            "blk.0.ffn_up_exps.weight": (4, 2, 3),
            "blk.0.dense3d.weight": (4, 2, 3),
            "blk.0.nextn.eh_proj.weight": (8, 4),
        },
    )
    path = tmp_path / "i.gguf"
    path.write_bytes(
        imatrix_bytes(
            {
                "blk.0.attn_q.weight": ([[1.0] * 4], [512.0]),
                "blk.0.ffn_up_exps.weight": ([[1.0] * 4] * 3, [500.0, 12.0, 0.0]),
                "blk.0.dense3d.weight": ([[1.0] * 12], [512.0]),
            }
        )
    )
    read = read_imatrix(path)
    found = check_imatrix(read, info)
    assert found.missing == ("token_embd.weight", "blk.0.nextn.eh_proj.weight")
    assert len(found.covered) == 3
    assert found.thin_experts == {"blk.0.ffn_up_exps.weight": (1, 2)}
    dense = read.weights("blk.0.dense3d.weight", columns=4)
    assert dense is not None
    assert dense.shape == (3, 4)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"blk.9.attn_q.weight": ([[1.0] * 4], [1.0])}, "not in it, such as blk.9"),
        ({"blk.0.attn_q.weight": ([[1.0] * 5], [1.0])}, "5 columns"),
        ({"blk.0.ffn_up_exps.weight": ([[1.0] * 2] * 6, [1.0] * 6)}, "6 experts"),
    ],
)
def test_the_imatrix_of_another_model_is_refused(
    tmp_path: Path, entries: Entries, words: str
) -> None:
    tensors = {"blk.0.attn_q.weight": (4, 8), "blk.0.ffn_up_exps.weight": (4, 2, 3)}
    info = model(tmp_path / "m.gguf", tensors)
    path = tmp_path / "i.gguf"
    path.write_bytes(imatrix_bytes(entries))
    with pytest.raises(BadModelFile, match="another model") as caught:
        check_imatrix(read_imatrix(path), info)
    assert words in caught.value.why
