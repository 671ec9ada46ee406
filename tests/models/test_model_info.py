"""What a model is, read from its header: layers, heads, types, parts, fingerprints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from browndwarf.errors import BadModelFile, HeadMismatch
from browndwarf.models import fingerprints
from browndwarf.models.gguf import check_head, fingerprint, mismatch, read_model
from gguf_files import gguf, hollow_pair, tensor, tiny, tiny_file


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fingerprints are remembered in this test's folder only."""
    monkeypatch.setattr(fingerprints, "_cache_file", lambda: tmp_path / "cache" / "f.json")


def test_gemma_layers_windows_and_shared_caches_are_counted(tmp_path: Path) -> None:
    """Five sliding layers to a full one; E-models share the last caches."""
    target, head = hollow_pair(tmp_path, "gemma4-e4b", layers=12)
    info = read_model(target)
    assert (info.layers.full, info.layers.sliding, info.layers.kv_shared) == (2, 10, 6)
    assert info.shape.sliding_window == 512
    assert [b.k_dim for b in info.blocks[4:6]] == [256, 512]
    assert info.tied
    assert info.head.kind == "none"
    assert read_model(head).head.kind == "assistant"
    assert read_model(head).shape.hidden_out == info.hidden_width


def test_a_qwen_hybrid_has_recurrent_layers_and_a_head_inside(tmp_path: Path) -> None:
    """Three recurrent layers to a full one; the nextn layer is counted apart."""
    target, _ = hollow_pair(tmp_path, "qwen35-9b", layers=8)
    info = read_model(target)
    assert (info.layers.total, info.layers.full, info.layers.recurrent) == (8, 2, 6)
    assert (info.head.kind, info.head.layers) == ("nextn", 1)
    # (4 - 1) x (4096 + 2 x 16 x 128) and 128 x 4096
    assert (info.shape.state_r, info.shape.state_s) == (24576, 524288)
    assert not info.is_head
    assert check_head(info).ok


def test_the_nextn_key_without_its_tensors_is_no_head(tmp_path: Path) -> None:
    """Many conversions keep the key and drop the layer."""
    path = tiny_file(tmp_path / "m.gguf", **{"llama.nextn_predict_layers": 1})
    assert read_model(path).head.kind == "none"


def test_bits_per_weight_weigh_tensors_by_size(tmp_path: Path) -> None:
    """8.5 bits for Q8_0 and 32 for F32, over all parameters."""
    path = tmp_path / "m.gguf"
    parts = [tensor("token_embd.weight", (64, 100), 8), tensor("output.weight", (64, 100), 0, 6816)]
    path.write_bytes(gguf(tiny(), parts, 6816 + 25600))
    info = read_model(path)
    assert info.bits_per_weight == pytest.approx((8.5 + 32) / 2)
    assert not info.tied
    assert info.type_bytes == {"F32": 25600, "Q8_0": 6800}


def split(path: Path, count: int) -> list[Path]:
    """Parts of one tensor each; the first holds the metadata."""
    made = []
    for no in range(count):
        keys = tiny() if no == 0 else {"general.architecture": "llama"}
        keys |= {"split.no": no, "split.count": count, "split.tensors.count": count}
        part = path.with_name(f"m-{no + 1:05d}-of-{count:05d}.gguf")
        part.write_bytes(gguf(keys, [tensor(f"blk.{no}.w", (64, 2))], 512))
        made.append(part)
    return made


def test_all_parts_of_a_split_model_are_one_model(tmp_path: Path) -> None:
    """Whichever part is named."""
    parts = split(tmp_path / "m", 3)
    for named in parts:
        info = read_model(named)
        assert info.path == parts[0]
        assert [t.name for t in info.tensors] == ["blk.0.w", "blk.1.w", "blk.2.w"]
        assert [t.part for t in info.tensors] == [0, 1, 2]
        assert info.file_bytes == sum(p.stat().st_size for p in parts)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    """Not a file-not-found error of the system."""
    parts = split(tmp_path / "m", 3)
    parts[1].unlink()
    with pytest.raises(BadModelFile, match="m-00002-of-00003"):
        read_model(parts[0])


