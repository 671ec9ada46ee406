"""From a model and a budget to a quantization plan: the steps in order, each one elsewhere.

``gather`` asks llama-quantize what it touches and what its own mixes are, sets out the legal types
and measures the errors; that is the part that takes time and does not depend on the budget.
``Material.plan`` then answers for any budget in milliseconds.

Example:
    material = gather(build, model, table, setup=setup)
    outcome = material.plan(WeightsBudget(weights_mib=6180.0), alphas, "priors")
    outcome.plan.save(Path("plan.json"))
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from browndwarf.engine.locate import Build
from browndwarf.errors import CheckFailed
from browndwarf.models.gguf import ModelInfo, Tensor, fingerprint
from browndwarf.plan.choice import (
    Choice,
    Errors,
    NothingFits,
    Slot,
    assess,
    choose,
    largest,
    make_slots,
    smallest,
    smallest_beside,
)
from browndwarf.plan.legal import DEFAULT_TYPES, legal_types, tensor_bytes
from browndwarf.plan.loss import ErrorTable
from browndwarf.plan.quantization import (
    Objective,
    QuantizationPlan,
    StockChoice,
    TensorChoice,
    WeightsBudget,
)
from browndwarf.plan.repack import is_copied, repacked_types
from browndwarf.plan.setup import Setup
from browndwarf.plan.sizes import target_weights, tensor_place
from browndwarf.plan.stock import STOCK, quantizable, stock_types
from browndwarf.units import GIB, MIB, format_bytes

_BASES = ("Q4_K", "Q3_K", "Q5_K", "Q6_K", "Q8_0", "Q2_K", "IQ4_XS", "IQ4_NL", "IQ3_S", "Q5_0")
"""Types that llama-quantize takes as a file's type without an imatrix."""
_ALIGNMENT = 32
_TRIES = 8

Times = Callable[[Tensor, str], float]


@dataclass(frozen=True)
class Outcome:
    """A plan, and what a reader asks next. ``more_gib`` is the predicted loss with one GiB more;
    ``bound`` the least loss that any choice could have; ``quality`` the choice without regard to
    speed, where another objective was asked for."""

    plan: QuantizationPlan
    bound: float
    more_gib: float
    smallest: int
    largest: int
    time_ms: float
    quality: Choice | None = None


