"""The memory budget of one configuration, line by line, and what it decides.

``plan_memory`` adds up the lines for one device and gives the verdict; ``max_context`` finds the
largest context that fits. Each line names its source: a formula over the
header, the engine's own dry allocation, a fitted estimate, an assumption or the user. Nothing is
started here; the compute source may run a worker.

Not covered: several devices at once, image projectors, LoRA adapters.

Example:
    limit = limit_from_size(8 * GIB, backend="cuda")
    budget = plan_memory(Setup(target=t, n_ctx=16384), limit, FittedCompute())
    budget.fits, budget.total_mib, budget.as_json()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from browndwarf.plan.compute import ComputeSizes, ComputeSource
from browndwarf.plan.limits import Limit
from browndwarf.plan.setup import PAD, Setup
from browndwarf.plan.sizes import (
    draft_kv_bytes,
    flash_scratch_bytes,
    head_weights,
    kv_bytes,
    output_bytes,
    recurrent_bytes,
    target_weights,
)
from browndwarf.units import MIB

_HEADER = "formula over the header"


@dataclass(frozen=True, slots=True)
class Line:
    """One item of a budget."""

    name: str
    mib: float
    source: str


@dataclass(frozen=True)
class Budget:
    """The lines of one setup against a limit. ``host`` lists what goes to RAM beside."""

    setup: Setup
    limit: Limit
    lines: tuple[Line, ...]
    host: tuple[Line, ...]

    @property
    def total_mib(self) -> float:
        """All lines, the margin included."""
        return sum(line.mib for line in self.lines)

    @property
    def engine_mib(self) -> float:
        """What llama.cpp itself allocates on the device: no context overhead, no margin."""
        return sum(line.mib for line in self.lines if line.name not in ("context", "margin"))

    @property
    def free_mib(self) -> float:
        """What stays unused; negative when it does not fit."""
        return self.limit.mib - self.total_mib

    @property
    def fits(self) -> bool:
        """Whether the total is within the limit."""
        return self.free_mib >= 0

    def line(self, name: str) -> float:
        """MiB of one line, 0 when absent."""
        return sum(line.mib for line in self.lines if line.name == name)

    def as_json(self) -> dict[str, Any]:
        """The ``budget`` object of a ``plan`` document."""
        return {
            "lines": [_line_json(line) for line in self.lines],
            "host": [_line_json(line) for line in self.host],
            "total_mib": round(self.total_mib, 2),
            "limit_mib": round(self.limit.mib, 2),
            "limit_source": self.limit.source,
            "free_mib": round(self.free_mib, 2),
            "fits": self.fits,
        }


def budgets(setups: Sequence[Setup], limit: Limit, compute: ComputeSource) -> list[Budget]:
    """One budget per setup; the compute buffers of all are sized in one go."""
    sizes = compute.sizes(setups)
    return [_budget(setup, limit, size) for setup, size in zip(setups, sizes, strict=True)]


def plan_memory(setup: Setup, limit: Limit, compute: ComputeSource) -> Budget:
    """The budget of one setup."""
    return budgets([setup], limit, compute)[0]


def max_context(setup: Setup, limit: Limit, compute: ComputeSource) -> int:
    """The largest context (over all slots together) that fits, 0 when none does.

    A multiple of 256 per slot, and no longer than the model was trained for per slot. Weights
    and caches are exact at every step; compute buffers are measured on a grid of contexts and
    interpolated, and the answer itself is measured again and lowered until it holds.
    """
    step = PAD * setup.streams
    top = max(1, (setup.trained_ctx or 2**20 * setup.parallel) // step)

    def at(n: int) -> Setup:
        return setup.with_(n_ctx=n * step)

    nothing = ComputeSizes(0.0, 0.0, "", exact=False)
    top = _last_fitting(top, lambda n: _budget(at(n), limit, nothing).fits)
    if top == 0:
        return 0
    grid = sorted({1, top, *(2**k for k in range(1, top.bit_length()) if 2**k < top)})
    sizes = compute.sizes([at(n) for n in grid])
    best = _last_fitting(top, lambda n: _budget(at(n), limit, _between(grid, sizes, n)).fits)
    while best > 0 and not plan_memory(at(best), limit, compute).fits:
        best -= 1
    return best * step


def _last_fitting(top: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``top`` that fits, for a condition that only ever turns false."""
    low, high = 0, top
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _between(grid: list[int], sizes: list[ComputeSizes], n: int) -> ComputeSizes:
    above = next(i for i, point in enumerate(grid) if point >= n)
    if grid[above] == n or above == 0:
        return sizes[above]
    left, right = sizes[above - 1], sizes[above]
    share = (n - grid[above - 1]) / (grid[above] - grid[above - 1])
    return ComputeSizes(
        left.target_mib + share * (right.target_mib - left.target_mib),
        left.draft_mib + share * (right.draft_mib - left.draft_mib),
        right.source,
        right.exact,
    )


