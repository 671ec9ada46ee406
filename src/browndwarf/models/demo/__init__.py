"""The embedded demo pair: a Gemma-4-shaped target, its MTP drafter, prompts and template.

Purpose: name the packaged files and prove that they are the ones that were released.
Boundary: no model is loaded here; `training/` in the source tree made the files, and
`CARD.md` beside this module says what the pair is and what it cannot do.
Output contract: paths are real files; :func:`verify` returns nothing or raises BadModelFile.

Example:
    >>> from browndwarf.models import demo
    >>> demo.TARGET.name
    'target-Q8_0.gguf'
    >>> {prompt["workload"] for prompt in demo.prompts()} >= {"prose", "code", "json", "chat"}
    True
"""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from browndwarf.errors import BadModelFile

FOLDER: Path = Path(str(files(__name__)))
TARGET: Path = FOLDER / "target-Q8_0.gguf"
HEAD: Path = FOLDER / "mtp-F16.gguf"
CHAT_TEMPLATE: Path = FOLDER / "chat_template.jinja"
PROMPTS: Path = FOLDER / "prompts.jsonl"
CARD: Path = FOLDER / "CARD.md"
CHECKSUMS: Path = FOLDER / "SHA256SUMS"


def checksums() -> dict[str, str]:
    """Return file name -> hexadecimal SHA-256, as released."""
    pairs = (line.split() for line in CHECKSUMS.read_text(encoding="utf-8").splitlines() if line)
    return {name: digest for digest, name in pairs}


def verify(folder: Path = FOLDER) -> None:
    """Check every released file in ``folder`` against its SHA-256.

    Raises BadModelFile that names the first missing or changed file.
    """
    for name, expected in checksums().items():
        path = folder / name
        if not path.is_file():
            raise BadModelFile(
                f"the demo pair is incomplete: {name} is missing",
                why=f"no such file in {folder}",
                fix="install browndwarf again",
            )
        with path.open("rb") as stream:
            actual = hashlib.file_digest(stream, "sha256").hexdigest()
        if actual != expected:
            raise BadModelFile(
                f"the demo pair is damaged: {name} is not the released file",
                why=f"SHA-256 is {actual}, expected {expected}",
                fix="install browndwarf again",
            )


def prompts(workload: str | None = None) -> list[dict[str, Any]]:
    """Return the held-out prompts, of one workload or all, in file order.

    Each has ``id``, ``workload`` and ``messages`` (OpenAI form), and may have ``tools``,
    ``thinking`` (the template's ``enable_thinking``) and ``answer`` (what is right).
    """
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    every: list[dict[str, Any]] = [json.loads(line) for line in lines if line]
    return [item for item in every if workload in (None, item["workload"])]
