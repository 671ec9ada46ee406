"""A budget against what llama-server's log says it allocated.

Example:
    rows = compare(budget, server.log)
    max(rows, key=lambda row: row.excess).name
"""

from __future__ import annotations

from dataclasses import dataclass

from browndwarf.engine.logparse import LogFacts
from browndwarf.plan.memory import Budget

TOLERANCE_MIB = 1.0
TOLERANCE_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Compared:
    """One kind of buffer, planned and logged, in MiB."""

    name: str
    planned_mib: float
    logged_mib: float

    @property
    def error_mib(self) -> float:
        """Planned minus logged."""
        return self.planned_mib - self.logged_mib

    @property
    def excess(self) -> float:
        """The error over what is tolerated, the larger of 1 MiB and 0.5%; up to 1 is fine."""
        return abs(self.error_mib) / max(TOLERANCE_MIB, TOLERANCE_SHARE * self.logged_mib)

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.excess <= 1.0


def compare(budget: Budget, log: LogFacts) -> tuple[Compared, ...]:
    """Planned against logged for every kind of buffer on the budget's device.

    With a GPU backend, buffers in RAM (``CPU...`` and ``..._Host``) are left out.
    """
    on_cpu = budget.setup.on_cpu

    def here(device: str) -> bool:
        return on_cpu or not (device.startswith("CPU") or device.endswith("_Host"))

    def logged(context: str, kind: str) -> float:
        return sum(
            b.mib for b in log.buffers if b.context == context and b.kind == kind and here(b.device)
        )

    pairs: list[tuple[str, float, float]] = [
        ("model", budget.line("weights"), logged("target", "model")),
        ("kv", budget.line("kv_full") + budget.line("kv_sliding"), logged("target", "KV")),
        ("recurrent", budget.line("recurrent"), logged("target", "RS")),
        ("compute", budget.line("compute"), logged("target", "compute")),
        ("draft model", budget.line("draft_weights"), logged("draft", "model")),
        ("draft kv", budget.line("draft_kv"), logged("draft", "KV")),
        ("draft compute", budget.line("draft_compute"), logged("draft", "compute")),
    ]
    rows = [Compared(*pair) for pair in pairs if pair[1] or pair[2]]
    planned, found = sum(row.planned_mib for row in rows), sum(row.logged_mib for row in rows)
    return (*rows, Compared("total", planned, found))
