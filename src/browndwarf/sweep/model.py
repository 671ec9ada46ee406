"""Speed as acceptance over cycle cost, so that cells can be predicted that were not run.

    tokens/s = L(P) / T(n),    L = 1 + P1 + ... + Pn,    T(n) = T0 * v(n+1) + n * d(head) + c

P, the unconditional acceptance per position, depends on the head, the text and the sampling, and
hardly on the hardware. T depends on the hardware, the types and the options, and not on the text:
T0 is the baseline's step, v(k) the cost of a batch of k tokens relative to one (from llama-bench),
d the head's cost per drafted token, c what a cycle costs beside. Each factor is measured where it
is cheap; the grid is their product. The context behind a step makes it dearer: T0 and d grow with
the workload's depth, where the workloads differ enough in it to tell (``steps``).

Assumptions, and where they end: acceptance at position i is the same whatever n_max (within a few
percent); d depends on the head, c and d by offsets on the group; a group that was not measured
costs what its settings cost one by one (``effects``); one slot. What a nextn head does again after
each batch goes with n and is in d and c, what a recurrent model rolls back is in c. With several
slots nothing is predicted.

Example:
    >>> model = FactorModel(cells, curves)                          # doctest: +SKIP
    >>> model.predict(configuration, "prose").decode_tok_s          # doctest: +SKIP
    1322.5
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from browndwarf.records import CellRecord, Prediction
from browndwarf.sweep.analysis import configuration_of
from browndwarf.sweep.effects import Effects
from browndwarf.sweep.pace import Pace
from browndwarf.sweep.space import Configuration
from browndwarf.sweep.steps import TELLING_TOKENS, Steps, depth_of

#: 90% of a normal distribution lies within so many standard deviations.
Z90 = 1.645
#: Cycle costs are never believed to be known better than this, relative.
LEAST_ERROR = 0.025
#: What adding up a group's settings may be wrong by, relative.
UNSEEN_ERROR = 0.04
#: Marks of cells whose times say something else than their name.
SPOILED = frozenset({"busy", "spilled", "throttled", "cache-hit"})
#: Pull of the unknown costs towards their common value, in squared milliseconds per data point.
RIDGE = 1e-3
#: Tokens that the growth of d is fitted in, so that its unknown is as large as the others.
DEPTH_UNIT = 1000.0

Curve = Sequence[float]
HeadKey = tuple[str | None, float | None, str | None]


def head_key(configuration: Configuration) -> HeadKey:
    """What acceptance and draft cost depend on."""
    return configuration.head_type, configuration.p_min, configuration.draft_kv


def trusted(cell: CellRecord, allow_busy: bool) -> bool:
    """Whether a cell's figures may be used."""
    spoiled = SPOILED - ({"busy"} if allow_busy else set())
    return cell.status == "ok" and not spoiled.intersection(cell.marks)


def added_cost(curve: Curve | None, tokens: int, step_ms: float) -> float:
    """Milliseconds that a batch of ``tokens`` takes longer than one of a single token."""
    if not curve:
        return step_ms * (relative_cost(None, tokens) - 1.0)
    return curve[0] * (relative_cost(curve, tokens) - 1.0)


def relative_cost(curve: Curve | None, tokens: int) -> float:
    """v(k): the cost of a batch of ``tokens`` relative to one token.

    ``curve`` has milliseconds for batches of 1, 2, ...; beyond its end the last step goes on, and
    without a curve a token more costs a quarter of the first (the fit absorbs the error).
    """
    if not curve:
        return 1.0 + 0.25 * (tokens - 1)
    if tokens <= len(curve):
        return curve[tokens - 1] / curve[0]
    step = (curve[-1] - curve[0]) / max(len(curve) - 1, 1)
    return (curve[-1] + step * (tokens - len(curve))) / curve[0]


