"""Is greedy decoding with MTP in this process what the target alone would say?

Every prompt is answered by the target alone and then with each kind of head and n_max 1 to 4;
token lists are compared. Where two part, the target's own logits are looked at: if the two tokens
are its best two and nearly equal (their margin is given), a batch of another size has rounded the
other way; anything else is a mismatch, and the run fails.

    python benchmarks/inprocess_lossless.py                  # 200 prompts, minutes

Heads: the embedded drafter as F16 and Q4_0, prompt lookup, and the MTP block inside a random
qwen35 model, whose guesses are replaced by right tokens with errors, so that recurrent states are
rolled back by every length. The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np

from browndwarf.decode.llm import LLM, load
from browndwarf.decode.slot import Slot
from browndwarf.engine.locate import choose_build, find_builds
from browndwarf.engine.quantizer import quantize
from browndwarf.models import demo, synthetic

NEAR = 0.1


def prompts_of(llm: LLM, count: int) -> list[list[int]]:
    """Held-out prompts, each with and without thinking, and then with a system message, until
    there are enough."""
    found: list[list[int]] = []
    for system in ("", "Be brief.", "Answer in detail.", "Be polite."):
        for thinking in (False, True):
            for item in demo.prompts():
                messages = list(item["messages"])
                if system and messages[0]["role"] != "system":
                    messages.insert(0, {"role": "system", "content": system})
                text = llm.template.render(messages, tools=item.get("tools"), thinking=thinking)
                tokens = llm.tokenize(text)
                if tokens not in found:
                    found.append(tokens)
                if len(found) == count:
                    return found
    return found


def generate(llm: LLM, prompt: list[int], tokens: int) -> list[int]:
    """One greedy answer."""
    with llm.stream_text(prompt, max_tokens=tokens) as stream:
        return list(stream.run().tokens)


def margin(plain: LLM, tokens: list[int], one: int, other: int) -> float:
    """How far apart the two are in the target's logits; infinite if they are not its best."""
    slot = plain._slots[0]
    plain.keeper.clear(slot)
    plain.keeper.prefill(slot, tokens)
    logits = plain.pair.target.logits(plain.keeper.last_row)
    if {one, other} != set(np.argsort(logits)[-2:].tolist()):
        return float("inf")
    return abs(float(logits[one] - logits[other]))


class Oracle:
    """Replaces a head's guesses by the right tokens, three of ten spoilt."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.start = inner, 0
        self.right: list[int] = []
        self.chance = random.Random(5)

    def draft(self, slots: list[Slot], n: int) -> None:
        """As the head, then replaced."""
        self.inner.draft(slots, n)
        for slot in slots:
            at = len(slot.tokens) - self.start
            for i, token in enumerate(self.right[at : at + len(slot.draft)]):
                slot.draft[i] = token if self.chance.random() < 0.7 else (token + 1) % 1000

    def settle(self, slot: Slot) -> None:
        """As the head."""
        self.inner.settle(slot)


def compare(
    plain: LLM, fast: LLM, prompts: list[list[int]], wanted: list[list[int]], tokens: int
) -> dict[str, Any]:
    """One arm against the target alone."""
    near, wrong, accepted, drafted = [], [], 0, 0
    identical = 0
    for number, (prompt, right) in enumerate(zip(prompts, wanted, strict=True)):
        oracle = fast.speculator._drafter
        if isinstance(oracle, Oracle):
            oracle.start, oracle.right = len(prompt), right
        made = generate(fast, prompt, tokens)
        tally = fast._slots[0].tally
        accepted, drafted = accepted + sum(tally.accepted), drafted + sum(tally.drafted)
        if made == right:
            identical += 1
            continue
        at = next(i for i, (a, b) in enumerate(zip(made, right, strict=False)) if a != b)
        gap = margin(plain, prompt + right[:at], right[at], made[at])
        entry = {"prompt": number, "token": at, "margin": round(gap, 5)}
        (near if gap < NEAR else wrong).append(entry)
    return {
        "identical": identical,
        "near_ties": near,
        "mismatches": wrong,
        "acceptance": round(accepted / max(1, drafted), 4),
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All arms."""
    started = time.monotonic()
    build = choose_build(find_builds())
    arms = []
    with tempfile.TemporaryDirectory(prefix="lossless-") as name:
        folder = Path(name)
        target = folder / "target.gguf"
        quantize(build, demo.TARGET, target, "Q4_0", allow_requantize=True)
        heads: list[tuple[str, Any]] = [("F16", demo.HEAD)]
        for kind in ("Q4_0",):
            path = folder / f"head-{kind}.gguf"
            quantize(build, demo.HEAD, path, kind, allow_requantize=True)
            heads.append((kind, path))
        heads.append(("lookup", "lookup"))
        with load(target, "none", n_ctx=1024, backend_sampling=False) as plain:
            prompts = prompts_of(plain, args.prompts)
            wanted = [generate(plain, p, args.tokens) for p in prompts]
            for head, path in heads:
                for n_max in (1, 2, 3, 4):
                    with load(target, path, n_ctx=1024, n_max=n_max) as fast:
                        row = compare(plain, fast, prompts, wanted, args.tokens)
                    arms.append({"head": head, "n_max": n_max, **row})
                    print(json.dumps(arms[-1]), file=sys.stderr, flush=True)
        hybrid = synthetic.write_hybrid(folder / "hybrid.gguf")
        with load(hybrid, "none", n_ctx=1024, backend_sampling=False) as plain:
            rng = np.random.default_rng(1)
            size = plain.pair.vocab.size
            prompts = [rng.integers(300, size, 24).tolist() for _ in range(args.prompts)]
            wanted = [generate(plain, p, args.tokens) for p in prompts]
            for rollback in (True, False):
                for n_max in (1, 2, 3, 4):
                    with load(hybrid, n_ctx=1024, n_max=n_max, recurrent_rollback=rollback) as fast:
                        drafter: Any = Oracle(fast.speculator._drafter)
                        fast.speculator._drafter = drafter
                        row = compare(plain, fast, prompts, wanted, args.tokens)
                    kind = "nextn, rollback" if rollback else "nextn, state copies"
                    arms.append({"head": kind, "n_max": n_max, **row})
                    print(json.dumps(arms[-1]), file=sys.stderr, flush=True)
    wrong = sum(len(arm["mismatches"]) for arm in arms)
    return {
        "name": "inprocess_lossless",
        "mismatches": wrong,
        "near_ties": sum(len(arm["near_ties"]) for arm in arms),
        "answers": args.prompts * len(arms),
        "identical": sum(arm["identical"] for arm in arms),
        "arms": arms,
        "goal": "no mismatch beyond near ties",
        "met": wrong == 0,
        "engine": build.label,
        "machine": {"os": platform.system(), "cores": os.cpu_count()},
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="greedy MTP decoding against the target alone")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=48)
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
