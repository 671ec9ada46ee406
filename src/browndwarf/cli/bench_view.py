"""Benchmark results for people: tables, the one-line summary, verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from browndwarf.bench.compare import ComparedPoint, Comparison, Crossover, Ratio
from browndwarf.bench.metrics import PointRecord
from browndwarf.bench.run import TIME_CAP
from browndwarf.bench.saved import BenchRecord
from browndwarf.bench.selftest import SelfTest
from browndwarf.cli.render import Output
from browndwarf.units import MIB, format_bytes, format_duration


def show_run(record: BenchRecord, folder: Path, out: Output) -> None:
    """The table, the summary lines, the errors, and the document."""
    if record.points:
        out.table(points_table(record.points))
    for point in record.points:
        out.text(summary(record, point))
    for point in record.points:
        where = _name(point)
        for name, count in point.errors.items():
            example = (point.error_examples.get(name) or [""])[0]
            out.note(f"{where}: {count} x {name}: {example}"[:300])
        for note in point.notes:
            out.note(f"{where}: {note}")
    out.note(f"run: {folder}")
    body = msgspec.to_builtins(record)
    body.pop("schema")
    out.document("bench-run", 1, {"run": str(folder), **body})


def points_table(points: Sequence[PointRecord]) -> Table:
    """One row a point; latencies in milliseconds as median / p99."""
    table = Table(box=None, pad_edge=False)
    for title in ("load", "done", "errors", "decode\ntok/s", "prefill\ntok/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("TTFT ms\np50 / p99", "TPOT ms\np50 / p99", "step ms\np50 / p99"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("tokens\nper step", "accepted", "memory", "client\nus/event"):
        table.add_column(title, justify="right", no_wrap=True)
    goodput = any(point.goodput is not None for point in points)
    if goodput:
        table.add_column("good", justify="right", no_wrap=True)
    for point in points:
        row = [
            _name(point),
            f"{point.completed}/{point.requests}",
            str(sum(point.errors.values())),
            f"{point.decode_tok_s:.1f}",
            _number(point.prefill_tok_s, ".0f") + ("*" if point.prefill_from == "client" else ""),
            _pair(point.ttft_ms),
            _pair(point.tpot_ms),
            _pair(point.step_gap_ms),
            _number(_per_step(point), ".2f"),
            f"{point.acceptance.rate:.0%}" if point.acceptance else "",
            format_bytes(point.memory_mib * MIB) if point.memory_mib else "",
            f"{point.client.get('cpu_us_per_event', 0):.0f}",
        ]
        if goodput:
            row.append(f"{point.goodput['share']:.0%}" if point.goodput else "")
        table.add_row(*row)
    return table


def _per_step(point: PointRecord) -> float | None:
    """By the server's counters where it has them, else by the events that arrived."""
    return point.accepted_length or point.tokens_per_step


def summary(record: BenchRecord, point: PointRecord) -> str:
    """One line in the form in which such results are reported."""
    parts = [f"{record.label} ({record.endpoint.kind}), {record.dataset.kind}, {_name(point)}:"]
    count = f"{point.completed}/{record.plan.num_prompts}"
    errors = sum(point.errors.values())
    parts.append(f"{count}, {errors} errors" + ("," if point.stopped else "."))
    if point.stopped == TIME_CAP:
        parts.append(f"hit the {format_duration(record.plan.max_seconds or 0)} cap.")
    elif point.stopped:
        parts.append(f"{point.stopped}.")
    parts.append(
        f"Throughput (aggregate): prefill {point.prompt_tok_s:.1f} tok/s, "
        f"decode {point.decode_tok_s:.1f} tok/s."
    )
    if point.ttft_ms:
        parts.append(f"TTFT median {_time(point.ttft_ms['p50'])}")
    if point.tpot_ms:
        parts[-1] += f", TPOT median {_time(point.tpot_ms['p50'])}"
    parts[-1] += "" if parts[-1].endswith(".") else "."
    if point.acceptance is not None:
        parts.append(
            f"Acceptance {point.acceptance.rate:.0%}, "
            f"{_number(_per_step(point), '.2f')} tokens per step."
        )
    if point.memory_mib:
        parts.append(f"Memory {format_bytes(point.memory_mib * MIB)}.")
    return " ".join(parts)


