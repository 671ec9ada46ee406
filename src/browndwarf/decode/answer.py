"""From generated text back to an answer: what is thought, what is said, which tools are called.

``AnswerParser`` takes text as it comes and gives ``Chunk``s that are safe to show: a marker is
never shown in part. Formats: Gemma 4's channels and tool calls, and the ``<think>`` and
``<tool_call>`` tags that many other models use. ``markup_of`` tells them by the template.

Not covered: calls whose arguments are malformed; they come back as text under the key ``raw``.

Example:
    >>> parser = AnswerParser(GEMMA)
    >>> [str(c) for c in parser.feed("Hi <|tool_call>call:add{a:1}<tool_call|>")]
    ['Hi ', 'call:add{a:1}']
    >>> parser.calls[0].arguments
    {'a': 1}
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

ChunkKind = Literal["text", "thinking", "tool_call"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer. ``str`` of it is its text; of a tool call, the call as written."""

    text: str
    kind: ChunkKind = "text"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for."""

    name: str
    arguments: dict[str, Any]
    id: str = ""

    def as_message(self) -> dict[str, Any]:
        """In the form of ``message.tool_calls``."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Markup:
    """The markers of a format, each as (begin, end); empty where there are none. ``noise`` is
    dropped wherever it stands."""

    thinking: tuple[str, str]
    call: tuple[str, str]
    noise: tuple[str, ...] = ()
    quote: str = '"'


GEMMA = Markup(
    thinking=("<|channel>thought\n", "<channel|>"),
    call=("<|tool_call>", "<tool_call|>"),
    noise=("<|channel>thought<channel|>", "<turn|>", "<|tool_response>"),
    quote='<|"|>',
)
TAGS = Markup(thinking=("<think>", "</think>"), call=("<tool_call>", "</tool_call>"))
PLAIN = Markup(thinking=("", ""), call=("", ""))


def markup_of(template: str) -> Markup:
    """The format that a chat template speaks."""
    if "<|channel>" in template or "<|tool_call>" in template or "<turn|>" in template:
        return GEMMA
    if "<think>" in template or "<tool_call>" in template:
        return TAGS
    return PLAIN


class AnswerParser:
    """Of one answer. ``thinking`` tells that the prompt already opened a thought."""

    def __init__(self, markup: Markup, *, thinking: bool = False) -> None:
        self.markup = markup
        self.calls: list[ToolCall] = []
        self._buffer = ""
        self._state: ChunkKind = "thinking" if thinking else "text"
        self._texts: dict[ChunkKind, list[str]] = {"text": [], "thinking": [], "tool_call": []}

    @property
    def text(self) -> str:
        """What was said so far."""
        return "".join(self._texts["text"])

    @property
    def thought(self) -> str:
        """What was thought so far."""
        return "".join(self._texts["thinking"])

    def feed(self, text: str) -> list[Chunk]:
        """Take more text; returns what can be shown."""
        self._buffer += text
        return self._scan(final=False)

    def finish(self) -> list[Chunk]:
        """The end has come: returns what was held back. An unfinished call is text."""
        chunks = self._scan(final=True)
        if self._state == "tool_call" and self._buffer:
            chunks.append(self._emit(self.markup.call[0] + self._buffer, "text"))
            self._buffer = ""
        return chunks

    def _scan(self, *, final: bool) -> list[Chunk]:
        chunks: list[Chunk] = []
        while True:
            marks = self._marks()
            place, mark = _earliest(self._buffer, marks)
            if mark is None:
                break
            before, self._buffer = self._buffer[:place], self._buffer[place + len(mark) :]
            self._pass(before, chunks)
            self._turn(mark, chunks)
        if self._state != "tool_call":
            hold = 0 if final else held_back(self._buffer, marks)
            shown = self._buffer[: len(self._buffer) - hold]
            self._buffer = self._buffer[len(shown) :]
            self._pass(shown, chunks)
        return chunks

    def _marks(self) -> tuple[str, ...]:
        markup = self.markup
        if self._state == "thinking":
            found: tuple[str, ...] = (markup.thinking[1],)
        elif self._state == "tool_call":
            found = (markup.call[1],)
        else:
            found = (*markup.noise, markup.thinking[0], markup.call[0])
        return tuple(mark for mark in found if mark)

    def _turn(self, mark: str, chunks: list[Chunk]) -> None:
        markup = self.markup
        if mark in markup.noise:
            return
        if self._state == "text":
            self._state = "thinking" if mark == markup.thinking[0] else "tool_call"
            return
        if self._state == "tool_call":
            written = "".join(self._texts["tool_call"])
            self._texts["tool_call"].clear()
            self.calls.append(parse_call(written, markup, len(self.calls)))
            chunks.append(Chunk(written, "tool_call"))
        self._state = "text"

    def _pass(self, text: str, chunks: list[Chunk]) -> None:
        if not text:
            return
        chunk = self._emit(text, self._state)
        if chunk.kind != "tool_call":
            chunks.append(chunk)

    def _emit(self, text: str, kind: ChunkKind) -> Chunk:
        self._texts[kind].append(text)
        return Chunk(text, kind)


