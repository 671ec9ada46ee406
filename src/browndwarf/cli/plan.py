"""``browndwarf plan``: the memory budget of one configuration, line by line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from browndwarf.cli.options import DockerOption, JsonOption, LlamaDirOption
from browndwarf.cli.quantize_plan import (
    DeviceBytesOption,
    HostBytesOption,
    ImatrixOption,
    ObjectiveOption,
    OutputOption,
    ProbeOption,
    ProbeTextOption,
    ProbeTimeOption,
    QuantizeOption,
    TypesOption,
    Wanted,
)

if TYPE_CHECKING:
    from browndwarf.plan.limits import Limit
    from browndwarf.plan.setup import Backend


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan)


def plan(
    model: Annotated[
        str | None, typer.Argument(help="A .gguf file, demo, or hf:owner/name[:file].")
    ] = None,
    draft: Annotated[
        str | None, typer.Option("--draft", help="The MTP head's file, or demo.")
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(help="Instead of MODEL: a shape such as gemma4-12b, or gemma4-12b:Q4_0."),
    ] = None,
    vram: Annotated[
        str | None, typer.Option("--vram", help="Device memory to plan with, such as 8GiB.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="A device of this machine by name or number; or cpu."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="A card by name, which need not be here.")
    ] = None,
    ctx: Annotated[str, typer.Option("--ctx", help="Context over all slots, such as 16k.")] = "4k",
    kv: Annotated[str, typer.Option("--kv", help="Type of the KV cache.")] = "f16",
    kv_k: Annotated[str | None, typer.Option("--kv-k", help="Type of K alone.")] = None,
    kv_v: Annotated[str | None, typer.Option("--kv-v", help="Type of V alone.")] = None,
    draft_kv: Annotated[
        str, typer.Option("--draft-kv", help="Type of an embedded head's own cache.")
    ] = "f16",
    parallel: Annotated[int, typer.Option("--parallel", help="Slots.")] = 1,
    unified: Annotated[
        bool, typer.Option("--kv-unified", help="One cache shared by all slots.")
    ] = False,
    ubatch: Annotated[int, typer.Option("--ubatch", help="Micro-batch of prefill.")] = 512,
    layers: Annotated[
        str, typer.Option("--layers", help="Layers on the device as -ngl counts, or all.")
    ] = "all",
    n_max: Annotated[
        int | None, typer.Option("--n-max", help="Draft tokens per cycle; 0 for no drafting.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option("--margin", help="MiB to keep free. Default 128.")
    ] = None,
    context_overhead: Annotated[
        float | None,
        typer.Option("--context-overhead", help="MiB that a device context costs, if measured."),
    ] = None,
    quantize: QuantizeOption = False,
    imatrix: ImatrixOption = None,
    types: TypesOption = None,
    objective: ObjectiveOption = "quality",
    probe: ProbeOption = "priors",
    probe_time: ProbeTimeOption = "30m",
    probe_text: ProbeTextOption = None,
    output: OutputOption = None,
    device_bytes: DeviceBytesOption = None,
    host_bytes: HostBytesOption = None,
    llama_dir: LlamaDirOption = None,
    docker: DockerOption = None,
    json: JsonOption = False,
) -> None:
    """Say what a configuration needs, whether it fits, and what to give up if not.

    Reads headers only. With --quantize it also reads a sample of the weights and chooses a type for
    every tensor, to fill what the rest of the budget leaves. Ends with 1 when it does not fit.
    """
    from browndwarf.cli.render import Output
    from browndwarf.engine.dryalloc import DryModels
    from browndwarf.hardware.devices import cpu_flags
    from browndwarf.models.gguf import check_head, mismatch, read_model
    from browndwarf.plan.compute import DryCompute
    from browndwarf.plan.remedies import make_plan
    from browndwarf.plan.setup import Setup
    from browndwarf.units import parse_count

    out = Output(json=json)
    wanted = Wanted(
        imatrix=imatrix,
        types=types,
        objective=objective,
        probe=probe,
        probe_time=probe_time,
        probe_text=probe_text,
        output=output,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
    )
    wanted.check(quantize=quantize)
    target_path, head_path = _files(model, draft, synthetic, quantize=quantize)
    wanted_layers = _layers(layers)
    models = DryModels(
        target=str(target_path),
        head=str(head_path) if head_path else None,
        gpu_layers=-1 if wanted_layers is None else wanted_layers,
    )
    target = read_model(target_path)
    head = read_model(head_path) if head_path else None
    known = [target, *([head] if head else [])]
    with DryCompute(models, known=known) as compute:
        drafting = n_max != 0 and (head is not None or target.head.kind == "nextn")
        if n_max and not drafting:
            out.note(f"note: --n-max {n_max} is ignored: no --draft, and no head in the model")
        if head is not None and drafting:
            match = check_head(target, head)
            if not match.ok:
                raise mismatch(target, head, match)
        backend, limit = _limit(vram, device, gpu, margin, context_overhead, llama_dir, docker)
        setup = Setup(
            target=target,
            head=head if drafting else None,
            draft=drafting,
            n_ctx=parse_count(ctx) or target.context_length,
            parallel=parallel,
            unified=unified,
            ubatch=ubatch,
            kv_k=kv_k or kv,
            kv_v=kv_v or kv,
            draft_kv_k=draft_kv,
            draft_kv_v=draft_kv,
            n_max=3 if n_max is None else n_max,
            gpu_layers=wanted_layers,
            backend=backend,
            repack=cpu_flags(),
        )
        body: dict[str, Any] = {}
        outcome = None
        if quantize:
            from browndwarf.cli.machine import chosen_build
            from browndwarf.cli.quantize_plan import choose_types

            build = chosen_build(llama_dir, docker)
            setup, outcome, body = choose_types(out, wanted, setup, limit, compute, build)
        answer = make_plan(setup, limit, compute)
    if not json:
        from browndwarf.cli.memory_view import show_plan
        from browndwarf.cli.quantize_view import show_types

        show_plan(out, answer)
        if outcome is not None:
            show_types(out, outcome, tied=target.tied, saved=output)
    out.document("plan", 1, answer.as_json() | body)
    if not answer.budget.fits:
        raise typer.Exit(1)


def _files(
    model: str | None, draft: str | None, synthetic: str | None, *, quantize: bool
) -> tuple[Path, Path | None]:
    """The files of target and head; a shape's are headers without weights, in the cache."""
    from browndwarf.errors import UsageError
    from browndwarf.files import cache_folder
    from browndwarf.models import filled
    from browndwarf.models.resolve import resolve_model

    if (model is None) == (synthetic is None):
        raise UsageError(
            "no model is named" if model is None else "MODEL and --synthetic exclude each other",
            fix="browndwarf plan MODEL --draft HEAD, or browndwarf plan --synthetic gemma4-12b",
        )
    if synthetic is None:
        head = resolve_model(draft, "head") if draft is not None else None
        return resolve_model(str(model)), head
    if draft is not None or quantize:
        raise UsageError(
            f"--synthetic does not go with {'--draft' if draft is not None else '--quantize'}",
            why="a shape brings its own head, and has no weights to look at",
            fix="leave it out",
        )
    name, _, type_name = synthetic.partition(":")
    return filled.headers(cache_folder("headers"), name, type_name or "Q4_K")


