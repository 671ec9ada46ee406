"""Compressed sessions: smaller, as safe as others, and refused in plain words."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from browndwarf.decode import session_file, session_parts
from browndwarf.decode.session import SessionStore
from browndwarf.decode.session_file import Disk, SessionFile
from browndwarf.decode.session_records import Snapshot
from browndwarf.decode.state_layout import Bytes
from browndwarf.errors import EnvironmentFault, RunFormatError
from decode.states import FINGERPRINT, grown, same, snapshot

pytest.importorskip("zstandard", reason="the package zstandard is not installed")


def compressible(kept: int, turns: int) -> Snapshot:
    """Long rows that repeat themselves, in several parts."""
    return snapshot(kept, turns, rows=(1024,) * 4)


def test_compressed_sessions_are_smaller_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (session_file, session_parts):
        monkeypatch.setattr(module, "PART", 100_000)
    packed = SessionStore(tmp_path / "packed", compress=True)
    plain = SessionStore(tmp_path / "plain")
    sizes = [store.save("a", compressible(60, 1), FINGERPRINT).bytes for store in (packed, plain)]
    assert sizes[0] < sizes[1] / 5
    first = packed.load("a", FINGERPRINT)
    assert same(first, compressible(60, 1))
    # Either kind of store goes on with what the other one saved.
    folder = tmp_path / "packed"
    for turn, store in enumerate((SessionStore(folder), packed, SessionStore(folder)), 2):
        later = grown(first, 300 * turn, turn, rows=(1024,) * 4)
        assert store.save("a", later, FINGERPRINT).appended
        assert same(store.load("a", FINGERPRINT), compressible(300 * turn, turn))
        first = later
    codecs = {s.codec for s in SessionFile(folder / "a", Disk()).manifest().sections}
    assert codecs == {"none", "zstd"}


@pytest.mark.parametrize("kind", ["flipped", "garbage", "longer", "cut"])
def test_a_damaged_frame_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    store = SessionStore(tmp_path, compress=True)
    good = session_parts.shrink

    def bad(part: Bytes) -> Bytes:
        frame = good(part)
        if kind == "garbage":
            frame = np.frombuffer(b"no frame" * 9, np.uint8)
        elif kind == "longer":
            frame = good(np.concatenate([part, part]))
        elif kind == "cut":
            frame = frame[: len(frame) // 2]
        return frame

    # What a broken writer leaves has right checksums.
    monkeypatch.setattr(session_file, "shrink", bad)
    store.save("a", compressible(60, 1), FINGERPRINT)
    if kind == "flipped":
        section = SessionFile(tmp_path / "a", Disk()).manifest().sections[-1]
        path = next((tmp_path / "a").glob("data-*"))
        content = bytearray(path.read_bytes())
        content[section.offset + section.stored // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(RunFormatError, match="cannot be resumed"):
        store.load("a", FINGERPRINT)


def test_without_zstandard_compression_is_refused_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SessionStore(tmp_path, compress=True)
    store.save("a", compressible(60, 1), FINGERPRINT)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "zstandard", None)
        with pytest.raises(EnvironmentFault, match="zstandard"):
            SessionStore(tmp_path, compress=True)
        with pytest.raises(EnvironmentFault, match="zstandard"):
            SessionStore(tmp_path).load("a", FINGERPRINT)
    assert same(store.load("a", FINGERPRINT), compressible(60, 1))
