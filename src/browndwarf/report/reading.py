"""A run, read and analysed once for its page.

The boundary: verdict, findings and model come from ``sweep``; this adds only whether the run came
to its end. Sentences that the terminal shows as well are given by the command line (``Wording``),
so that both say the same.

Example:
    >>> reading = read(read_run(Path("runs/demo")))                # doctest: +SKIP
    >>> reading.verdict.winner.label, reading.unfinished           # doctest: +SKIP
    ('Q4_0 + Q4_K n3', False)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from browndwarf.records import CellRecord
from browndwarf.sweep.analysis import (
    Standing,
    Verdict,
    analyse,
    configuration_of,
    disqualifying,
    grid,
    to_confirm,
)
from browndwarf.sweep.laws import Law, check
from browndwarf.sweep.model import Curve, FactorModel
from browndwarf.sweep.planned import SweepPlan
from browndwarf.sweep.search import next_step
from browndwarf.sweep.setup import saved_plan
from browndwarf.sweep.space import Configuration, cell_id
from browndwarf.sweep.store import RunView
from browndwarf.sweep.workload import for_steps


@dataclass(frozen=True)
class Wording:
    """What the terminal says of a run.

    ``story``: the verdict first, then what else is to be known. ``synthetic``: what was made up.
    ``disturbed``: the marks that keep cells from winning. ``failures``: why cells have no figure.
    ``pace``: that the machine changed its speed. ``closing``: how long it took. ``hide``: settings
    that all configurations share, such as ``ctx=2048``; labels leave them out.
    """

    story: tuple[str, ...]
    synthetic: tuple[str, ...]
    disturbed: tuple[str, ...]
    failures: tuple[str, ...]
    pace: tuple[str, ...]
    closing: str
    hide: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """A run with all that was derived from it. ``unfinished``: its sweep has more to do."""

    view: RunView
    plan: SweepPlan
    verdict: Verdict
    laws: tuple[Law, ...]
    model: FactorModel
    unfinished: bool

    @property
    def cells(self) -> tuple[CellRecord, ...]:
        """All cells, in the order in which they were first saved."""
        return self.view.cells

    @property
    def measured(self) -> tuple[CellRecord, ...]:
        """The cells that have a speed."""
        return tuple(c for c in self.cells if c.status == "ok" and c.decode_tok_s is not None)

    @property
    def workloads(self) -> tuple[str, ...]:
        """Names of the workloads, in the plan's order."""
        return tuple(w.name for w in self.plan.workloads)

    @property
    def groups(self) -> tuple[str, ...]:
        """Labels of the groups that have cells: the winner's first, then as they were measured."""
        winner = self.verdict.winner
        first = [winner.group] if winner else []
        return tuple(dict.fromkeys([*first, *(c.group for c in self.cells)]))

    def counts(self, cell: CellRecord) -> bool:
        """Whether no mark keeps this cell out of the contest."""
        return not disqualifying(self.plan.allow_busy).intersection(cell.marks)


def read(view: RunView) -> Reading:
    """Analyse a run.

    Raises:
        RunFormatError: its plan was written by another version.
    """
    plan = saved_plan(view.plan, view.directory)
    verdict = analyse(view.cells, allow_busy=plan.allow_busy)
    curves: Mapping[str, Curve] = view.meta.get("curves") or {}
    return Reading(
        view=view,
        plan=plan,
        verdict=verdict,
        laws=check(view.cells),
        model=FactorModel(view.cells, curves, allow_busy=plan.allow_busy, pace=verdict.pace),
        unfinished=_grid_open(plan, view.cells, curves) or _confirmation_open(plan, verdict, view),
    )


def draft_label(configuration: Configuration, hide: Collection[str] = ()) -> str:
    """A configuration's name inside its group: ``Q4_K n3 p_min=0.5``, or ``no MTP``."""
    shared = (*configuration.baseline().settings(), *hide)
    return configuration.label(shared).removeprefix(f"{configuration.target_type} + ")


def head_label(configuration: Configuration) -> str:
    """The drafter's name without its n_max: ``Q4_K p_min=0.5``. "" for a baseline."""
    if configuration.head_type is None:
        return ""
    shared = configuration.baseline().settings()
    own = [text for text in configuration.settings() if text not in shared]
    return " ".join([configuration.head_type, *own])


def in_order(standings: Sequence[Standing]) -> list[Standing]:
    """The baseline first, then the confirmed ones, then the others; fastest first in each."""
    return sorted(
        standings, key=lambda s: (s.configuration.speculative, not s.confirmed, -s.speedup.mean)
    )


def _grid_open(plan: SweepPlan, cells: Sequence[CellRecord], curves: Mapping[str, Curve]) -> bool:
    """Whether the part before the confirming passes has more to do."""
    if not plan.fast:
        have = {c.id for c in cells if c.status != "predicted"}
        wanted = (
            cell_id(job.configuration, w.name, job.role)
            for job in plan.jobs()
            for w in plan.workloads
        )
        return any(name not in have for name in wanted)
    # Confirming and predicting come after it, also where a budget cut it short.
    if any(c.status == "predicted" or c.role.startswith("confirm") for c in cells):
        return False
    step = next_step(
        plan.axes,
        [w.name for w in plan.workloads],
        cells,
        curves,
        plain=for_steps(plan.workloads),
        allow_busy=plan.allow_busy,
    )
    return step is not None


def _confirmation_open(plan: SweepPlan, verdict: Verdict, view: RunView) -> bool:
    """Whether a confirming pass is missing, or stopped on its way."""
    if not plan.confirm:
        return False
    first, second = (
        {(configuration_of(c), c.workload) for c in view.cells if c.role == role}
        for role in ("confirm-a", "confirm-b")
    )
    if first != second:
        return True
    if plan.fast:
        return not first and verdict.best(speculative=True) is not None
    chosen = to_confirm(analyse(grid(view.cells), allow_busy=plan.allow_busy))
    return any((c, w.name) not in first for c in chosen for w in plan.workloads)
