"""A sweep as it was asked for, and the order in which its grid is measured.

Example:
    >>> [job.role for job in plan.jobs()][:2]                       # doctest: +SKIP
    ['baseline', 'mtp']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from browndwarf.sweep.cell import Job
from browndwarf.sweep.served import Settings
from browndwarf.sweep.space import Axes, Configuration, Group
from browndwarf.sweep.synthetic import Synthetic
from browndwarf.sweep.workload import Workload


class SweepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a sweep needs to go on after a kill; saved in the run directory."""

    model: str
    draft: str | None
    axes: Axes
    workloads: tuple[Workload, ...]
    settings: Settings
    llama_dir: str | None = None
    docker: str | None = None
    synth_rates: tuple[float, ...] | None = None
    synthetic: Synthetic | None = None
    fast: bool = False
    budget_s: float | None = None
    confirm: bool = True
    allow_busy: bool = False
    try_anyway: bool = False

    def jobs(self) -> Iterator[Job]:
        """Every configuration of the grid with its role, in the order of measurement."""
        for group in self.axes.groups():
            yield from group_jobs(group)

    @property
    def patient(self) -> bool:
        """Whether to wait for the machine's fast pace, and to measure again what ran slow. Not for
        those who want to be quick, or measure on a busy machine on purpose."""
        return bool(self.settings.precision) and not self.allow_busy

    @property
    def grid_cells(self) -> int:
        """Number of cells of the grid, baselines at both ends included."""
        return sum(1 for _ in self.jobs()) * len(self.workloads)


def group_jobs(group: Group) -> Iterator[Job]:
    """Baseline, candidates, and the baseline again when there was anything between."""
    yield Job(configuration=group.baseline, role="baseline", group=group.label)
    for candidate in group.candidates:
        yield Job(configuration=candidate, role="mtp", group=group.label)
    if group.candidates:
        yield Job(configuration=group.baseline, role="baseline-again", group=group.label)


def confirm_jobs(configurations: Sequence[Configuration]) -> list[Job]:
    """The best few and their baselines twice, the second time in opposite order (A B B A).

    A machine drifts while a grid is measured, so neighbours in time are compared last.
    """
    chosen = [Job(configuration=c, role="confirm-a", group=c.group_label()) for c in configurations]
    return chosen + [msgspec.structs.replace(job, role="confirm-b") for job in reversed(chosen)]
