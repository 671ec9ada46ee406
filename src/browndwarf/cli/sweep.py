"""``browndwarf sweep``, ``recipe`` and ``demo``: measure, name the winner, print its command."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from browndwarf.cli.options import DockerOption, JsonOption, LlamaDirOption

if TYPE_CHECKING:
    from browndwarf.cli.render import Output
    from browndwarf.cli.sweeping import Done


def register(app: typer.Typer) -> None:
    """Add the three commands."""
    app.command("sweep")(sweep)
    app.command("recipe")(recipe)
    app.command("demo")(demo)


def sweep(
    model: Annotated[
        str | None, typer.Argument(help="The target GGUF, `demo`, or hf:owner/name[:file].")
    ] = None,
    draft: Annotated[
        str | None, typer.Option("--draft", "-d", help="The MTP head's GGUF, where it is separate.")
    ] = None,
    target_types: Annotated[
        str, typer.Option(help="Target types; missing ones are quantized first. as-is: the file.")
    ] = "as-is",
    head_types: Annotated[
        str | None, typer.Option(help="Head types, e.g. Q8_0,Q6_K,Q4_K; `none`, `embedded`.")
    ] = None,
    n_max: Annotated[str, typer.Option(help="Draft tokens per step; 0 is no MTP.")] = "1,2,3,4",
    p_min: Annotated[str | None, typer.Option(help="Least draft probability, e.g. 0,0.5.")] = None,
    layers: Annotated[str, typer.Option(help="Layers on the device: all, or numbers.")] = "all",
    kv: Annotated[str, typer.Option(help="KV cache types; K:V where they differ.")] = "f16",
    draft_kv: Annotated[str | None, typer.Option(help="KV types of the head's own cache.")] = None,
    ctx: Annotated[str, typer.Option(help="Context sizes, e.g. 4096,16k.")] = "4096",
    parallel: Annotated[str, typer.Option(help="Slots; all are kept busy.")] = "1",
    ubatch: Annotated[str | None, typer.Option(help="Physical batch sizes.")] = None,
    backend_sampling: Annotated[str, typer.Option(help="off, on, or off,on.")] = "off",
    threads: Annotated[str | None, typer.Option(help="CPU thread counts.")] = None,
    axis: Annotated[
        list[str] | None,
        typer.Option(help="Any other llama-server option as an axis: NAME=v1,v2. Repeatable."),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(help="prose, code, json, chat, or your own .jsonl or .txt files."),
    ] = "prose,code,json,chat",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per workload, at most.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats; under 3 proves little.")] = 3,
    precision: Annotated[
        str,
        typer.Option(
            help="Short cells are repeated until their mean is known this well (standard error), "
            "four times --repeats at most, at the machine's fast pace. 0: be quick."
        ),
    ] = "2%",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate per prompt.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of every request.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    natural_end: Annotated[
        bool, typer.Option(help="Let answers end by themselves instead of ignoring their end.")
    ] = False,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Synthetic acceptance per position, e.g. .80,.54,.43, or a run that measured "
            "it: invalid text, right speed. Everything is labelled synthetic."
        ),
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(
            help="Instead of MODEL: random weights of a shape (gemma4-12b, qwen35-27b, ...) or "
            "of a GGUF's header. Needs --rates; nothing is downloaded."
        ),
    ] = None,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast/--full",
            help="Measure the factors, predict the grid, confirm the best; or measure every cell.",
        ),
    ] = True,
    budget: Annotated[
        str | None, typer.Option(help="With --fast: explore no longer than this, e.g. 10m.")
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Run directory. Default: runs/NAME-DATE.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="Go on with this run, or with `last` (--full measures its grid)."),
    ] = None,
    allow_busy: Annotated[
        bool,
        typer.Option(help="Measure although others use the machine; disturbed cells are marked."),
    ] = False,
    patience: Annotated[str, typer.Option(help="How long to wait for a quiet machine.")] = "60s",
    gate: Annotated[
        bool,
        typer.Option("--gate", help="End with a recipe that passed its smoke and lossless checks."),
    ] = False,
    try_anyway: Annotated[
        bool, typer.Option(help="Start what the memory budget says cannot fit.")
    ] = False,
    llama_dir: LlamaDirOption = None,
    docker: DockerOption = None,
    json: JsonOption = False,
) -> None:
    """Measure MTP configurations with the real llama-server; find the fastest."""
    from browndwarf.cli import requests, sweeping
    from browndwarf.cli.render import Output
    from browndwarf.cli.runs import run_directory
    from browndwarf.errors import UsageError
    from browndwarf.units import parse_duration, parse_share

    out = Output(json=json)
    patience_s = parse_duration(patience)
    if resume is not None:
        given = changed_options(sweep, locals())
        if given:
            raise UsageError(
                f"--resume does not go together with {', '.join(given)}",
                why="the run directory knows its own model and settings",
                fix=f"browndwarf sweep --resume {shlex.quote(resume)}",
            )
        done = sweeping.resume(
            run_directory(resume),
            out,
            patience_s=patience_s,
            allow_busy=allow_busy,
            try_anyway=try_anyway,
            fast=fast,
        )
    else:
        if (model is None) == (synthetic is None):
            raise UsageError(
                "no model is named"
                if model is None
                else "MODEL and --synthetic exclude each other",
                fix="browndwarf sweep MODEL --draft HEAD, browndwarf sweep --synthetic SHAPE "
                "--rates .80,.54,.43, or browndwarf demo",
            )
        axes = requests.axes(
            target_types=target_types,
            head_types=head_types,
            n_max=n_max,
            p_min=p_min,
            layers=layers,
            kv=kv,
            draft_kv=draft_kv,
            ctx=ctx,
            parallel=parallel,
            ubatch=ubatch,
            backend_sampling=backend_sampling,
            threads=threads,
            extra=axis or [],
        )
        plan = requests.plan(
            model,
            draft,
            axes,
            workloads=workload,
            prompts=prompts,
            repeats=repeats,
            precision=parse_share(precision),
            tokens=tokens,
            seed=seed,
            temperature=temperature,
            natural_end=natural_end,
            rates=rates,
            allow_busy=allow_busy,
            try_anyway=try_anyway,
            fast=fast,
            budget_s=parse_duration(budget) if budget else None,
            llama_dir=llama_dir,
            docker=docker,
            synthetic=synthetic,
        )
        named = plan.synthetic.label if plan.synthetic else Path(plan.model).stem
        directory = out_dir or sweeping.new_directory(named)
        done = sweeping.start(plan, directory, out, patience_s=patience_s)
    _show(done, out)
    if not done.answered:
        raise typer.Exit(1)
    if gate:
        made = sweeping.make_recipe(
            sweeping.view_run(str(done.directory)), out, smoke=True, gate=True
        )
        sweeping.save_recipe(made, done.directory)
        out.text("\n" + made.text("sh"))


#: What may be said beside --resume; everything else is the run's own.
WITH_RESUME = frozenset({"resume", "allow_busy", "patience", "try_anyway", "fast", "gate", "json"})


def changed_options(command: Callable[..., None], given: dict[str, object]) -> list[str]:
    """Options of ``command`` that differ from their defaults and don't go with --resume."""
    parameters = inspect.signature(command).parameters.values()
    return [
        "MODEL" if p.name == "model" else "--out" if p.name == "out_dir" else _flag(p.name)
        for p in parameters
        if p.name not in WITH_RESUME and given[p.name] != p.default
    ]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def recipe(
    run: Annotated[str, typer.Argument(help="A run directory, its name in runs/, or `last`.")],
    format: Annotated[str, typer.Option(help="sh, powershell or json.")] = "sh",
    smoke: Annotated[
        bool, typer.Option(help="Try the command before printing it (--no-smoke skips).")
    ] = True,
    gate: Annotated[
        bool, typer.Option("--gate", help="Also compare its answers with plain decoding.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Print the winning llama-server command, after trying it out."""
    import msgspec

    from browndwarf.cli import sweeping
    from browndwarf.cli.render import Output
    from browndwarf.errors import StorageError, UsageError

    if format not in ("sh", "powershell", "json"):
        raise UsageError(f"no recipe format {format!r}", fix="use sh, powershell or json")
    if gate and not smoke:
        raise UsageError(
            "--gate and --no-smoke exclude each other",
            why="a recipe behind the gate has passed its smoke test",
            fix="leave one of them out",
        )
    out = Output(json=json or format == "json")
    view = sweeping.view_run(run)
    made = sweeping.make_recipe(view, out, smoke=smoke, gate=gate)
    try:
        for path in sweeping.save_recipe(made, view.directory):
            out.note(f"saved {path}")
    except StorageError as error:
        out.note(f"not saved: {error.what} ({error.why})")
    out.text(made.text("powershell" if format == "powershell" else "sh"))
    out.document("recipe", 1, msgspec.to_builtins(made) | {"header": made.header})


def demo(
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Run directory. Default: runs/demo-DATE.")
    ] = None,
    allow_busy: Annotated[
        bool,
        typer.Option(help="Measure although others use the machine; disturbed cells are marked."),
    ] = False,
    patience: Annotated[str, typer.Option(help="How long to wait for a quiet machine.")] = "5m",
    llama_dir: LlamaDirOption = None,
    docker: DockerOption = None,
    json: JsonOption = False,
) -> None:
    """The whole story on the embedded pair of small models: sweep, winner, recipe. Minutes."""
    from browndwarf.cli import requests, sweeping
    from browndwarf.cli.render import Output
    from browndwarf.sweep.store import read_run
    from browndwarf.units import parse_duration

    out = Output(json=json)
    out.note("A 17-million-parameter target with its MTP head, shipped with browndwarf:")
    out.note("four head types and up to four draft tokens against no MTP, on this machine.")
    plan = requests.demo_plan(allow_busy=allow_busy, llama_dir=llama_dir, docker=docker)
    directory = out_dir or sweeping.new_directory("demo")
    done = sweeping.start(plan, directory, out, patience_s=parse_duration(patience))
    _show(done, out)
    view = read_run(done.directory)
    made = sweeping.make_recipe(view, out, smoke=True)
    sweeping.save_recipe(made, done.directory)
    out.text("\nThe recipe (paste it into a shell):\n\n" + made.text("sh"))
    out.text(
        f"Files: {directory / 'cells.csv'}, {directory / 'run.sqlite'}, "
        f"{directory / 'recipe.sh'}, {directory / 'logs'}"
    )


def _show(done: Done, out: Output) -> None:
    """Table, story and JSON document of a run."""
    from browndwarf.cli import sweep_view, tables
    from browndwarf.sweep.laws import check
    from browndwarf.sweep.store import read_run

    view, verdict = read_run(done.directory), done.verdict
    laws = check(view.cells)
    workloads = [w["name"] for w in view.plan["workloads"]]
    for line in tables.synthetic_lines(view.plan):
        out.text(line)
    out.table(tables.standings_table(verdict, workloads, width=out.result.width))
    if any(s.confirmed for s in verdict.standings):
        out.text(
            "* measured side by side at the end; the other rows earlier. ± is half of max - min."
        )
    lines = tables.failures(view.cells) + tables.marks(view.cells) + tables.story(verdict)
    lines += tables.predicted_line(verdict, view.cells) + sweep_view.pace_line(verdict.pace)
    for line in lines + sweep_view.law_lines(laws):
        out.text(line)
    out.text(sweep_view.closing_note(view))
    if verdict.winner is not None:
        out.note(f"next: browndwarf recipe {shlex.quote(str(done.directory))}")
    out.document("sweep", 1, sweep_view.payload(view, verdict, laws))
