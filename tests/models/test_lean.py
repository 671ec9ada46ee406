"""A header without its vocabulary is the same model but for its tokenizer."""

from __future__ import annotations

from pathlib import Path

from browndwarf.models.gguf import read_model
from browndwarf.models.gguf_read import read_header
from browndwarf.models.lean import write_lean
from gguf_files import hollow_pair


def test_shape_and_tensors_are_kept_and_the_vocabulary_is_a_number(tmp_path: Path) -> None:
    """What decides a buffer is there; the file is a fraction of the size."""
    target, _ = hollow_pair(tmp_path, "gemma4-e4b", layers=12, vocab=4096)
    lean = tmp_path / "lean.gguf"
    write_lean(target, lean, vocab=4096)
    info, thin = read_model(target), read_model(lean)
    assert thin.shape == info.shape
    assert thin.tensors == info.tensors
    assert thin.vocab == info.vocab
    assert thin.tokenizer.fingerprint == ""
    assert read_header(lean).data_offset < read_header(target).data_offset / 2
