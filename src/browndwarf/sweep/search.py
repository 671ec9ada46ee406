"""Which cells to run next, so that the winner is known after a few of them.

The steps, each only for what is still missing:

1. the baseline of the first group and of those that differ from it in one setting: a step costs
   the same whatever the text, and other groups' costs add up (``effects``), so one workload is
   enough, or two where prompts differ much in length (``steps``);
2. every head in the first group, at the largest n_max, on all workloads: acceptance;
3. one head in each of the other groups, at the largest and the smallest n_max, and in the first
   one at the smallest: what a cycle costs there, and how much of that goes with n_max;
4. whoever could still be the fastest by the model's intervals, one after the other, until the
   best is separated or the refinements are used up.

Where nothing runs in the first group, because it does not fit, the next one takes its place.

After that the best few are confirmed side by side with their baselines, as in a full sweep. Pure:
from the cells so far to the next job, so a resumed sweep goes on where it was.

Example:
    >>> step = next_step(plan.axes, ["prose"], cells, curves)       # doctest: +SKIP
    >>> step.job.configuration.label(), step.workloads              # doctest: +SKIP
    ('Q4_0 + no MTP', ('prose',))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from browndwarf.records import CellRecord
from browndwarf.sweep.analysis import configuration_of
from browndwarf.sweep.cell import Job
from browndwarf.sweep.effects import star
from browndwarf.sweep.model import Curve, FactorModel, head_key, trusted
from browndwarf.sweep.space import Axes, Configuration, Group

#: Configurations that are measured in full because the model cannot tell them from the best.
REFINEMENTS = 2


@dataclass(frozen=True)
class Step:
    """A configuration to measure now, and on which workloads."""

    job: Job
    workloads: tuple[str, ...]


@dataclass(frozen=True)
class Estimate:
    """A configuration's speed over the mix, measured where it was, predicted elsewhere."""

    configuration: Configuration
    speed: float
    low: float
    high: float
    measured: bool


def next_step(
    axes: Axes,
    workloads: Sequence[str],
    cells: Sequence[CellRecord],
    curves: Mapping[str, Curve],
    *,
    plain: Sequence[str] = (),
    allow_busy: bool = False,
) -> Step | None:
    """The next thing to measure before the confirmation; None when nothing is worth it.

    ``plain``: the workloads that plain steps are measured on, the first one unless given.
    ``cells`` holds failed ones too: what was tried is not asked for again.
    """
    tried = {(configuration_of(c).key(), c.workload) for c in cells if c.status != "predicted"}
    exploration = list(_exploration(axes, workloads, plain, cells))
    for step in exploration:
        missing = tuple(w for w in step.workloads if (step.job.configuration.key(), w) not in tried)
        if missing:
            return Step(step.job, missing)
    explored = {(step.job.configuration.key(), w) for step in exploration for w in step.workloads}
    refined = {
        configuration_of(c).key()
        for c in cells
        if c.status == "ok" and (configuration_of(c).key(), c.workload) not in explored
    }
    if len(refined) >= REFINEMENTS:
        return None
    ranked = estimates(axes, workloads, cells, curves, allow_busy=allow_busy)
    if not ranked:
        return None
    best = ranked[0]
    # Heads differ less than depths do, so a depth that was never measured settles more.
    known = {_depth(configuration_of(c)) for c in cells if c.status == "ok"}
    for rival in sorted(ranked, key=lambda e: (_depth(e.configuration) in known, -e.high)):
        missing = tuple(w for w in workloads if (rival.configuration.key(), w) not in tried)
        if missing and rival.high >= best.low:
            return Step(_job(rival.configuration), missing)
    return None


def finalists(ranked: Sequence[Estimate]) -> list[Configuration]:
    """Whom to confirm first: the fastest of each group and n_max, then the others in order."""
    first: dict[object, Configuration] = {}
    for estimate in ranked:
        first.setdefault(_depth(estimate.configuration), estimate.configuration)
    rest = [e.configuration for e in ranked if e.configuration not in first.values()]
    return [*first.values(), *rest]


def _depth(configuration: Configuration) -> tuple[Configuration, int]:
    return configuration.baseline(), configuration.n_max


def exploration_cells(axes: Axes, workloads: Sequence[str], plain: Sequence[str] = ()) -> int:
    """How many cells the first three steps take."""
    return sum(len(step.workloads) for step in _exploration(axes, workloads, plain, ()))


