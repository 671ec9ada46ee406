"""Model files of every type: the source itself where it is that type, else made once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from browndwarf.errors import DiskFull, StorageError, UsageError
from browndwarf.sweep.sources import (
    Source,
    ensure_variant,
    parse_type,
    prune,
    touch,
    variant_path,
)

SOURCE = Source(path="/models/m.gguf", type="Q4_K_M", fingerprint="sha256:" + "ab" * 32)


@pytest.mark.parametrize(
    ("has", "wanted"),
    [("Q8_0", "Q8_0"), ("Q4_K_M", "Q4_K"), ("Q4_K", "Q4_K"), ("Q4_K", "Q4_K_M"), ("odd", "odd")],
)
def test_a_file_that_has_the_type_is_used_as_it_is(has: str, wanted: str) -> None:
    source = Source(path="m.gguf", type=has, fingerprint="sha256:00")
    assert variant_path(source, wanted, "sha") == Path("m.gguf")


def test_variants_are_named_by_content_and_engine() -> None:
    a = variant_path(SOURCE, "Q2_K", "engine1", Path("c"))
    other = Source(path=SOURCE.path, type=SOURCE.type, fingerprint="sha256:" + "cd" * 32)
    assert len({a, variant_path(SOURCE, "Q2_K", "engine2", Path("c")),
                variant_path(other, "Q2_K", "engine1", Path("c"))}) == 3  # fmt: skip


def test_a_variant_is_made_once(tmp_path: Path) -> None:
    made: list[str] = []

    def make(source: Path, dest: Path, name: str) -> None:
        made.append(name)
        dest.write_bytes(b"x")

    for _ in range(2):
        path = ensure_variant(SOURCE, "Q2_K", "sha", make, cache=tmp_path)
    assert path.exists()
    assert made == ["Q2_K"]


def test_a_failed_variant_leaves_nothing(tmp_path: Path) -> None:
    def full(source: Path, dest: Path, name: str) -> None:
        raise DiskFull("no space")

    with pytest.raises(DiskFull):
        ensure_variant(SOURCE, "Q2_K", "sha", full, cache=tmp_path)
    assert not any(p.is_file() for p in tmp_path.rglob("*"))


def test_types_are_spelled_in_capitals_and_checked() -> None:
    assert parse_type(" q4_k_m ") == "Q4_K_M"
    assert parse_type("As-Is") == "as-is"
    with pytest.raises(UsageError, match="Q9_9"):
        parse_type("Q9_9")


def test_a_damaged_variant_is_made_again(tmp_path: Path) -> None:
    made: list[str] = []

    def make(source: Path, dest: Path, name: str) -> None:
        made.append(name)
        dest.write_bytes(b"good")

    path = ensure_variant(SOURCE, "Q2_K", "sha", make, cache=tmp_path)
    path.write_bytes(b"cut")
    ensure_variant(
        SOURCE, "Q2_K", "sha", make, cache=tmp_path, intact=lambda p: p.read_bytes() == b"good"
    )
    assert made == ["Q2_K", "Q2_K"]
    assert path.read_bytes() == b"good"


def test_a_cache_that_cannot_be_written_says_where_to_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("BROWNDWARF_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="quantized files") as caught:
        ensure_variant(SOURCE, "Q2_K", "sha", lambda *_: None)
    assert "BROWNDWARF_CACHE" in caught.value.fix


def test_the_cache_forgets_what_was_used_longest_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROWNDWARF_CACHE_SIZE", "3KiB")
    days = {"old": 9, "older": 30, "used": 5, "fresh": 0}
    for name, age in days.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(b"x" * 1024)
        when = time.time() - age * 86_400
        os.utime(path, (when, when))
    (tmp_path / "notes.txt").write_bytes(b"x" * 9000)
    assert [p.name for p in prune(tmp_path)] == ["older.gguf"]
    touch(tmp_path / "old.gguf")
    monkeypatch.setenv("BROWNDWARF_CACHE_SIZE", "1KiB")
    # What was used within a day stays, even beyond the limit.
    assert [p.name for p in prune(tmp_path)] == ["used.gguf"]
    assert {p.name for p in tmp_path.iterdir()} == {"old.gguf", "fresh.gguf", "notes.txt"}


def test_a_size_that_is_none_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BROWNDWARF_CACHE_SIZE", "plenty")
    with pytest.raises(UsageError, match="not a size"):
        prune(tmp_path)