def _layers(text: str) -> int | None:
    from browndwarf.errors import UsageError

    if text.lower() == "all":
        return None
    if not text.isdigit():
        raise UsageError(
            f"--layers {text} is neither a number nor 'all'", fix="write --layers 40 or all"
        )
    return int(text)


def _limit(
    vram: str | None,
    device: str | None,
    gpu: str | None,
    margin: float | None,
    overhead: float | None,
    llama_dir: str | None,
    docker: str | None,
) -> tuple[Backend, Limit]:
    """The backend and the memory to plan with. Without any option: this machine's RAM or device."""
    from browndwarf.errors import UsageError
    from browndwarf.hardware.cards import find_card
    from browndwarf.plan.limits import limit_from_size
    from browndwarf.units import MIB, parse_bytes

    if sum(option is not None for option in (vram, device, gpu)) > 1:
        raise UsageError(
            "--vram, --device and --gpu exclude each other",
            why="each states the memory to plan with",
            fix="give one of them",
        )
    if vram is not None:
        if vram.strip().replace(".", "", 1).isdigit():
            raise UsageError(
                f"--vram {vram} has no unit",
                why="a bare number could mean MiB or GiB",
                fix=f"write {vram.strip()}GiB or {vram.strip()}MiB",
            )
        size = parse_bytes(vram)
        return "cuda", limit_from_size(
            size, backend="cuda", margin_mib=margin, context_mib=overhead
        )
    if gpu is not None:
        card = find_card(gpu)
        return card.backend, limit_from_size(
            card.memory_mib * MIB,
            backend=card.backend,
            source=f"{card.name}, {card.source}",
            margin_mib=margin,
            context_mib=overhead,
        )
    return _here(device, margin, overhead, llama_dir, docker)


def _here(
    device: str | None,
    margin: float | None,
    overhead: float | None,
    llama_dir: str | None,
    docker: str | None,
) -> tuple[Backend, Limit]:
    from browndwarf.cli.machine import devices, memory_here
    from browndwarf.engine.locate import choose_build, find_builds

    wanted = device.lower() if device is not None and device.lower() == "cpu" else device
    listed = []
    if wanted != "cpu":
        builds = find_builds(Path(llama_dir) if llama_dir else None, docker)
        if builds or wanted is not None:
            listed = devices(choose_build(builds, frozenset()))
    return memory_here(listed, wanted, margin_mib=margin, context_mib=overhead)