def explored_groups(axes: Axes, cells: Sequence[CellRecord] = ()) -> list[Group]:
    """The groups that the first steps measure: a star around the first one that runs."""
    groups = axes.groups()
    return star(groups, _centre(groups, cells))


def estimates(
    axes: Axes,
    workloads: Sequence[str],
    cells: Sequence[CellRecord],
    curves: Mapping[str, Curve],
    *,
    allow_busy: bool = False,
) -> list[Estimate]:
    """Every configuration whose speed over the mix can be told, fastest first."""
    model = FactorModel(cells, curves, allow_busy=allow_busy)
    measured: dict[tuple[str, str], list[CellRecord]] = {}
    for cell in cells:
        if cell.decode_tok_s is not None and trusted(cell, allow_busy):
            measured.setdefault((configuration_of(cell).key(), cell.workload), []).append(cell)
    failed = _failed(cells)
    found = []
    for group in axes.groups():
        for configuration in (group.baseline, *group.candidates):
            if configuration.key() not in failed:
                made = _estimate(configuration, workloads, measured, model)
                if made is not None:
                    found.append(made)
    return sorted(found, key=lambda e: -e.speed)


def _estimate(
    configuration: Configuration,
    workloads: Sequence[str],
    measured: Mapping[tuple[str, str], list[CellRecord]],
    model: FactorModel,
) -> Estimate | None:
    logs, below, above = 0.0, 0.0, 0.0
    all_measured = True
    for workload in workloads:
        cells = measured.get((configuration.key(), workload))
        if cells:
            runs = [rates for c in cells if (rates := model.pace.rates(c))]
            speed = math.fsum(math.fsum(r) / len(r) for r in runs) / len(runs)
            spread = max(max(r) - min(r) for r in runs) / 2
            low, high = max(speed - spread, speed / 2), speed + spread
        else:
            all_measured = False
            prediction = model.predict(configuration, workload)
            if prediction is None:
                return None
            speed, low, high = prediction.decode_tok_s, prediction.low, prediction.high
        logs += math.log(speed)
        below += math.log(low)
        above += math.log(high)
    count = len(workloads)
    return Estimate(
        configuration,
        math.exp(logs / count),
        math.exp(below / count),
        math.exp(above / count),
        all_measured,
    )


def _exploration(
    axes: Axes, workloads: Sequence[str], plain: Sequence[str], cells: Sequence[CellRecord]
) -> Iterator[Step]:
    """Steps 1 to 3, in order."""
    groups = explored_groups(axes, cells)
    first = workloads[:1]
    for group in groups:
        yield Step(_job(group.baseline), tuple(plain or first))
    if not groups or not groups[0].candidates:
        return
    deepest = _deepest(groups[0])
    for configuration in deepest:
        yield Step(_job(configuration), tuple(workloads))
    failed = _failed(cells)
    running = next((c for c in deepest if c.key() not in failed), deepest[0])
    for group in groups[1:]:
        yield from _ends(group, running, first)
    yield from _ends(groups[0], running, first)


def _ends(group: Group, like: Configuration, workloads: Sequence[str]) -> Iterator[Step]:
    """A group's largest and smallest n_max with the head of ``like``."""
    same = sorted((c for c in group.candidates if head_key(c) == head_key(like)), key=_n_max)
    for configuration in dict.fromkeys((same[-1], same[0])):
        yield Step(_job(configuration), tuple(workloads))


def _n_max(configuration: Configuration) -> int:
    return configuration.n_max


def _centre(groups: Sequence[Group], cells: Sequence[CellRecord]) -> int:
    """The first group in which something runs, as far as is known."""
    failed = _failed(cells)
    for index, group in enumerate(groups):
        deepest = _deepest(group)
        dead = group.baseline.key() in failed
        if not dead and (not deepest or any(c.key() not in failed for c in deepest)):
            return index
    return 0


def _failed(cells: Sequence[CellRecord]) -> set[str]:
    """Configurations that could not be measured."""
    return {configuration_of(c).key() for c in cells if c.status in ("failed", "does-not-fit")}


def _deepest(group: Group) -> list[Configuration]:
    """Each head's candidate with the largest n_max, in axis order."""
    found: dict[object, Configuration] = {}
    for configuration in group.candidates:
        key = head_key(configuration)
        if key not in found or configuration.n_max > found[key].n_max:
            found[key] = configuration
    return list(found.values())


def _job(configuration: Configuration) -> Job:
    role = "mtp" if configuration.speculative else "baseline"
    return Job(configuration=configuration, role=role, group=configuration.group_label())  # type: ignore[arg-type]
