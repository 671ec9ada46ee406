"""The types of a whole model: what can be chosen, what it weighs, and the choice for a budget.

A ``Slot`` is one tensor with its options; ``make_slots`` lists them once the errors are known.
``choose`` spends a budget of device bytes on those that live there, and gives the others, which
cost the device nothing, the best that a cap on RAM allows. ``assess`` measures a given choice, such
as a stock mix, in the same units.

Speed enters as a second cost, the time of one verify batch (``speed``):

    minimise  loss / loss_q + w * time / time_q    within the bytes,

where loss_q and time_q are those of the choice for quality alone, with the largest w whose loss
is at most ``MOST_LOSS`` times loss_q: 1.1 times for ``balanced``, 1.5 times for ``speed``.

Example:
    slots = make_slots(...)
    found = choose(slots, budget=6_000_000_000)
    found.types["blk.0.attn_v.weight"], found.loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from browndwarf.models.gguf import ModelInfo, Tensor
from browndwarf.plan.allocate import NothingFits, allocate
from browndwarf.plan.legal import tensor_bytes
from browndwarf.plan.quantization import Objective
from browndwarf.plan.sizes import Place

MOST_LOSS: Mapping[Objective, float] = {"balanced": 1.1, "speed": 1.5}
_STEPS = 14

Errors = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Slot:
    """One tensor and its options. A tensor that is copied as it is has one.

    Attributes:
        losses: alpha x relative error, by type.
        costs: bytes that count against the budget, by type: the tensor's own, and those of a
            second copy in a processor's layout.
        times: milliseconds of one verify batch, by type; empty when speed does not count.
    """

    tensor: Tensor
    place: Place
    chosen: bool
    bytes: Mapping[str, int]
    costs: Mapping[str, int]
    losses: Mapping[str, float]
    times: Mapping[str, float]

    @property
    def options(self) -> list[str]:
        """Names of the types."""
        return list(self.bytes)


@dataclass(frozen=True)
class Choice:
    """A type for every tensor, with its sums. ``cost`` is what counts against the budget: the
    device bytes, and copies. ``bound`` is the least loss that any choice within the budget could
    have (host tensors as chosen); ``per_gib`` the loss that one more GiB saves at the margin."""

    types: Mapping[str, str]
    device_bytes: int
    cost: int
    file_bytes: int
    loss: float
    time_ms: float = 0.0
    bound: float = 0.0
    per_gib: float = 0.0


def make_slots(
    model: ModelInfo,
    places: Mapping[str, Place],
    options: Mapping[str, Sequence[str]],
    errors: Errors,
    alphas: Mapping[str, float],
    times: Callable[[Tensor, str], float] | None = None,
    copied: Callable[[Tensor, str], bool] = lambda *_: False,
) -> list[Slot]:
    """One slot per tensor, in the file's order.

    Args:
        options: legal types of the tensors that llama-quantize quantizes; others are copied.
        errors: relative error by tensor and type.
        times: milliseconds of a verify batch for a tensor in a type.
        copied: whether a tensor is stored twice in a type.
    """
    slots = []
    for tensor in model.tensors:
        kinds = options.get(tensor.name)
        chosen = kinds is not None
        known = errors.get(tensor.name, {})
        alpha = alphas.get(tensor.name, 1.0)
        kinds = kinds if kinds is not None else (tensor.type,)
        place = places[tensor.name]
        timed = times is not None and chosen and place == "device"
        sizes = {k: tensor_bytes(tensor, k) if chosen else tensor.bytes for k in kinds}
        slots.append(
            Slot(
                tensor,
                place,
                chosen,
                sizes,
                {k: size * (1 + copied(tensor, k)) for k, size in sizes.items()},
                {k: alpha * known.get(k, 0.0) for k in kinds},
                {k: times(tensor, k) for k in kinds} if timed and times is not None else {},
            )
        )
    return slots


def smallest(slots: Sequence[Slot]) -> int:
    """The least budget that any choice is within."""
    return sum(min(s.costs.values()) for s in slots if s.place == "device")


def smallest_beside(slots: Sequence[Slot]) -> int:
    """The fewest bytes that all which is not on the device takes."""
    return sum(min(s.costs.values()) for s in slots if s.place != "device")


def largest(slots: Sequence[Slot]) -> int:
    """What the best types cost everywhere; more buys nothing."""
    return sum(
        s.costs[min(s.options, key=lambda k: (s.losses[k], s.costs[k]))]
        for s in slots
        if s.place == "device"
    )


def choose(
    slots: Sequence[Slot],
    budget: int,
    *,
    host_cap: int | None = None,
    objective: Objective = "quality",
    tolerance: float = 1e-3,
) -> Choice:
    """The choice of least loss within ``budget`` bytes on the device.

    Args:
        host_cap: most bytes of the tensors that are not on the device; None for no cap.

    Raises:
        NothingFits: the budget, or the cap, is below the smallest possible.
    """
    there = [s for s in slots if s.place == "device"]
    beside = [s for s in slots if s.place != "device"]
    cap = sum(max(s.costs.values()) for s in beside) if host_cap is None else host_cap
    kept = _solve(beside, cap, tolerance, None)[0]
    types, bound, price = _solve(there, budget, tolerance, None)
    best = assess(slots, types | kept)
    if objective != "quality" and best.time_ms > 0 and best.loss > 0:
        quality = best

        def weighed(weight: float) -> Choice:
            found = _solve(there, budget, tolerance, (weight, quality.loss, quality.time_ms))[0]
            return assess(slots, found | kept)

        best = _fastest(weighed, best, MOST_LOSS[objective])
    host_loss = sum(s.losses[kept[s.tensor.name]] for s in beside)
    return Choice(
        types=best.types,
        device_bytes=best.device_bytes,
        cost=best.cost,
        file_bytes=best.file_bytes,
        loss=best.loss,
        time_ms=best.time_ms,
        bound=bound + host_loss,
        per_gib=price * 2**30,
    )


def assess(slots: Sequence[Slot], types: Mapping[str, str]) -> Choice:
    """The sums of a given choice. Types must be among the slots' options."""
    return Choice(
        types=types,
        device_bytes=sum(s.bytes[types[s.tensor.name]] for s in slots if s.place == "device"),
        cost=sum(s.costs[types[s.tensor.name]] for s in slots if s.place == "device"),
        file_bytes=sum(s.bytes[types[s.tensor.name]] for s in slots),
        loss=sum(s.losses[types[s.tensor.name]] for s in slots),
        time_ms=sum(s.times[types[s.tensor.name]] for s in slots if s.times),
    )


