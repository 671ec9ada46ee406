"""Datasets: formats, filters with counts, damage, and constant memory."""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browndwarf.bench.dataset import Filters, load_prompts
from browndwarf.bench.jsonstream import ArrayReader
from browndwarf.errors import UsageError


def turn(who: str, text: str) -> dict[str, str]:
    return {"from": who, "value": text}


def talk(number: int, text: str = "How do magnets work?") -> dict[str, Any]:
    turns = [turn("human", text), turn("gpt", "They have two poles.")]
    return {"id": f"c{number}", "conversations": turns}


def write(path: Path, items: list[Any]) -> Path:
    path.write_text(json.dumps(items, ensure_ascii=False), encoding="utf-8")
    return path


def test_sharegpt_gives_the_first_human_turn_and_counts_what_it_drops(tmp_path: Path) -> None:
    items = [
        talk(1),
        {"id": "c2", "conversations": [turn("gpt", "Hello"), turn("human", "Hello there")]},
        {"id": "c3", "conversations": [turn("human", "Nobody answers me")]},
        talk(4, "no"),
        talk(5, "x" * 5000),
        {"id": "c6", "conversations": "none"},
        {"id": "c7", "conversations": [turn("system", "Be kind"), *talk(7)["conversations"]]},
    ]
    loaded = load_prompts(str(write(tmp_path / "s.json", items)), limit=100)
    assert [p.id for p in loaded.prompts] == ["c1", "c7"]
    assert loaded.prompts[0].messages == ({"role": "user", "content": "How do magnets work?"},)
    assert loaded.dropped == {
        "first turn is not human": 1,
        "no answer to it": 1,
        "too short": 1,
        "too long": 1,
        "malformed": 1,
    }
    assert loaded.warnings == []


def test_length_caps_are_settings(tmp_path: Path) -> None:
    path = write(tmp_path / "s.json", [talk(1, "no"), talk(2, "x" * 5000)])
    loaded = load_prompts(str(path), limit=9, filters=Filters(min_chars=1, max_chars=9999))
    assert len(loaded.prompts) == 2


def test_a_truncated_file_gives_what_can_be_read_and_a_warning(tmp_path: Path) -> None:
    path = write(tmp_path / "s.json", [talk(i) for i in range(20)])
    path.write_bytes(path.read_bytes()[:-130])
    loaded = load_prompts(str(path), limit=100)
    assert len(loaded.prompts) == 19
    assert "truncated" in loaded.warnings[0]


def test_strict_stops_at_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "s.json", [talk(i) for i in range(20)])
    path.write_bytes(path.read_bytes()[:-130])
    with pytest.raises(UsageError, match="damaged"):
        load_prompts(str(path), limit=100, strict=True)


def test_a_damaged_record_costs_no_other(tmp_path: Path) -> None:
    texts = [json.dumps(talk(i)) for i in range(10)]
    texts[4] = texts[4].replace('"from"', "from", 1)
    path = tmp_path / "s.json"
    path.write_text("[" + ",\n".join(texts) + "]", encoding="utf-8")
    loaded = load_prompts(str(path), limit=100)
    assert [p.id for p in loaded.prompts] == [f"c{i}" for i in range(10) if i != 4]
    assert loaded.dropped["malformed"] == 1
    assert "damaged" in loaded.warnings[0]


def test_reading_stops_when_there_are_enough(tmp_path: Path) -> None:
    path = write(tmp_path / "s.json", [talk(i) for i in range(50)])
    loaded = load_prompts(str(path), limit=5)
    assert loaded.seen == 5


def test_a_shuffle_draws_from_the_whole_file_and_repeats_with_its_seed(tmp_path: Path) -> None:
    path = str(write(tmp_path / "s.json", [talk(i) for i in range(200)]))
    first, again, other = (
        [p.id for p in load_prompts(path, limit=20, shuffle=True, seed=s).prompts]
        for s in (1, 1, 2)
    )
    assert first == again != other
    assert max(int(name[1:]) for name in first) > 100


def test_jsonl_of_messages_keeps_history_and_drops_the_last_answer(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
    ]
    path = tmp_path / "m.jsonl"
    path.write_text(
        json.dumps({"messages": messages, "thinking": False}) + "\n\nnot json\n[1]\n",
        encoding="utf-8",
    )
    loaded = load_prompts(str(path), limit=9)
    assert [m["role"] for m in loaded.prompts[0].messages] == ["system", "user"]
    assert loaded.prompts[0].extra == {"chat_template_kwargs": {"enable_thinking": False}}
    assert loaded.dropped == {"malformed": 2}


def test_paragraphs_of_a_text_are_prompts(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("One line\nand another.\n\n\nA second prompt.", encoding="utf-8")
    loaded = load_prompts(str(path), limit=9)
    assert [p.text for p in loaded.prompts] == ["One line\nand another.", "A second prompt."]


def test_synthetic_prompts_say_what_they_are_unfit_for() -> None:
    loaded = load_prompts("synthetic:50", limit=3, seed=7)
    assert [len(p.text.split()) for p in loaded.prompts] == [50, 50, 50]
    assert loaded.synthetic
    assert "acceptance" in loaded.warnings[0]


def test_packaged_prompts_are_there() -> None:
    assert len(load_prompts("packaged", limit=5).prompts) == 5


@pytest.mark.parametrize(
    ("name", "content"), [("none.json", None), ("e.json", "[]"), ("b.json", "[1, 2"), ("t.txt", "")]
)
def test_nothing_to_use_is_an_error_with_a_reason(
    tmp_path: Path, name: str, content: str | None
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UsageError):
        load_prompts(str(tmp_path / name), limit=5)


def test_a_large_array_is_read_in_constant_memory() -> None:
    """Sixteen MB pass through; under four are ever held."""

    class Endless(io.RawIOBase):
        sent = 0
        record = json.dumps(talk(1, "word " * 200)).encode() + b",\n"

        def read(self, size: int = -1) -> bytes:
            if self.sent > 16 << 20:
                return b""
            self.sent += len(self.record) * 50
            return self.record * 50

    tracemalloc.start()
    count = sum(1 for _ in ArrayReader(Endless(), block=1 << 16))  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count > 10_000
    assert peak < 4 << 20


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.fixed_dictionaries({"id": st.text(max_size=12), "value": st.text()}), max_size=12),
    st.integers(1, 64),
)
def test_any_array_reads_the_same_at_any_block_size(items: list[Any], block: int) -> None:
    data = json.dumps(items, ensure_ascii=False).encode("utf-8", "surrogatepass")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return
    reader = ArrayReader(io.BytesIO(data), block=block)
    assert list(reader) == items
    assert (reader.malformed, reader.truncated) == (0, False)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_rubbish_ends(data: bytes) -> None:
    list(ArrayReader(io.BytesIO(data), block=16))
