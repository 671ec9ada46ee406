"""What to give up when a configuration does not fit, cheapest first.

The ranking is the field's experience, not arithmetic: slots nobody uses cost nothing, a smaller
micro-batch costs prefill, a quantized cache a little quality, a shorter context only what it
says, a smaller head next to nothing in acceptance; a smaller target costs quality; and layers in
RAM come last, because an MTP setup that is not wholly on the device loses to the plain model that
is.

Example:
    answer = make_plan(setup, limit, compute)
    answer.remedies[0].what, answer.together
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from browndwarf.models.ggml_types import GGML_TYPES
from browndwarf.models.gguf import ModelInfo
from browndwarf.plan.compute import ComputeSource
from browndwarf.plan.limits import Limit
from browndwarf.plan.memory import Budget, budgets, max_context
from browndwarf.plan.setup import Setup
from browndwarf.plan.sizes import kv_bytes, target_weights
from browndwarf.units import MIB, format_bytes

_HEAD_TYPES = ("Q8_0", "Q6_K", "Q4_K")
_TARGET_TYPES = (("Q6_K", 6.6), ("Q5_K_M", 5.7), ("Q4_K_M", 4.9), ("Q4_K_S", 4.6), ("Q3_K_M", 3.9))
"""Usual mixes with the bits per weight that they come to, embeddings included."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something to give up: what it frees, what it costs, whether it suffices by itself.

    ``options`` are the changed settings; empty where another file is needed.
    """

    what: str
    frees_mib: float
    cost: str
    enough: bool
    options: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """One entry of a ``plan`` document's ``remedies``."""
        return {
            "what": self.what,
            "frees_mib": round(self.frees_mib, 2),
            "cost": self.cost,
            "enough": self.enough,
            "options": self.options,
        }


@dataclass(frozen=True)
class PlanAnswer:
    """A budget with what follows from it. ``together`` is the shortest run of remedies, in rank
    order, that makes it fit; empty when it fits already, or when not even all of them do.
    ``all_enough``: everything given up at once, smaller files and layers too, makes it fit."""

    budget: Budget
    max_ctx: int
    remedies: tuple[Remedy, ...]
    together: tuple[str, ...]
    all_enough: bool = True

    def as_json(self) -> dict[str, Any]:
        """The body of a ``plan`` document."""
        return {
            "budget": self.budget.as_json(),
            "max_ctx": self.max_ctx,
            "remedies": [remedy.as_json() for remedy in self.remedies],
            "together": list(self.together),
            "all_enough": self.all_enough,
        }


def make_plan(setup: Setup, limit: Limit, compute: ComputeSource) -> PlanAnswer:
    """Budget, largest context and, when it does not fit, the ranked remedies."""
    changes = list(_changes(setup))
    variants = [setup.with_(**change) for _, _, change in changes]
    chain, so_far = [], setup
    for _, _, change in changes:
        so_far = so_far.with_(**change)
        chain.append(so_far)
    # All in one question: the engine answers many settings as fast as one.
    base, *rest = budgets([setup, *variants, *chain], limit, compute)
    singles, sums = rest[: len(variants)], rest[len(variants) :]
    longest = max_context(setup, limit, compute)
    if base.fits:
        return PlanAnswer(base, longest, (), ())
    remedies = [
        _remedy(what, cost, base, budget, change)
        for (what, cost, change), budget in zip(changes, singles, strict=True)
    ]
    remedies += _shorter(base, limit, compute, longest)
    remedies += _smaller_files(base)
    remedies += _fewer_layers(base)
    useful = [remedy for remedy in remedies if remedy.frees_mib > 0.5]
    ranked = sorted(useful, key=lambda remedy: _rank(remedy.what))
    together: list[str] = []
    for (what, _, _), budget in zip(changes, sums, strict=True):
        together.append(what)
        if budget.fits:
            break
    else:
        together = []
    enough = _all_enough(sums[-1] if sums else base) or any(remedy.enough for remedy in ranked)
    return PlanAnswer(base, longest, tuple(ranked), tuple(together), enough)


