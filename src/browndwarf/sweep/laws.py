"""What was found on one 8 GB card, checked on this machine: does it hold here?

Four findings made MTP pay on a small card. Each is a claim about configurations, so a sweep that
varied the right axis can confirm or refute it; one that did not says which axis to add. Only
measured cells count, but for the best n_max, where predicted ones may stand in and are named so.

The boundary: pure, from cells to findings; wording for people is here, layout is not.

Example:
    >>> [law.verdict for law in check(cells)]                      # doctest: +SKIP
    ['not measured', 'holds', 'not measured', 'holds', 'fails']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from browndwarf.records import CellRecord, Record
from browndwarf.sweep.analysis import DISQUALIFYING, configuration_of
from browndwarf.sweep.pace import Pace
from browndwarf.sweep.space import Configuration

Finding = Literal["holds", "fails", "unclear", "not measured"]

#: Speeds closer than this share are not told apart.
TIE = 0.02
#: Points of acceptance between the best and the worst head that count as hardly any.
HARDLY = 0.07
#: The n_max that was best on the small card.
FOUND_N_MAX = 2


class Law(Record, frozen=True, kw_only=True):
    """One finding: the claim, whether it holds here, the figures, and the cells that show them."""

    name: str
    claim: str
    verdict: Finding
    detail: str
    cells: tuple[str, ...] = ()


class _Speed(msgspec.Struct, frozen=True):
    rate: float
    id: str
    measured: bool


def check(cells: Sequence[CellRecord]) -> tuple[Law, ...]:
    """Every law with what these cells say about it."""
    pace = Pace(cells)
    speeds: dict[tuple[Configuration, str], _Speed] = {}
    for cell in cells:
        rate = pace.rate(cell)
        key = configuration_of(cell), cell.workload
        if rate and cell.status == "ok" and not DISQUALIFYING.intersection(cell.marks):
            speeds[key] = _Speed(rate, cell.id, True)
        elif cell.predicted is not None:
            speeds.setdefault(key, _Speed(cell.predicted.decode_tok_s, cell.id, False))
    measured = [c for c in cells if c.status == "ok"]
    return (
        _layers(speeds),
        _funds(measured, "parallel", "one slot instead of several", "--parallel 1,4"),
        _funds(measured, "kv", "a q8_0 cache instead of f16", "--kv f16,q8_0"),
        _head_bits(measured),
        _best_n_max(speeds),
    )


def _layers(speeds: dict[tuple[Configuration, str], _Speed]) -> Law:
    name, claim = "layers", "layers on the host never pay for the draft"
    missing = "not measured: add --layers all,N with N below the model's layers"
    found: list[tuple[float, _Speed, _Speed, Configuration]] = []
    for (configuration, workload), mine in speeds.items():
        if not configuration.speculative or configuration.layers is None or not mine.measured:
            continue
        full = msgspec.structs.replace(configuration.baseline(), layers=None)
        whole = speeds.get((full, workload))
        if whole is not None and whole.measured:
            found.append((mine.rate / whole.rate, mine, whole, configuration))
    if not found:
        return Law(name=name, claim=claim, verdict="not measured", detail=missing)
    ratio, mine, whole, best = max(found, key=lambda f: f[0])
    return Law(
        name=name,
        claim=claim,
        verdict="holds" if ratio < 1 - TIE else "fails" if ratio > 1 + TIE else "unclear",
        detail=f"at best {best.label()} reaches {ratio:.2f}x of all layers without MTP "
        f"({mine.rate:.1f} against {whole.rate:.1f} tok/s)",
        cells=(mine.id, whole.id),
    )


def _funds(cells: Sequence[CellRecord], axis: str, what: str, fix: str) -> Law:
    name, claim = f"{axis}-funds", f"{what} frees what the draft takes"
    costs = list(_draft_costs(cells))
    freed = list(_freed(cells, axis))
    if not costs or not freed:
        missing = f"not measured: add {fix}" if costs else "not measured: no MTP cell with memory"
        return Law(name=name, claim=claim, verdict="not measured", detail=missing)
    cost, draft = min(costs, key=lambda c: c[0])
    most, less, more = max(freed, key=lambda f: f[0])
    return Law(
        name=name,
        claim=claim,
        verdict="holds" if most >= cost else "fails",
        detail=f"it frees {most:.0f} MiB ({more.label()} against {less.label()}), and the "
        f"smallest draft takes {cost:.0f} MiB ({draft.label()})",
        cells=tuple(c.id for c in cells if configuration_of(c) in (less, more, draft))[:4],
    )


def _memory(cells: Sequence[CellRecord]) -> dict[Configuration, float]:
    """MiB of the engine's buffers by configuration; the same figure on every machine."""
    return {configuration_of(c): c.memory["buffers"] for c in cells if c.memory.get("buffers")}


