"""The server's counters as Prometheus text, under llama-server's names.

So ``browndwarf bench`` and dashboards made for llama-server read them as they are.

Example:
    >>> exposition(Counters(), busy=False, waiting=0).splitlines()[1]
    '# TYPE llamacpp:prompt_tokens_total counter'
"""

from __future__ import annotations

from dataclasses import dataclass, field

from browndwarf.decode.result import AnswerStats


@dataclass(slots=True)
class Counters:
    """Sums over all answers since the start; times in seconds, drafts by position."""

    answers: int = 0
    prompt_tokens: int = 0
    prompt_s: float = 0.0
    tokens: int = 0
    decode_s: float = 0.0
    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, stats: AnswerStats) -> None:
        """Count one answer."""
        self.answers += 1
        self.prompt_tokens += stats.prompt_tokens - stats.reused_tokens
        self.prompt_s += stats.prefill_s
        self.tokens += stats.tokens
        self.decode_s += stats.decode_s
        self.steps += stats.steps
        for sums, added in ((self.drafted, stats.drafted), (self.accepted, stats.accepted)):
            sums.extend([0] * (len(added) - len(sums)))
            for i, count in enumerate(added):
                sums[i] += count


def exposition(counters: Counters, *, busy: bool, waiting: int) -> str:
    """All counters since the start, and who is served now."""
    c = counters
    steps_that_drafted = c.drafted[0] if c.drafted else 0
    lines: list[str] = []
    for name, kind, value, meaning in (
        ("prompt_tokens_total", "counter", c.prompt_tokens, "Prompt tokens read"),
        ("prompt_seconds_total", "counter", c.prompt_s, "Time of reading prompts"),
        ("tokens_predicted_total", "counter", c.tokens, "Tokens generated"),
        ("tokens_predicted_seconds_total", "counter", c.decode_s, "Time of all decode steps"),
        ("n_decode_total", "counter", c.steps, "Decode steps"),
        ("requests_processing", "gauge", int(busy), "Requests being answered"),
        ("requests_deferred", "gauge", waiting, "Requests in line"),
        ("spec_decode_num_drafts_total", "counter", steps_that_drafted, "Steps with drafts"),
        ("spec_decode_num_draft_tokens_total", "counter", sum(c.drafted), "Tokens drafted"),
        ("spec_decode_num_accepted_tokens_total", "counter", sum(c.accepted), "Drafts accepted"),
    ):
        lines += _family(name, kind, meaning)
        lines.append(f"llamacpp:{name} {value:.10g}")
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    lines += _family(name, "counter", "Drafts accepted at a position")
    lines += [f'llamacpp:{name}{{position="{i}"}} {n}' for i, n in enumerate(c.accepted)]
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP llamacpp:{name} {meaning}.", f"# TYPE llamacpp:{name} {kind}"]
