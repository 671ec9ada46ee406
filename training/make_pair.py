"""The one command: corpus, tokenizer, target, drafter, and the released files.

    $ python -m training.make_pair work                  # everything, under 20 minutes on an H200
    $ python -m training.make_pair work --stage train    # needs no gguf
    $ python -m training.make_pair work --stage export   # needs no GPU

Boundary: `parity` and `evaluate` check what this makes and are started by themselves, as they
need a llama.cpp build. Output contract, in the work folder: `vocab.json`, `target.pt`,
`drafter.pt` (float16), `log.json` (device, seeds, seconds, tokens, losses), then the GGUFs
`target-Q8_0.gguf`, `mtp-F16.gguf` and, for parity, F16 and F32 ones.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from training.data import build
from training.model import Drafter, DrafterShape, Target, TargetShape
from training.tokenizer import Vocabulary
from training.tokenizer import train as train_tokenizer
from training.train import train_drafter, train_target


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the pair, but the device."""

    target: TargetShape = field(default_factory=TargetShape)
    drafter: DrafterShape = field(default_factory=DrafterShape)
    documents: int = 1_000_000
    data_seed: int = 20_000
    target_seed: int = 0
    drafter_seed: int = 1
    target_seconds: float = 290.0
    drafter_seconds: float = 130.0
    rows_per_update: int = 64


_STARTED = time.monotonic()


def say(text: str) -> None:
    """Print with the time since the start."""
    print(f"[{time.monotonic() - _STARTED:5.0f} s] {text}", flush=True)


def train(recipe: Recipe, work: Path, workers: int) -> None:
    """Train both networks and save them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    name = torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores"
    say(f"device: {name}; torch {torch.__version__}")
    vocab_path = work / "vocab.json"
    if not vocab_path.exists():
        train_tokenizer(recipe.documents // 20).save(vocab_path)
        say("tokenizer trained")
    rows = build(vocab_path, recipe.documents, recipe.data_seed, workers)
    million = rows.token_count / 1e6
    say(f"{recipe.documents} documents, {million:.1f}M tokens, {len(rows.tokens)} rows")
    target, target_log = train_target(
        recipe.target, rows, recipe.target_seconds, recipe.rows_per_update, device, say,
        seed=recipe.target_seed, compiled=cuda,
    )  # fmt: skip
    _save(target, work / "target.pt")
    drafter, drafter_log = train_drafter(
        target, recipe.drafter, rows, recipe.drafter_seconds, recipe.rows_per_update, device, say,
        seed=recipe.drafter_seed, compiled=cuda,
    )  # fmt: skip
    _save(drafter, work / "drafter.pt")
    log: dict[str, Any] = {
        "device": name, "torch": torch.__version__, "recipe": asdict(recipe),
        "corpus_tokens": rows.token_count, "target": asdict(target_log),
        "drafter": asdict(drafter_log), "wall_seconds": time.monotonic() - _STARTED,
    }  # fmt: skip
    (work / "log.json").write_text(json.dumps(log, indent=2), encoding="utf-8")
    say("saved")


def _save(model: torch.nn.Module, path: Path) -> None:
    state = {k.replace("_orig_mod.", ""): v.half().cpu() for k, v in model.state_dict().items()}
    torch.save(state, path)


def load(recipe: Recipe, work: Path) -> tuple[Target, Drafter, Vocabulary]:
    """Read what `train` saved, as float32."""
    target, drafter = Target(recipe.target), Drafter(recipe.target, recipe.drafter)
    for model, name in ((target, "target.pt"), (drafter, "drafter.pt")):
        state = torch.load(work / name, map_location="cpu", weights_only=True)
        model.load_state_dict({k: v.float() for k, v in state.items()})
        model.eval().requires_grad_(False)
    return target, drafter, Vocabulary.load(work / "vocab.json")


def export(recipe: Recipe, work: Path) -> None:
    """Write the GGUF files."""
    from gguf import GGMLQuantizationType as Type

    from training.corpus.mixture import TEMPLATE
    from training.export import write_drafter, write_target

    target, drafter, vocabulary = load(recipe, work)
    template = TEMPLATE.read_text(encoding="utf-8")
    for kind in (Type.Q8_0, Type.F16, Type.F32):
        write_target(work / f"target-{kind.name}.gguf", target, vocabulary, template, kind)
    for kind in (Type.F16, Type.F32):
        write_drafter(work / f"mtp-{kind.name}.gguf", drafter, vocabulary, template, kind)
    for path in sorted(work.glob("*.gguf")):
        say(f"{path.name}: {path.stat().st_size / 2**20:.2f} MiB")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m training.make_pair")
    parser.add_argument("work", type=Path)
    parser.add_argument("--stage", choices=("all", "train", "export"), default="all")
    parser.add_argument("--documents", type=int, default=Recipe.documents)
    parser.add_argument("--target-seconds", type=float, default=Recipe.target_seconds)
    parser.add_argument("--drafter-seconds", type=float, default=Recipe.drafter_seconds)
    parser.add_argument("--rows", type=int, default=Recipe.rows_per_update)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    recipe = Recipe(
        documents=given.documents, target_seconds=given.target_seconds,
        drafter_seconds=given.drafter_seconds, rows_per_update=given.rows,
    )  # fmt: skip
    given.work.mkdir(parents=True, exist_ok=True)
    if given.stage != "export":
        train(recipe, given.work, given.workers)
    if given.stage != "train":
        export(recipe, given.work)


if __name__ == "__main__":
    main()