def _solve(
    slots: Sequence[Slot],
    budget: int,
    tolerance: float,
    speed: tuple[float, float, float] | None,
) -> tuple[dict[str, str], float, float]:
    """Types, the bound on the loss, and the price of a byte."""
    if not slots:
        return {}, 0.0, 0.0

    def value(slot: Slot, kind: str) -> float:
        if speed is None:
            return slot.losses[kind]
        weight, loss, time = speed
        return slot.losses[kind] / loss + weight * slot.times.get(kind, 0.0) / time

    found = allocate(
        [list(s.costs.values()) for s in slots],
        [[value(s, kind) for kind in s.options] for s in slots],
        budget,
        tolerance=tolerance,
    )
    types = {s.tensor.name: s.options[at] for s, at in zip(slots, found.choice, strict=True)}
    return types, found.bound, found.price


def _fastest(weighed: Callable[[float], Choice], quality: Choice, most: float) -> Choice:
    """The fastest choice whose loss is at most ``most`` times the least."""
    low, high, best = 1e-3, 1e3, quality
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5  # weights matter by their ratio
        found = weighed(middle)
        if found.loss <= most * quality.loss:
            low = middle
            best = min(best, found, key=lambda c: c.time_ms)
        else:
            high = middle
    return best


__all__ = [
    "Choice",
    "NothingFits",
    "Slot",
    "assess",
    "choose",
    "largest",
    "make_slots",
    "smallest",
    "smallest_beside",
]
