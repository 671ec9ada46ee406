"""How much memory there is to plan with, and what of it llama.cpp never gets.

``Limit`` holds the memory, the cost of a device context beside llama.cpp's buffers, and the
margin. The memory is what the user states, a card's size, or a device's free memory right now.
In the last case the context costs nothing more: the free figure is read by a process that already
has one. Otherwise it is assumed; ``plan --device`` or a measurement is better than the
assumption.

Example:
    limit_from_size(8 * GIB, backend="cuda"), limit_from_free(7_100 * MIB, "CUDA0 free")
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from browndwarf.errors import UsageError
from browndwarf.plan.setup import Backend
from browndwarf.units import MIB, format_bytes

MARGIN_MIB = 128.0
"""Kept free unless the user says otherwise: pools that grow with the batch, display, driver."""

_CONTEXT_MIB: dict[Backend, float] = {
    "cuda": 450.0,
    "rocm": 450.0,
    "vulkan": 250.0,
    "sycl": 250.0,
    "metal": 0.0,
    "cpu": 0.0,
    "other": 300.0,
}
"""CUDA: reports say 300 to 600 MiB, driver share included; the others are guesses below it."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Memory to plan with, and the two lines that are not llama.cpp's. All in MiB.

    Raises:
        UsageError: one of these two is negative or no number.
    """

    mib: float
    source: str
    context_mib: float
    context_source: str
    margin_mib: float = MARGIN_MIB
    margin_source: str = "default"

    def __post_init__(self) -> None:
        for name, value in (("margin", self.margin_mib), ("context overhead", self.context_mib)):
            if not 0 <= value < math.inf:
                raise UsageError(
                    f"the {name} is {value:g} MiB",
                    why="it is memory that llama.cpp does not get, so it cannot be negative",
                    fix="give 0 MiB or more",
                )


def limit_from_size(
    n_bytes: int,
    *,
    backend: Backend,
    source: str = "",
    margin_mib: float | None = None,
    context_mib: float | None = None,
) -> Limit:
    """A whole card of ``n_bytes`` with nothing on it."""
    assumed = context_mib is None
    return Limit(
        mib=n_bytes / MIB,
        source=source or f"{format_bytes(n_bytes)}, as stated",
        context_mib=_CONTEXT_MIB[backend] if context_mib is None else context_mib,
        context_source=f"assumed for {backend}; not measured here" if assumed else "as stated",
        margin_mib=MARGIN_MIB if margin_mib is None else margin_mib,
        margin_source="default" if margin_mib is None else "as stated",
    )


def limit_from_free(
    n_bytes: int, source: str, *, margin_mib: float | None = None, context_mib: float | None = None
) -> Limit:
    """A device that has ``n_bytes`` free now, as the engine itself reports it."""
    return Limit(
        mib=n_bytes / MIB,
        source=source,
        context_mib=0.0 if context_mib is None else context_mib,
        context_source="in the free figure already" if context_mib is None else "as stated",
        margin_mib=MARGIN_MIB if margin_mib is None else margin_mib,
        margin_source="default" if margin_mib is None else "as stated",
    )


def as_backend(name: str) -> Backend:
    """A backend by name; ``other`` for one that is not known."""
    for backend in _CONTEXT_MIB:
        if backend == name:
            return backend
    return "other"