def test_a_part_under_another_name_says_what_it_needs(tmp_path: Path) -> None:
    """Its key tells, its name does not."""
    first = split(tmp_path / "m", 2)[0]
    lone = tmp_path / "renamed.gguf"
    shutil.copy(first, lone)
    with pytest.raises(BadModelFile, match="one of 2 parts"):
        read_model(lone)


def test_a_fingerprint_names_the_content(tmp_path: Path) -> None:
    """Copies agree, one changed byte differs, and time of change is looked at."""
    one, two = tiny_file(tmp_path / "a.gguf"), tiny_file(tmp_path / "b.gguf")
    first = fingerprint(one)
    assert first == fingerprint(two)
    assert first.startswith("sha256:")
    data = bytearray(one.read_bytes())
    data[-1] ^= 1
    one.write_bytes(data)
    os.utime(one, ns=(1, 1))
    assert fingerprint(one) != first


def test_a_fingerprint_is_not_computed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second answer comes from the cache; a broken cache is no fault."""
    path = tiny_file(tmp_path / "a.gguf")
    first = fingerprint(path)
    monkeypatch.setattr(fingerprints, "_compute", lambda _: pytest.fail("computed again"))
    assert fingerprint(path) == first
    monkeypatch.undo()
    cache = tmp_path / "broken.json"
    cache.write_text("not json")
    monkeypatch.setattr(fingerprints, "_cache_file", lambda: cache)
    assert fingerprint(path) == first


def test_a_large_file_is_sampled_and_its_header_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the limit only blocks are read; a change in the first bytes still shows."""
    monkeypatch.setattr(fingerprints, "WHOLE_BELOW", 1)
    monkeypatch.setattr(fingerprints, "TAIL_BYTES", 16)
    one, two = tiny_file(tmp_path / "a.gguf"), tiny_file(tmp_path / "b.gguf", **{"x.y": 1})
    three = tiny_file(tmp_path / "c.gguf")
    assert fingerprint(one) == fingerprint(three)
    assert fingerprint(one) != fingerprint(two)


def test_a_drafter_of_the_same_model_belongs_to_it(tmp_path: Path) -> None:
    """All that is shared agrees."""
    target, head = hollow_pair(tmp_path, "gemma4-12b", layers=6)
    match = check_head(read_model(target), read_model(head))
    assert match.ok
    assert match.reasons == ()


def test_a_drafter_of_another_model_is_refused_with_reasons(tmp_path: Path) -> None:
    """Another width, another cache, another family, another tokenizer."""
    target, own = hollow_pair(tmp_path, "gemma4-12b", layers=6)
    _, wide = hollow_pair(tmp_path, "gemma4-31b", layers=6)
    qwen, _ = hollow_pair(tmp_path, "qwen35-9b", layers=4)
    info = read_model(target)
    assert "hidden width 5376" in check_head(info, read_model(wide)).reasons[0]
    assert "made for gemma4" in check_head(read_model(qwen), read_model(own)).reasons[0]
    assert (
        "no MTP head" in check_head(info, read_model(qwen.with_name("gemma4-12b.gguf"))).reasons[0]
    )
    assert "itself a drafter" in check_head(read_model(own), read_model(own)).reasons[0]
    error = mismatch(info, read_model(wide), check_head(info, read_model(wide)))
    assert isinstance(error, HeadMismatch)
    assert error.exit_code == 3


def test_the_same_width_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """llama.cpp would load it and draft rubbish."""
    target, head = hollow_pair(tmp_path, "gemma4-12b", layers=6)
    data = head.read_bytes()
    head.write_bytes(data.replace(b"w9q", b"v9q", 1))
    match = check_head(read_model(target), read_model(head))
    assert match.reasons == ("its tokenizer maps ids to other tokens than the target's",)


def test_another_vocabulary_size_is_refused(tmp_path: Path) -> None:
    """Ids past the smaller one would be out of range."""
    other = tmp_path / "other"
    other.mkdir()
    target, _ = hollow_pair(tmp_path, "gemma4-12b", layers=6)
    _, head = hollow_pair(other, "gemma4-12b", layers=6, vocab=4096)
    match = check_head(read_model(target), read_model(head))
    assert match.reasons == ("its vocabulary has 4096 tokens, the target's 2048",)
