"""Per-tensor types against llama-quantize's own mixes, at the same device bytes.

On the embedded target, from its Q8_0 master: mean KL divergence by llama-perplexity, on text that
neither the model, the imatrix nor the calibration has seen (held-out problems of the corpus
generator, as plain text, seed fixed; conversations that share a line with the calibration text are
left out). The imatrix and the calibration are made from the packaged calibration text. For every
mix: without imatrix, with the same imatrix, and ours in exactly its device bytes with equal,
shipped and calibrated weights of the errors. Differences are paired by chunk.

Goals: 20% less than Q4_K_M and Q3_K_M without imatrix, 10% less than these with the same imatrix,
and 10% from calibration over equal weights.

    python benchmarks/quantization_frontier.py [--work DIR] [--chunks 70] [--mixes Q4_K_M,Q3_K_M]

With ``--work`` an interrupted run goes on where it was. The last line of output is one JSON
document.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from training.corpus import mixture

from browndwarf.cli.probing import calibration, types_file
from browndwarf.cli.render import Output
from browndwarf.engine.locate import Build, choose_build, find_builds
from browndwarf.engine.quantizer import quantize
from browndwarf.engine.tools import imatrix
from browndwarf.hardware.devices import machine
from browndwarf.models import demo
from browndwarf.models.gguf import read_model
from browndwarf.models.imatrix import read_imatrix
from browndwarf.plan.calibration import default_text
from browndwarf.plan.choice import assess, choose
from browndwarf.plan.loss import ErrorTable
from browndwarf.plan.planner import Material, gather
from browndwarf.plan.roles import groups, prior_alphas
from browndwarf.plan.setup import Setup
from browndwarf.quality.divergence import KldRecord, compare_kld, measure_kld
from browndwarf.quality.perplexity import Run

MIXES = "Q6_K,Q5_K_M,Q5_K_S,Q4_K_M,Q4_K_S,IQ4_XS,Q3_K_L,Q3_K_M,Q3_K_S,Q2_K"
SEED, PER_WORKLOAD, SHARED_LINE = 40_002, 60, 40
GOALS = {"without_imatrix": 0.20, "same_imatrix": 0.10, "calibration": 0.10}
ARMS = ("equal", "equal_layers", "priors", "calibrated")
GOAL_MIXES = ("Q4_K_M", "Q3_K_M")


def evaluation_text(calibration_text: str) -> str:
    """Held-out conversations, as many of each workload."""
    known = {line for line in calibration_text.splitlines() if len(line) >= SHARED_LINE}
    streams = [mixture.held_out(SEED, workload) for workload in mixture.SHARES]
    texts = []
    for _ in range(PER_WORKLOAD):
        for stream in streams:
            parts = [m["content"] for m in next(stream).messages if m.get("content")]
            text = "\n".join(parts)
            if not known.intersection(text.splitlines()):
                texts.append(text)
    return "\n\n".join(texts)


class Bench:
    """Files are made from types, measured once, and remembered by their types."""

    def __init__(self, build: Build, work: Path, chunks: int) -> None:
        self.build, self.work = build, work
        self.run = Run(ctx=512, chunks=chunks)
        self.model = read_model(demo.TARGET)
        words = default_text(self.model)
        (work / "calibration.txt").write_bytes(words.data)
        self.text = work / "evaluation.txt"
        self.text.write_text(evaluation_text(words.data.decode()), encoding="utf-8")
        self.matrix = work / "imatrix.gguf"
        if not self.matrix.exists():
            imatrix(build, demo.TARGET, work / "calibration.txt", self.matrix, ctx=512)

    def kld(self, label: str, base: str, types: Mapping[str, str], *, matrix: bool) -> KldRecord:
        """The divergence of the target with these types (all others as ``base`` has them)."""
        key = json.dumps([base, sorted(types.items()), matrix, self.run.chunks])
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        kept = self.work / f"{name}.json"
        if kept.exists():
            return msgspec.json.decode(kept.read_bytes(), type=KldRecord)
        path = self.work / "quantized.gguf"
        quantize(
            self.build,
            demo.TARGET,
            path,
            base,
            allow_requantize=True,
            imatrix=self.matrix if matrix else None,
            tensor_type_file=types_file(self.work, types),
            overwrite=True,
        )
        made = read_model(path).by_name
        wrong = {n for n, kind in types.items() if made[n].type != kind}
        if wrong:
            raise SystemExit(f"{label}: {len(wrong)} tensors have another type than planned")
        found = measure_kld(self.build, path, demo.TARGET, self.text, self.run, cache=self.work)
        kept.write_bytes(msgspec.json.encode(found))
        path.unlink()
        print(f"{label}: {found.mean:.5f} ± {found.error:.5f}", file=sys.stderr, flush=True)
        return found


def material(bench: Bench, mixes: list[str], *, matrix: bool) -> tuple[Material, ErrorTable]:
    """Errors and stock types, with or without the imatrix."""
    setup = Setup(target=bench.model, n_ctx=512, backend="cuda")
    sha = hashlib.sha256(bench.matrix.read_bytes()).hexdigest() if matrix else ""
    table = ErrorTable(bench.model, read_imatrix(bench.matrix) if matrix else None, sha, bench.work)
    chosen = bench.matrix if matrix else None
    return (
        gather(bench.build, table, setup, mixes=mixes, imatrix=chosen, imatrix_sha=sha),
        table,
    )


def equal_layers(alphas: Mapping[str, float], group_of: Mapping[str, str]) -> dict[str, float]:
    """The calibrated weight of the output, and one weight for all tensors of layers: their mean.

    Tells what role and depth add to knowing that the output counts more than a layer.
    """
    layers = [alpha for name, alpha in alphas.items() if "/" in group_of[name]]
    mean = sum(layers) / len(layers)
    return {name: mean if "/" in group_of[name] else alpha for name, alpha in alphas.items()}


def less(ours: KldRecord, theirs: KldRecord) -> dict[str, float]:
    """By how much ours is less, as a share of theirs, with the paired error."""
    compared = compare_kld(theirs, ours)
    return {
        "less": round(-compared.change / theirs.mean, 4),
        "error": round(compared.error / theirs.mean, 4),
    }


def row(bench: Bench, mix: str, plain: Material, full: Material, alphas: Mapping[str, Any]) -> Any:
    """Everything about one mix's size."""
    stock = bench.kld(f"{mix}, no imatrix", mix, {}, matrix=False)
    same = bench.kld(f"{mix}, imatrix", mix, {}, matrix=True)
    found: dict[str, Any] = {"mix": mix, "stock": stock, "stock_imatrix": same}
    for name, weights in alphas.items():
        sized = assess(full.slots(weights, mix=mix), full.stock[mix])
        ours = choose(full.slots(weights), sized.device_bytes)
        if not 0 <= 1 - ours.device_bytes / sized.device_bytes <= 1e-3:
            print(f"{mix}: {ours.device_bytes} of {sized.device_bytes} bytes", file=sys.stderr)
        touched = {n: ours.types[n] for n in full.options}
        found[name] = bench.kld(f"{mix}'s bytes, {name}", "Q4_K", touched, matrix=True)
        found[f"{name}_bytes"] = ours.device_bytes
        found[f"{name}_predicted"] = (ours.loss, sized.loss)
        found["bytes"] = sized.device_bytes
    weights = alphas["priors"]
    sized = assess(plain.slots(weights, mix=mix), plain.stock[mix])
    ours = choose(plain.slots(weights), sized.device_bytes)
    touched = {n: ours.types[n] for n in plain.options}
    found["plain"] = bench.kld(f"{mix}'s bytes, no imatrix", "Q4_K", touched, matrix=False)
    return found