@dataclass(frozen=True)
class Profile:
    """Acceptance of a head on a text: accepted per position, and cycles tried, repeats counted
    once; and of an answer its tokens and the cycles that came to nothing.

    The draft that runs into an answer's end is verified and adds no token. One such cycle is
    nothing to an answer of 500 tokens and an eighth of one of 25, drafted six at a time.
    """

    accepted: tuple[float, ...] = ()
    tried: tuple[float, ...] = ()
    tokens: float = math.inf
    idle: float = 0.0

    def tokens_per_cycle(self, n_max: int) -> tuple[float, float]:
        """Tokens of an answer over all its cycles, and the standard deviation of that."""
        length, deviation = self.length(n_max)
        more = 1.0 + self.idle * length / self.tokens
        return length / more, deviation / more

    def length(self, n_max: int) -> tuple[float, float]:
        """(L, its standard deviation) for ``n_max`` draft tokens; positions beyond the
        measured ones continue the last ratio."""
        rates: list[float] = []
        variance = 0.0
        for i in range(n_max):
            if i < len(self.accepted) and self.tried[i] > 0:
                # One pseudo-observation each way keeps small counts honest.
                rate = (self.accepted[i] + 0.5) / (self.tried[i] + 1.0)
                variance += rate * (1 - rate) / (self.tried[i] + 1.0)
            else:
                ratio = rates[-1] / rates[-2] if len(rates) > 1 else 0.8
                rate = (rates[-1] if rates else 0.8) * min(ratio, 1.0)
                variance += (0.1 * rate) ** 2
            rates.append(rate)
        return 1.0 + sum(rates), math.sqrt(variance)


@dataclass
class _Counts:
    accepted: list[float] = field(default_factory=list)
    tried: list[float] = field(default_factory=list)
    answers: int = 0
    tokens: int = 0
    idle: int = 0

    def add(self, cell: CellRecord) -> None:
        acceptance = cell.acceptance
        if acceptance is None or not acceptance.drafts:
            return
        # Repeats of a prompt draft the same; synthetic acceptance is drawn anew each time.
        cycles = sum(t.cycles for t in cell.traces) or acceptance.drafts
        self.answers += len(cell.traces)
        self.tokens += sum(max(t.predicted_n - 1, 0) for t in cell.traces)
        self.idle += max(acceptance.drafts - cycles, 0)
        repeats = 1 if cell.synthetic else max(1, len({t.repeat for t in cell.traces}))
        for i, rate in enumerate(acceptance.per_position):
            if i == len(self.accepted):
                self.accepted.append(0.0)
                self.tried.append(0.0)
            self.accepted[i] += rate * acceptance.drafts / repeats
            self.tried[i] += max(cycles, rate * acceptance.drafts) / repeats

    def profile(self) -> Profile:
        tokens = self.tokens / self.answers if self.tokens else math.inf
        idle = self.idle / self.answers if self.answers else 0.0
        return Profile(tuple(self.accepted), tuple(self.tried), tokens, idle)


