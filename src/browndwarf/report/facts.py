"""How a run was measured: machine, engine, models, settings, as pairs of name and text.

Models go by name and fingerprint; the folders that they lie in are nobody's business.

Example:
    >>> facts(reading)[0]                                          # doctest: +SKIP
    ('machine', 'AMD EPYC, 2 cores, 3.8 GiB, Linux ...')
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import PurePath
from typing import TypeVar

import msgspec

from browndwarf.errors import RunFormatError
from browndwarf.records import EngineRecord, MachineRecord, ModelRecord
from browndwarf.report.reading import Reading
from browndwarf.sweep.store import RunView
from browndwarf.units import MIB, format_bytes, format_duration

T = TypeVar("T")


def facts(reading: Reading, hide: Collection[str] = ()) -> tuple[tuple[str, str], ...]:
    """Everything that a reader needs to judge the figures, or to make them again."""
    view = reading.view
    return (
        *_machine(_saved(view, "machine", MachineRecord)),
        *_engine(_saved(view, "engine", EngineRecord)),
        *_models(models_of(view)),
        *_settings(reading, hide),
        *_time(view),
    )


def models_of(view: RunView) -> tuple[ModelRecord, ...]:
    """The target and, where it is separate, the head; nothing where a run does not say."""
    return _saved(view, "models", tuple[ModelRecord, ...]) or ()


def _saved(view: RunView, key: str, kind: type[T]) -> T | None:
    try:
        return msgspec.convert(view.meta[key], kind) if key in view.meta else None
    except msgspec.ValidationError as exc:
        raise RunFormatError(
            f"the {key} saved in {view.directory} cannot be read",
            why=str(exc),
            fix="it was written by another version; start a new run with another --out",
        ) from exc


def _machine(machine: MachineRecord | None) -> Iterator[tuple[str, str]]:
    if machine is None:
        return
    memory = format_bytes(machine.ram_mib * MIB)
    yield "machine", f"{machine.cpu}, {machine.cores} cores, {memory}, {machine.os}"
    for device in machine.devices:
        total = format_bytes(device.total_mib * MIB)
        yield "device", f"{device.name}, {total} ({device.backend})"


def _engine(engine: EngineRecord | None) -> Iterator[tuple[str, str]]:
    if engine is not None:
        yield "engine", f"llama.cpp {engine.version} ({engine.sha})"
        for fault in engine.faults:
            yield "known fault", fault


def _models(models: tuple[ModelRecord, ...]) -> Iterator[tuple[str, str]]:
    for role, model in zip(("target", "head"), models, strict=False):
        file = PurePath(model.path.replace("\\", "/")).name
        yield (
            role,
            f"{model.name}: {model.architecture}, {model.type}, {format_bytes(model.size_bytes)}, "
            f"file {file}, fingerprint {model.fingerprint}",
        )


def _settings(reading: Reading, hide: Collection[str]) -> Iterator[tuple[str, str]]:
    plan, settings = reading.plan, reading.plan.settings
    yield (
        "sweep",
        "fast: what decides the speed is measured, the rest of the grid predicted"
        if plan.fast
        else "full: every cell of the grid is measured",
    )
    if hide:
        yield "the same for all", ", ".join(hide)
    for workload in plan.workloads:
        count = min(len(workload.prompts), settings.prompts)
        yield "workload", f"{workload.name}: {count} prompts, {workload.fingerprint}"
    ends = "their end ignored" if settings.ignore_eos else "until their natural end"
    yield "answers", f"{settings.n_predict} tokens at most, {ends}"
    yield (
        "sampling",
        f"{'greedy' if not settings.temperature else f'temperature {settings.temperature:g}'}, "
        f"seed {settings.seed}",
    )
    more = f"; more until the mean is known to {settings.precision:.1%}, at most four times as many"
    yield "repeats", f"{settings.repeats}{more if settings.precision else ''}"
    if plan.allow_busy:
        yield "other programs", "allowed beside the measurement"


def _time(view: RunView) -> Iterator[tuple[str, str]]:
    if wall := view.meta.get("wall_s"):
        share = float(view.meta.get("overhead_share") or 0.0)
        yield "wall time", f"{format_duration(float(wall))}, {share:.0%} of it not generation"