def main() -> None:
    """Measure, print the table, then the JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--chunks", type=int, default=70)
    parser.add_argument("--mixes", default=MIXES)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="browndwarf-frontier-") as folder:
        work = args.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        build = choose_build(find_builds(), frozenset())
        bench = Bench(build, work, args.chunks)
        mixes = args.mixes.split(",")
        plain, _ = material(bench, mixes, matrix=False)
        full, table = material(bench, mixes, matrix=True)
        measured = calibration(Output(json=True), full, table, build, text=None, budget="1h")
        group_of = groups(bench.model, full.options)
        calibrated = measured.alphas(group_of)
        alphas = {
            "equal": {},
            "equal_layers": equal_layers(calibrated, group_of),
            "priors": prior_alphas(bench.model, full.options),
            "calibrated": calibrated,
        }
        rows = [row(bench, mix, plain, full, alphas) for mix in mixes]
    report(rows, measured.seconds)


def report(rows: list[dict[str, Any]], calibration_s: float) -> None:
    """The table of the results page, and the document."""
    columns = ["stock", "stock_imatrix", "plain", *ARMS]
    print("| mix | device bytes | " + " | ".join(columns) + " |")
    print("|---|---|" + "---|" * len(columns))
    for r in rows:
        cells = [f"{r[c].mean:.5f} ± {r[c].error:.5f}" for c in columns]
        print(f"| {r['mix']} | {r['bytes']:,} | " + " | ".join(cells) + " |")
    goals: dict[str, Any] = {}
    for r in rows:
        goals[r["mix"]] = {
            "without_imatrix": less(r["calibrated"], r["stock"]),
            "same_imatrix": less(r["calibrated"], r["stock_imatrix"]),
            "calibration": less(r["calibrated"], r["equal"]),
            "priors_over_equal": less(r["priors"], r["equal"]),
            "roles_and_depth": less(r["calibrated"], r["equal_layers"]),
            "calibration_over_priors": less(r["calibrated"], r["priors"]),
            "priors_same_imatrix": less(r["priors"], r["stock_imatrix"]),
            "without_any_imatrix": less(r["plain"], r["stock"]),
            "bytes_used": min(round(r[f"{arm}_bytes"] / r["bytes"], 5) for arm in ARMS),
            "predicted": [round(loss, 5) for loss in r["calibrated_predicted"]],
            "p999": {c: r[c].p999 for c in columns},
            "same_top": {c: round(r[c].same_top, 4) for c in columns},
        }
    met = {
        f"{mix}:{name}": goals[mix][name]["less"] >= least
        for mix in GOAL_MIXES
        if mix in goals
        for name, least in GOALS.items()
    }
    document = {
        "name": "quantization_frontier",
        "less_kld": goals,
        "calibration_s": round(calibration_s, 1),
        "goal": GOALS,
        "met": met,
        "machine": msgspec.to_builtins(machine()),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