def _earliest(text: str, marks: tuple[str, ...]) -> tuple[int, str | None]:
    """The first marker in a text; the longest of those at one place."""
    best: tuple[int, int, str] | None = None
    for mark in marks:
        place = text.find(mark)
        if place >= 0 and (best is None or (place, -len(mark)) < best[:2]):
            best = (place, -len(mark), mark)
    return (best[0], best[2]) if best else (-1, None)


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """How much of a text's end may be the beginning of a marker."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(mark.startswith(tail) for mark in marks):
            return size
    return 0


def parse_call(written: str, markup: Markup, index: int) -> ToolCall:
    """A call from its text: ``call:NAME{...}`` in Gemma's notation, or a JSON object."""
    identity = f"call_{index}"
    match = re.match(r"\s*call:\s*([\w.-]+)\s*(\{.*)", written, re.DOTALL)
    try:
        if match is not None:
            value, end = _Notation(match[2], markup.quote).value(0)
            if isinstance(value, dict) and not match[2][end:].strip():
                return ToolCall(match[1], value, identity)
        else:
            document = json.loads(written)
            arguments = document.get("arguments", document.get("parameters", {}))
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            return ToolCall(str(document["name"]), dict(arguments), identity)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        pass
    return ToolCall(match[1] if match else "", {"raw": written}, identity)


class _Notation:
    """Gemma's notation for values: JSON with bare keys and quotes that are tokens."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote

    def value(self, at: int) -> tuple[Any, int]:
        """The value at ``at``, and where it ends."""
        text = self._text
        at = self._skip(at)
        for quote in (self._quote, '"'):
            if text.startswith(quote, at):
                end = text.index(quote, at + len(quote))
                return text[at + len(quote) : end], end + len(quote)
        if text[at] == "{":
            return self._mapping(at + 1)
        if text[at] == "[":
            return self._list(at + 1)
        match = re.compile(r"[^,\]}]+").match(text, at)
        if match is None:
            raise ValueError("a value is missing")
        word = match[0].strip()
        known = {"true": True, "false": False, "null": None}
        if word in known:
            return known[word], match.end()
        try:
            return int(word), match.end()
        except ValueError:
            return float(word), match.end()

    def _mapping(self, at: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        while True:
            at = self._skip(at)
            if self._text[at] == "}":
                return found, at + 1
            if self._text.startswith((self._quote, '"'), at):
                key, at = self.value(at)
            else:
                end = self._text.index(":", at)
                key, at = self._text[at:end].strip(), end
            at = self._skip(at)
            if self._text[at] != ":":
                raise ValueError("a key without a value")
            found[key], at = self.value(at + 1)
            at = self._comma(at)

    def _list(self, at: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        while True:
            at = self._skip(at)
            if self._text[at] == "]":
                return found, at + 1
            value, at = self.value(at)
            found.append(value)
            at = self._comma(at)

    def _comma(self, at: int) -> int:
        at = self._skip(at)
        if self._text[at] == ",":
            return at + 1
        if self._text[at] not in "]}":
            raise ValueError("a comma is missing")
        return at

    def _skip(self, at: int) -> int:
        while at < len(self._text) and self._text[at].isspace():
            at += 1
        return at
