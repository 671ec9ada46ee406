"""Tables of ``doctor``, ``inspect`` and ``plan``. Takes data, prints through ``Output``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from browndwarf.cli.render import Output
from browndwarf.units import format_bytes

if TYPE_CHECKING:
    from browndwarf.models.gguf import HeadMatch, ModelInfo
    from browndwarf.plan.doctor import Finding, Seen
    from browndwarf.plan.remedies import PlanAnswer

_NAMES = {
    "weights": "weights on the device",
    "kv_full": "KV, full-attention layers",
    "kv_sliding": "KV, sliding-window layers",
    "recurrent": "recurrent state",
    "draft_weights": "draft weights",
    "draft_kv": "draft KV",
    "compute": "compute, target",
    "draft_compute": "compute, draft",
    "flash_scratch": "flash-attention scratch",
    "context": "device context",
    "margin": "margin",
}
_STYLE = {"error": "bold red", "warn": "yellow", "info": "dim"}


def show_plan(out: Output, answer: PlanAnswer) -> None:
    """The budget as a table, the verdict, and the remedies."""
    budget = answer.budget
    setup = budget.setup
    slots = f"{setup.parallel} slot{'s' if setup.parallel > 1 else ''}"
    table = Table("", "MiB", "from", box=None, title_justify="left")
    table.title = f"{setup.target.path.name}: context {setup.n_ctx}, {slots}, KV {setup.kv_k}"
    table.columns[1].justify = "right"
    for line in budget.lines:
        table.add_row(_NAMES.get(line.name, line.name), f"{line.mib:,.1f}", line.source)
    table.add_section()
    table.add_row("total", f"{budget.total_mib:,.1f}", "")
    table.add_row("limit", f"{budget.limit.mib:,.1f}", budget.limit.source)
    table.add_row("free", f"{budget.free_mib:,.1f}", "", style="" if budget.fits else "bold red")
    out.table(table)
    for line in budget.host:
        if line.mib >= 0.05:
            out.result.print(f"in RAM beside: {line.name} {line.mib:,.1f} MiB", style="dim")
    verdict = "fits" if budget.fits else f"does not fit: {-budget.free_mib:,.0f} MiB too much"
    out.result.print(verdict, style="bold green" if budget.fits else "bold red")
    beyond = 0 < setup.trained_ctx < setup.n_ctx
    if beyond:
        out.result.print(
            f"note: the model was trained for {setup.target.context_length} tokens per slot; "
            "expect worse answers beyond that"
        )
    if not (beyond and budget.fits):
        longest = f"{answer.max_ctx} tokens" if answer.max_ctx else "none, however short"
        out.result.print(f"largest context that fits with these options: {longest}")
    if not budget.fits:
        _show_remedies(out, answer)


def _show_remedies(out: Output, answer: PlanAnswer) -> None:
    table = Table("give up", "frees MiB", "enough", "cost", box=None)
    table.columns[1].justify = "right"
    for remedy in answer.remedies:
        enough = "yes" if remedy.enough else ""
        table.add_row(remedy.what, f"{remedy.frees_mib:,.0f}", enough, remedy.cost)
    if answer.remedies:
        out.table(table)
    together = f"together they fit: {', '.join(answer.together)}"
    if any(remedy.enough for remedy in answer.remedies):
        if len(answer.together) > 1:
            out.result.print(together)
    elif not answer.remedies:
        out.result.print("there is nothing to give up")
    elif answer.together:
        out.result.print(f"none of these is enough alone; {together}")
    elif answer.all_enough:
        out.result.print("none of these is enough alone; all of them together are")
    else:
        out.result.print("none of these is enough alone, and neither are all of them together")


def show_model(
    out: Output,
    info: ModelInfo,
    head: ModelInfo | None,
    match: HeadMatch | None,
    *,
    tensors: bool,
) -> None:
    """A model's facts, its drafter's, and whether they match."""
    table = Table("", "", box=None, show_header=False)
    for name, value in facts(info):
        table.add_row(name, value)
    out.table(table)
    if tensors:
        listing = Table("tensor", "type", "shape", "size", box=None)
        for tensor in info.tensors:
            shape = " x ".join(map(str, tensor.shape))
            listing.add_row(tensor.name, tensor.type, shape, format_bytes(tensor.bytes))
        out.table(listing)
    if head is not None and match is not None:
        out.result.print(f"\ndrafter {head.path.name} ({head.architecture}, {head.file_type})")
        if match.ok:
            out.result.print("belongs to this model", style="bold green")
        for reason in match.reasons:
            out.result.print(f"does not belong: {reason}", style="bold red", markup=False)
        for note in match.notes:
            out.result.print(f"note: {note}", markup=False)


def facts(info: ModelInfo) -> list[tuple[str, str]]:
    """Name and value pairs that describe a model."""
    layers, shape = info.layers, info.shape
    kinds = [
        f"{count} {name}"
        for name, count in (
            ("full", layers.full),
            (f"sliding ({shape.sliding_window})", layers.sliding),
            ("recurrent", layers.recurrent),
        )
        if count
    ]
    if layers.kv_shared:
        kinds.append(f"{layers.kv_shared} of them without a cache of their own")
    own = [b for b in info.blocks if b.kind != "recurrent"]
    heads = Counter((b.kind, b.kv_heads, b.k_dim, b.v_dim) for b in own)
    cache = [
        f"{kind}: {kv} x {k}" + (f"/{v}" if v != k else "") for kind, kv, k, v in sorted(heads)
    ]
    types = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in info.type_bytes.items())
    rows = [
        ("model", f"{info.name} ({info.architecture})"),
        ("size", f"{format_bytes(info.file_bytes)}, {info.parameters / 1e9:.2f} B parameters"),
        ("type", f"{info.file_type}, {info.bits_per_weight:.2f} bits per weight"),
        ("tensors", f"{len(info.tensors)}: {types}"),
        ("layers", f"{layers.total}: " + ", ".join(kinds)),
        ("K/V heads x dimension", "; ".join(cache) or "none"),
        ("hidden width", str(info.hidden_width)),
        ("vocabulary", f"{info.vocab}, embeddings {'tied' if info.tied else 'untied'}"),
        ("tokenizer", f"{info.tokenizer.model or 'none'} {info.tokenizer.fingerprint[:12]}"),
        ("trained context", str(info.context_length)),
        ("MTP head", _head(info)),
    ]
    if shape.experts:
        rows.insert(5, ("experts", f"{shape.experts}, {shape.experts_used} used"))
    if len(info.files) > 1:
        rows.insert(1, ("parts", str(len(info.files))))
    return rows


def _head(info: ModelInfo) -> str:
    count = info.head.layers
    where = {"none": "none", "assistant": "this file is one", "nextn": "inside"}[info.head.kind]
    return f"{where}, {count} layer{'s' if count > 1 else ''}" if count else where


def show_doctor(out: Output, seen: Seen, found: Sequence[Finding]) -> None:
    """What was seen, then what to do."""
    table = Table("", "", box=None, show_header=False)
    machine = seen.machine
    table.add_row("system", f"{machine.os}, Python {machine.python}")
    table.add_row("processor", f"{machine.cpu}, {machine.cores} cores")
    table.add_row("RAM", f"{machine.ram_mib / 1024:.1f} GiB")
    for device in seen.devices:
        table.add_row(
            device.id,
            f"{device.name}: {device.total_mib:.0f} MiB, {device.free_mib:.0f} MiB free",
        )
    if not seen.devices:
        table.add_row("devices", "none that the build in use can see")
    for card in seen.nvidia:
        power = f", {card.power_w:.0f} W" if card.power_w is not None else ""
        table.add_row(f"NVIDIA {card.index}", f"{card.name}, driver {card.driver}{power}")
    for build in seen.builds:
        speculation = "MTP" if "draft-mtp" in build.features else "no MTP"
        table.add_row("engine", f"{build.label}: {speculation}")
    table.add_row("packages", ", ".join(f"{k} {v}" for k, v in seen.packages.items()))
    out.table(table)
    for finding in found:
        out.result.print(f"\n{finding.level}: ", style=_STYLE[finding.level], end="")
        out.result.print(finding.what, markup=False)
        out.result.print(f"  next: {finding.fix}", markup=False)
    if not found:
        out.result.print("\nnothing to fix", style="bold green")
