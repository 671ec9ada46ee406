"""Alphas from measurement: how far a relative error in a group of tensors moves predictions.

One group at a time is quantized to a low type while all else stays as good as it is, and the
Kullback-Leibler divergence from the source is measured on a small text:

    alpha = (KLD - KLD of nothing but the rest) / sum of the group's relative errors

so that alpha x error is in nats per token. For small errors the divergence is quadratic in the
noise and adds over groups, which is what makes one group at a time enough.

What cannot be told from noise is pulled towards its role: an alpha is the mean of its own figure
and that of all groups of its role, weighed by how well each is known (empirical Bayes over the
bands). Groups for which the time did not suffice get the role's figure, or that of all.

Boundary: which measurement is made is the caller's (``Probe``); this decides what to measure and
what follows from it.

Example:
    found = calibrate(material, measure, budget_s=600)
    found.alphas["blk.0.ffn_down.weight"], found.groups["ffn_down/early"]
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from browndwarf.errors import CheckFailed, StorageError
from browndwarf.files import atomic_write
from browndwarf.plan.legal import legal_types
from browndwarf.plan.loss import ErrorTable
from browndwarf.plan.planner import Material
from browndwarf.plan.roles import groups
from browndwarf.records import Record

LOW_TYPES = ("Q3_K", "Q4_0")
"""Tried in this order; the second for rows that fill no block of 256."""
FLOOR = 0.05
"""Least alpha, as a share of the mean: a group never counts nothing."""


class Divergence(Record, frozen=True, kw_only=True):
    """Mean KLD from the source in nats per token, and its standard error."""

    mean: float
    error: float


Probe = Callable[[Mapping[str, str]], Divergence]
"""Measures the model with these types of tensors, and the rest as good as can be."""


class Measured(Record, frozen=True, kw_only=True):
    """One group: its divergence above the rest's, and the sum of its relative errors."""

    kld: float
    error: float
    noise: float


class Calibration(Record, frozen=True, kw_only=True):
    """What was measured, kept so that alphas can be computed anew. ``missing``: groups for which
    the time did not suffice."""

    measured: dict[str, Measured]
    base: Divergence
    missing: tuple[str, ...] = ()
    seconds: float = 0.0

    def alphas(self, groups_of: Mapping[str, str]) -> dict[str, float]:
        """Tensor name -> alpha, for tensors with these groups."""
        found = pooled(self.measured)
        everywhere = found["*"]
        return {
            name: found.get(group, found.get(group.split("/")[0], everywhere))
            for name, group in groups_of.items()
        }


def calibrate(
    material: Material,
    table: ErrorTable,
    probe: Probe,
    *,
    budget_s: float,
    kept: Calibration | None = None,
    on_group: Callable[[str, int, int], None] = lambda *_: None,
    save: Callable[[Calibration], None] = lambda _: None,
) -> Calibration:
    """Measure the groups, heaviest first, as long as the time lasts.

    Args:
        kept: an earlier, perhaps partial, calibration to go on from.
        on_group: called with the group about to be measured, its number, and how many there are.
        save: called after each measurement.

    Raises:
        CheckFailed: not even one group was measured.
    """
    began = time.monotonic()
    group_of = groups(material.model, material.options)
    members: dict[str, dict[str, str]] = defaultdict(dict)
    weight: dict[str, int] = defaultdict(int)
    for name, group in group_of.items():
        tensor = material.model.by_name[name]
        kinds = legal_types(tensor, LOW_TYPES, covered=table.covered(name))
        members[group][name] = kinds[0]
        weight[group] += tensor.elements
    measured = dict(kept.measured) if kept is not None else {}
    base = kept.base if kept is not None else None
    errors = table.measure({n: (t,) for some in members.values() for n, t in some.items()})
    order = sorted(members, key=lambda group: -weight[group])
    longest = 0.0
    for number, group in enumerate(order, 1):
        if group in measured:
            continue
        started = time.monotonic()
        if measured and started - began + longest > budget_s:
            break
        on_group(group, number, len(order))
        base = probe({}) if base is None else base
        found = probe(members[group])
        noise = sum(errors[name][kind] for name, kind in members[group].items())
        measured[group] = Measured(
            kld=found.mean - base.mean,
            error=(found.error**2 + base.error**2) ** 0.5,
            noise=noise,
        )
        longest = max(longest, time.monotonic() - started)
        save(Calibration(measured=measured, base=base))
    if base is None or not measured:
        raise CheckFailed(
            "no group of tensors could be measured",
            why="the model has none that llama-quantize touches",
            fix="plan without --probe calibrated",
        )
    return Calibration(
        measured=measured,
        base=base,
        missing=tuple(group for group in order if group not in measured),
        seconds=time.monotonic() - began,
    )


def pooled(measured: Mapping[str, Measured]) -> dict[str, float]:
    """Alphas by group and by role; ``*`` is that of all together.

    A group's figure k/n with standard error e/n is drawn to its role's m by the spread s between
    the bands of the role: alpha = (k/n * s^2 + m * (e/n)^2) / (s^2 + (e/n)^2).
    """
    usable = {group: m for group, m in measured.items() if m.noise > 0}
    roles: dict[str, list[Measured]] = defaultdict(list)
    for group, item in usable.items():
        roles[group.split("/")[0]].append(item)
    everything = _ratio(list(usable.values()))
    found = {"*": everything}
    floor = FLOOR * everything
    for role, items in roles.items():
        found[role] = max(floor, _ratio(items))
    for group, item in usable.items():
        role = group.split("/")[0]
        own, own_error = item.kld / item.noise, item.error / item.noise
        others = [m.kld / m.noise for m in roles[role]]
        spread = max(
            sum((x - found[role]) ** 2 for x in others) / max(len(others) - 1, 1) - own_error**2,
            0.0,
        )
        both = spread + own_error**2
        drawn = (own * spread + found[role] * own_error**2) / both if both > 0 else own
        found[group] = max(floor, drawn)
    return found


def load(path: Path) -> Calibration | None:
    """A kept calibration; None where there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError):
        return None


def keep(path: Path, calibration: Calibration) -> None:
    """Keep a calibration; a folder that cannot be written costs time, not the result."""
    try:
        atomic_write(path, msgspec.json.encode(calibration))
    except StorageError:
        return


def _ratio(items: list[Measured]) -> float:
    noise = sum(item.noise for item in items)
    return max(sum(item.kld for item in items), 0.0) / noise if noise > 0 else 0.0
