"""Write the calibration texts that ship with the package.

Boundary: ``demo`` is the corpus alone, from a seed of its own; ``general`` mixes corpus, the
passages beside this module, and this project's own documents and code as they are when it runs.
Output contract: UTF-8 under ``src/browndwarf/plan/texts``; no piece shares a long line with a text
that quality is measured on, and the corpus' held-out problems never come up.

Example:
    $ python -m training.calibration.make
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from training.corpus.mixture import documents
from training.corpus.sample import Sample

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/browndwarf"
EVALUATED = (
    "quality/texts/demo.txt", "quality/questions.jsonl", "models/demo/prompts.jsonl",
)  # fmt: skip
SEED = 40_961
DEMO_BYTES = 120_000
CORPUS_BYTES = 60_000
CODE = (
    "stats.py", "units.py", "files.py", "models/gguf_read.py", "decode/sampling.py",
    "bench/jsonstream.py", "sweep/model.py", "engine/guard.py", "quality/partings.py",
)  # fmt: skip
LONG = 32
"""Shorter lines, such as "The end.", may be anywhere."""


def long_lines(text: str) -> set[str]:
    """Lines that could not be the same by chance."""
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= LONG}


def evaluated_lines() -> set[str]:
    """The long lines of all texts that quality is measured on; of JSON, its strings'."""
    found: set[str] = set()
    for name in EVALUATED:
        text = (PACKAGE / name).read_text(encoding="utf-8")
        if name.endswith(".jsonl"):
            text = "\n".join("\n".join(strings(json.loads(x))) for x in text.splitlines() if x)
        found |= long_lines(text)
    return found


def strings(value: object) -> Iterator[str]:
    """All strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def plain(sample: Sample) -> str:
    """A conversation as text without special tokens."""
    parts = []
    for message in sample.messages:
        parts += [message.get("reasoning_content"), message.get("content")]
        parts += [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
    return "\n".join(part if isinstance(part, str) else json.dumps(part) for part in parts if part)


def corpus(seed: int, size: int, avoid: set[str]) -> list[str]:
    """Conversations up to ``size`` bytes, none with a line to avoid."""
    found, total = [], 0
    for sample in documents(seed):
        text = plain(sample)
        if long_lines(text) & avoid:
            continue
        found.append(text)
        total += len(text.encode()) + 2
        if total >= size:
            break
    return found


def own() -> list[str]:
    """The project's documents and some of its modules, in pieces of a few paragraphs."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    files += [PACKAGE / name for name in CODE]
    pieces = []
    for path in files:
        paragraphs = path.read_text(encoding="utf-8").split("\n\n")
        pieces += ["\n\n".join(paragraphs[i : i + 6]) for i in range(0, len(paragraphs), 6)]
    return pieces


def main() -> None:
    """Write both texts."""
    avoid = evaluated_lines()
    folder = PACKAGE / "plan/texts"
    folder.mkdir(exist_ok=True)
    demo = corpus(SEED, DEMO_BYTES, avoid)
    passages = (Path(__file__).parent / "passages.txt").read_text(encoding="utf-8").split("\n\n")
    general = corpus(SEED + 1, CORPUS_BYTES, avoid) + passages
    general += [piece for piece in own() if not long_lines(piece) & avoid]
    random.Random(SEED).shuffle(general)
    for name, texts in (("demo", demo), ("general", general)):
        text = "\n\n".join(piece.strip("\n") for piece in texts) + "\n"
        (folder / f"calibration-{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
