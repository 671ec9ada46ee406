"""Before the first cell: look at the files, fix what must not change, spell every command.

Example:
    >>> prepared = prepare(plan, build)                            # doctest: +SKIP
    >>> prepared.identity["target"]                                # doctest: +SKIP
    'sha256:51c4...'
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from browndwarf.engine.locate import Build
from browndwarf.errors import RunFormatError, UsageError
from browndwarf.models.filled import Role
from browndwarf.models.gguf import ModelInfo, check_head, fingerprint, mismatch, read_model
from browndwarf.records import EngineRecord, ModelRecord
from browndwarf.sweep import synthetic
from browndwarf.sweep.launch import check_plan
from browndwarf.sweep.planned import SweepPlan
from browndwarf.sweep.sources import AS_IS, Source, check_place, parse_type, variant_path
from browndwarf.sweep.space import EMBEDDED, Axes


@dataclass(frozen=True)
class Prepared:
    """A checked plan with its sources. ``identity`` is what a resume must find unchanged."""

    plan: SweepPlan
    target: Source
    head: Source | None
    models: tuple[ModelRecord, ...]
    identity: dict[str, str]
    notes: tuple[str, ...] = ()


def prepare(
    plan: SweepPlan,
    build: Build,
    *,
    force_head: bool = False,
    on_make: Callable[[str], None] = lambda _: None,
) -> Prepared:
    """Check a plan against its files and the engine; a synthetic plan's files are made first.

    Raises:
        ModelNotFound, BadModelFile: a file is missing or damaged.
        HeadMismatch: the drafter does not belong to the target (``force_head`` overrides).
        UsageError, EngineUnsupported: an axis or option is impossible.
        StorageError, DiskFull: there is no place for the files that are to be made.
    """
    if plan.synthetic is not None:
        synthetic.ensure(plan.synthetic, plan.model, plan.draft, on_make)
    target_info = read_model(plan.model)
    head_info = read_model(plan.draft) if plan.draft else None
    notes: list[str] = []
    if head_info is not None:
        match = check_head(target_info, head_info)
        if not match.ok and not force_head:
            raise mismatch(target_info, head_info, match)
        notes += match.notes
    plan = msgspec.structs.replace(plan, axes=_complete(plan.axes, target_info, head_info))
    check_plan(plan, build)
    target = _source(target_info, plan.synthetic, "target")
    head = _source(head_info, plan.synthetic, "head") if head_info else None
    _check_places(plan.axes, build, target, head)
    records = [_record(target_info, target)]
    if head_info is not None and head is not None:
        records.append(_record(head_info, head))
    return Prepared(
        plan, target, head, tuple(records), _identity(plan, build, records), tuple(notes)
    )


def _complete(axes: Axes, target: ModelInfo, head: ModelInfo | None) -> Axes:
    """Real type names in place of ``as-is``, and the head axis that the files allow."""
    target_types = tuple(
        target.file_type if parse_type(t) == AS_IS else parse_type(t) for t in axes.target_type
    )
    head_types: list[str] = []
    for text in axes.head_type or (AS_IS,):
        if text.lower() in ("none", EMBEDDED):
            head_types.append(text.lower())
        elif head is not None:
            made = parse_type(text)
            head_types.append(head.file_type if made == AS_IS else made)
        elif target.head.kind == "nextn":
            if parse_type(text) != AS_IS:
                raise UsageError(
                    f"head type {text} needs a separate head file",
                    why=f"{target.path.name} carries its head inside",
                    fix=f"leave --head-types out, or write {EMBEDDED}",
                )
            head_types.append(EMBEDDED)
    if EMBEDDED in head_types and target.head.kind != "nextn":
        raise UsageError(
            f"{target.path.name} carries no MTP head inside",
            why=f"its architecture is {target.architecture}, its head kind {target.head.kind}",
            fix="give the head's file with --draft",
        )
    if any(h != "none" for h in head_types) is False and any(axes.n_max):
        raise UsageError(
            "there is nothing to draft with",
            why=f"{target.path.name} carries no MTP head, and no --draft was given",
            fix="give the head's file with --draft, or --n-max 0 to measure the model alone",
        )
    return msgspec.structs.replace(
        axes,
        target_type=tuple(dict.fromkeys(target_types)),
        head_type=tuple(dict.fromkeys(head_types)),
    )


def _check_places(axes: Axes, build: Build, target: Source, head: Source | None) -> None:
    """Files that are still to be made can be written: better known now than after the baseline."""
    sha = build.sha or build.version
    paths = [variant_path(target, name, sha) for name in axes.target_type]
    if head is not None:
        named = (name for name in axes.head_type if name not in ("none", EMBEDDED))
        paths += [variant_path(head, name, sha) for name in named]
    missing = [path for path in paths if not path.exists()]
    if missing:
        check_place(missing[0])


def _source(info: ModelInfo, spec: synthetic.Synthetic | None, role: Role) -> Source:
    made = synthetic.source_of(spec, str(info.path), role) if spec is not None else None
    if made is not None:
        return made
    return Source(path=str(info.path), type=info.file_type, fingerprint=fingerprint(info.path))


def _record(info: ModelInfo, source: Source) -> ModelRecord:
    return ModelRecord(
        path=str(Path(source.path).resolve()),
        name=info.name,
        architecture=info.architecture,
        type=source.type,
        size_bytes=info.file_bytes,
        fingerprint=source.fingerprint,
    )


def _identity(plan: SweepPlan, build: Build, models: list[ModelRecord]) -> dict[str, str]:
    """Everything that must be the same for cells to be comparable; axes may grow."""
    named = {"target": models[0].fingerprint}
    if len(models) > 1:
        named["head"] = models[1].fingerprint
    named |= {f"workload {w.name}": w.fingerprint for w in plan.workloads}
    named["settings"] = msgspec.json.encode(plan.settings, order="sorted").decode()
    named["synthetic rates"] = str(plan.synth_rates)
    named["engine"] = f"{build.version} {build.sha}"
    named["machine"] = f"{platform.system()} {platform.machine()} {platform.processor()}"
    return named


def engine_record(build: Build) -> EngineRecord:
    """The engine as records keep it."""
    return msgspec.convert(build.as_record(), EngineRecord)


def saved_plan(data: dict[str, Any], directory: Path) -> SweepPlan:
    """The plan of a run directory.

    Raises:
        RunFormatError: it is not one that this version wrote.
    """
    try:
        return msgspec.convert(data, SweepPlan)
    except msgspec.ValidationError as exc:
        raise RunFormatError(
            f"the plan saved in {directory} cannot be read",
            why=str(exc),
            fix="it was written by another version; start a new run with another --out",
        ) from exc
