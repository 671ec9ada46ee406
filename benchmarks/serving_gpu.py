"""Where does MTP stop paying on a large GPU? A Gemma-4 shape, base against MTP, served.

Both servers hold the same target file; MTP adds the drafter with a given (synthetic) acceptance,
so text is meaningless and speed is right. They alternate (A B B A A B) over concurrency 1 to 32,
each point under a time cap, and are compared as ``browndwarf bench compare`` does.

    python3 benchmarks/serving_gpu.py --out DIR [--dataset SHAREGPT.json] [--shape gemma4-31b]
    python3 benchmarks/serving_gpu.py --target T.gguf --head H.gguf --out DIR

Without ``--target`` a file of the shape with zero weights is written; a bias then makes it speak.
``--rehearse`` runs the embedded pair on a CPU, briefly. The last line of output is one JSON
document; the tables go to stderr. ``--seconds`` bounds a run: 6 x points x seconds, and loading.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console

from browndwarf.bench.saved import read_run
from browndwarf.cli import bench_pairs, bench_view, benching
from browndwarf.cli.render import Output

RATES = (0.80, 0.54, 0.43, 0.35)
#: A plain entry of an invented vocabulary: zero weights would choose a control token instead.
SPOKEN_TOKEN = 1000


def make_models(folder: Path, name: str) -> tuple[Path, Path]:
    """The shape and its drafter with zero weights."""
    from browndwarf.models.hollow import SHAPES, write_hollow, write_hollow_head

    target, head = folder / f"{name}.gguf", folder / f"{name}-head.gguf"
    write_hollow(target, SHAPES[name])
    write_hollow_head(head, SHAPES[name])
    return target, head


def commands(args: argparse.Namespace, target: Path, head: Path) -> tuple[str, str]:
    """The base command and the MTP command."""
    slots = max(int(level) for level in args.concurrency.split(","))
    base = ["llama-server", "-m", str(target), "-np", str(slots), "-c", str(slots * args.slot_ctx)]
    base += ["-fit", "off", "--metrics", "--jinja", *shlex.split(args.extra)]
    if not args.rehearse:
        base += ["-ngl", "999", "-fa", "on"]
    mtp = [*base, "-md", str(head), "--spec-type", "draft-mtp", "--spec-draft-n-max"]
    mtp += [str(args.n_max)]
    if not args.rehearse:
        rates = ",".join(f"{rate:g}" for rate in RATES[: args.n_max])
        mtp += ["-ngld", "999", "--spec-synth-rates", rates]
    return shlex.join(base), shlex.join(mtp)


def main() -> None:
    """Run it, then print the document."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--shape", default="gemma4-12b")
    parser.add_argument("--dataset", default="packaged")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32")
    parser.add_argument("--n-max", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="time cap of each point")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-chars", type=int, default=1200, help="longest prompt taken")
    parser.add_argument("--slot-ctx", type=int, default=2048)
    parser.add_argument("--extra", default="", help="more flags for both servers")
    parser.add_argument("--llama-dir")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    if not 1 <= args.n_max <= len(RATES):
        parser.error(f"--n-max must be 1 to {len(RATES)}")
    out = Output()
    with tempfile.TemporaryDirectory() as name:
        hollow = args.target is None and not args.rehearse
        if args.rehearse:
            from browndwarf.models import demo

            target, head = demo.TARGET, demo.HEAD
        elif hollow:
            target, head = make_models(Path(name), args.shape)
        else:
            target, head = args.target, args.head
        wanted = benching.settings(
            model=None,
            dataset=args.dataset,
            concurrency=args.concurrency,
            num_prompts=512,
            max_seconds=f"{args.seconds:g}s",
            max_tokens=args.max_tokens,
            warmup=4,
            ignore_eos=True,
            seed=1,
            temperature=0.0,
            api="chat",
            shuffle=False,
            strict=False,
            min_chars=4,
            max_chars=args.max_chars,
            timeout="120s",
            load_timeout="10m",
            label=f"{args.shape} shape, zero weights" if hollow else target.stem,
            llama_dir=args.llama_dir,
        )
        if hollow:
            for index, prompt in enumerate(wanted.prompts.prompts):
                extra = {**prompt.extra, "logit_bias": [[SPOKEN_TOKEN, 20.0]]}
                spoken = msgspec.structs.replace(prompt, extra=extra)
                wanted.prompts.prompts[index] = spoken
        base, mtp = commands(args, target, head)
        (found,) = bench_pairs.alternate(base, mtp, args.repeats, wanted, args.out, out)
    Console(stderr=True, width=140).print(bench_view.comparison_table(found.points))
    out.note(bench_view.crossover_text(found.crossover, found.points))
    records = [read_run(args.out / f"{arm}-1") for arm in ("base", "mtp")]
    document = {
        "name": "serving_gpu",
        "ratios": {p.concurrency: [p.ratio.mean, p.ratio.low, p.ratio.high] for p in found.points},
        "verdicts": {p.concurrency: p.verdict for p in found.points},
        "crossover": msgspec.to_builtins(found.crossover),
        "tok_s": {p.concurrency: [p.base_tok_s, p.mtp_tok_s] for p in found.points},
        "acceptance": {p.concurrency: p.acceptance.rate for p in records[1].points if p.acceptance},
        "memory_mib": [max((p.memory_mib or 0) for p in r.points) for r in records],
        "ttft_ms": {p.concurrency: p.ttft_ms.get("p50") for p in records[1].points},
        "errors": [sum(sum(p.errors.values()) for p in r.points) for r in records],
        "dataset": msgspec.to_builtins(records[0].dataset),
        "commands": [base, mtp],
        "repeats": args.repeats,
        "goal": "MTP faster at 1; the crossover lies inside 1 to 32",
        "met": found.points[0].verdict == "faster" and found.crossover.where == "inside",
        "machine": msgspec.to_builtins(records[0].machine),
    }
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