class FactorModel:
    """Fitted to the measured cells; predicts the others.

    ``curves`` has, per group, milliseconds of a batch of 1, 2, ... tokens. Disturbed cells are
    left out unless ``allow_busy``. Cycles are evened out by ``pace``, and predictions are for a
    machine at its reference speed.
    """

    def __init__(
        self,
        cells: Sequence[CellRecord],
        curves: Mapping[str, Curve],
        *,
        allow_busy: bool = False,
        pace: Pace | None = None,
    ) -> None:
        self.pace = pace or Pace(cells)
        usable = [c for c in cells if c.cycle_ms and trusted(c, allow_busy)]
        self._steps = Steps(usable, self.pace)
        bases = {configuration_of(c).baseline() for c in cells}
        self._curves = Effects(
            {b: tuple(curve) for b in bases if (curve := curves.get(b.group_label()))}
        )
        # Made-up acceptance is the same for all heads.
        synthetic = any(c.synthetic for c in usable)
        self._guess_error = 0.0 if synthetic else 0.04
        self._profiles = {} if synthetic else _profiles(usable)
        self._any_head = _profiles(usable, pooled=True)
        self._fit([c for c in usable if c.head_type is not None])

    def predict(self, configuration: Configuration, workload: str) -> Prediction | None:
        """Decode tok/s with a 90% interval; None where a factor is not known yet."""
        base = configuration.baseline()
        depth = self._steps.depth_on(workload)
        step = self._steps.ms(base, depth=depth)
        if configuration.parallel != 1 or step is None:
            return None
        unseen = 0.0 if self._steps.measured(base) else UNSEEN_ERROR
        shared = self._steps.error(base)
        if not configuration.speculative:
            return self._interval(1e3 / step, math.hypot(self.error, unseen, shared))
        key = head_key(configuration)
        profile = self._profiles.get((key, workload)) or self._any_head.get((None, workload))
        cycle = self.cycle_ms(configuration, depth=depth)
        if profile is None or cycle is None:
            return None
        length, deviation = profile.tokens_per_cycle(configuration.n_max)
        guess = 0.0 if (key, workload) in self._profiles else self._guess_error
        # And the batch curve, where there is one, is a measurement too.
        curve = self.pace.noise if self._curves.of(base) else 0.0
        error = math.hypot(deviation / length, self.error, guess, unseen, shared, curve)
        return self._interval(1e3 * length / cycle, error)

    def _interval(self, speed: float, relative: float) -> Prediction:
        # What is predicted is a measurement, with a measurement's noise.
        spread = math.exp(Z90 * math.hypot(relative, self.pace.noise))
        reference = self.pace.reference
        return Prediction(
            decode_tok_s=speed, low=speed / spread, high=speed * spread, probe_ms=reference
        )

    def cycle_ms(self, configuration: Configuration, *, depth: float | None = None) -> float | None:
        """T(n) of a speculative configuration with ``depth`` tokens in the cache (the first
        baseline's unless given); None without its group's plain step."""
        base = configuration.baseline()
        step = self._steps.ms(base)
        if step is None:
            return None
        n, further = configuration.n_max, 0.0 if depth is None else depth - self._steps.depth
        draft_more, fixed_more = self._offsets.of(base) or (0.0, 0.0)
        made = self._verify_ms(base, step, n, further) + self._fixed + fixed_more
        made += n * (self._draft_ms(configuration) + draft_more + self._draft_growth * further)
        made *= self._bends.get((base, n), 1.0)
        # Verifying more tokens is never cheaper than a plain step.
        return max(made, self._verify_ms(base, step, 0, further))

    def took_ms(self, cell: CellRecord) -> float:
        """What one cycle of a measured speculative cell took, those included that came to
        nothing, evened out."""
        made = self.pace.cycle_ms(cell) or 0.0
        cycles = sum(t.cycles for t in cell.traces)
        drafts = cell.acceptance.drafts if cell.acceptance is not None else 0
        return made * cycles / max(drafts, cycles) if cycles else made

    def _verify_ms(self, base: Configuration, step_ms: float, n: int, further: float) -> float:
        # The cache is read once for the whole batch.
        growth = self._steps.growth(base) * further
        return step_ms + added_cost(self._curves.of(base), n + 1, step_ms) + growth

    def _draft_ms(self, configuration: Configuration) -> float:
        return self._draft.get(head_key(configuration), self._mean_draft)

    def _fit(self, cells: Sequence[CellRecord]) -> None:
        """Least squares for c, d(head), each group's offsets to both, and what a token in the cache
        adds to d; all pulled towards 0."""
        self._fixed, self._mean_draft, self._draft_growth = 0.0, 0.0, 0.0
        self._draft: dict[HeadKey, float] = {}
        self._offsets = Effects({})
        self._bends: dict[tuple[Configuration, int], float] = {}
        self.error = LEAST_ERROR
        known = []
        for cell in cells:
            configuration = configuration_of(cell)
            step = self._steps.ms(configuration.baseline())
            if step is not None:
                further = depth_of(cell) - self._steps.depth
                known.append((configuration, step, further, self.took_ms(cell)))
        if not known:
            return
        heads = list(dict.fromkeys(head_key(c) for c, *_ in known))
        bases = list(dict.fromkeys(c.baseline() for c, *_ in known))
        draft_at, fixed_at = 2 + len(heads), 2 + len(heads) + len(bases)
        width = fixed_at + len(bases) + 1
        telling = max(abs(further) for _, _, further, _ in known) >= TELLING_TOKENS
        rows, values, weights = [], [], []
        for configuration, step_ms, further, cycle in known:
            base, n = configuration.baseline(), configuration.n_max
            row = np.zeros(width)
            row[0], row[1] = 1.0, n
            row[2 + heads.index(head_key(configuration))] = n
            row[draft_at + bases.index(base)] = n
            row[fixed_at + bases.index(base)] = 1.0
            row[-1] = n * further / DEPTH_UNIT if telling else 0.0
            rows.append(row)
            values.append(cycle - self._verify_ms(base, step_ms, n, further))
            weights.append(1.0 / cycle)
        matrix = np.array(rows) * np.array(weights)[:, None]
        target = np.array(values) * np.array(weights)
        pull = np.full(width, RIDGE)
        pull[0], pull[1] = RIDGE / 10, RIDGE / 100
        normal = matrix.T @ matrix + np.diag(pull)
        solved = np.linalg.solve(normal, matrix.T @ target)
        self._fixed, self._mean_draft = float(solved[0]), float(solved[1])
        self._draft_growth = float(solved[-1]) / DEPTH_UNIT
        self._draft = {h: self._mean_draft + float(solved[2 + i]) for i, h in enumerate(heads)}
        self._offsets = Effects(
            {
                b: (float(solved[draft_at + i]), float(solved[fixed_at + i]))
                for i, b in enumerate(bases)
            },
            signed=True,
        )
        residual = matrix @ solved - target
        self._bends = _bends([(c.baseline(), c.n_max) for c, *_ in known], -residual)
        spare = max(len(values) - width, 1)
        self.error = max(LEAST_ERROR, float(np.sqrt((residual**2).sum() / spare)))


