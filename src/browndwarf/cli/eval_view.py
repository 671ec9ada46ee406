"""Quality records as tables, sentences and documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.table import Table

from browndwarf.cli.render import Output
from browndwarf.quality.divergence import KldRecord
from browndwarf.quality.lossless import LosslessRecord
from browndwarf.quality.partings import Parting
from browndwarf.quality.perplexity import Comparison, PplRecord, compare_ppl
from browndwarf.quality.quiz import QuizComparison, QuizRecord

SHOWN_PARTINGS = 10


def show_ppl(out: Output, records: Sequence[PplRecord], compared: Comparison | None) -> None:
    """One row a record; each context's first record is the base of the others."""
    table = _table("context", "KV", "PPL", "±", "against the first KV type", right=(0, 2, 3))
    for record in records:
        base = next(r for r in records if r.run.ctx == record.run.ctx)
        change = "" if base is record else compare_ppl(base, record).sentence
        table.add_row(
            str(record.run.ctx), record.run.kv, f"{record.ppl:.4f}", f"{record.error:.4f}", change
        )
    out.table(table)
    _compared(out, compared)
    first = records[0]
    out.document(
        "eval-ppl",
        1,
        {
            "ppl": first.ppl,
            "error": first.error,
            "records": _plain(records),
            "comparison": _comparison(compared),
        },
    )


def show_kld(out: Output, records: Sequence[KldRecord], compared: Comparison | None) -> None:
    """One row a record."""
    table = _table(
        "context", "KV", "mean KLD", "±", "99.9%", "same top", "PPL", "", right=(0, 2, 3, 4, 5, 6)
    )
    for r in records:
        table.add_row(
            str(r.run.ctx),
            r.run.kv,
            f"{r.mean:.6f}",
            f"{r.error:.6f}",
            "-" if r.p999 is None else f"{r.p999:.4f}",
            f"{r.same_top:.2%}",
            f"{r.ppl:.4f}",
            "zero within error" if r.is_zero else "",
        )
    out.table(table)
    _compared(out, compared)
    first = records[0]
    out.document(
        "eval-kld",
        1,
        {
            "mean": first.mean,
            "error": first.error,
            "p999": first.p999,
            "same_top": first.same_top,
            "records": _plain(records),
            "comparison": _comparison(compared),
        },
    )


def show_lossless(out: Output, records: Sequence[LosslessRecord]) -> None:
    """One row a setup, then the partings."""
    table = _table(
        "setup", "answers", "identical", "near ties", "mismatches", "accepted", "verdict",
        right=(1, 2, 3, 4, 5),
    )  # fmt: skip
    for r in records:
        table.add_row(
            r.settings.setup,
            str(r.prompts),
            str(r.identical),
            str(len(r.near_ties)),
            str(len(r.mismatches)),
            f"{r.accepted / r.drafted:.1%}" if r.drafted else "-",
            r.verdict,
        )
    out.table(table)
    for record in records:
        for parting in (*record.mismatches, *record.near_ties)[:SHOWN_PARTINGS]:
            out.text(_parting(parting, record))
        if record.sampled is not None:
            s = record.sampled
            out.text(
                f"{record.settings.setup}: {s.tokens} tokens of {s.answers} answers at temperature "
                f"{s.temperature:g}; ranks p = {s.p:.3g}, partings p = {s.sign_p:.3g} "
                f"({s.identical} answers identical). One wrong token in 50 would be noticed with "
                f"probability {s.power_plausible:.2f} (plausible) or {s.power_implausible:.2f}."
            )
    order = ["mismatch", "lossy", "not-speculating", "inconclusive", "near-ties"]
    worst = next((v for v in order for r in records if r.verdict == v), records[0].verdict)
    out.document(
        "eval-lossless",
        1,
        {
            "prompts": sum(r.prompts for r in records),
            "identical": sum(r.identical for r in records),
            "near_ties": _plain([p for r in records for p in r.near_ties]),
            "mismatches": _plain([p for r in records for p in r.mismatches]),
            "verdict": worst,
            "records": _plain(records),
        },
    )


def _parting(p: Parting, record: LosslessRecord) -> str:
    margin = "beyond the best candidates" if p.margin is None else f"{p.margin:.6f} nats"
    return (
        f"{p.kind}: {p.prompt_id}, token {p.position}: plain {p.plain} {p.plain_text!r}, "
        f"speculative {p.speculative} {p.speculative_text!r}, margin {margin} "
        f"(bound {record.bound or 0:.6f})"
    )


def show_quiz(out: Output, record: QuizRecord, compared: QuizComparison | None) -> None:
    """What was wrong, and the score by area."""
    table = _table("area", "thinking", "right", "of", right=(2, 3))
    for mode in dict.fromkeys(q.thinking for q in record.questions):
        asked = [q for q in record.questions if q.thinking is mode]
        for area in dict.fromkeys(q.area for q in asked):
            here = [q for q in asked if q.area == area]
            table.add_row(area, _mode(mode), str(sum(q.ok for q in here)), str(len(here)))
        table.add_row("all", _mode(mode), str(sum(q.ok for q in asked)), str(len(asked)))
        table.add_section()
    out.table(table)
    for q in record.questions:
        if not q.ok:
            out.text(f"wrong: {q.id} (thinking {_mode(q.thinking)}): {q.why}")
    if compared is not None:
        out.text(f"against the saved quiz: {compared.sentence}")
    out.document(
        "eval-quiz",
        1,
        {
            **msgspec.to_builtins(record),
            "score": record.score,
            "comparison": None if compared is None else msgspec.to_builtins(compared),
        },
    )


def _mode(thinking: bool | None) -> str:
    return "default" if thinking is None else "on" if thinking else "off"


def _compared(out: Output, compared: Comparison | None) -> None:
    if compared is not None:
        out.text(f"against the saved record: {compared.sentence}")


def _comparison(compared: Comparison | None) -> dict[str, Any] | None:
    if compared is None:
        return None
    plain: dict[str, Any] = msgspec.to_builtins(compared)
    return plain | {"sentence": compared.sentence}


def _plain(records: Sequence[Any]) -> list[Any]:
    return [msgspec.to_builtins(record) for record in records]


def _table(*titles: str, right: tuple[int, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i in right else "left", no_wrap=True)
    return table