def _budget(setup: Setup, limit: Limit, compute: ComputeSizes) -> Budget:
    weights, head, kv = target_weights(setup), head_weights(setup), kv_bytes(setup)
    cache = f"{_HEADER}: {setup.streams} x {setup.cells} cells, {_types(setup)}"
    window = f"{_HEADER}: {setup.streams} x {setup.sliding_cells} cells, {_types(setup)}"
    if not setup.target.shape.modelled:
        cache = f"{cache}; not verified for {setup.target.architecture}"
    tensors = f"{_HEADER}: tensors"
    if setup.on_cpu and setup.repack:
        tensors += ", and copies in the processor's layout"
    lines = [
        Line("weights", weights.device / MIB, tensors),
        Line("kv_full", kv.full / MIB, cache),
    ]
    if setup.target.layers.sliding:
        lines.append(Line("kv_sliding", kv.sliding / MIB, window))
    if setup.target.layers.recurrent:
        source = f"{_HEADER}: {setup.parallel} slots x {setup.state_copies} states, f32"
        lines.append(Line("recurrent", recurrent_bytes(setup) / MIB, source))
    if setup.draft:
        if setup.head is not None:
            lines.append(Line("draft_weights", head.device / MIB, tensors))
        lines.append(Line("draft_kv", draft_kv_bytes(setup) / MIB, _draft_kv_source(setup)))
    lines.append(Line("compute", compute.target_mib, compute.source))
    if setup.draft:
        lines.append(Line("draft_compute", compute.draft_mib, compute.source))
    scratch = flash_scratch_bytes(setup)
    if scratch:
        source = "formula: one layer's quantized K and V unpacked to f16 by flash attention"
        lines.append(Line("flash_scratch", scratch / MIB, source))
    lines.append(Line("context", limit.context_mib, limit.context_source))
    lines.append(Line("margin", limit.margin_mib, limit.margin_source))
    return Budget(setup, limit, tuple(lines), _host_lines(setup, weights.host + head.host, kv.host))


def _host_lines(setup: Setup, weights: int, kv: int) -> tuple[Line, ...]:
    if setup.on_cpu:
        return (Line("output", output_bytes(setup) / MIB, _HEADER),)
    return (
        Line("weights", weights / MIB, f"{_HEADER}: embeddings, and layers that stay in RAM"),
        Line("kv", kv / MIB, f"{_HEADER}: layers that stay in RAM"),
        Line("output", output_bytes(setup) / MIB, _HEADER),
    )


def _types(setup: Setup) -> str:
    same = setup.kv_k == setup.kv_v
    return setup.kv_k if same else f"K {setup.kv_k}, V {setup.kv_v}"


def _draft_kv_source(setup: Setup) -> str:
    owner = setup.head or setup.target
    if owner.head.kind == "assistant":
        return "none of its own: it reads the target's cache"
    return f"{_HEADER}: {setup.streams} x {setup.cells} cells, {setup.draft_kv_k}"


def _line_json(line: Line) -> dict[str, Any]:
    return {"name": line.name, "mib": round(line.mib, 2), "source": line.source}
