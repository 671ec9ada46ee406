"""Speed as acceptance over cycle cost, so that cells can be predicted that were not run.

    tokens/s = L(P) / T(n),    L = 1 + P1 + ... + Pn,    T(n) = T0 * v(n+1) + n * d(head) + c

P, the unconditional acceptance per position, depends on the head, the text and the sampling, and
hardly on the hardware. T depends on the hardware, the types and the options, and not on the text:
T0 is the baseline's step, v(k) the cost of a batch of k tokens relative to one (from llama-bench),
d the head's cost per drafted token, c what a cycle costs beside. Each factor is measured where it
is cheap; the grid is their product.

Assumptions, and where they end: acceptance at position i is the same whatever n_max (within a few
percent); d depends on the head and, by an offset, on the group; one slot. With several slots
nothing is predicted.

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
from browndwarf.sweep.space import Configuration

#: 90% of a normal distribution lies within so many standard deviations.
Z90 = 1.645
#: Cycle costs are never believed to be known better than this, relative.
LEAST_ERROR = 0.025
#: Pull of the unknown costs towards their common value, in squared milliseconds per data point.
RIDGE = 1e-3

Curve = Sequence[float]
HeadKey = tuple[str | None, float | None, str | None]


def head_key(configuration: Configuration) -> HeadKey:
    """What acceptance and draft cost depend on."""
    return configuration.head_type, configuration.p_min, configuration.draft_kv


def trusted(cell: CellRecord, allow_busy: bool) -> bool:
    """Whether a cell's figures may be used."""
    return cell.status == "ok" and (allow_busy or "busy" not in cell.marks)


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
    """Acceptance of a head on a text: accepted and tried per position, repeats counted once."""

    accepted: tuple[float, ...] = ()
    tried: tuple[float, ...] = ()

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

    def add(self, cell: CellRecord) -> None:
        acceptance = cell.acceptance
        if acceptance is None or not acceptance.drafts:
            return
        repeats = max(1, len({t.repeat for t in cell.traces}))
        for i, rate in enumerate(acceptance.per_position):
            if i == len(self.accepted):
                self.accepted.append(0.0)
                self.tried.append(0.0)
            self.accepted[i] += rate * acceptance.drafts / repeats
            self.tried[i] += acceptance.drafts / repeats

    def profile(self) -> Profile:
        return Profile(tuple(self.accepted), tuple(self.tried))


class FactorModel:
    """Fitted to the measured cells; predicts the others.

    ``curves`` has, per group, milliseconds of a batch of 1, 2, ... tokens. Disturbed cells are
    left out unless ``allow_busy``.
    """

    def __init__(
        self,
        cells: Sequence[CellRecord],
        curves: Mapping[str, Curve],
        *,
        allow_busy: bool = False,
    ) -> None:
        self._curves = curves
        usable = [c for c in cells if c.cycle_ms and trusted(c, allow_busy)]
        self._step_ms = _baseline_steps(usable)
        self._profiles = _profiles(usable)
        self._any_head = _profiles(usable, pooled=True)
        self._fit([c for c in usable if c.head_type is not None])

    def predict(self, configuration: Configuration, workload: str) -> Prediction | None:
        """Decode tok/s with a 90% interval; None where a factor is not known yet."""
        group = configuration.group_label()
        if configuration.parallel != 1 or group not in self._step_ms:
            return None
        if not configuration.speculative:
            return _interval(1e3 / self._step_ms[group], self.error)
        key = head_key(configuration)
        profile = self._profiles.get((key, workload)) or self._any_head.get((None, workload))
        cycle = self.cycle_ms(configuration)
        if profile is None or cycle is None:
            return None
        length, deviation = profile.length(configuration.n_max)
        guess = 0.0 if (key, workload) in self._profiles else 0.04
        return _interval(1e3 * length / cycle, math.hypot(deviation / length, self.error, guess))

    def cycle_ms(self, configuration: Configuration) -> float | None:
        """T(n) of a speculative configuration; None without its group's baseline."""
        group = configuration.group_label()
        step = self._step_ms.get(group)
        if step is None:
            return None
        n = configuration.n_max
        verify = step * relative_cost(self._curves.get(group), n + 1)
        made = verify + self._fixed + n * (self._draft_ms(configuration) + self._offset(group))
        # Verifying more tokens is never cheaper than a plain step.
        return max(made, step)

    def _draft_ms(self, configuration: Configuration) -> float:
        return self._draft.get(head_key(configuration), self._mean_draft)

    def _offset(self, group: str) -> float:
        return self._group_offset.get(group, 0.0)

    def _fit(self, cells: Sequence[CellRecord]) -> None:
        """Least squares for c, d(head) and an offset per group, pulled towards their means."""
        configurations = [configuration_of(c) for c in cells]
        heads = list(dict.fromkeys(head_key(c) for c in configurations))
        groups = list(dict.fromkeys(c.group_label() for c in configurations))
        self._fixed, self._mean_draft = 0.0, 0.0
        self._draft: dict[HeadKey, float] = {}
        self._group_offset: dict[str, float] = {}
        self.error = LEAST_ERROR
        known = [
            (configuration, cell)
            for configuration, cell in zip(configurations, cells, strict=True)
            if configuration.group_label() in self._step_ms
        ]
        if not known:
            return
        width = 2 + len(heads) + len(groups)
        rows, values, weights = [], [], []
        for configuration, cell in known:
            group, n = configuration.group_label(), configuration.n_max
            verify = self._step_ms[group] * relative_cost(self._curves.get(group), n + 1)
            row = np.zeros(width)
            row[0], row[1] = 1.0, n
            row[2 + heads.index(head_key(configuration))] = n
            row[2 + len(heads) + groups.index(group)] = n
            rows.append(row)
            cycle = cell.cycle_ms or 0.0
            values.append(cycle - verify)
            weights.append(1.0 / cycle)
        matrix = np.array(rows) * np.array(weights)[:, None]
        target = np.array(values) * np.array(weights)
        pull = np.full(width, RIDGE)
        pull[0], pull[1] = RIDGE / 10, RIDGE / 100
        normal = matrix.T @ matrix + np.diag(pull)
        solved = np.linalg.solve(normal, matrix.T @ target)
        self._fixed, self._mean_draft = float(solved[0]), float(solved[1])
        self._draft = {h: self._mean_draft + float(solved[2 + i]) for i, h in enumerate(heads)}
        self._group_offset = {g: float(solved[2 + len(heads) + i]) for i, g in enumerate(groups)}
        residual = matrix @ solved - target
        spare = max(len(values) - min(len(values) - 1, 3), 1)
        self.error = max(LEAST_ERROR, float(np.sqrt((residual**2).sum() / spare)))


def _baseline_steps(cells: Sequence[CellRecord]) -> dict[str, float]:
    """Milliseconds of a plain step, per group: the mean over its baseline cells."""
    sums: dict[str, list[float]] = {}
    for cell in cells:
        if cell.head_type is None and cell.cycle_ms:
            sums.setdefault(cell.group, []).append(cell.cycle_ms)
    return {group: math.fsum(values) / len(values) for group, values in sums.items()}


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


def _interval(speed: float, relative: float) -> Prediction:
    spread = math.exp(Z90 * relative)
    return Prediction(decode_tok_s=speed, low=speed / spread, high=speed * spread)
