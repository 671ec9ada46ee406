"""Does a long-lived process stay as it is? Thousands of turns of everything that can happen.

Each turn resumes a conversation from disk, answers (some answers are cancelled, some outgrow the
context and shift), and saves it. After a warm-up that fills every context once, resident memory and
the number of live C objects must not grow. One thread decodes: with models this small it is quick.

    python benchmarks/inprocess_soak.py                  # 2,000 turns with each head, minutes

Goal: memory within 1% of what it was after the warm-up, no pointer more. The last line of output
is one JSON document; ``rss_mib`` in it are the sizes from the warm-up's end to the last turn.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil

from browndwarf.decode.llm import LLM, load
from browndwarf.decode.sampling import Sampling
from browndwarf.engine.native import live_pointers
from browndwarf.models import demo, synthetic


def turn(llm: LLM, chance: random.Random) -> str:
    """One turn; returns what happened in it."""
    name = chance.choice(("anna", "ben", "carla"))
    talk = llm.conversation(name)
    sampling = Sampling(temperature=chance.choice((0.0, 0.7)), seed=chance.randrange(1000))
    length = chance.choice((4, 12, 40))
    cancelled = False
    with talk.say("Tell me about the sea.", sampling=sampling, max_tokens=length) as stream:
        for _ in stream:
            if chance.random() < 0.1:
                stream.cancel()
                cancelled = True
    if len(talk.messages) > 24:
        assert llm.store is not None
        llm.store.delete(name)
        return "deleted"
    talk.save()
    return "cancelled" if cancelled else stream.answer.reason


def shift(llm: LLM, chance: random.Random) -> str:
    """One answer that outgrows the context."""
    words = " ".join(chance.choice(("sea", "dog", "wind", "hat")) for _ in range(60))
    with llm.stream_text(words, max_tokens=llm.pair.n_ctx) as stream:
        return f"long, {stream.run().reason}"


def reach(llm: LLM) -> None:
    """Use every buffer to its end once: the engine reserves for the longest prompt and the fullest
    context, and the system counts a page when it is first touched."""
    for slot in llm._slots:
        llm.keeper.prefill(slot, [9 + slot.seq] * (llm.pair.n_ctx - 8))
    for token in (5, 6):
        with llm.stream_text([token] * 60, max_tokens=llm.pair.n_ctx) as stream:
            stream.run()


def sample(process: psutil.Process, sizes: list[int], held: list[int]) -> None:
    """Resident memory as it is, and without the free pieces that glibc's allocator keeps: those
    grow slowly by fragmentation and say nothing of a leak."""
    gc.collect()
    sizes.append(process.memory_info().rss)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    held.append(process.memory_info().rss)


def run(args: argparse.Namespace) -> dict[str, object]:
    """The embedded pair, then the recurrent model."""
    started = time.monotonic()
    chance = random.Random(args.seed)
    process = psutil.Process()
    counts: dict[str, int] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        hybrid = synthetic.write_hybrid(Path(name) / "hybrid.gguf")
        pairs = (("assistant", demo.TARGET, demo.HEAD), ("nextn", hybrid, None))
        for kind, target, head in pairs:
            if kind not in args.heads.split(","):
                continue
            with load(
                target,
                head,
                n_ctx=512,
                n_max=3,
                sequences=2,
                context_shift=True,
                threads=1,
                sessions=Path(name) / kind,
            ) as llm:
                sizes: list[int] = []
                held: list[int] = []
                pointers: dict[str, int] = {}
                reach(llm)
                for i in range(args.warm_up + args.turns):
                    if i == args.warm_up:
                        gc.collect()
                        pointers = live_pointers()
                    if i >= args.warm_up and (i - args.warm_up) % max(1, args.turns // 10) == 0:
                        sample(process, sizes, held)
                        print(f"{kind} {i} {sizes[-1] / 2**20:.2f} MiB", file=sys.stderr)
                    what = shift(llm, chance) if i % 20 == 19 else turn(llm, chance)
                    counts[what] = counts.get(what, 0) + 1
                sample(process, sizes, held)
                rows.append(
                    {
                        "head": kind,
                        "turns": args.turns,
                        "memory_growth": round(held[-1] / held[0] - 1, 5),
                        "rss_mib": [round(size / 2**20, 2) for size in sizes],
                        "held_mib": [round(size / 2**20, 2) for size in held],
                        "pointers_before": pointers,
                        "pointers_after": live_pointers(),
                    }
                )
    left = live_pointers()
    return {
        "name": "inprocess_soak",
        "memory_growth": max(float(str(row["memory_growth"])) for row in rows),
        "rows": rows,
        "happened": counts,
        "pointers_at_the_end": left,
        "goal": "memory within 1%, no pointer more, none left",
        "met": not left
        and all(
            float(str(r["memory_growth"])) < 0.01 and r["pointers_before"] == r["pointers_after"]
            for r in rows
        ),
        "machine": {"os": platform.system(), "cores": os.cpu_count()},
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="many turns in one process")
    parser.add_argument("--turns", type=int, default=2000, help="with each head")
    parser.add_argument("--heads", default="assistant,nextn")
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
