"""``browndwarf report``: a sweep as one HTML page, to look at and to show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from browndwarf.cli.options import JsonOption

if TYPE_CHECKING:
    from browndwarf.cli.render import Output
    from browndwarf.report.reading import Reading, Wording

#: The page's name in its run directory.
PAGE = "report.html"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    run: Annotated[
        str, typer.Argument(help="A run directory, its name in runs/, or `last`.")
    ] = "last",
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="The page's file. Default: report.html in the run directory."),
    ] = None,
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Show the page in a browser afterwards.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Make one HTML page of a sweep, finished or not: verdict, charts and tables in one file."""
    from browndwarf.cli.render import Output
    from browndwarf.cli.runs import run_directory
    from browndwarf.files import atomic_write
    from browndwarf.report.page import collect, render
    from browndwarf.report.reading import read
    from browndwarf.sweep.store import read_run

    out = Output(json=json)
    reading = read(read_run(run_directory(run)))
    page = collect(reading, wording(reading))
    path = out_file or reading.view.directory / PAGE
    # A name that came from a file system may hold bytes that are no text.
    atomic_write(path, render(page).encode("utf-8", errors="replace"))
    if page.charts_note:
        out.note(page.charts_note)
    if open_page:
        _open(path, out)
    winner = reading.verdict.winner
    out.text(str(path))
    out.document(
        "report",
        1,
        {
            "run": str(reading.view.directory),
            "page": str(path),
            "charts": page.charts,
            "finished": not reading.unfinished,
            "winner": winner.label if winner else None,
            "headline": page.headline,
        },
    )


def wording(reading: Reading) -> Wording:
    """What the other commands say of this run, for the page to say the same."""
    from browndwarf.cli import sweep_view, tables
    from browndwarf.report.reading import Wording

    verdict, cells = reading.verdict, reading.cells
    return Wording(
        story=tuple(tables.story(verdict)),
        synthetic=tuple(tables.synthetic_lines(reading.view.plan)),
        disturbed=tuple(tables.marks(cells)),
        failures=tuple(tables.failures(cells)),
        pace=tuple(sweep_view.pace_line(verdict.pace)),
        closing=sweep_view.closing_note(reading.view),
        hide=tuple(tables.common_settings(verdict)),
    )


def _open(path: Path, out: Output) -> None:
    """Show the page; that there is no browser is no fault."""
    import webbrowser

    if not webbrowser.open(path.resolve().as_uri()):
        out.note("no browser could be started; open the file yourself")
