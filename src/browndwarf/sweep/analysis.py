"""From measured cells to a verdict: drift, speed-ups with intervals, the winner.

Speeds are compared inside a group only (same target, same server options), against the group's
own baseline, paired by prompt and repeat. Over several workloads the figure is the geometric
mean with equal weights. Times are evened out by the machine's pace where it was probed.
Acceptance never ranks anything.

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
from browndwarf.sweep.pace import Pace
from browndwarf.sweep.space import Configuration

#: An interval whose ends differ by more than so many times says too little for a verdict.
TELLING = 2.0
#: Marks that keep a cell out of the contest: its figure says something else than its name.
DISQUALIFYING = frozenset({"busy", "spilled", "low-acceptance", "cache-hit", "throttled"})

Word = Literal["faster", "slower", "inconclusive", "baseline"]


@dataclass(frozen=True)
class Standing:
    """One configuration over all workloads, against the baseline of its group.

    ``speed`` is the geometric mean of decode tok/s, on a machine at its median pace;
    ``by_workload`` the speed-up for each.
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
    def tok_s(self) -> float:
        """Decode tokens/s as measured, the geometric mean over the cells; ``speed`` is evened
        out by the machine's pace and serves for the order."""
        rates = [c.decode_tok_s.mean for c in self.cells if c.decode_tok_s is not None]
        return math.exp(math.fsum(map(math.log, rates)) / len(rates))

    @property
    def word(self) -> Word:
        """The verdict against the baseline, at the interval's confidence."""
        if not self.configuration.speculative:
            return "baseline"
        if self.speedup.high > TELLING * self.speedup.low:
            return "inconclusive"
        if self.speedup.low > 1.0:
            return "faster"
        return "slower" if self.speedup.high < 1.0 else "inconclusive"

    @property
    def doubt(self) -> str:
        """Why an inconclusive verdict is one."""
        if self.speedup.low <= 1.0 <= self.speedup.high:
            return "the interval holds 1.00, so it is not proven to be faster"
        return "so wide an interval says little: measure again on a quieter machine"


@dataclass(frozen=True)
class GroupDrift:
    """How a group's baseline moved between two measurements, per workload."""

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
    pace: Pace

    def best(self, *, speculative: bool, group: str | None = None) -> Standing | None:
        """The fastest eligible standing of one kind, in one group or in all."""
        return _fastest(
            s
            for s in self.standings
            if s.configuration.speculative is speculative and group in (None, s.group)
        )


def disqualifying(allow_busy: bool) -> frozenset[str]:
    """The marks that keep a cell out of the contest; ``busy`` is none for who allowed it."""
    return DISQUALIFYING - ({"busy"} if allow_busy else set())


def analyse(cells: Sequence[CellRecord], *, allow_busy: bool = False) -> Verdict:
    """The verdict over all measured cells; missing and failed ones are left out.

    ``allow_busy``: the user knows that others used the machine; disturbed cells may win then, and
    their mark goes with them.

    Where a configuration and its baseline were measured in the confirming passes, those cells
    speak, because both arms were measured side by side; and only confirmed ones can win.
    """
    usable = [c for c in cells if c.status == "ok" and c.decode_tok_s is not None]
    pace = Pace(usable)
    keeping_out = disqualifying(allow_busy)
    by_configuration: dict[str, list[CellRecord]] = {}
    for cell in usable:
        by_configuration.setdefault(configuration_of(cell).key(), []).append(cell)
    standings: list[Standing] = []
    for members in by_configuration.values():
        base = by_configuration.get(configuration_of(members[0]).baseline().key(), [])
        made = _standing(_pairs(members, base, pace), keeping_out, pace)
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
    return Verdict(tuple(standings), winner, baseline, drifts(usable, pace), pace)


def grid(cells: Iterable[CellRecord]) -> list[CellRecord]:
    """The cells of the grid: those of the confirming passes left out."""
    return [c for c in cells if not c.role.startswith("confirm")]


def to_confirm(verdict: Verdict, top: int = 3) -> tuple[Configuration, ...]:
    """The baselines and the fastest few, in the order of the first confirming pass."""
    ranked = sorted((s for s in verdict.standings if s.eligible), key=lambda s: -s.speed)[:top]
    wanted = {s.configuration.baseline(): None for s in ranked}
    wanted |= {s.configuration: None for s in ranked}
    return tuple(wanted) if len(wanted) > 1 else ()


@dataclass(frozen=True)
class _Pair:
    """Cells of a configuration and the baseline's cells of the same time."""

    members: list[CellRecord]
    baseline: list[CellRecord]
    confirmed: bool
    pace: Pace

    @property
    def busy(self) -> int:
        """How many of the two arms were measured while others used the machine."""
        return sum(any("busy" in c.marks for c in arm) for arm in (self.members, self.baseline))

    def times(self, workload: str) -> tuple[list[float], list[float]]:
        """Milliseconds per token of baseline and configuration, request by request."""
        mine = _times(self.members, workload, self.pace)
        theirs = _times(self.baseline, workload, self.pace)
        common = [key for key in mine if key in theirs]
        return [theirs[key] for key in common], [mine[key] for key in common]


