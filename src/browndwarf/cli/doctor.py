"""``browndwarf doctor``: what is here, what is wrong with it, what to do."""

from __future__ import annotations

from pathlib import Path

import typer

from browndwarf.cli.options import DockerOption, JsonOption, LlamaDirOption


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(
    llama_dir: LlamaDirOption = None, docker: DockerOption = None, json: JsonOption = False
) -> None:
    """Examine the machine, its devices and its llama.cpp builds; end with 1 if something must be
    fixed first."""
    from browndwarf.cli.render import Output
    from browndwarf.plan.doctor import examine, findings

    out = Output(json=json)
    seen = examine(Path(llama_dir) if llama_dir else None, docker)
    found = findings(seen)
    if not json:
        from browndwarf.cli.memory_view import show_doctor

        show_doctor(out, seen, found)
    out.document("doctor", 1, seen.as_json())
    if any(finding.level == "error" for finding in found):
        raise typer.Exit(1)
