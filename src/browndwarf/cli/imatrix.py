"""``browndwarf imatrix``: how strongly a model's inputs excite each column, for quantization."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from browndwarf.cli.options import DockerOption, JsonOption, LlamaDirOption

if TYPE_CHECKING:
    from browndwarf.cli.render import Output
    from browndwarf.plan.importance import Collected


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("imatrix")(imatrix)


def imatrix(
    model: Annotated[str, typer.Argument(help="A .gguf file, demo, or hf:owner/name[:file].")],
    data: Annotated[
        list[Path] | None,
        typer.Option(help="UTF-8 text to run the model over. Repeatable. Default: packaged."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Default: MODEL's name with .imatrix.gguf, here."),
    ] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="At most so many chunks.")] = None,
    ctx: Annotated[str, typer.Option(help="Tokens per chunk.")] = "512",
    output_tensor: Annotated[
        bool, typer.Option("--output-tensor", help="Collect for output.weight too.")
    ] = False,
    layers: Annotated[
        int | None, typer.Option(min=0, help="Layers on the device. Default: what fits.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Overwrite the output; begin anew if an interrupted run differs."
        ),
    ] = False,
    llama_dir: LlamaDirOption = None,
    docker: DockerOption = None,
    json: JsonOption = False,
) -> None:
    """Collect an importance matrix, which `plan --quantize` and `quantize` use.

    An interrupted run goes on where it was when the same command is given again.
    """
    from browndwarf.cli.machine import chosen_build
    from browndwarf.cli.render import Output
    from browndwarf.cli.steps import Steps
    from browndwarf.models.gguf import read_model
    from browndwarf.models.resolve import resolve_model
    from browndwarf.plan.calibration import default_text, read_texts
    from browndwarf.plan.importance import Job, Step, collect
    from browndwarf.units import format_duration, parse_count

    out = Output(json=json)
    path = resolve_model(model)
    text = read_texts(data) if data else default_text(read_model(path))
    dest = output or Path(f"{path.stem}.imatrix.gguf")
    build = chosen_build(llama_dir, docker)
    job = Job(
        model=path,
        dest=dest,
        text=text,
        ctx=parse_count(ctx),
        chunks=chunks,
        output_tensor=output_tensor,
        layers=layers,
        threads=threads,
        force=force,
    )
    with Steps(out, "collecting, chunks") as steps:

        def show(step: Step) -> None:
            note = "" if step.left_s is None else f"about {format_duration(step.left_s)} left"
            steps.at(step.done, step.total, note)

        found = collect(build, job, on_step=show)
    _show(out, model, found, text.sources)


def _show(out: Output, model: str, found: Collected, sources: tuple[str, ...]) -> None:
    from browndwarf.plan.verify import listed
    from browndwarf.units import format_duration

    matrix, coverage = found.matrix, found.coverage
    wanted = len(coverage.covered) + len(coverage.missing)
    resumed = f", {found.resumed} of them from before" if found.resumed else ""
    ppl = "" if found.ppl is None else f"; perplexity {found.ppl:.4g}"
    size = found.tokens // found.chunks
    out.text(
        f"{found.dest}: {found.chunks} chunks of {size} tokens{resumed}"
        f"{ppl}; {format_duration(found.seconds)}"
    )
    none = f"; none for {listed(coverage.missing)}" if coverage.missing else ""
    out.text(f"data for {len(coverage.covered)} of {wanted} matrices{none}")
    if "output.weight" in coverage.missing:
        out.note("note: add --output-tensor for data of output.weight")
    if coverage.thin_experts:
        thin = coverage.thin_experts
        seen = sum(len(matrix.entries[name].counts) for name in thin)
        out.note(
            f"note: {sum(map(len, thin.values()))} of {seen} matrices of experts were hardly used: "
            "give more text, or text of more kinds"
        )
    words = ["browndwarf", "plan", model, "--quantize", "--imatrix", str(found.dest)]
    out.note(f"next: {shlex.join([*words, '--output', 'plan.json'])}")
    out.document(
        "imatrix",
        1,
        {
            "path": found.dest,
            "sha256": found.sha256,
            "model_fingerprint": found.model_fingerprint,
            "engine_sha": found.engine_sha,
            "sources": sources,
            "text_sha256": found.text_sha256,
            "chunks": found.chunks,
            "chunk_tokens": size,
            "tokens": found.tokens,
            "resumed_chunks": found.resumed,
            "ppl": found.ppl,
            "seconds": found.seconds,
            "covered": len(coverage.covered),
            "missing": coverage.missing,
            "thin_experts": coverage.thin_experts,
        },
    )
