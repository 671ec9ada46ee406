"""One training conversation, the tiny grammar that writes its sentences, the held-out rule.

Boundary: no workload knows how a conversation becomes tokens; `render` does that, through the
chat template that ships with the pair, so the corpus and the server write the same bytes.
Output contract: the same `random.Random` state gives the same samples, on every platform.

Example:
    >>> import random
    >>> expand(random.Random(0), "[A|A] {animal} runs.", animal="fox")
    'A fox runs.'
"""

from __future__ import annotations

import random
import re
import zlib
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]

_ALTERNATION = re.compile(r"\[([^\[\]]*)\]")
HELD_OUT_SHARE = 1 / 40


def _is_held_out(key: str) -> bool:
    return bool(key) and zlib.crc32(key.encode()) < HELD_OUT_SHARE * 2**32


@dataclass(frozen=True, slots=True)
class Sample:
    """A whole conversation; the last message is the assistant's.

    ``key`` names the problem behind the words (two operands, a question), one for every
    exchange, joined by ``|``; so no paraphrase of a held-out problem is trained on.
    ``answer`` is a string that a right reply contains, or for tools the expected call.
    """

    workload: str
    key: str
    messages: tuple[Message, ...]
    thinking: bool = False
    tools: tuple[Tool, ...] = ()
    answer: Any = None

    @property
    def held_out(self) -> bool:
        """Whether any of its problems is kept away from training."""
        return any(_is_held_out(key) for key in self.key.split("|"))


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question with its reply, and what a thinking model would think first."""

    question: str
    reply: str
    thought: str
    key: str = ""
    answer: str | None = None


def user(text: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": text}


def assistant(text: str, thought: str | None = None) -> Message:
    """Return an assistant message, with the thought that came before it if there was one."""
    message: Message = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    return message


def system(text: str) -> Message:
    """Return a system message."""
    return {"role": "system", "content": text}


def expand(rng: random.Random, template: str, **slots: object) -> str:
    """Choose one option of every ``[a|b|c]``, innermost first, then fill ``{slots}``."""

    def choose(match: re.Match[str]) -> str:
        return rng.choice(match.group(1).split("|"))

    while "[" in template:
        template = _ALTERNATION.sub(choose, template)
    return template.format_map(slots) if "{" in template else template


def article(word: str) -> str:
    """Put ``a`` or ``an`` before a word."""
    return f"{'an' if word[0] in 'aeiouAEIOU' else 'a'} {word}"


def listing(items: list[str]) -> str:
    """Join items as English does: ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
