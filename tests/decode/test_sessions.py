"""Sessions on disk: the last good state survives everything, or there is a clear refusal."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browndwarf.decode.session import SessionStore
from browndwarf.decode.session_file import SessionFile
from browndwarf.decode.session_records import Snapshot
from browndwarf.decode.state_delta import Assembly, StateRecord, describe
from browndwarf.decode.state_layout import Bytes, parse, runs
from browndwarf.errors import (
    DiskFull,
    RunChanged,
    RunFormatError,
    StorageError,
    UsageError,
)
from decode.states import FINGERPRINT, FailingDisk, Killed, cache, grown, same, snapshot, state


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes die in these tests and not the power, so nothing needs to reach the platter."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "sessions")


FORMS = [
    {},
    {"window": 40},
    {"wide": True, "tail": bytes(range(200))},
    {"window": 24, "tail": b"recurrent" * 50},
]


@pytest.mark.parametrize("form", FORMS, ids=["full", "sliding", "hybrid", "both"])
def test_what_was_saved_comes_back(store: SessionStore, form: dict[str, object]) -> None:
    one = snapshot(50, 1, **form)
    store.save("anna", one, FINGERPRINT)
    assert same(store.load("anna", FINGERPRINT), snapshot(50, 1, **form))


@pytest.mark.parametrize("form", FORMS, ids=["full", "sliding", "hybrid", "both"])
def test_many_turns_come_back_too(store: SessionStore, form: dict[str, object]) -> None:
    last = snapshot(50, 1, **form)
    store.save("anna", last, FINGERPRINT)
    for turn in range(2, 40):
        last = grown(last, 50 + 9 * turn, turn, **form)
        last.unchanged -= turn % 3
        store.save("anna", last, FINGERPRINT)
        loaded = store.load("anna", FINGERPRINT)
        assert loaded.tokens == last.tokens
        assert loaded.messages == last.messages
        if loaded.kept == last.kept:
            assert same(loaded, snapshot(50 + 9 * turn, turn, **form))
        else:
            # Only tokens were saved; the states are those of an earlier turn, whole.
            assert np.array_equal(loaded.states["target"], state(loaded.kept, **form))  # type: ignore[arg-type]


def test_rewritten_turns_come_back_as_they_are_now(store: SessionStore) -> None:
    first = snapshot(200)
    store.save("anna", first, FINGERPRINT)
    again = grown(first, 220, 2)
    again.unchanged = 150
    version = dict.fromkeys(range(150, 220), 1)
    again.states = {"target": state(220, changed=version)}
    store.save("anna", again, FINGERPRINT)
    assert same(store.load("anna", FINGERPRINT), again)


def test_a_turn_costs_what_it_added(store: SessionStore) -> None:
    first = snapshot(2000, rows=(512,) * 8)
    whole = store.save("anna", first, FINGERPRINT)
    later = grown(first, 2030, 2, rows=(512,) * 8)
    turn = store.save("anna", later, FINGERPRINT)
    assert turn.appended
    assert not turn.replay
    assert turn.bytes < 0.05 * whole.bytes
    assert same(store.load("anna", FINGERPRINT), later)


def test_a_short_turn_over_wide_windows_saves_only_its_tokens(store: SessionStore) -> None:
    form: dict[str, object] = {"window": 400, "rows": (256,) * 4}
    first = snapshot(600, 1, **form)
    whole = store.save("anna", first, FINGERPRINT)
    later = grown(first, 700, 2, **form)
    turn = store.save("anna", later, FINGERPRINT)
    assert turn.replay == 100
    assert turn.bytes < 0.05 * whole.bytes
    loaded = store.load("anna", FINGERPRINT)
    assert loaded.tokens == later.tokens
    assert loaded.kept == 600
    assert np.array_equal(loaded.states["target"], first.states["target"])


def turn_files(store: SessionStore) -> tuple[Snapshot, Snapshot]:
    """A session with two records; returns the state before the last save and after it."""
    first = snapshot(60, 1, window=20)
    store.save("anna", first, FINGERPRINT)
    second = grown(first, 340, 2, window=20)
    store.save("anna", second, FINGERPRINT)
    return snapshot(60, 1, window=20), second


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("full", [True, False], ids=["full-disk", "killed"])
def test_a_save_that_fails_anywhere_loses_nothing(tmp_path: Path, append: bool, full: bool) -> None:
    at, finished = 0, False
    while not finished:
        at += 1
        folder = tmp_path / f"{append}{full}{at}"
        good = SessionStore(folder)
        _, old = turn_files(good)
        new = grown(old, 660, 3, window=20)
        if not append:
            new.unchanged, new.layouts = 0, {}
        disk = FailingDisk(at, full=full)
        try:
            SessionStore(folder, disk=disk).save("anna", new, FINGERPRINT)
        except Killed:
            pass
        except DiskFull:
            assert full
        finished = disk.steps < at
        loaded = good.load("anna", FINGERPRINT)
        expected_new = loaded.tokens == new.tokens
        if expected_new:
            assert loaded.messages == new.messages
        else:
            assert same(loaded, old)
        # And the session goes on from whatever survived.
        newest = grown(loaded, 920, 4, window=20)
        good.save("anna", newest, FINGERPRINT)
        assert same(good.load("anna", FINGERPRINT), newest)
    assert at > 10


def test_a_flipped_bit_in_any_section_is_refused_by_name(store: SessionStore) -> None:
    turn_files(store)
    folder = store.folder / "anna"
    manifest = SessionFile(folder, store._disk).manifest()
    data = folder / manifest.data
    content = bytearray(data.read_bytes())
    assert len({s.name for s in manifest.sections}) == 4
    for section in manifest.sections:
        for place in (0, section.stored // 2, section.stored - 1):
            at = section.offset + place
            content[at] ^= 0x10
            data.write_bytes(content)
            with pytest.raises(RunFormatError) as refusal:
                store.load("anna", FINGERPRINT)
            assert section.name in refusal.value.why
            content[at] ^= 0x10
    data.write_bytes(content)
    store.load("anna", FINGERPRINT)


def test_five_hundred_random_faults_lose_and_accept_nothing_wrong(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "s")
    turn_files(store)
    folder = store.folder / "anna"
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "lock"}
    truth = store.load("anna", FINGERPRINT)
    chance = random.Random(8)
    refused = 0
    for _ in range(500):
        name = chance.choice(sorted(files))
        content = bytearray(files[name])
        kind = chance.choice(["flip", "cut", "grow", "zero", "swap", "gone"])
        place = chance.randrange(len(content))
        if kind == "flip":
            content[place] ^= 1 << chance.randrange(8)
        elif kind == "cut":
            del content[place:]
        elif kind == "grow":
            content += chance.randbytes(chance.randrange(1, 100))
        elif kind == "zero":
            content[place : place + 64] = bytes(len(content[place : place + 64]))
        elif kind == "swap":
            piece = content[place : place + 32]
            content[place : place + 32] = piece[::-1]
        (folder / name).write_bytes(content)
        if kind == "gone":
            (folder / name).unlink()
        try:
            assert same(store.load("anna", FINGERPRINT), truth), (name, kind, place)
        except (RunFormatError, UsageError):
            refused += 1
        for path, data in files.items():
            (folder / path).write_bytes(data)
    assert refused > 300
    assert same(store.load("anna", FINGERPRINT), truth)


@pytest.mark.parametrize("key", sorted(FINGERPRINT))
def test_another_model_head_context_or_engine_is_refused(store: SessionStore, key: str) -> None:
    store.save("anna", snapshot(30), FINGERPRINT)
    with pytest.raises(RunChanged) as refusal:
        store.load("anna", FINGERPRINT | {key: "other"})
    assert key in refusal.value.why
    reread = store.load("anna", FINGERPRINT | {key: "other"}, states=False)
    assert reread.messages == snapshot(30).messages
    assert reread.kept == 0
    assert not reread.states


def test_another_models_save_starts_anew(store: SessionStore) -> None:
    first = snapshot(60)
    store.save("anna", first, FINGERPRINT)
    other = FINGERPRINT | {"model": "other"}
    later = grown(first, 70, 2)
    assert not store.save("anna", later, other).appended
    assert same(store.load("anna", other), later)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "a\\b", ".hidden", "nul", "COM1.txt", "x" * 65, "a ", "ä"],
)
def test_unsafe_names_are_refused(store: SessionStore, name: str) -> None:
    with pytest.raises(UsageError):
        store.save(name, snapshot(10), FINGERPRINT)
    with pytest.raises(UsageError):
        store.has(name)
    assert not store.folder.exists() or not list(store.folder.iterdir())


def test_listing_and_deletion(store: SessionStore) -> None:
    assert store.list() == []
    for name in ("anna", "Ben 2", "c-3.x"):
        store.save(name, snapshot(10), FINGERPRINT)
    assert store.has("anna")
    assert not store.has("dora")
    (store.folder / "anna" / "manifest").write_bytes(b"rubbish")
    listed = {info.name: info for info in store.list()}
    assert set(listed) == {"anna", "Ben 2", "c-3.x"}
    assert listed["anna"].problem
    assert listed["Ben 2"].tokens == 11
    assert listed["Ben 2"].title == "message 0"
    store.delete("Ben 2")
    assert {info.name for info in store.list()} == {"anna", "c-3.x"}
    with pytest.raises(UsageError):
        store.delete("Ben 2")
    with pytest.raises(UsageError):
        store.load("Ben 2", FINGERPRINT)


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    size = SessionStore(tmp_path / "probe").save("x", snapshot(100), FINGERPRINT).bytes
    store = SessionStore(tmp_path / "s", cap_bytes=3 * size + size // 2)
    for i, name in enumerate("abc"):
        store.save(name, snapshot(100), FINGERPRINT)
        stamp = 1000 + i
        os.utime(store.folder / name / "manifest", (stamp, stamp))
    store.load("a", FINGERPRINT)
    store.save("d", snapshot(100), FINGERPRINT)
    assert {info.name for info in store.list()} == {"a", "c", "d"}


def test_a_session_larger_than_the_cap_is_kept(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "s", cap_bytes=10)
    store.save("a", snapshot(100), FINGERPRINT)
    assert [info.name for info in store.list()] == ["a"]


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("a file")
    with pytest.raises(StorageError):
        SessionStore(tmp_path / "s").save("a", snapshot(10), FINGERPRINT)


def test_unknown_forms_are_saved_whole(store: SessionStore) -> None:
    strange = snapshot(10)
    strange.states = {"target": np.arange(5000, dtype=np.uint16).view(np.uint8)}
    assert not parse(strange.states["target"]).blocks
    store.save("a", strange, FINGERPRINT)
    assert np.array_equal(store.load("a", FINGERPRINT).states["target"], strange.states["target"])


def test_another_versions_session_is_refused_by_that_name(store: SessionStore) -> None:
    store.save("a", snapshot(10), FINGERPRINT)
    manifest = store.folder / "a" / "manifest"
    manifest.write_bytes(manifest.read_bytes().replace(b"session 2 ", b"session 1 ", 1))
    with pytest.raises(RunFormatError) as refusal:
        store.load("a", FINGERPRINT)
    assert "another version" in refusal.value.why


def assemble(records: list[StateRecord], payloads: list[Bytes], step: int = 1 << 20) -> Bytes:
    """All payloads put in place, in pieces of ``step`` bytes, the last ones first."""
    made = Assembly(records)
    assert made.lengths == [payload.nbytes for payload in payloads]
    for number, payload in enumerate(payloads):
        for at in reversed(range(0, payload.nbytes, step)):
            made.place(number, at, payload[at : at + step])
    return made.finish()


def test_records_that_contradict_each_other_are_refused() -> None:
    one = state(50)
    first, pieces = describe(one, parse(one), None, 0)
    later = state(60)
    second, more = describe(later, parse(later), parse(one), 50)
    payloads = [np.concatenate(pieces), np.concatenate(more)]
    for step in (1, 7, 100, 1 << 20):
        assert np.array_equal(assemble([first, second], payloads, step), later)
    with pytest.raises(ValueError, match="record"):
        assemble([second], payloads[1:])
    changed = payloads[0].copy()
    changed[-1] ^= 1
    with pytest.raises(ValueError, match="not the one"):
        assemble([first, second], [changed, payloads[1]])


TURNS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 30), min_size=1, max_size=24, unique=True), st.integers(0, 31)
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60)
@given(turns=TURNS, step=st.integers(1, 900), wide=st.booleans())
def test_any_cells_in_any_order_come_back(
    turns: list[tuple[list[int], int]], step: int, wide: bool
) -> None:
    """Each turn has some positions in some order; those from ``unchanged`` on are new."""
    version: dict[int, int] = {}
    records: list[StateRecord] = []
    payloads: list[Bytes] = []
    before = None
    for turn, (positions, unchanged) in enumerate(turns):
        version |= dict.fromkeys(range(unchanged, 31), turn)
        data = struct.pack("<Ii", 0x1234, 0) + cache(positions, [24, 40], version, wide=wide)
        now = np.frombuffer(data, np.uint8)
        layout = parse(now)
        record, pieces = describe(now, layout, before, unchanged)
        records.append(record)
        payloads.append(np.concatenate(pieces))
        before = layout
        assert np.array_equal(assemble(records, payloads, step), now)


def test_runs_cover_their_source() -> None:
    chance = random.Random(1)
    for _ in range(200):
        source = np.array([chance.randrange(-1, 6) for _ in range(chance.randrange(12))], np.int32)
        spread = [first if first < 0 else first + i for first, n in runs(source) for i in range(n)]
        assert spread == source.tolist()
