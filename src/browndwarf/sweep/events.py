"""What a sweep tells its listener while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from browndwarf.records import CellRecord
from browndwarf.sweep.cell import Job


@dataclass(frozen=True)
class Started:
    """The sweep begins: cells in all, and how many are there already."""

    total: int
    done: int


@dataclass(frozen=True)
class Measuring:
    """A configuration is being measured now."""

    job: Job


@dataclass(frozen=True)
class CellDone:
    """A cell was saved. ``eta_s`` is what the rest should take at the pace so far."""

    cell: CellRecord
    done: int
    total: int
    eta_s: float


@dataclass(frozen=True)
class Again:
    """So many cells ran while the machine was slow, and are measured once more."""

    cells: int


@dataclass(frozen=True)
class Finished:
    """All cells are there."""

    wall_s: float
    overhead_share: float


Event = Started | Measuring | CellDone | Again | Finished
Listener = Callable[[Event], None]
