"""Prompts for a benchmark: ShareGPT JSON, JSONL of messages, plain text, packaged, synthetic.

Files are read as a stream and in constant memory. Everything that is left out is counted with
its reason; a damaged file gives what can be read and a warning, or stops with ``strict``.

Example:
    >>> load = load_prompts("packaged", limit=2)
    >>> len(load.prompts), load.dropped
    (2, {})
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from browndwarf.bench.jsonstream import ArrayReader
from browndwarf.errors import UsageError
from browndwarf.files import storage_errors
from browndwarf.records import Record
from browndwarf.units import parse_count

_HUMAN = frozenset({"human", "user"})
_WORDS = (
    "river stone garden letter winter copper window paper morning shadow engine harbour music "
    "number field answer simple narrow bright silent follow gather measure carry build between"
).split()


class Prompt(Record, frozen=True, kw_only=True):
    """One prompt as OpenAI messages. ``extra`` goes into the request as it is."""

    id: str
    messages: tuple[dict[str, Any], ...]
    extra: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def text(self) -> str:
        """All of it as plain text, for the completions endpoint."""
        return "\n\n".join(_plain(m.get("content")) for m in self.messages)


@dataclass(frozen=True)
class Filters:
    """What is kept, as users of ShareGPT expect: first human turn, an answer, bounded length.

    Lengths are characters of the prompt; 4096 are about 1024 tokens of English.
    """

    min_chars: int = 4
    max_chars: int = 4096


@dataclass
class Loaded:
    """Prompts with what was left out and why. ``kind`` names the format that was found."""

    kind: str
    prompts: list[Prompt] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    seen: int = 0
    synthetic: bool = False


def load_prompts(
    source: str,
    *,
    limit: int,
    filters: Filters | None = None,
    shuffle: bool = False,
    seed: int = 0,
    strict: bool = False,
) -> Loaded:
    """Read at most ``limit`` prompts.

    Args:
        source: a file, ``packaged``, or ``synthetic:LENGTH`` (words, about as many tokens).
        shuffle: draw from the whole file (reservoir sampling) instead of taking the first.
        seed: of the draw, and of synthetic text.
        strict: a damaged file raises.

    Raises:
        UsageError: no such file, no known format, damage under ``strict``, or nothing left.
    """
    rules = filters or Filters()
    if source == "packaged":
        loaded = Loaded("packaged")
        _collect(loaded, _packaged(), Filters(1, 1 << 30), limit, shuffle, seed)
    elif source.startswith("synthetic"):
        loaded = Loaded("synthetic", synthetic=True)
        loaded.prompts = list(itertools.islice(_synthetic(source, seed), limit))
        loaded.seen = len(loaded.prompts)
        loaded.warnings.append("synthetic prompts: acceptance and text mean nothing, speed does")
    else:
        loaded = _from_file(Path(source).expanduser(), rules, limit, shuffle, seed)
    if strict and loaded.warnings and not loaded.synthetic:
        raise UsageError(
            f"{source} is damaged",
            why="; ".join(loaded.warnings),
            fix="get a whole copy, or leave out --strict to use what can be read",
        )
    if not loaded.prompts:
        reasons = ", ".join(f"{n} {why}" for why, n in loaded.dropped.most_common())
        raise UsageError(
            f"{source} holds no prompt that can be used",
            why=reasons or "; ".join(loaded.warnings) or "it is empty",
            fix="check the file, or widen --min-chars and --max-chars",
        )
    return loaded


def _from_file(path: Path, rules: Filters, limit: int, shuffle: bool, seed: int) -> Loaded:
    if not path.is_file():
        raise UsageError(
            f"there is no dataset at {path}",
            why="the path is not a file",
            fix="name a .json, .jsonl or .txt file, `packaged`, or synthetic:512",
        )
    with storage_errors(path, "read the dataset"), path.open("rb") as file:
        head = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
        file.seek(0)
        if head[:1] == b"[":
            loaded = Loaded("sharegpt")
            reader = ArrayReader(file)
            records = (_from_record(item, f"{i}") for i, item in enumerate(reader))
            _collect(loaded, records, rules, limit, shuffle, seed)
            if reader.malformed:
                loaded.dropped["malformed"] += reader.malformed
                loaded.warnings.append(f"{reader.malformed} places in {path.name} are damaged")
            if reader.truncated:
                loaded.warnings.append(
                    f"{path.name} is truncated: it ends in mid-record after {loaded.seen} records"
                )
            if reader.bad_text:
                loaded.warnings.append(f"{path.name} holds bytes that are not UTF-8")
        elif head[:1] == b"{" or path.suffix == ".jsonl":
            loaded = Loaded("jsonl")
            _collect(loaded, _json_lines(file), rules, limit, shuffle, seed)
            if bad := loaded.dropped["malformed"]:
                loaded.warnings.append(f"{bad} lines of {path.name} are not JSON objects")
        else:
            loaded = Loaded("text")
            _collect(loaded, _paragraphs(file), rules, limit, shuffle, seed)
    return loaded


def _collect(
    loaded: Loaded,
    found: Iterator[Prompt | str],
    rules: Filters,
    limit: int,
    shuffle: bool,
    seed: int,
) -> None:
    """Filter; keep the first ``limit``, or a uniform draw of them in file order."""
    rng = random.Random(seed)
    kept: list[tuple[int, Prompt]] = []
    passed = 0
    for item in found:
        loaded.seen += 1
        reason = item if isinstance(item, str) else _reason(item, rules)
        if reason:
            loaded.dropped[reason] += 1
            continue
        assert not isinstance(item, str)
        passed += 1
        if len(kept) < limit:
            kept.append((passed, item))
        elif shuffle:
            place = rng.randrange(passed)
            if place < limit:
                kept[place] = (passed, item)
        if not shuffle and len(kept) == limit:
            break
    loaded.prompts = [prompt for _, prompt in sorted(kept, key=lambda pair: pair[0])]


def _reason(prompt: Prompt, rules: Filters) -> str:
    """Why a prompt is dropped; empty if it is kept."""
    length = len(prompt.text.strip())
    if not length:
        return "empty"
    if length < rules.min_chars:
        return "too short"
    return "too long" if length > rules.max_chars else ""


def _from_record(item: dict[str, Any], fallback: str) -> Prompt | str:
    """A ShareGPT record, or one with OpenAI messages; a text is the reason to drop it."""
    name = str(item.get("id") or fallback)
    if "messages" in item:
        return _from_messages(item, name)
    turns = item.get("conversations", item.get("conversation"))
    if isinstance(item.get("prompt"), str):
        return Prompt(id=name, messages=({"role": "user", "content": item["prompt"]},))
    if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
        return "malformed"
    spoken = [t for t in turns if t.get("from", t.get("role")) != "system"]
    if len(spoken) < 2:
        return "no answer to it"
    first = spoken[0]
    if first.get("from", first.get("role")) not in _HUMAN:
        return "first turn is not human"
    text = first.get("value", first.get("content"))
    if not isinstance(text, str):
        return "malformed"
    return Prompt(id=name, messages=({"role": "user", "content": text},))


def _from_messages(item: dict[str, Any], name: str) -> Prompt | str:
    messages = item["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        return "malformed"
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        return "no human turn"
    extra: dict[str, Any] = {}
    if "tools" in item:
        extra["tools"] = item["tools"]
    if isinstance(item.get("thinking"), bool):
        extra["chat_template_kwargs"] = {"enable_thinking": item["thinking"]}
    return Prompt(id=name, messages=tuple(messages), extra=extra)


def _json_lines(file: Any) -> Iterator[Prompt | str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            yield "malformed"
            continue
        yield _from_record(item, f"line-{number}") if isinstance(item, dict) else "malformed"


def _paragraphs(file: Any) -> Iterator[Prompt | str]:
    """Blank lines part prompts."""
    lines: list[str] = []
    number = 0
    for raw in itertools.chain(file, [b""]):
        line = raw.decode("utf-8", "replace").rstrip()
        if line:
            lines.append(line)
        elif lines:
            number += 1
            content = "\n".join(lines)
            lines = []
            yield Prompt(id=f"text-{number}", messages=({"role": "user", "content": content},))


def _packaged() -> Iterator[Prompt | str]:
    from browndwarf.models import demo

    for item in demo.prompts():
        yield _from_messages(item, str(item["id"]))


def _synthetic(source: str, seed: int) -> Iterator[Prompt]:
    words = parse_count(source.partition(":")[2] or "128")
    rng = random.Random(seed)
    for number in itertools.count(1):
        text = " ".join(rng.choices(_WORDS, k=max(words, 1)))
        yield Prompt(id=f"synthetic-{number}", messages=({"role": "user", "content": text},))


def _plain(content: object) -> str:
    if isinstance(content, list):  # parts, as multimodal messages have them
        return "\n".join(str(p.get("text", "")) for p in content if isinstance(p, dict))
    return content if isinstance(content, str) else ""
