"""What stands above the charts: the verdict in a sentence, warnings, the command.

Example:
    >>> headline(reading, wording)                                 # doctest: +SKIP
    'Q4_0 + Q4_K n3 is the fastest: 1403.0 tok/s, 1.34 times (95% interval 1.30 to 1.38) ...'
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from browndwarf.report.reading import Reading, Wording
from browndwarf.sweep.analysis import Standing
from browndwarf.sweep.cell import LEAST_REPEATS


@dataclass(frozen=True)
class Banner:
    """What a reader must know before believing a figure. ``kind`` is for the style sheet."""

    kind: str
    word: str
    text: str


@dataclass(frozen=True)
class Recipe:
    """The saved command, or "" and how to make it. ``stale``: it is another configuration's."""

    text: str
    note: str = ""
    stale: bool = False


def headline(reading: Reading, wording: Wording) -> str:
    """The verdict in one sentence, or why there is none."""
    if not reading.measured:
        return "No cell has a figure" + (" yet." if reading.unfinished else ".")
    winner, baseline = reading.verdict.winner, reading.verdict.baseline
    if winner is None or baseline is None or winner is baseline:
        return wording.story[0]
    against = f"{baseline.configuration.label(wording.hide)} at {baseline.tok_s:.1f} tok/s"
    doubt = "" if winner.word == "faster" else f"; {winner.doubt}"
    return (
        f"{winner.configuration.label(wording.hide)} is the fastest: {winner.tok_s:.1f} tok/s, "
        f"{_times(winner)} {against}{doubt}."
    )


def _times(standing: Standing) -> str:
    interval = standing.speedup
    if math.isinf(interval.high):
        return f"{interval.mean:.2f} times (one run: no spread)"
    return f"{interval.mean:.2f} times (95% interval {interval.low:.2f} to {interval.high:.2f})"


def more(reading: Reading, wording: Wording) -> tuple[str, ...]:
    """What is to be said below the headline."""
    shared = (f"The same for all: {', '.join(wording.hide)}.",) if wording.hide else ()
    if reading.verdict.winner is None:
        return (*wording.failures, *shared)
    return (*wording.story[1:], *shared)


def banners(reading: Reading, wording: Wording) -> tuple[Banner, ...]:
    """Whether the run is made up, disturbed, not finished, or too quick to prove much."""
    found = [Banner("synthetic", "Synthetic.", line) for line in wording.synthetic]
    if wording.disturbed:
        text = "; ".join(wording.disturbed) + "."
        if reading.plan.allow_busy:
            text += " Busy ones may win all the same: the run was told to allow it."
        found.append(Banner("disturbed", "Disturbed.", text))
    if reading.unfinished:
        resume = f"browndwarf sweep --resume {shlex.quote(str(reading.view.directory))}"
        found.append(
            Banner(
                "unfinished",
                "Not finished.",
                f"Cells measured so far: {len(reading.measured)}. What stands here can change. "
                f"If it is not running now, it goes on with: {resume}",
            )
        )
    repeats = reading.plan.settings.repeats
    if repeats < LEAST_REPEATS:
        times = "once" if repeats == 1 else f"{repeats} times"
        text = f"Each cell was measured {times}; under {LEAST_REPEATS} repeats prove little."
        found.append(Banner("quick", "Quick.", text))
    return tuple(found)


def recipe(reading: Reading) -> Recipe:
    """The command of ``recipe.sh`` in the run directory, as it stands there."""
    winner = reading.verdict.winner
    make = f"browndwarf recipe {shlex.quote(str(reading.view.directory))}"
    try:
        text = (reading.view.directory / "recipe.sh").read_text("utf-8", errors="replace")
    except OSError:
        if winner is None:
            return Recipe("", "No configuration won, so there is no command.")
        return Recipe("", f"{make} tries the winning command out, and keeps it with the run.")
    label = _recipe_label(reading)
    if winner is not None and label in ("", winner.label):
        return Recipe(text)
    now = f"the run's winner is {winner.label} now" if winner else "the run has no winner now"
    return Recipe(text, f"This is for {label or 'an earlier state'}; {now}: {make}", stale=True)


def _recipe_label(reading: Reading) -> str:
    """Whose command the saved recipe is; "" where that cannot be told."""
    try:
        saved = msgspec.json.decode((reading.view.directory / "recipe.json").read_bytes())
        return str(saved["label"])
    except (OSError, msgspec.DecodeError, LookupError, TypeError):
        return ""


def measured_on(reading: Reading) -> str:
    """The day of the first cell, in UTC; "" without cells."""
    times = [c.started_unix for c in reading.cells if c.started_unix]
    return datetime.fromtimestamp(min(times), UTC).strftime("%Y-%m-%d") if times else ""