def _pairs(members: list[CellRecord], baseline: list[CellRecord], pace: Pace) -> list[_Pair]:
    """Both confirming passes where they are whole; else the grid's cells against the baseline
    at the start and, where it was measured, at the end. Of two, a disturbed one is left out."""
    found = _all_pairs(members, baseline, pace)
    least = min((pair.busy for pair in found), default=0)
    return [pair for pair in found if pair.busy == least]


def _all_pairs(members: list[CellRecord], baseline: list[CellRecord], pace: Pace) -> list[_Pair]:
    passes = [
        _Pair(
            [c for c in members if c.role == role],
            [c for c in baseline if c.role == role],
            True,
            pace,
        )
        for role in ("confirm-a", "confirm-b")
    ]
    every = {c.workload for c in members}
    if all({c.workload for c in arm} == every for p in passes for arm in (p.members, p.baseline)):
        return passes
    mine = [c for c in members if c.role in ("baseline", "mtp")]
    found = []
    for role in ("baseline", "baseline-again"):
        theirs = [c for c in baseline if c.role == role]
        if theirs and mine and (role == "baseline" or mine[0].role == "mtp"):
            found.append(_Pair(mine, theirs, False, pace))
    return found


def configuration_of(cell: CellRecord) -> Configuration:
    """The configuration a cell was measured with."""
    return msgspec.convert(cell.options, Configuration)


def drifts(cells: Iterable[CellRecord], pace: Pace) -> tuple[GroupDrift, ...]:
    """Per group, the baseline's later measurement against its earlier one.

    The confirming passes are compared where they are there, since the verdict rests on them; else
    the grid's start and end.
    """
    found: dict[str, dict[str, Drift]] = {}
    by_role: dict[tuple[str, str, str], tuple[float, ...]] = {
        (c.group, c.workload, c.role): pace.rates(c)
        for c in cells
        if c.head_type is None and c.decode_tok_s is not None
    }
    for before, after in (("baseline", "baseline-again"), ("confirm-a", "confirm-b")):
        for (group, workload, role), first in by_role.items():
            later = by_role.get((group, workload, after))
            if role == before and later is not None:
                found.setdefault(group, {})[workload] = drift(first, later)
    return tuple(GroupDrift(group, by_workload) for group, by_workload in found.items())


def _standing(pairs: list[_Pair], keeping_out: Collection[str], pace: Pace) -> Standing | None:
    """A configuration against its baseline; None when they cannot be compared.

    The requests of all pairs are pooled. Each pair was measured at a time of its own, and a
    bootstrap over requests knows nothing of a machine that changed between them: so the
    interval is widened to hold every pair's own ratio.
    """
    by_workload: dict[str, Interval] = {}
    arms: list[tuple[list[float], list[float]]] = []
    for workload in dict.fromkeys(c.workload for pair in pairs for c in pair.members):
        each = [times for pair in pairs if (times := pair.times(workload))[0]]
        if each:
            pooled = [x for base, _ in each for x in base], [x for _, mine in each for x in mine]
            arms.append(pooled)
            by_workload[workload] = mean_ratio_interval([pooled]).covering(
                [mean_ratio_interval([one]).mean for one in each]
            )
    if not arms:
        return None
    each_pair = [[t for w in by_workload if (t := pair.times(w))[0]] for pair in pairs]
    ratios = [mean_ratio_interval(made).mean for made in each_pair if made]
    # In the grid every pair has the same members.
    members = list({c.id: c for pair in pairs for c in pair.members}.values())
    compared = [c for c in members if c.workload in by_workload]
    speeds = [rate for c in compared if (rate := pace.rate(c))]
    baselines = [c for pair in pairs for c in pair.baseline]
    marked = any(mark in keeping_out for c in (*members, *baselines) for mark in c.marks)
    return Standing(
        configuration=configuration_of(members[0]),
        group=members[0].group,
        cells=tuple(compared),
        speed=math.exp(math.fsum(math.log(s) for s in speeds) / len(speeds)),
        speedup=mean_ratio_interval(arms).covering(ratios),
        by_workload=by_workload,
        eligible=not marked,
        confirmed=pairs[0].confirmed,
    )


def _times(cells: list[CellRecord], workload: str, pace: Pace) -> dict[tuple[str, int], float]:
    """Milliseconds per token of each request, by prompt and repeat."""
    return {
        (t.prompt_id, t.repeat): ms
        for c in cells
        if c.workload == workload
        for t, ms in pace.ms_per_token(c)
    }


def _fastest(standings: Iterable[Standing]) -> Standing | None:
    return max((s for s in standings if s.eligible), key=lambda s: s.speed, default=None)
