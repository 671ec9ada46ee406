"""Did a cell run over the device's memory without anybody saying so?

Some drivers page device memory to RAM instead of failing. Where no counter tells, two signs
together do: the device is full, and a cycle takes far longer than the same batch took in
llama-bench, which runs without head and with a small cache and so has room.

Not covered: a spill that costs less than the tolerance; a device whose use nobody reports.

Example:
    >>> spilled(cell, device_mib=8192, curve=(24.0, 26.0, 29.0))    # doctest: +SKIP
    True
"""

from __future__ import annotations

from browndwarf.records import CellRecord
from browndwarf.sweep.model import Curve

#: A device is full from this share of its memory on.
FULL_SHARE = 0.97
#: A plain step beyond so many times the benchmark's is a cliff. With room, server and llama-bench
#: are 11% apart.
PLAIN_CLIFF = 1.35
#: The same for a speculative cycle, which also drafts: 1.6 times was seen with room to spare.
CYCLE_CLIFF = 2.5


def spilled(cell: CellRecord, *, device_mib: float | None, curve: Curve) -> bool:
    """Whether both signs are there. ``curve``: milliseconds for batches of 1, 2, ... tokens."""
    used = cell.memory.get("device_used_peak")
    if device_mib is None or used is None or cell.cycle_ms is None or len(curve) <= cell.n_max:
        return False
    limit = CYCLE_CLIFF if cell.head_type else PLAIN_CLIFF
    return used >= FULL_SHARE * device_mib and cell.cycle_ms > limit * curve[cell.n_max]
