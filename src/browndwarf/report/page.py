"""The HTML page of a sweep: collected into typed values, then rendered by one template.

The page is whole in itself: styles and drawings are inside, nothing is loaded, no script runs, and
its own security policy forbids both. Names come from users and model files, so the template
escapes everything but the drawings, whose text Vega escapes, and the style sheet.

Example:
    >>> page = collect(read(read_run(Path("runs/demo"))), wording)  # doctest: +SKIP
    >>> render(page)[:15]                                          # doctest: +SKIP
    '<!doctype html>'
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment, StrictUndefined

from browndwarf import __version__
from browndwarf.report import facts, reproduce, rows, told
from browndwarf.report.figures import INSTALL, Figure, drawable, figures
from browndwarf.report.reading import Reading, Wording
from browndwarf.sweep.laws import Law

#: Names of cells that a row of a table lists at most.
MOST_NAMES = 8


@dataclass(frozen=True)
class Page:
    """Everything that the page shows, as text. Parts that a run has nothing for are empty.

    ``again`` is the command of the same sweep; ``again_note`` says why there is none.
    """

    title: str
    run: str
    measured_on: str
    headline: str
    more: tuple[str, ...]
    has_verdict: bool
    banners: tuple[told.Banner, ...]
    recipe: told.Recipe
    charts_note: str
    figures: tuple[Figure, ...]
    workloads: tuple[str, ...]
    groups: tuple[rows.GroupRows, ...]
    failures: tuple[rows.Failure, ...]
    findings: tuple[Law, ...]
    drifts: tuple[rows.DriftRow, ...]
    memory: rows.MemoryTable | None
    facts: tuple[tuple[str, str], ...]
    pace: tuple[str, ...]
    closing: str
    again: str
    again_note: str
    version: str = __version__

    @property
    def charts(self) -> int:
        """How many drawings the page holds."""
        return sum(len(figure.drawings) for figure in self.figures)


def collect(reading: Reading, wording: Wording) -> Page:
    """All that is to be shown of a run."""
    hide = wording.hide
    models = facts.models_of(reading.view)
    draw = drawable()
    return Page(
        title=f"MTP sweep of {models[0].name}" if models else "MTP sweep",
        run=reading.view.directory.resolve().name,
        measured_on=told.measured_on(reading),
        headline=told.headline(reading, wording),
        more=told.more(reading, wording),
        has_verdict=reading.verdict.winner is not None,
        banners=told.banners(reading, wording),
        recipe=told.recipe(reading),
        charts_note="" if draw else f"No charts here. To get them: {INSTALL}, then this page anew.",
        figures=figures(reading, hide) if draw else (),
        workloads=reading.workloads,
        groups=rows.configurations(reading, hide),
        failures=rows.failure_rows(reading),
        findings=reading.laws if reading.measured else (),
        drifts=rows.drift_rows(reading),
        memory=rows.memory_table(reading, hide),
        facts=facts.facts(reading, hide),
        pace=wording.pace,
        closing=wording.closing,
        again=reproduce.command(reading.plan, models) or "",
        again_note=reproduce.why_not(reading.plan),
    )


def render(page: Page) -> str:
    """The page as HTML."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_resource("page.html"))
    return template.render(page=page, css=_resource("page.css"), most=MOST_NAMES)


def _resource(name: str) -> str:
    return resources.files("browndwarf.report").joinpath(name).read_text("utf-8")
