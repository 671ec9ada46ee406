"""From what a user writes to a file, without the network."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from browndwarf.errors import ModelNotFound, UsageError
from browndwarf.models.resolve import Role, cache_folder, resolve_model


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cached repository owner/name with one snapshot."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--owner--name-GGUF"
    folder = repository / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    return folder


def put(folder: Path, *names: str) -> None:
    """Empty files."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")


def test_a_path_is_itself(tmp_path: Path) -> None:
    """And a missing one is told with the other ways to name a model."""
    put(tmp_path, "m.gguf")
    assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    with pytest.raises(ModelNotFound, match="hf:owner"):
        resolve_model(str(tmp_path / "none.gguf"))


def test_an_empty_or_impossible_name_is_told() -> None:
    """An empty one is not the current folder."""
    for role in get_args(Role):
        with pytest.raises(UsageError, match="is empty"):
            resolve_model(" ", role)
    with pytest.raises(ModelNotFound, match="too long"):
        resolve_model("a" * 5000)
    with pytest.raises(ModelNotFound, match="home"):
        resolve_model("~no-such-user-here/m.gguf")


def test_the_only_model_of_a_cached_repository_is_taken(snapshot: Path) -> None:
    """Drafters, projectors, imatrices and later parts are no choice for a target."""
    put(
        snapshot,
        "gemma-Q4_K_M.gguf",
        "mtp-gemma-Q8_0.gguf",
        "mmproj-F16.gguf",
        "gemma-imatrix.gguf",
    )
    assert resolve_model("hf:owner/name-GGUF").name == "gemma-Q4_K_M.gguf"
    assert resolve_model("hf:owner/name-GGUF", "head").name == "mtp-gemma-Q8_0.gguf"


def test_a_name_or_a_part_of_it_chooses(snapshot: Path) -> None:
    """And several choices are listed."""
    put(snapshot, "g-Q4_K_M.gguf", "g-Q8_0.gguf", "sub/g-F16-00001-of-00002.gguf")
    put(snapshot, "sub/g-F16-00002-of-00002.gguf")
    assert resolve_model("hf:owner/name-GGUF:g-Q8_0.gguf").name == "g-Q8_0.gguf"
    assert resolve_model("hf:owner/name-GGUF:Q4_K_M").name == "g-Q4_K_M.gguf"
    assert resolve_model("hf:owner/name-GGUF:F16").name == "g-F16-00001-of-00002.gguf"
    with pytest.raises(ModelNotFound, match=r"g-Q4_K_M\.gguf, g-Q8_0\.gguf"):
        resolve_model("hf:owner/name-GGUF")


def test_what_is_not_cached_says_how_to_get_it(snapshot: Path) -> None:
    """Nothing is downloaded."""
    with pytest.raises(ModelNotFound, match="hf download owner/other"):
        resolve_model("hf:owner/other")
    with pytest.raises(ModelNotFound, match="no single choice"):
        resolve_model("hf:owner/name-GGUF")
    with pytest.raises(ModelNotFound, match="no name of a cached model"):
        resolve_model("hf:justaname")


def test_the_cache_is_where_hugging_face_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HF_HUB_CACHE before HF_HOME before the default."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert cache_folder() == tmp_path / "home" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "direct"))
    assert cache_folder() == tmp_path / "direct"
