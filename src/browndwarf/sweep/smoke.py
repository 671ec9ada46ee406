"""The two-turn smoke test: a short prompt, a long one, the short one again.

A recipe is only worth recommending when exactly its command serves. This asks the running
server three greedy questions through its chat endpoint, as a user would, prompt cache on. It
catches what speed cells cannot see: speculation that is silently off, a server that dies on a
long prompt, and output that is corrupted after a long prompt was followed by a short one
(llama.cpp#27296).

Example:
    >>> smoke = await two_turns(chatter, speculative=True, long_tokens=1024)  # doctest: +SKIP
    >>> smoke.passed                                                          # doctest: +SKIP
    True
"""

from __future__ import annotations

from typing import Protocol

from browndwarf.errors import CheckFailed
from browndwarf.records import Record

ANSWER_TOKENS = 48

#: Two greedy answers that part within so few characters are not a rounding near-tie.
SAME_PREFIX_CHARS = 24

_SHORT = "Write two sentences about a small boat."
_FILLER = (
    "The old harbour lies at the end of the road. Every morning the boats go out, and every "
    "evening they come back with fish, salt and stories. "
)


class Reply(Protocol):
    """A chat answer with the server's draft figures."""

    @property
    def text(self) -> str: ...
    @property
    def drafted(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...


class Chatter(Protocol):
    """A running server's chat endpoint; greedy, prompt cache on."""

    async def ask(self, text: str, *, max_tokens: int) -> Reply: ...


class Smoke(Record, frozen=True, kw_only=True):
    """What the three questions showed. ``problems`` is empty when all is well."""

    drafted: int
    accepted: int
    long_prompt_tokens: int
    same_answer: bool
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the command may be recommended."""
        return not self.problems

    def require(self) -> None:
        """Raise CheckFailed when something was wrong."""
        if self.problems:
            raise CheckFailed(
                "the winning command failed its smoke test, so it is not recommended",
                why="; ".join(self.problems),
                fix="see the server's log in the run directory; `browndwarf doctor` lists known "
                "faults of this build; --no-smoke prints the command all the same",
            )


async def two_turns(chatter: Chatter, *, speculative: bool, long_tokens: int) -> Smoke:
    """Ask short, long, short; ``long_tokens`` is about how many tokens the long prompt has.

    Raises:
        ServerError: the server failed outright.
    """
    first = await chatter.ask(_SHORT, max_tokens=ANSWER_TOKENS)
    per_filler = max((await chatter.ask(_FILLER, max_tokens=1)).prompt_tokens, 1)
    long_text = _FILLER * max(1, long_tokens // per_filler) + "What do the boats bring back?"
    long = await chatter.ask(long_text, max_tokens=ANSWER_TOKENS)
    again = await chatter.ask(_SHORT, max_tokens=ANSWER_TOKENS)
    replies = (first, long, again)
    problems = []
    if not all(r.text.strip() for r in replies):
        problems.append("an answer was empty")
    drafted = sum(r.drafted for r in replies)
    if speculative and not drafted:
        problems.append("nothing was drafted: speculation is silently off")
    if first.text[:SAME_PREFIX_CHARS] != again.text[:SAME_PREFIX_CHARS]:
        problems.append(
            "the same short question was answered differently after a long prompt "
            f"({first.text[:SAME_PREFIX_CHARS]!r}, then {again.text[:SAME_PREFIX_CHARS]!r})"
        )
    return Smoke(
        drafted=drafted,
        accepted=sum(r.accepted for r in replies),
        long_prompt_tokens=long.prompt_tokens,
        same_answer=first.text == again.text,
        problems=tuple(problems),
    )