@dataclass(frozen=True)
class Material:
    """All that a plan is made of, for one model, set of types and place of the layers."""

    setup: Setup
    options: Mapping[str, Sequence[str]]
    errors: Errors
    stock: Mapping[str, Mapping[str, str]]
    proxied: Mapping[str, str]
    engine_sha: str
    imatrix: Path | None = None
    imatrix_sha: str | None = None

    @property
    def model(self) -> ModelInfo:
        """The source."""
        return self.setup.target

    def slots(
        self,
        alphas: Mapping[str, float],
        times: Times | None = None,
        *,
        mix: str | None = None,
        copies: bool = False,
    ) -> list[Slot]:
        """The tensors with the types that may be chosen, or with those of a stock mix.

        Args:
            copies: on a CPU, count what is stored a second time in the processor's layout.
        """
        places = {t.name: tensor_place(self.setup, t) for t in self.model.tensors}
        options = self.options
        if mix is not None:
            options = {name: (self.stock[mix][name],) for name in options}
        again = repacked_types(self.setup.repack) if copies and self.setup.on_cpu else {}

        def copied(tensor: Tensor, kind: str) -> bool:
            return is_copied(replace(tensor, type=kind), again, tied=self.model.tied)

        return make_slots(self.model, places, options, self.errors, alphas, times, copied)

    def plan(
        self,
        budget: WeightsBudget,
        alphas: Mapping[str, float],
        alphas_source: str,
        *,
        alpha_groups: Mapping[str, float] | None = None,
        objective: Objective = "quality",
        times: Times | None = None,
        host_cap: int | None = None,
    ) -> Outcome:
        """The plan for a budget.

        Args:
            alphas: weight of every tensor's error; ``alpha_groups`` the same by group, for the
                record.
            host_cap: most bytes in RAM of tensors that are not on the device; None for no cap.

        Raises:
            CheckFailed: the budget, or the cap, is below the smallest possible.
        """
        copies = budget.limit_mib is not None
        slots = self.slots(alphas, times, copies=copies)
        available = int(budget.weights_mib * MIB)
        least = smallest_beside(slots)
        if host_cap is not None and host_cap < least:
            raise CheckFailed(
                "the tensors that stay in RAM do not fit the cap on it",
                why=f"they take {format_bytes(least)} at least, {format_bytes(host_cap)} are "
                "allowed",
                fix="allow more with --host-bytes, or smaller types with --types",
            )
        found = self._within(slots, available, host_cap, objective, copies)
        more = choose(slots, available + GIB, host_cap=host_cap)
        quality = None if objective == "quality" else choose(slots, available, host_cap=host_cap)
        plan = self._record(found, slots, budget, objective)
        return Outcome(
            plan=msgspec.structs.replace(
                plan,
                alphas=dict(alpha_groups or {}),
                alphas_source=alphas_source,
                stock=tuple(self._stock(slots, alphas, host_cap, copies)),
            ),
            bound=found.bound,
            more_gib=more.loss,
            smallest=smallest(slots),
            largest=largest(slots),
            time_ms=found.time_ms,
            quality=quality,
        )

    def _within(
        self,
        slots: list[Slot],
        available: int,
        host_cap: int | None,
        objective: Objective,
        copies: bool,
    ) -> Choice:
        """The choice whose bytes on the device, by the budget's own rules, are within the budget.

        On a GPU these are the sum of the tensors. On a CPU a mapped file counts from its first to
        its last tensor that is used as it is, which the sum over tensors only comes near.
        """
        budget = available
        for _ in range(_TRIES):
            try:
                found = choose(slots, budget, host_cap=host_cap, objective=objective)
            except NothingFits as exc:
                raise self._too_little(slots, available, exc.smallest) from exc
            if not (copies and self.setup.on_cpu):
                return found
            real = target_weights(self.setup.with_(target=retyped(self.model, found.types)))
            if real.device <= available:
                return found
            budget -= real.device - available
        raise self._too_little(slots, available, smallest(slots))

    def _too_little(self, slots: list[Slot], available: int, least: int) -> CheckFailed:
        return CheckFailed(
            "no choice of types fits",
            why=f"{format_bytes(max(available, 0))} are left for the weights on the device; with "
            f"these types they take {format_bytes(least)} at least ({least} bytes)",
            fix="allow smaller types with --types, or free memory: `browndwarf plan` without "
            "--quantize ranks what could be given up",
        )

    def _record(
        self, found: Choice, slots: list[Slot], budget: WeightsBudget, objective: Objective
    ) -> QuantizationPlan:
        tensors = tuple(
            TensorChoice(
                name=slot.tensor.name,
                type=(kind := found.types[slot.tensor.name]),
                elements=slot.tensor.elements,
                bytes=slot.bytes[kind],
                device=slot.place == "device",
                loss=slot.losses[kind],
                chosen=slot.chosen,
            )
            for slot in slots
        )
        elements = sum(tensor.elements for tensor in tensors)
        return QuantizationPlan(
            source=str(self.model.path),
            source_fingerprint=fingerprint(self.model.path),
            base_type=base_type(tensors),
            tensors=tensors,
            device_bytes=found.device_bytes,
            file_bytes=found.file_bytes,
            bits_per_weight=8 * found.file_bytes / max(elements, 1),
            predicted_loss=found.loss,
            budget=budget,
            imatrix=str(self.imatrix) if self.imatrix is not None else None,
            imatrix_sha256=self.imatrix_sha,
            objective=objective,
            proxied=dict(self.proxied),
            engine_sha=self.engine_sha,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _stock(
        self,
        slots: list[Slot],
        alphas: Mapping[str, float],
        host_cap: int | None,
        copies: bool,
    ) -> Iterable[StockChoice]:
        for mix, types in self.stock.items():
            theirs = assess(self.slots(alphas, mix=mix, copies=copies), types)
            try:
                ours = choose(slots, theirs.cost, host_cap=host_cap).loss
            except NothingFits:
                ours = None
            yield StockChoice(
                type=mix,
                device_bytes=theirs.device_bytes,
                predicted_loss=theirs.loss,
                bits_per_weight=8 * theirs.file_bytes / max(self.model.parameters, 1),
                ours=ours,
            )


def gather(
    build: Build,
    table: ErrorTable,
    setup: Setup,
    *,
    types: Sequence[str] = DEFAULT_TYPES,
    mixes: Sequence[str] = STOCK,
    imatrix: Path | None = None,
    imatrix_sha: str | None = None,
    workers: int = 2,
    on_progress: Callable[[float], None] = lambda _: None,
    cancel: threading.Event | None = None,
) -> Material:
    """Ask, and measure, all that plans for this model need.

    Raises:
        EngineUnsupported, ToolFailed: llama-quantize cannot say what it would do.
        Interrupted: ``cancel`` was set.
    """
    model = setup.target
    touched = quantizable(build, model)
    stock = {mix: stock_types(build, model, mix, imatrix) for mix in mixes}
    options = {
        tensor.name: legal_types(tensor, types, covered=table.covered(tensor.name))
        for tensor in model.tensors
        if tensor.name in touched
    }
    wanted = {
        name: tuple(dict.fromkeys((*kinds, *(mix[name] for mix in stock.values()))))
        for name, kinds in options.items()
    }
    errors = table.measure(wanted, workers=workers, on_progress=on_progress, cancel=cancel)
    return Material(
        setup=setup,
        options=options,
        errors=errors,
        stock=stock,
        proxied={name: why for name, why in table.proxied.items() if name in options},
        engine_sha=build.sha or build.version,
        imatrix=imatrix,
        imatrix_sha=imatrix_sha,
    )


def retyped(model: ModelInfo, types: Mapping[str, str]) -> ModelInfo:
    """The model as it will be in one file, with these types."""
    tensors, offset = [], 0
    for tensor in model.tensors:
        kind = types.get(tensor.name, tensor.type)
        size = tensor.bytes if kind == tensor.type else tensor_bytes(tensor, kind)
        tensors.append(replace(tensor, type=kind, bytes=size, offset=offset, part=0))
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return replace(model, tensors=tuple(tensors))


def base_type(tensors: Iterable[TensorChoice]) -> str:
    """The file's type for llama-quantize: that which holds most bytes, of those it takes."""
    sums: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.chosen and tensor.type in _BASES:
            sums[tensor.type] += tensor.bytes
    return max(sums, key=lambda kind: sums[kind]) if sums else _BASES[0]
