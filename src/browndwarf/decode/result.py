"""What an answer comes back with: its text, its calls, and the figures of how it was made.

Example:
    answer.text, answer.stats.tok_s, answer.stats.acceptance
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from browndwarf.decode.answer import ToolCall
from browndwarf.decode.slot import Tally

Reason = Literal["end", "length", "stop", "cancelled", "context"]


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Figures of one answer. Times in seconds; ``drafted`` and ``accepted`` by draft position.

    The first token comes out of reading the prompt, so ``steps`` made ``tokens`` - 1.
    """

    prompt_tokens: int
    reused_tokens: int
    tokens: int
    steps: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    prefill_s: float
    draft_s: float
    verify_s: float
    sample_s: float
    rest_s: float

    @property
    def decode_s(self) -> float:
        """Time of all steps; what the caller did between them is not in it."""
        return self.draft_s + self.verify_s + self.sample_s + self.rest_s

    @property
    def tok_s(self) -> float:
        """Decode rate over the tokens that steps made; 0 without a step."""
        return (self.tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def cycle_ms(self) -> float:
        """Mean time of a step."""
        return 1e3 * self.decode_s / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float:
        """Accepted drafts over all drafts; 0 without any."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else 0.0

    @property
    def per_position(self) -> tuple[float, ...]:
        """Share of steps with drafts in which the i-th draft was accepted."""
        return tuple(a / self.drafted[0] for a in self.accepted) if self.drafted else ()

    @property
    def accepted_length(self) -> float:
        """Tokens per step."""
        return (self.tokens - 1) / self.steps if self.steps else 0.0


def stats_of(
    tally: Tally, *, prompt_tokens: int, reused_tokens: int, prefill_s: float
) -> AnswerStats:
    """Freeze a slot's sums."""
    return AnswerStats(
        prompt_tokens=prompt_tokens,
        reused_tokens=reused_tokens,
        tokens=tally.tokens,
        steps=tally.steps,
        drafted=tuple(tally.drafted),
        accepted=tuple(tally.accepted),
        prefill_s=prefill_s,
        draft_s=tally.draft_s,
        verify_s=tally.verify_s,
        sample_s=tally.sample_s,
        rest_s=tally.rest_s,
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer. ``tokens`` are the ids as the model gave them, its end included."""

    text: str
    thinking: str
    tool_calls: tuple[ToolCall, ...]
    reason: Reason
    tokens: tuple[int, ...]
    stats: AnswerStats

    def as_message(self) -> dict[str, Any]:
        """As the assistant's message for the next turn."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [call.as_message() for call in self.tool_calls]
        return message
