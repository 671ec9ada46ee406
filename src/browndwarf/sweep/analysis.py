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
from collections.abc import Collection, Iterable, Sequence
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
    confirmed: bool = False

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


def analyse(cells: Sequence[CellRecord], *, allow_busy: bool = False) -> Verdict:
    """The verdict over all measured cells; missing and failed ones are left out.

    ``allow_busy``: the user knows that others used the machine; disturbed cells may win then, and
    their mark goes with them.

    Where a configuration and its baseline were measured in the confirming passes, those cells
    speak, because both arms were measured side by side; and only confirmed ones can win.
    """
    usable = [c for c in cells if c.status == "ok" and c.decode_tok_s is not None]
    disqualifying = DISQUALIFYING - ({"busy"} if allow_busy else set())
    by_configuration: dict[str, list[CellRecord]] = {}
    for cell in usable:
        by_configuration.setdefault(configuration_of(cell).key(), []).append(cell)
    confirmed = {
        key: found
        for key, members in by_configuration.items()
        if (found := _confirming(members)) is not None
    }
    standings: list[Standing] = []
    for key, members in by_configuration.items():
        base_key = configuration_of(members[0]).baseline().key()
        if key in confirmed and base_key in confirmed:
            made = _standing(confirmed[key], confirmed[base_key], disqualifying, confirmed=True)
        else:
            made = _standing(
                _grid(members), _grid(by_configuration.get(base_key, [])), disqualifying
            )
        if made is not None:
            standings.append(made)
    # A configuration that lacks a workload could win by leaving out the slow one.
    most = max((len(s.by_workload) for s in standings), default=0)
    complete = [s for s in standings if len(s.by_workload) == most]
    winner = _fastest(s for s in complete if s.confirmed) or _fastest(complete)
    baseline = None
    if winner is not None:
        same_group = (s for s in standings if s.group == winner.group)
        baseline = next((s for s in same_group if not s.configuration.speculative), None)
    return Verdict(tuple(standings), winner, baseline, drifts(usable))


def to_confirm(verdict: Verdict, top: int = 3) -> tuple[Configuration, ...]:
    """The baselines and the fastest few, in the order of the first confirming pass."""
    ranked = sorted((s for s in verdict.standings if s.eligible), key=lambda s: -s.speed)[:top]
    wanted = {s.configuration.baseline(): None for s in ranked}
    wanted |= {s.configuration: None for s in ranked}
    return tuple(wanted) if len(wanted) > 1 else ()


def _grid(members: list[CellRecord]) -> list[CellRecord]:
    return [c for c in members if c.role in ("baseline", "mtp")]


def _confirming(members: list[CellRecord]) -> list[CellRecord] | None:
    """The cells of both confirming passes, when both cover every workload."""
    passes = {
        role: {c.workload for c in members if c.role == role} for role in ("confirm-a", "confirm-b")
    }
    every = {c.workload for c in members}
    if not all(found == every for found in passes.values()):
        return None
    return [c for c in members if c.role in passes]


def configuration_of(cell: CellRecord) -> Configuration:
    """The configuration a cell was measured with."""
    return msgspec.convert(cell.options, Configuration)


def drifts(cells: Iterable[CellRecord]) -> tuple[GroupDrift, ...]:
    """Per group, the baseline at the end against the baseline at the start."""
    pairs: dict[str, dict[str, dict[str, CellRecord]]] = {}
    for cell in cells:
        if cell.role in ("baseline", "baseline-again"):
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
    members: list[CellRecord],
    baseline: list[CellRecord],
    disqualifying: Collection[str],
    *,
    confirmed: bool = False,
) -> Standing | None:
    """A configuration's cells against its baseline's; None when they cannot be compared."""
    arms: dict[str, tuple[list[float], list[float]]] = {}
    for workload in dict.fromkeys(c.workload for c in members):
        mine, theirs = _times(members, workload), _times(baseline, workload)
        common = [key for key in mine if key in theirs]
        if not common:
            return None
        arms[workload] = [theirs[key] for key in common], [mine[key] for key in common]
    if not arms:
        return None
    speeds = [c.decode_tok_s.mean for c in members if c.decode_tok_s is not None]
    marked = any(mark in disqualifying for c in (*members, *baseline) for mark in c.marks)
    return Standing(
        configuration=configuration_of(members[0]),
        group=members[0].group,
        cells=tuple(members),
        speed=math.exp(math.fsum(math.log(s) for s in speeds) / len(speeds)),
        speedup=mean_ratio_interval(list(arms.values())),
        by_workload={name: mean_ratio_interval([arm]) for name, arm in arms.items()},
        eligible=not marked,
        confirmed=confirmed,
    )


def _times(cells: list[CellRecord], workload: str) -> dict[tuple[str, str, int], float]:
    """Milliseconds per token of each request, by confirming pass, prompt and repeat."""
    return {
        (c.role if c.role.startswith("confirm") else "", t.prompt_id, t.repeat): t.ms_per_token
        for c in cells
        if c.workload == workload
        for t in c.traces
    }


def _fastest(standings: Iterable[Standing]) -> Standing | None:
    return max((s for s in standings if s.eligible), key=lambda s: s.speed, default=None)
