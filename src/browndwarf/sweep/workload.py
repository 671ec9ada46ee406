"""Workloads: named sets of prompts that a cell is measured on.

A workload is a list of chat prompts (OpenAI message form) or raw texts. Packaged ones are
``prose``, ``code``, ``json`` and ``chat``; a user's own file is JSONL (``{"messages": [...]}``
or ``{"prompt": "..."}`` a line, optional ``id``) or plain text with prompts separated by blank
lines. Acceptance depends on the text, so a speed is only worth what its prompts are: bring
your own.

Example:
    >>> [p.id for p in packaged("prose").prompts[:2]]
    ['prose-1', 'prose-2']
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from browndwarf.errors import UsageError

#: Characters of a token, roughly, in European languages and code.
CHARACTERS_PER_TOKEN = 4
#: Workloads whose prompts differ by so many tokens are measured for what depth costs.
UNLIKE_TOKENS = 1000.0

PACKAGED = ("prose", "code", "json", "chat")


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: ``messages`` go through the model's chat template, ``prompt`` goes as it is."""

    id: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    prompt: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool | None = None


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A named list of prompts. ``fingerprint`` changes with any prompt."""

    name: str
    prompts: tuple[Prompt, ...]

    @property
    def fingerprint(self) -> str:
        """Content hash of the prompts, so that a resumed run notices other texts."""
        return "sha256:" + hashlib.sha256(msgspec.json.encode(self.prompts)).hexdigest()[:16]

    def head(self, count: int) -> Workload:
        """The first ``count`` prompts, or all where there are fewer."""
        return msgspec.structs.replace(self, prompts=self.prompts[:count])


def depth_estimate(workload: Workload) -> float:
    """About how many tokens a workload's prompts have; nobody has tokenized them yet."""
    texts = [
        p.prompt or "".join(str(m.get("content")) for m in p.messages) for p in workload.prompts
    ]
    return sum(map(len, texts)) / CHARACTERS_PER_TOKEN / max(len(texts), 1)


def for_steps(workloads: Sequence[Workload]) -> tuple[str, ...]:
    """On which workloads a plain step is measured: the first, and the one that is deepest in
    context where it is much deeper, or much shallower than the first."""
    first = workloads[0]
    farthest = max(workloads, key=lambda w: abs(depth_estimate(w) - depth_estimate(first)))
    apart = abs(depth_estimate(farthest) - depth_estimate(first))
    return (first.name, farthest.name) if apart >= UNLIKE_TOKENS else (first.name,)


def packaged(name: str) -> Workload:
    """A packaged workload by name.

    Raises:
        UsageError: no such name.
    """
    if name not in PACKAGED:
        raise UsageError(
            f"there is no packaged workload {name!r}",
            why=f"packaged are {', '.join(PACKAGED)}",
            fix="name one of these, or give the path of a .jsonl or .txt file",
        )
    data = resources.files("browndwarf.sweep").joinpath("workloads", f"{name}.jsonl").read_bytes()
    return Workload(name=name, prompts=_parse_jsonl(data, name, source=f"packaged {name}"))


def load(text: str) -> Workload:
    """A workload from a packaged name or the path of a user's file."""
    if text in PACKAGED:
        return packaged(text)
    path = Path(text)
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise UsageError(
            f"no workload {text!r}",
            why=f"it is no packaged name ({', '.join(PACKAGED)}) and reading it as a file "
            f"failed: {exc.strerror or exc}",
            fix="check the path",
        ) from exc
    name = path.stem
    if path.suffix.lower() in {".jsonl", ".ndjson"}:
        prompts = _parse_jsonl(data, name, source=text)
    else:
        prompts = _parse_text(data, name, source=text)
    return Workload(name=name, prompts=prompts)


def from_rows(name: str, rows: list[dict[str, Any]]) -> Workload:
    """A workload from decoded rows, such as the demo pair's held-out prompts."""
    return Workload(name=name, prompts=tuple(_convert(row, name, i) for i, row in enumerate(rows)))


def _parse_jsonl(data: bytes, name: str, *, source: str) -> tuple[Prompt, ...]:
    prompts: list[Prompt] = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompts.append(_convert(msgspec.json.decode(line), name, len(prompts)))
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as exc:
            raise UsageError(
                f"line {number} of {source} is no prompt",
                why=str(exc),
                fix='each line is {"messages": [{"role": "user", "content": "..."}]} '
                'or {"prompt": "..."}',
            ) from exc
    return _not_empty(prompts, source)


def _convert(row: object, name: str, index: int) -> Prompt:
    prompt = msgspec.convert(row, Prompt)
    if bool(prompt.messages) == (prompt.prompt is not None):
        raise ValueError("exactly one of messages and prompt is needed")
    return prompt if prompt.id else msgspec.structs.replace(prompt, id=f"{name}-{index + 1}")


def _parse_text(data: bytes, name: str, *, source: str) -> tuple[Prompt, ...]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise UsageError(
            f"{source} is no UTF-8 text",
            why=str(exc),
            fix="save it as UTF-8, or give a .jsonl file",
        ) from exc
    parts = [part.strip() for part in text.replace("\r\n", "\n").split("\n\n")]
    prompts = [
        Prompt(id=f"{name}-{i}", messages=({"role": "user", "content": part},))
        for i, part in enumerate(filter(None, parts), 1)
    ]
    return _not_empty(prompts, source)


def _not_empty(prompts: list[Prompt], source: str) -> tuple[Prompt, ...]:
    if not prompts:
        raise UsageError(
            f"{source} holds no prompt", why="the file is empty", fix="add at least one prompt"
        )
    return tuple(prompts)
