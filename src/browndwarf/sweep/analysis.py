"""From measured cells to a verdict: drift, speed-ups with intervals, the winner.

Speeds are compared inside a group only (same target, same server options), against the group's
own baseline, paired by prompt and repeat. Over several workloads the figure is the geometric
mean with equal weights. Acceptance never ranks anything.

Example:
    >>> verdict = analyse(cells)                                   # doctest: +SKIP
    >>> verdict.winner.label, verdict.winner.speedup.mean          # doctest: +SKIP
    ('Q4_0 + Q6_K n3', 1.31)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from browndwarf.records import CellRecord
from browndwarf.stats import Drift, Interval, drift, mean_ratio_interval
from browndwarf.sweep.space import Configuration

#: Marks that keep a cell out of the contest: its figure says something else than its name.
DISQUALIFYING = frozenset({"busy", "spilled", "low-acceptance", "cache-hit", "throttled"})

Word = Literal["faster", "slower", "inconclusive", "baseline"]


@dataclass(frozen=True)
class Standing:
    """One configuration over all workloads, against the baseline of its group.

    ``speed`` is the geometric mean of decode tok/s; ``by_workload`` the speed-up for each.
    """

    configuration: Configuration
    group: str
    cells: tuple[CellRecord, ...]
    speed: float
    speedup: Interval
    by_workload: dict[str, Interval]
    eligible: bool

    @property
    def label(self) -> str:
        """Readable name of the configuration."""
        return self.configuration.label()

    @property
    def word(self) -> Word:
        """The verdict against the baseline, at the interval's confidence."""
        if not self.configuration.speculative:
            return "baseline"
        if self.speedup.low > 1.0:
            return "faster"
        return "slower" if self.speedup.high < 1.0 else "inconclusive"


@dataclass(frozen=True)
class GroupDrift:
    """How a group's baseline moved from its start to its end, per workload."""

    group: str
    by_workload: dict[str, Drift]

    @property
    def beyond_noise(self) -> bool:
        """Whether any workload's baseline moved more than its spread."""
        return any(d.beyond_noise for d in self.by_workload.values())


@dataclass(frozen=True)
class Verdict:
    """What a run says so far. ``winner`` may be a baseline: then MTP does not pay here."""

    standings: tuple[Standing, ...]
    winner: Standing | None
    baseline: Standing | None
    drifts: tuple[GroupDrift, ...]

    def best(self, *, speculative: bool, group: str | None = None) -> Standing | None:
        """The fastest eligible standing of one kind, in one group or in all."""
        return _fastest(
            s
            for s in self.standings
            if s.configuration.speculative is speculative and group in (None, s.group)
        )


def analyse(cells: Sequence[CellRecord]) -> Verdict:
    """The verdict over all measured cells; missing and failed ones are left out."""
    usable = [c for c in cells if c.status == "ok" and c.decode_tok_s is not None]
    baselines = {(c.group, c.workload): c for c in usable if c.role == "baseline"}
    standings: list[Standing] = []
    by_configuration: dict[str, list[CellRecord]] = {}
    for cell in usable:
        if cell.role != "baseline-again":
            by_configuration.setdefault(configuration_of(cell).key(), []).append(cell)
    for members in by_configuration.values():
        made = _standing(members, baselines)
        if made is not None:
            standings.append(made)
    # A configuration that lacks a workload could win by leaving out the slow one.
    most = max((len(s.cells) for s in standings), default=0)
    complete = [s for s in standings if len(s.cells) == most]
    winner = _fastest(complete)
    baseline = None
    if winner is not None:
        same_group = (s for s in standings if s.group == winner.group)
        baseline = next((s for s in same_group if not s.configuration.speculative), None)
    return Verdict(tuple(standings), winner, baseline, drifts(usable))


def configuration_of(cell: CellRecord) -> Configuration:
    """The configuration a cell was measured with."""
    return msgspec.convert(cell.options, Configuration)


def drifts(cells: Iterable[CellRecord]) -> tuple[GroupDrift, ...]:
    """Per group, the baseline at the end against the baseline at the start."""
    pairs: dict[str, dict[str, dict[str, CellRecord]]] = {}
    for cell in cells:
        if cell.role != "mtp":
            pairs.setdefault(cell.group, {}).setdefault(cell.workload, {})[cell.role] = cell
    found = []
    for group, workloads in pairs.items():
        by_workload = {
            name: drift(first.decode_tok_s.runs, again.decode_tok_s.runs)
            for name, roles in workloads.items()
            if (first := roles.get("baseline")) is not None
            and (again := roles.get("baseline-again")) is not None
            and first.decode_tok_s is not None
            and again.decode_tok_s is not None
        }
        if by_workload:
            found.append(GroupDrift(group, by_workload))
    return tuple(found)


def _standing(
    members: list[CellRecord], baselines: dict[tuple[str, str], CellRecord]
) -> Standing | None:
    arms: dict[str, tuple[list[float], list[float]]] = {}
    for cell in members:
        base = baselines.get((cell.group, cell.workload))
        if base is None:
            return None
        arms[cell.workload] = _paired(base, cell)
    if any(not base_ms for base_ms, _ in arms.values()):
        return None
    speeds = [c.decode_tok_s.mean for c in members if c.decode_tok_s is not None]
    return Standing(
        configuration=configuration_of(members[0]),
        group=members[0].group,
        cells=tuple(members),
        speed=math.exp(math.fsum(math.log(s) for s in speeds) / len(speeds)),
        speedup=mean_ratio_interval(list(arms.values())),
        by_workload={name: mean_ratio_interval([arm]) for name, arm in arms.items()},
        eligible=not any(DISQUALIFYING.intersection(c.marks) for c in members),
    )


def _paired(base: CellRecord, cell: CellRecord) -> tuple[list[float], list[float]]:
    """Milliseconds per token of both, over the requests that both have."""
    theirs = {(t.prompt_id, t.repeat): t.ms_per_token for t in base.traces}
    both = [
        (theirs[key], trace.ms_per_token)
        for trace in cell.traces
        if (key := (trace.prompt_id, trace.repeat)) in theirs
    ]
    return [a for a, _ in both], [b for _, b in both]


def _fastest(standings: Iterable[Standing]) -> Standing | None:
    return max((s for s in standings if s.eligible), key=lambda s: s.speed, default=None)
