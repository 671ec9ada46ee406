"""``browndwarf quantize``: carry out a plan, or make single types of a model or head."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from browndwarf.cli.options import DockerOption, JsonOption, LlamaDirOption
from browndwarf.errors import UsageError

if TYPE_CHECKING:
    from browndwarf.cli.render import Output
    from browndwarf.engine.locate import Build
    from browndwarf.plan.quantize import Quantized

_PART = re.compile(r"-\d{5}-of-\d{5}$")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("quantize")(quantize)


def quantize(
    what: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|MODEL",
            help="A plan that `plan --quantize` saved; or with --types a .gguf file, demo, "
            "or hf:owner/name[:file].",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; a folder for several types."),
    ] = None,
    types: Annotated[
        str | None, typer.Option(help="Types for the whole file, e.g. Q8_0,Q6_K: one file each.")
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(help="Importance matrix. A plan names its own; then: where it lies now."),
    ] = None,
    allow_requantize: Annotated[
        bool,
        typer.Option("--allow-requantize", help="Accept a source that is quantized already."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, write nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    llama_dir: LlamaDirOption = None,
    docker: DockerOption = None,
    json: JsonOption = False,
) -> None:
    """Quantize, and prove that the file is what was asked for.

    llama-quantize's dry run is compared tensor by tensor before, and the file after it.
    """
    from browndwarf.cli.machine import chosen_build
    from browndwarf.cli.render import Output

    out = Output(json=json)
    words = _Words(output, imatrix, allow_requantize, dry_run, force, threads)
    if _is_plan(what):
        if types is not None:
            raise UsageError(
                "a plan has its types already", fix="leave --types out, or name a model"
            )
    elif types is None:
        raise UsageError(
            f"no types for {what}",
            why="without a plan, one type for the whole file has to be named",
            fix="add --types Q8_0,Q6_K; or give a plan: `browndwarf plan --quantize` makes one",
        )
    names = _type_names(types) if types is not None else []
    build = chosen_build(llama_dir, docker)
    if not names:
        found = [_plan(out, build, Path(what).expanduser(), words)]
    else:
        found = _types(out, build, what, names, words)
    out.document("quantize", 1, {"dry_run": dry_run, "files": [_plain(done) for done in found]})


class _Words(NamedTuple):
    """The options that both ways share."""

    output: Path | None
    imatrix: Path | None
    allow_requantize: bool
    dry_run: bool
    force: bool
    threads: int | None


def _is_plan(what: str) -> bool:
    path = Path(what).expanduser()
    if path.suffix.lower() == ".json":
        return True
    try:
        with path.open("rb") as handle:
            return handle.read(1) == b"{"
    except OSError:
        return False


def _plan(out: Output, build: Build, path: Path, words: _Words) -> Quantized:
    from browndwarf.cli.steps import Steps
    from browndwarf.plan.quantization import QuantizationPlan
    from browndwarf.plan.quantize import run_plan

    plan = QuantizationPlan.load(path)
    name = f"{_stem(Path(plan.source))}-{plan.bits_per_weight:.2f}bpw.gguf"
    dest = words.output / name if words.output and words.output.is_dir() else words.output
    with Steps(out, "quantizing, tensors") as steps:
        done = run_plan(
            build,
            plan,
            None if words.dry_run else dest or Path(name),
            beside=path.parent,
            imatrix=words.imatrix,
            force=words.force,
            threads=words.threads,
            on_progress=steps.at,
        )
    _show(out, done, dest or Path(name))
    return done


def _types(
    out: Output, build: Build, what: str, names: list[str], words: _Words
) -> list[Quantized]:
    from browndwarf.cli.steps import Steps
    from browndwarf.models.gguf import read_model
    from browndwarf.models.resolve import resolve_model
    from browndwarf.plan.inputs import check_dest
    from browndwarf.plan.quantize import run_type

    source = resolve_model(what)
    info = read_model(source)
    dests = _dests(source, names, words.output)

    def run(name: str, dest: Path | None, steps: Steps | None = None) -> Quantized:
        return run_type(
            build,
            source,
            dest,
            name,
            imatrix=words.imatrix,
            allow_requantize=words.allow_requantize,
            force=words.force,
            threads=words.threads,
            on_progress=steps.at if steps is not None else None,
        )

    # All refusals come before the first file is written.
    if not words.dry_run:
        for dest in dests.values():
            check_dest(dest, info, None, words.force)
    found = {name: run(name, None) for name in names}
    for name, dest in dests.items():
        if not words.dry_run:
            with Steps(out, f"quantizing to {name}, tensors") as steps:
                found[name] = run(name, dest, steps)
        _show(out, found[name], dest, first=name == names[0])
    return list(found.values())


def _type_names(text: str) -> list[str]:
    from browndwarf.sweep.sources import AS_IS, parse_type

    names = list(dict.fromkeys(parse_type(part) for part in text.split(",") if part.strip()))
    if not names or AS_IS in names:
        raise UsageError("no types are named", fix="write for example --types Q8_0,Q6_K")
    return names


def _dests(source: Path, names: list[str], output: Path | None) -> dict[str, Path]:
    folder = output if output is not None else Path()
    if len(names) == 1 and output is not None and not output.is_dir():
        return {names[0]: output}
    if output is not None and not output.is_dir():
        raise UsageError(
            f"{output} is no folder",
            why=f"{len(names)} files are to be written",
            fix="make the folder, or name one type",
        )
    return {name: folder / f"{_stem(source)}-{name}.gguf" for name in names}


def _stem(source: Path) -> str:
    """A model's name without the type that it ends with."""
    from browndwarf.sweep.sources import KNOWN_TYPES

    stem = _PART.sub("", source.stem)
    for mark in ("-", ".", "_"):
        head, _, tail = stem.rpartition(mark)
        if head and tail.upper() in KNOWN_TYPES:
            return head
    return re.sub(r"[-.](Q\d\w*|IQ\d\w*)$", "", stem, flags=re.IGNORECASE) or stem


def _show(out: Output, done: Quantized, dest: Path, *, first: bool = True) -> None:
    from browndwarf.plan.verify import listed
    from browndwarf.units import format_bytes, format_duration

    if done.requantized and first:
        out.note(
            f"note: {done.source.name} is quantized already: {len(done.requantized)} tensors are "
            "quantized a second time. A file made from F16 or BF16 is better."
        )
    if done.without_imatrix and first:
        out.note(f"note: the importance matrix has no data for {listed(done.without_imatrix)}")
    verb = "would be" if done.path is None else "is"
    size = done.size_bytes or done.data_bytes
    took = "" if done.path is None else f"; {format_duration(done.seconds)}"
    out.text(
        f"{dest} {verb} {format_bytes(size)}, {done.bits_per_weight:.2f} bits per weight{took}"
    )
    out.text("  " + ", ".join(f"{kind} {count}" for kind, count in _counts(done).items()))
    if done.device_bytes is not None:
        out.text(f"  on the device: {done.device_bytes} bytes, as planned")


def _counts(done: Quantized) -> dict[str, int]:
    from collections import Counter

    return dict(Counter(done.types.values()).most_common())


def _plain(done: Quantized) -> dict[str, Any]:
    return {
        "path": done.path,
        "source": done.source,
        "type": done.type,
        "size_bytes": done.size_bytes,
        "data_bytes": done.data_bytes,
        "device_bytes": done.device_bytes,
        "bits_per_weight": done.bits_per_weight,
        "tensor_types": _counts(done),
        "requantized": len(done.requantized),
        "without_imatrix": done.without_imatrix,
        "seconds": done.seconds,
    }
