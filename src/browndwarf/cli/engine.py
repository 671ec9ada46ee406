"""``browndwarf engine``: install llama.cpp with its tools, list the builds that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from browndwarf.cli.options import DockerOption, JsonOption, LlamaDirOption


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help="Install and list llama.cpp builds.", no_args_is_help=True)
    group.command("install")(install)
    group.command("list")(list_builds)
    app.add_typer(group, name="engine")


def install(
    backend: Annotated[
        str, typer.Option(help="cpu, cuda, vulkan, metal or hip: what to compile for.")
    ] = "cpu",
    force: Annotated[bool, typer.Option(help="Build again even if all is there.")] = False,
    quiet: Annotated[bool, typer.Option(help="Say nothing when nothing was to do.")] = False,
) -> None:
    """Compile llama.cpp, its server and tools into this Python environment (minutes, once)."""
    from browndwarf.cli.render import Output
    from browndwarf.engine import install as installer

    out = Output()
    lines = 0

    def show(line: str) -> None:
        nonlocal lines
        lines += 1
        out.note(f"  {line}"[:160])

    build = installer.install(installer.parse_backend(backend), force=force, on_line=show)
    if lines or not quiet:
        out.note(f"llama.cpp {build.version} ({build.sha[:9]}) is ready: {build.server}")


def list_builds(
    llama_dir: LlamaDirOption = None, docker: DockerOption = None, json: JsonOption = False
) -> None:
    """Show every llama.cpp build that is found, the one in use first."""
    from rich.table import Table

    from browndwarf.cli.render import Output
    from browndwarf.engine.locate import find_builds

    out = Output(json=json)
    builds = find_builds(Path(llama_dir) if llama_dir else None, docker)
    table = Table("version", "commit", "MTP", "found by", "server", box=None)
    for build in builds:
        mtp = "yes" if "draft-mtp" in build.features else "no"
        table.add_row(build.version, build.sha[:9], mtp, build.source, str(build.server))
    if builds:
        out.table(table)
    else:
        out.note("no llama.cpp build found; `browndwarf engine install` makes one")
    out.document("engines", 1, {"engines": [b.as_record() for b in builds]})