def _changes(setup: Setup) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Changes of options, in rank order; each also applies on top of those before it."""
    if setup.parallel > 1:
        yield (
            "parallel 1",
            "one request at a time; n_ctx stays, and one slot has all of it",
            {"parallel": 1, "unified": False},
        )
    if setup.swa_full:
        yield (
            "no full-size sliding cache",
            "context shift and reuse of old prompts are limited to the window",
            {"swa_full": False},
        )
    for size in (256, 128):
        if setup.ubatch > size:
            yield (
                f"ubatch {size}",
                "slower prefill; measure it, some Vulkan drivers collapse with an f16 cache",
                {"ubatch": size},
            )
            break
    if setup.flash_attention:
        for kind in ("q8_0", "q4_0"):
            if _kv_bits(setup) > GGML_TYPES[kind.upper()].bits_per_element:
                cost = {
                    "q8_0": "about 1% of perplexity in one report",
                    "q4_0": "several percent of perplexity; acceptance may drop: measure",
                }[kind]
                yield f"KV {kind}", cost, {"kv_k": kind, "kv_v": kind}


def _shorter(base: Budget, limit: Limit, compute: ComputeSource, longest: int) -> Iterator[Remedy]:
    if 0 < longest < base.setup.n_ctx:
        shorter = budgets([base.setup.with_(n_ctx=longest)], limit, compute)[0]
        yield _remedy(f"context {longest}", "a shorter context", base, shorter, {"n_ctx": longest})


def _smaller_files(base: Budget) -> Iterator[Remedy]:
    """Other quantizations of the head and of the target, sized by bits per weight."""
    setup = base.setup
    if setup.draft and setup.head is not None:
        for kind in _HEAD_TYPES:
            bits = GGML_TYPES[kind].bits_per_element
            freed = _by_bits(setup.head, base.line("draft_weights"), bits)
            if freed > 0.5:
                yield Remedy(
                    f"head {kind}",
                    freed,
                    "acceptance hardly changes (55% at Q8 to 49% at Q2 in one report)",
                    base.free_mib + freed >= 0,
                )
    for name, bits in _TARGET_TYPES:
        freed = _by_bits(setup.target, base.line("weights"), bits)
        if freed > 0.5:
            yield Remedy(
                f"target {name}",
                freed,
                f"quality; about {format_bytes((base.line('weights') - freed) * MIB)} of weights",
                base.free_mib + freed >= 0,
            )


def _fewer_layers(base: Budget) -> Iterator[Remedy]:
    """The most layers that fit, by weights and caches; compute stays as it is."""
    setup, total = base.setup, len(base.setup.target.blocks) + 1
    if setup.on_cpu:
        return

    def moved(layers: int) -> float:
        less = setup.with_(gpu_layers=layers)
        kv = kv_bytes(less)
        kept = target_weights(less).device + kv.full + kv.sliding
        return base.line("weights") + base.line("kv_full") + base.line("kv_sliding") - kept / MIB

    start = total if setup.gpu_layers is None else min(setup.gpu_layers, total)
    for layers in range(start - 1, 0, -1):
        if base.free_mib + moved(layers) >= 0 or layers == 1:
            yield Remedy(
                f"layers {layers}",
                moved(layers),
                "the last resort: with layers in RAM the plain model on the device is faster",
                base.free_mib + moved(layers) >= 0,
                {"gpu_layers": layers},
            )
            return


def _all_enough(base: Budget) -> bool:
    """Whether smaller files and fewer layers bridge what all changes of options leave."""
    freed = {"head": 0.0, "target": 0.0, "layers": 0.0}
    for remedy in [*_smaller_files(base), *_fewer_layers(base)]:
        kind = remedy.what.split()[0]
        freed[kind] = max(freed[kind], remedy.frees_mib)
    # A weight cannot be both smaller and elsewhere.
    return base.free_mib + freed["head"] + max(freed["target"], freed["layers"]) >= 0


def _remedy(what: str, cost: str, base: Budget, other: Budget, options: dict[str, Any]) -> Remedy:
    return Remedy(what, base.total_mib - other.total_mib, cost, other.fits, options)


_ORDER = ("parallel", "no full", "ubatch", "KV", "context", "head", "target", "layers")


def _rank(what: str) -> int:
    return next(i for i, start in enumerate(_ORDER) if what.startswith(start))


def _by_bits(model: ModelInfo, device_mib: float, bits: float) -> float:
    """MiB that a requantization to ``bits`` per weight frees on the device."""
    return device_mib * (1 - bits / model.bits_per_weight) if model.bits_per_weight else 0.0


def _kv_bits(setup: Setup) -> float:
    return max(GGML_TYPES[kind.upper()].bits_per_element for kind in (setup.kv_k, setup.kv_v))