def show_comparison(found: Sequence[Comparison], out: Output) -> None:
    """A table per model, the crossover, the table of models, and the document."""
    for one in found:
        if one.label:
            out.text(f"{one.label}: base against MTP, {one.repeats} repeats")
        out.table(comparison_table(one.points))
        out.text(crossover_text(one.crossover, one.points))
        for note in one.notes:
            out.note(f"note: {note}")
    if len(found) > 1:
        out.table(models_table(found))
    out.document("bench-compare", 1, {**comparison_body(found[0]), "models": models_body(found)})


def comparison_body(one: Comparison) -> dict[str, Any]:
    """The stable keys of a comparison."""
    body: dict[str, Any] = msgspec.to_builtins(one)
    return body


def models_body(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """One entry a model."""
    return [comparison_body(one) for one in found]


def comparison_table(points: Sequence[ComparedPoint]) -> Table:
    """One row a concurrency."""
    table = Table(box=None, pad_edge=False)
    for title in ("concurrency", "base\ntok/s", "MTP\ntok/s", "decode\nMTP / base"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for title in ("TTFT\nMTP / base", "TPOT\nMTP / base", "pairs"):
        table.add_column(title, justify="right", no_wrap=True)
    for point in points:
        style = {"faster": "green", "slower": "red", "inconclusive": ""}[point.verdict]
        table.add_row(
            str(point.concurrency),
            f"{point.base_tok_s:.1f}",
            f"{point.mtp_tok_s:.1f}",
            _ratio(point.ratio),
            point.verdict,
            _ratio(point.ttft),
            _ratio(point.tpot),
            str(point.pairs),
            style=style,
        )
    return table


def models_table(found: Sequence[Comparison]) -> Table:
    """All models at the highest concurrency of each."""
    table = Table(box=None, pad_edge=False)
    table.add_column("model", no_wrap=True)
    for title in ("concurrency", "base decode", "with MTP", "gain", "pays up to"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found:
        last = one.points[-1]
        edge = one.crossover.concurrency
        table.add_row(
            one.label,
            str(last.concurrency),
            f"{last.base_tok_s:.1f}",
            f"{last.mtp_tok_s:.1f}",
            f"{last.ratio.mean - 1:+.0%}",
            f"{edge:.1f}" if edge else ("all" if one.crossover.where == "above" else "none"),
        )
    return table


def crossover_text(found: Crossover, points: Sequence[ComparedPoint]) -> str:
    """Where the gain ends, in one sentence."""
    first, last = points[0].concurrency, points[-1].concurrency
    low = f"{found.low:.1f}" if found.low else f"{first} or less"
    high = f"{found.high:.1f}" if found.high else f"beyond {last}"
    if found.where == "above":
        text = f"crossover: above {last}, the highest concurrency measured"
        return text + (f" (95%: from {low} on)" if found.low else "")
    if found.where == "below":
        text = f"crossover: MTP gains at none of {first} to {last}"
        return text + (f" (95%: up to {high})" if found.high else "")
    return (
        f"crossover: MTP stops paying at concurrency {found.concurrency:.1f} (95%: {low} to {high})"
    )


def selftest_text(report: SelfTest) -> str:
    """The client's own cost and limit."""
    return "\n".join(
        [
            f"client cost: {report.cpu_us_per_event:.1f} us of CPU per streamed event "
            f"({report.streams} paced streams, {report.events} events, {report.loop})",
            f"client limit: {report.max_events_s:,.0f} events/s "
            f"({report.rush_cpu_us_per_event:.1f} us each when they come in bulk)",
            f"against the mock's timetable: TTFT {report.ttft_error_ms:+.2f} ms, "
            f"TPOT {report.tpot_error_ms:+.3f} ms; event loop late by "
            f"{report.loop_lag_ms:.1f} ms (p99)",
        ]
    )


def _name(point: PointRecord) -> str:
    return f"{point.rate:g}/s" if point.rate is not None else f"conc {point.concurrency}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _pair(values: dict[str, float]) -> str:
    if not values:
        return ""
    digits = 0 if values["p99"] >= 100 else 1
    return f"{values['p50']:.{digits}f} / {values['p99']:.{digits}f}"


def _time(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.1f} s" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"


def _ratio(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.mean:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
