"""The corpus: conversations drawn from all workloads in fixed shares, and as text.

Boundary: the chat template that ships with the pair turns messages into text; nothing here
writes a special token. Output contract: `documents` never yields a held-out problem and
`held_out` yields nothing else.

Example:
    >>> import random
    >>> draw(random.Random(1)).workload in SHARES
    True
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from training.corpus.arithmetic import arithmetic
from training.corpus.chat import chat
from training.corpus.code import code
from training.corpus.jsondata import jsondata
from training.corpus.prose import prose
from training.corpus.retrieval import retrieval
from training.corpus.sample import Exchange, Message, Sample, assistant, system, user
from training.corpus.tools import tools

SHARES = {
    "prose": 0.17, "chat": 0.26, "arithmetic": 0.19, "code": 0.09, "json": 0.09, "tools": 0.15,
    "retrieval": 0.05,
}  # fmt: skip
THINKING_SHARE = {"arithmetic": 0.6}
TEMPLATE = Path(__file__).parents[2] / "src/browndwarf/models/demo/chat_template.jinja"
_SYSTEMS = (
    "You are a helpful assistant.", "You are a friendly assistant.", "Answer the questions.",
    "Be brief.", "You are a small demo model.", "Be helpful and polite.", "You are a poet.",
    "You are a teacher. Help the user.", "Today is Monday.",
)  # fmt: skip
_MAKERS = {
    "prose": prose, "chat": chat, "arithmetic": arithmetic, "code": code, "json": jsondata,
    "retrieval": retrieval,
}  # fmt: skip


@cache
def template() -> Any:
    """Return the compiled chat template."""
    return ImmutableSandboxedEnvironment().from_string(TEMPLATE.read_text(encoding="utf-8"))


def render(sample: Sample, *, prompt_only: bool = False) -> str:
    """Write a conversation, or its prompt up to the last model turn, as text with tokens."""
    messages = prompt_messages(sample) if prompt_only else list(sample.messages)
    text: str = template().render(
        messages=messages, tools=list(sample.tools) or None, bos_token="<bos>",
        enable_thinking=sample.thinking, add_generation_prompt=prompt_only,
    )  # fmt: skip
    return text


def prompt_messages(sample: Sample) -> list[Message]:
    """Return the messages up to and with the last user turn."""
    last = max(i for i, m in enumerate(sample.messages) if m["role"] == "user")
    return list(sample.messages[: last + 1])


def draw(rng: random.Random, workload: str | None = None) -> Sample:
    """Draw a conversation of a workload, or of a random one."""
    name = workload or rng.choices(tuple(SHARES), tuple(SHARES.values()))[0]
    thinking = rng.random() < THINKING_SHARE.get(name, 0.25)
    if name == "tools":
        return tools(rng, thinking)
    turns = 1 if name == "retrieval" else rng.choices((1, 2, 3), (0.72, 0.18, 0.10))[0]
    if workload:
        turns = 1
    items: list[Exchange] = []
    for turn in range(turns):
        kind = name if turn == turns - 1 or rng.random() < 0.5 else "chat"
        items.append(_MAKERS[kind](rng))
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append(system(rng.choice(_SYSTEMS)))
    for turn, item in enumerate(items):
        last = turn == len(items) - 1
        messages.append(user(item.question))
        messages.append(assistant(item.reply, item.thought if thinking and last else None))
    # A greeting has no key: small talk is never held out.
    key = "|".join(item.key for item in items)
    return Sample(name, key, tuple(messages), thinking, (), items[-1].answer)


def documents(seed: int) -> Iterator[Sample]:
    """Yield training conversations without end; every exchange is checked by its key."""
    rng = random.Random(seed)
    while True:
        sample = draw(rng)
        if not sample.held_out:
            yield sample


def held_out(seed: int, workload: str) -> Iterator[Sample]:
    """Yield conversations of a workload whose last problem is held out, without repeats."""
    rng, seen = random.Random(seed), set()
    while True:
        sample = draw(rng, workload)
        key = sample.key.split("|")[-1]
        if key and key not in seen and replace(sample, key=key).held_out:
            seen.add(key)
            yield sample
