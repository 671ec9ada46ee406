"""What a verify batch costs per type on this device, in milliseconds per million weights.

Speculative decoding evaluates n_max + 1 tokens at once, and how long that takes depends on the
type in ways that its size does not tell: some types have kernels that start at four tokens, others
none at all. So one small model per type is timed with ``llama-bench``: full-width matrices, few
layers, no data (a sparse file of zeros reads like any other), the same shape for all. The figure of
a type is the batch's time over the model's weights; what is not weights is the same for all and
does not move a choice.

Results are kept by build, device and batch. Lengths of rows and the rest of the model do matter:
this is for choosing, not for predicting a speed.

Example:
    costs = measure_costs(build, ("Q4_K", "Q4_0"), batch=4, shape="gemma4-12b")
    costs["Q4_0"]
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from browndwarf.engine.locate import Build
from browndwarf.engine.tools import bench
from browndwarf.errors import StorageError, ToolFailed
from browndwarf.files import atomic_write
from browndwarf.models.ggml_types import GGML_TYPES
from browndwarf.models.gguf import ModelInfo, Tensor, read_model
from browndwarf.models.hollow import HollowShape, write_hollow

REPETITIONS = 5
_PROBE = HollowShape("llama", 2, 2048, 8192, 16, (4, 4), (128, 128), 2048, tied=False)
"""Some 120 million weights: more than a CPU's caches hold, in every type."""


def measure_costs(
    build: Build,
    types: Sequence[str],
    *,
    batch: int,
    device: str,
    layers: int | None = None,
    folder: Path | None = None,
    threads: int | None = None,
    on_type: Callable[[str], None] = lambda _: None,
    cancel: threading.Event | None = None,
) -> dict[str, float]:
    """Milliseconds of a batch per million weights, by type.

    Args:
        batch: tokens evaluated at once: n_max + 1.
        device: names the device that the build uses, for the cache.
        layers: layers on it, as ``-ngl`` counts; None for the build's default.
        folder: of the cache; None keeps nothing.

    Raises:
        EngineUnsupported, ToolFailed: llama-bench is missing or failed.
    """
    key = "|".join((build.sha or build.version, device, str(batch), str(layers), str(threads)))
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json" if folder else None
    costs = _load(path)
    missing = [kind for kind in types if kind not in costs]
    with tempfile.TemporaryDirectory(prefix="browndwarf-speed-") as place:
        for kind in missing:
            on_type(kind)
            costs[kind] = _measure(
                build, Path(place), kind, batch, layers=layers, threads=threads, cancel=cancel
            )
            _save(path, costs)
    return {kind: costs[kind] for kind in types}


def batch_times(
    model: ModelInfo, costs: dict[str, float], *, batch: int
) -> Callable[[Tensor, str], float]:
    """Milliseconds of one batch for a tensor in a type, from the costs of the types.

    Of a tensor of experts a batch reads at most ``batch`` times those that one token uses. Types
    that were not measured (F16 for odd rows) cost as their bytes do against Q8_0's.
    """
    shape = model.shape
    share = min(1.0, batch * shape.experts_used / shape.experts) if shape.experts else 1.0

    def time_of(tensor: Tensor, kind: str) -> float:
        used = share if len(tensor.shape) > 2 and "_exps" in tensor.name else 1.0
        cost = costs.get(kind)
        if cost is None:
            bits = GGML_TYPES[kind].bits_per_element
            cost = max(costs.values()) * bits / GGML_TYPES["Q8_0"].bits_per_element
        return used * tensor.elements / 1e6 * cost

    return time_of


def _measure(
    build: Build,
    folder: Path,
    kind: str,
    batch: int,
    *,
    layers: int | None,
    threads: int | None,
    cancel: threading.Event | None,
) -> float:
    path = folder / f"{kind}.gguf"
    write_hollow(path, _PROBE, main=kind, embed=kind)
    try:
        weights = read_model(path).parameters
        rows = bench(
            build,
            path,
            n_prompt=[batch],
            n_gen=0,
            repetitions=REPETITIONS,
            threads=threads,
            n_gpu_layers=layers,
            cancel=cancel,
        )
    finally:
        path.unlink(missing_ok=True)
    samples = [ns for row in rows if row.n_prompt == batch for ns in row.samples_ns]
    if not samples:
        raise ToolFailed(
            f"llama-bench gave no time for {kind}",
            why=f"no row of {batch} tokens in its answer",
            fix="plan with --objective quality",
        )
    return min(samples) / 1e6 / (weights / 1e6)


def _load(path: Path | None) -> dict[str, float]:
    if path is None:
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, float])
    except (OSError, msgspec.DecodeError):
        return {}


def _save(path: Path | None, costs: dict[str, float]) -> None:
    if path is None:
        return
    try:
        atomic_write(path, msgspec.json.encode(costs))
    except StorageError:
        return
