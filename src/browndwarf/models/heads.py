"""Does this drafter belong to this target?

llama.cpp asserts on the hidden width and checks nothing else: a drafter of the same width made
for another model loads and drafts rubbish. ``check_head`` compares what a drafter must share with
its target, from the two headers.

Example:
    match = check_head(read_model(target), read_model(head))
    if not match.ok:
        raise mismatch(target, head, match)
"""

from __future__ import annotations

from dataclasses import dataclass

from browndwarf.errors import HeadMismatch
from browndwarf.models.info import ModelInfo
from browndwarf.models.shape import Block

_TARGETS = {"gemma4-assistant": "gemma4"}
"""Which target architecture a drafter's architecture is made for."""


@dataclass(frozen=True, slots=True)
class HeadMatch:
    """The answer: ``reasons`` forbid the pair; ``notes`` are differences that do not."""

    ok: bool
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()


def check_head(target: ModelInfo, head: ModelInfo | None = None) -> HeadMatch:
    """Compare a target with its drafter; without one, the target must carry a nextn head.

    For an assistant: family, hidden width (``embedding_length_out``), vocabulary, the mapping of
    ids to tokens, and per layer kind the K/V head dimensions, K/V heads, window and rope base,
    because it reads the target's own cache. Token types and merges are notes: a drafter never
    tokenizes.
    """
    if target.is_head:
        return HeadMatch(False, (f"{target.path.name} is itself a drafter, not a target",))
    if head is None:
        if target.head.kind == "nextn":
            return HeadMatch(True, ())
        return HeadMatch(False, (f"{target.path.name} carries no MTP head, and none was given",))
    if head.head.kind == "none":
        return HeadMatch(False, (f"{head.path.name} is no MTP head ({head.architecture})",))
    reasons = _family(target, head)
    if head.head.kind == "assistant":
        wide = head.shape.hidden_out
        if wide != target.hidden_width:
            reasons.append(f"it expects hidden width {wide}, the target has {target.hidden_width}")
        if not reasons:
            reasons += _shared_cache(target, head)
    elif head.hidden_width != target.hidden_width:
        reasons.append(
            f"its hidden width is {head.hidden_width}, the target's {target.hidden_width}"
        )
    notes: list[str] = []
    if head.vocab != target.vocab:
        reasons.append(f"its vocabulary has {head.vocab} tokens, the target's {target.vocab}")
    elif not (head.tokenizer.tokens and target.tokenizer.tokens):
        notes.append("one of the files carries no tokenizer, so the tokens were not compared")
    elif head.tokenizer.tokens != target.tokenizer.tokens:
        reasons.append("its tokenizer maps ids to other tokens than the target's")
    elif head.tokenizer.fingerprint != target.tokenizer.fingerprint:
        notes.append("the tokens agree, but token types or merges differ")
    return HeadMatch(not reasons, tuple(reasons), tuple(notes))


def mismatch(target: ModelInfo, head: ModelInfo | None, match: HeadMatch) -> HeadMismatch:
    """The error for a pair that must not run."""
    which = head.path.name if head is not None else "no separate drafter"
    return HeadMismatch(
        f"{which} does not fit {target.path.name}",
        why="; ".join(match.reasons),
        fix="use the drafter that was published with this very model; llama.cpp would load "
        "another one and draft rubbish",
    )


def _family(target: ModelInfo, head: ModelInfo) -> list[str]:
    wanted = _TARGETS.get(head.architecture, head.architecture)
    if wanted != target.architecture:
        return [f"it is made for {wanted} targets, this one is {target.architecture}"]
    return []


def _shared_cache(target: ModelInfo, head: ModelInfo) -> list[str]:
    """Differences between the cache that the drafter expects and the one the target keeps."""
    reasons = []
    for kind in ("full", "sliding"):
        own = _last(head.blocks, kind)
        theirs = _last([b for b in target.blocks if b.own_kv], kind)
        if own is None:
            continue
        if theirs is None:
            reasons.append(f"it attends to {kind} layers, the target has none")
            continue
        for what, mine, other in (
            ("K head dimension", own.k_dim, theirs.k_dim),
            ("V head dimension", own.v_dim, theirs.v_dim),
            ("K/V heads", own.kv_heads, theirs.kv_heads),
        ):
            if mine != other:
                reasons.append(f"{kind} layers: its {what} is {mine}, the target's {other}")
    if head.layers.sliding and head.shape.sliding_window != target.shape.sliding_window:
        reasons.append(
            f"its window is {head.shape.sliding_window}, the target's {target.shape.sliding_window}"
        )
    for what, mine_base, other_base in (
        ("rope base", head.shape.rope_base, target.shape.rope_base),
        (
            "rope base of sliding layers",
            head.shape.rope_base_sliding,
            target.shape.rope_base_sliding,
        ),
    ):
        if mine_base != other_base:
            reasons.append(f"its {what} is {mine_base:g}, the target's {other_base:g}")
    return reasons


def _last(blocks: tuple[Block, ...] | list[Block], kind: str) -> Block | None:
    found = [block for block in blocks if block.kind == kind]
    return found[-1] if found else None
