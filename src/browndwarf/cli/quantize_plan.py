"""The part of ``browndwarf plan`` that chooses types: its options, and how the parts compose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from browndwarf.cli.render import Output
    from browndwarf.engine.locate import Build
    from browndwarf.models.imatrix import Imatrix
    from browndwarf.plan.compute import ComputeSource
    from browndwarf.plan.limits import Limit
    from browndwarf.plan.loss import ErrorTable
    from browndwarf.plan.planner import Material, Outcome, Times
    from browndwarf.plan.quantization import WeightsBudget
    from browndwarf.plan.setup import Setup

QuantizeOption = Annotated[
    bool, typer.Option("--quantize", help="Choose a type for every tensor, to fit the budget.")
]
ImatrixOption = Annotated[
    Path | None, typer.Option("--imatrix", help="With --quantize: what `imatrix` wrote.")
]
TypesOption = Annotated[
    str | None, typer.Option("--types", help="Types to choose from, such as Q3_K,Q4_K,Q6_K.")
]
ObjectiveOption = Annotated[
    str,
    typer.Option("--objective", help="quality, speed (of a verify batch) or balanced."),
]
ProbeOption = Annotated[
    str,
    typer.Option(
        "--probe",
        help="How much a tensor's error counts: priors, equal, or calibrated (measured here).",
    ),
]
ProbeTimeOption = Annotated[
    str, typer.Option("--probe-time", help="Most time for --probe calibrated.")
]
ProbeTextOption = Annotated[
    Path | None, typer.Option("--probe-text", help="Text for it. Default: packaged.")
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Save the types here, for `quantize`.")
]
DeviceBytesOption = Annotated[
    int | None,
    typer.Option("--device-bytes", min=1, help="Exact bytes for the weights on the device."),
]
HostBytesOption = Annotated[
    str | None,
    typer.Option("--host-bytes", help="Most RAM for tensors that never go to the device."),
]

PROBES = ("priors", "equal", "calibrated")
OBJECTIVES = ("quality", "speed", "balanced")
HOST_SHARE = 4
"""Tensors that stay in RAM may take a quarter of what is free of it."""


@dataclass(frozen=True)
class Wanted:
    """What the command line asked for."""

    imatrix: Path | None
    types: str | None
    objective: str
    probe: str
    probe_time: str
    probe_text: Path | None
    output: Path | None
    device_bytes: int | None
    host_bytes: str | None

    def check(self, *, quantize: bool) -> None:
        """Refuse what is no choice, before any work.

        Raises:
            UsageError: an unknown word, or an option that only ``quantize`` uses.
        """
        from browndwarf.errors import UsageError
        from browndwarf.plan.legal import parse_types
        from browndwarf.units import parse_bytes, parse_duration

        for option, value, known in (
            ("--probe", self.probe, PROBES),
            ("--objective", self.objective, OBJECTIVES),
        ):
            if value not in known:
                raise UsageError(
                    f"{option} {value} is unknown",
                    why="it is one of " + ", ".join(known),
                    fix=f"write {option} {known[0]}",
                )
        only = {
            "--imatrix": self.imatrix, "--types": self.types, "--output": self.output,
            "--device-bytes": self.device_bytes, "--host-bytes": self.host_bytes,
            "--probe-text": self.probe_text,
        }  # fmt: skip
        given = [option for option, value in only.items() if value is not None]
        if given and not quantize:
            raise UsageError(
                f"{given[0]} needs --quantize",
                why="without it no types are chosen",
                fix="add --quantize, or leave the option out",
            )
        if self.output is not None and self.output.is_dir():
            raise UsageError(
                f"--output {self.output} is a folder", fix="name a file, such as plan.json"
            )
        if self.types is not None:
            parse_types(self.types)
        if self.host_bytes is not None:
            parse_bytes(self.host_bytes)
        parse_duration(self.probe_time)


def choose_types(
    out: Output,
    wanted: Wanted,
    setup: Setup,
    limit: Limit,
    compute: ComputeSource,
    build: Build,
) -> tuple[Setup, Outcome, dict[str, Any]]:
    """Choose, save, and return the setup with these types, and the document's part.

    Raises:
        CheckFailed: not even the smallest types fit.
    """
    from browndwarf.cli.steps import Steps
    from browndwarf.files import cache_folder, sha256_of
    from browndwarf.models.imatrix import check_imatrix, read_imatrix
    from browndwarf.plan.legal import DEFAULT_TYPES, parse_types
    from browndwarf.plan.loss import ErrorTable
    from browndwarf.plan.planner import gather, retyped

    matrix, sha = None, None
    if wanted.imatrix is not None:
        matrix = read_imatrix(wanted.imatrix)
        check_imatrix(matrix, setup.target)
        sha = f"sha256:{sha256_of(wanted.imatrix)}"
    _say_source(out, setup, matrix)
    budget = weights_budget(setup, limit, compute, wanted.device_bytes)
    table = ErrorTable(setup.target, matrix, sha or "", cache_folder("errors"))
    with Steps(out, "measuring errors, percent") as steps:
        material = gather(
            build,
            table,
            setup,
            types=DEFAULT_TYPES if wanted.types is None else parse_types(wanted.types),
            imatrix=wanted.imatrix,
            imatrix_sha=sha,
            workers=_workers(),
            on_progress=lambda share: steps.at(int(100 * share), 100),
        )
    alphas, by_group, source = _alphas(out, wanted, material, table, build)
    outcome = material.plan(
        budget,
        alphas,
        source,
        alpha_groups=by_group,
        objective=wanted.objective,  # type: ignore[arg-type]
        times=None if wanted.objective == "quality" else _times(out, material, build),
        host_cap=_host_cap(wanted, material),
    )
    if wanted.output is not None:
        outcome.plan.save(wanted.output)
    quantized = setup.with_(target=retyped(setup.target, outcome.plan.types))
    return quantized, outcome, {"quantization": as_json(outcome, wanted.output)}


def weights_budget(
    setup: Setup, limit: Limit, compute: ComputeSource, exact: int | None
) -> WeightsBudget:
    """What is left for the target's weights, or what was asked for exactly."""
    from browndwarf.plan.memory import plan_memory
    from browndwarf.plan.quantization import WeightsBudget
    from browndwarf.units import MIB

    if exact is not None:
        return WeightsBudget(weights_mib=exact / MIB)
    budget = plan_memory(setup, limit, compute)
    line = budget.line
    return WeightsBudget(
        weights_mib=limit.mib - (budget.total_mib - line("weights")),
        limit_mib=limit.mib,
        kv_mib=line("kv_full") + line("kv_sliding"),
        recurrent_mib=line("recurrent"),
        draft_mib=line("draft_weights") + line("draft_kv"),
        compute_mib=line("compute") + line("draft_compute") + line("flash_scratch"),
        context_mib=line("context"),
        margin_mib=line("margin"),
    )


