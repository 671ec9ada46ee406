"""What ``plan --quantize`` tells people: types by role, the loss, what more bytes would buy."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

from rich.table import Table

from browndwarf.cli.render import Output
from browndwarf.plan.planner import Outcome
from browndwarf.plan.quantization import QuantizationPlan, TensorChoice
from browndwarf.plan.roles import role_of
from browndwarf.units import format_bytes


def show_types(out: Output, outcome: Outcome, *, tied: bool, saved: Path | None) -> None:
    """The chosen types, role by role, and how they compare."""
    plan = outcome.plan
    out.table(_roles(plan, tied))
    out.result.print(
        f"\n{format_bytes(plan.device_bytes)} of weights on the device, "
        f"{format_bytes(plan.file_bytes)} in all, {plan.bits_per_weight:.2f} bits per weight"
    )
    unit = " nats per token" if plan.alphas_source.startswith("calibrated") else ""
    source = plan.alphas_source.split(":")[0]
    out.result.print(
        f"predicted loss {plan.predicted_loss:.4g}{unit} (weights of the errors: {source})"
    )
    _more(out, outcome)
    if plan.stock:
        out.table(_stock(plan))
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in plan.proxied.items():
        by_reason[reason].append(name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        out.result.print(
            f"measured without imatrix data ({reason}): {', '.join(names[:3])}{more}", style="dim"
        )
    if saved is not None:
        out.note(f"next: browndwarf quantize {saved}")
    else:
        out.note("note: add --output plan.json to keep these types for `browndwarf quantize`")


def _roles(plan: QuantizationPlan, tied: bool) -> Table:
    table = Table("role", "types", "bits", "size", "loss", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    members: dict[str, list[TensorChoice]] = defaultdict(list)
    for tensor in plan.tensors:
        key = role_of(tensor.name, tied=tied) if tensor.chosen else "(copied as they are)"
        members[key].append(tensor)
    order = sorted(members, key=lambda role: -sum(t.bytes for t in members[role]))
    for role in order:
        tensors = members[role]
        size = sum(t.bytes for t in tensors)
        bits = 8 * size / max(sum(t.elements for t in tensors), 1)
        counts = Counter(t.type for t in tensors).most_common()
        types = ", ".join(f"{count} {kind}" for kind, count in counts)
        place = "" if any(t.device for t in tensors) else " (RAM)"
        loss = sum(t.loss for t in tensors)
        table.add_row(role + place, types, f"{bits:.2f}", format_bytes(size), f"{loss:.3g}")
    return table


def _more(out: Output, outcome: Outcome) -> None:
    plan = outcome.plan
    if plan.device_bytes >= outcome.largest:
        out.result.print("every tensor has the best of these types: more memory buys nothing")
        return
    if plan.predicted_loss > 0 and outcome.quality is None:
        less = 1 - outcome.more_gib / plan.predicted_loss
        out.result.print(f"one more GiB would take {less:.0%} off the loss")
    if outcome.quality is not None and outcome.quality.time_ms > 0:
        quality = outcome.quality
        faster = 1 - outcome.time_ms / quality.time_ms
        worse = plan.predicted_loss / quality.loss - 1 if quality.loss > 0 else 0.0
        out.result.print(
            f"against the best quality in the same bytes: a verify batch {faster:.0%} faster, "
            f"{worse:.0%} more loss"
        )


def _stock(plan: QuantizationPlan) -> Table:
    table = Table("stock mix", "on the device", "its loss", "ours in its bytes", "", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for stock in plan.stock:
        ours = "does not fit" if stock.ours is None else f"{stock.ours:.4g}"
        less = ""
        if stock.ours is not None and stock.predicted_loss > 0:
            less = f"{stock.ours / stock.predicted_loss - 1:+.0%}"
        table.add_row(
            stock.type, format_bytes(stock.device_bytes), f"{stock.predicted_loss:.4g}", ours, less
        )
    return table