def _bends(
    places: Sequence[tuple[Configuration, int]], missed: Sequence[float]
) -> dict[tuple[Configuration, int], float]:
    """What the measured cycles of a group and n_max say about the curve there: a factor to the
    fitted cycle, from their mean deviation, pulled towards 1 as if one more deviated by nothing.
    """
    found: dict[tuple[Configuration, int], list[float]] = {}
    for place, deviation in zip(places, missed, strict=True):
        found.setdefault(place, []).append(float(deviation))
    return {place: 1.0 + math.fsum(seen) / (len(seen) + 1) for place, seen in found.items()}


def _profiles(
    cells: Sequence[CellRecord], *, pooled: bool = False
) -> dict[tuple[HeadKey | None, str], Profile]:
    """Acceptance by head and workload, or by workload over all heads."""
    found: dict[tuple[HeadKey | None, str], _Counts] = {}
    for cell in cells:
        if cell.head_type is not None:
            key = None if pooled else head_key(configuration_of(cell))
            found.setdefault((key, cell.workload), _Counts()).add(cell)
    return {key: counts.profile() for key, counts in found.items() if counts.accepted}


def pooled_rates(cells: Sequence[CellRecord]) -> tuple[float, ...]:
    """Unconditional acceptance per position over all cells; never rising. Empty without any."""
    counts = _Counts()
    for cell in cells:
        if cell.status == "ok":
            counts.add(cell)
    rates: list[float] = []
    for accepted, tried in zip(counts.accepted, counts.tried, strict=True):
        rates.append(min(accepted / tried, *rates[-1:], 1.0))
    return tuple(rates)