def _draft_costs(cells: Sequence[CellRecord]) -> Iterator[tuple[float, Configuration]]:
    known = _memory(cells)
    for configuration, mib in known.items():
        base = known.get(configuration.baseline())
        if configuration.speculative and base is not None:
            yield mib - base, configuration


def _freed(
    cells: Sequence[CellRecord], axis: str
) -> Iterator[tuple[float, Configuration, Configuration]]:
    known = _memory(cells)
    for configuration, mib in known.items():
        wasteful = configuration.parallel > 1 if axis == "parallel" else configuration.kv == "f16"
        thrifty: dict[str, object] = {"parallel": 1} if axis == "parallel" else {"kv": "q8_0"}
        if wasteful:
            less = msgspec.structs.replace(configuration, **thrifty)
            if less in known:
                yield mib - known[less], less, configuration


def _head_bits(cells: Sequence[CellRecord]) -> Law:
    name, claim = "head-bits", "the bits of the head hardly change acceptance"
    if any(c.synthetic for c in cells):
        detail = "not measured: acceptance was given, not measured"
        return Law(name=name, claim=claim, verdict="not measured", detail=detail)
    # Compared where the heads drafted under the same settings on the same texts.
    by_place: dict[tuple[Configuration, str], dict[str, CellRecord]] = {}
    for cell in cells:
        if cell.head_type is not None and cell.acceptance is not None:
            place = msgspec.structs.replace(configuration_of(cell), head_type="any")
            by_place.setdefault((place, cell.workload), {})[cell.head_type] = cell
    most = max((len(v) for v in by_place.values()), default=0)
    if most < 2:
        detail = "not measured: add --head-types Q8_0,Q4_K,Q2_K"
        return Law(name=name, claim=claim, verdict="not measured", detail=detail)
    places = [v for v in by_place.values() if len(v) == most]
    rates: dict[str, list[float]] = {}
    for members in places:
        for head, cell in members.items():
            if cell.acceptance is not None:
                rates.setdefault(head, []).append(cell.acceptance.rate)
    means = {head: sum(values) / len(values) for head, values in rates.items()}
    span = max(means.values()) - min(means.values())
    listed = ", ".join(f"{head} {mean:.0%}" for head, mean in means.items())
    return Law(
        name=name,
        claim=claim,
        verdict="holds" if span <= HARDLY else "fails",
        detail=f"{listed}: {100 * span:.0f} points apart",
        cells=tuple(cell.id for members in places for cell in members.values())[:8],
    )


def _best_n_max(speeds: dict[tuple[Configuration, str], _Speed]) -> Law:
    name, claim = "n-max", f"n_max {FOUND_N_MAX} is best"
    drafting = {key: speed for key, speed in speeds.items() if key[0].speculative}
    depths = {configuration.n_max for configuration, _ in drafting}
    if len(depths) < 2 or FOUND_N_MAX not in depths:
        detail = "not measured: add --n-max 1,2,3,4"
        return Law(name=name, claim=claim, verdict="not measured", detail=detail)
    best: dict[str, tuple[Configuration, _Speed]] = {}
    for (configuration, workload), speed in drafting.items():
        if workload not in best or speed.rate > best[workload][1].rate:
            best[workload] = configuration, speed
    close = all(
        _close(drafting, workload, speed.rate)
        for workload, (configuration, speed) in best.items()
        if configuration.n_max != FOUND_N_MAX
    )
    same = all(configuration.n_max == FOUND_N_MAX for configuration, _ in best.values())
    listed = ", ".join(
        f"{workload} {configuration.n_max}{'' if speed.measured else ' (predicted)'}"
        for workload, (configuration, speed) in best.items()
    )
    return Law(
        name=name,
        claim=claim,
        verdict="holds" if same else "unclear" if close else "fails",
        detail=f"best here: {listed}",
        cells=tuple(speed.id for _, speed in best.values()),
    )


def _close(
    drafting: dict[tuple[Configuration, str], _Speed], workload: str, best_rate: float
) -> bool:
    """Whether the found n_max comes within a tie of the best on this workload."""
    rates = [s.rate for (c, w), s in drafting.items() if w == workload and c.n_max == FOUND_N_MAX]
    return max(rates, default=0.0) > best_rate * (1 - TIE)