def as_json(outcome: Outcome, saved: Path | None) -> dict[str, Any]:
    """The ``quantization`` object of a ``plan`` document."""
    import msgspec

    plan: dict[str, Any] = msgspec.to_builtins(outcome.plan)
    plan.pop("schema")
    return {
        **plan,
        "saved": str(saved) if saved is not None else None,
        "loss_bound": outcome.bound,
        "more_gib_loss": outcome.more_gib,
        "smallest_device_bytes": outcome.smallest,
        "largest_device_bytes": outcome.largest,
        "verify_ms": outcome.time_ms or None,
    }


def _alphas(
    out: Output, wanted: Wanted, material: Material, table: ErrorTable, build: Build
) -> tuple[dict[str, float], dict[str, float], str]:
    """Alpha by tensor and by group, and where they come from."""
    from browndwarf.plan.roles import groups, prior_alphas

    group_of = groups(material.model, material.options)
    if wanted.probe == "equal":
        return {}, {"*": 1.0}, "equal"
    if wanted.probe == "priors":
        alphas = prior_alphas(material.model, material.options)
        return alphas, {group_of[name]: alpha for name, alpha in alphas.items()}, "priors"
    from browndwarf.cli.probing import calibration

    found = calibration(
        out, material, table, build, text=wanted.probe_text, budget=wanted.probe_time
    )
    alphas = found.alphas(group_of)
    by_group = {group_of[name]: alpha for name, alpha in alphas.items()}
    missing = f", {len(found.missing)} groups not measured" if found.missing else ""
    return alphas, by_group, f"calibrated: nats per token{missing}"


def _times(out: Output, material: Material, build: Build) -> Times:
    from browndwarf.files import cache_folder
    from browndwarf.hardware.devices import machine
    from browndwarf.plan.speed import batch_times, measure_costs

    setup = material.setup
    kinds = sorted({kind for kinds in material.options.values() for kind in kinds} - {"F16"})
    batch = setup.drafted + 1
    costs = measure_costs(
        build,
        kinds,
        batch=batch,
        device=f"{setup.backend}|{machine().cpu}",
        layers=0 if setup.on_cpu else None,
        folder=cache_folder("speed"),
        on_type=lambda kind: out.note(f"timing a batch of {batch} in {kind}"),
    )
    return batch_times(setup.target, costs, batch=batch)


def _say_source(out: Output, setup: Setup, matrix: Imatrix | None) -> None:
    from browndwarf.models.ggml_types import GGML_TYPES

    main = next(iter(setup.target.type_bytes), "")
    if GGML_TYPES[main].block > 1:
        out.note(f"note: the source is {main} already; errors are counted from there")
    if matrix is None:
        out.note(
            "note: without --imatrix all columns count alike, and types below three bits are out; "
            "`browndwarf imatrix` makes one"
        )


def _host_cap(wanted: Wanted, material: Material) -> int:
    from browndwarf.hardware.devices import free_ram_mib
    from browndwarf.plan.choice import smallest_beside
    from browndwarf.units import MIB, parse_bytes

    if wanted.host_bytes is not None:
        return parse_bytes(wanted.host_bytes)
    share = int(free_ram_mib() * MIB / HOST_SHARE)
    return max(share, smallest_beside(material.slots({})))


def _workers() -> int:
    import psutil

    return max(1, psutil.cpu_count(logical=False) or 1)
