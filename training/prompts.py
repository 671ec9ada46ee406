"""Write the held-out prompts that ship with the pair.

Boundary: problems whose key the corpus keeps away from training, from a seed of their own.
Output contract: one JSON object a line: ``id``, ``workload``, ``messages`` (OpenAI form, the
last one the user's), and where it applies ``tools``, ``thinking`` and ``answer``.

Example:
    $ python -m training.prompts src/browndwarf/models/demo/prompts.jsonl
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from training.corpus import mixture
from training.corpus.sample import Message

SEED = 77_001
COUNTS = {
    "prose": 16, "code": 16, "json": 16, "chat": 16, "arithmetic": 16, "tools": 16, "retrieval": 8,
}  # fmt: skip


def openai_form(messages: list[Message]) -> list[Message]:
    """Write call arguments as JSON text, as the OpenAI API has them."""
    out = []
    for message in messages:
        if calls := message.get("tool_calls"):
            calls = [
                {
                    **c,
                    "function": {
                        **c["function"],
                        "arguments": json.dumps(c["function"]["arguments"]),
                    },
                }
                for c in calls
            ]
            message = {**message, "tool_calls": calls}
        out.append({k: v for k, v in message.items() if k != "reasoning_content"})
    return out


def collect(seed: int, counts: dict[str, int]) -> list[dict[str, Any]]:
    """Return held-out prompts of every workload; in half of the sums thinking is on."""
    out = []
    for workload, count in counts.items():
        for number, sample in enumerate(islice(mixture.held_out(seed, workload), count), 1):
            thinking = number % 2 == 1 if workload == "arithmetic" else sample.thinking
            item: dict[str, Any] = {
                "id": f"{workload}-{number:02d}", "workload": workload,
                "messages": openai_form(mixture.prompt_messages(sample)), "thinking": thinking,
            }  # fmt: skip
            if sample.tools:
                item["tools"] = list(sample.tools)
            if sample.answer is not None:
                item["answer"] = sample.answer
            out.append(item)
    return out


def main() -> None:
    """Write the file."""
    lines = [json.dumps(item, ensure_ascii=False) for item in collect(SEED, COUNTS)]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} prompts")


if __name__ == "__main__":
    main()
