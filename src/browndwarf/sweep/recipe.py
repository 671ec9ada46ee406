"""From a finished run to the command that a user pastes: header, command, what was checked.

The boundary: this composes text from records; the spelling of the command itself comes from
the engine floor, and the smoke test has been run before.

Example:
    >>> print(recipe.text("sh"))                                   # doctest: +SKIP
    # browndwarf: Gemma 4 12B with MTP, 1.46x (1.43 to 1.49) ...
    llama-server -m target.gguf -md head.gguf --spec-type draft-mtp ...
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Literal

from browndwarf.errors import CheckFailed
from browndwarf.records import Record
from browndwarf.sweep.analysis import Standing, Verdict
from browndwarf.sweep.smoke import Smoke

Format = Literal["sh", "powershell", "json"]


class Recipe(Record, frozen=True, kw_only=True):
    """The winning command with its evidence. ``commands`` holds one spelling per shell."""

    label: str
    commands: dict[str, str]
    argv: tuple[str, ...]
    decode_tok_s: float
    speedup: tuple[float, float, float]
    verdict: str
    by_workload: dict[str, tuple[float, float, float]]
    engine: str
    machine: str
    run: str
    measured: str
    synthetic: bool
    smoke: Smoke | None
    lossless: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def header(self) -> list[str]:
        """What the command rests on, one statement a line, without comment signs."""
        mean, low, high = self.speedup
        if self.verdict == "baseline":
            gain = "the plain server: no MTP setting was shown to be faster"
        else:
            known = f"95% interval {low:.2f} to {high:.2f}"
            spread = known if math.isfinite(high) else "one run: no spread"
            gain = f"{mean:.2f}x the same server without MTP ({spread})"
        lines = [
            f"browndwarf recipe: {self.label}",
            f"{self.decode_tok_s:.1f} tok/s decode; {gain}",
        ]
        if self.synthetic:
            lines.insert(1, "SYNTHETIC: acceptance was given, not measured; the text is not valid")
        lines += [
            f"  on {name}: {m:.2f}x" + (f" ({lo:.2f} to {hi:.2f})" if math.isfinite(hi) else "")
            for name, (m, lo, hi) in self.by_workload.items()
            if self.verdict != "baseline" and len(self.by_workload) > 1
        ]
        lines += [
            f"measured {self.measured} on {self.machine}",
            f"engine: llama.cpp {self.engine}; run: {self.run}",
            f"checked: {self._checked()}",
        ]
        if self.verdict == "inconclusive":
            _, low, high = self.speedup
            doubt = "includes 1.00x" if low <= 1.0 <= high else "is too wide to mean much"
            lines.append(f"warning: the interval {doubt}: faster is not proven")
        return lines + [f"warning: {text}" for text in self.warnings]

    def _checked(self) -> str:
        done, missing = [], ["quality"]
        if self.smoke is None:
            missing.insert(0, "the command itself (smoke test skipped)")
        else:
            done.append(self._smoked(self.smoke))
        if self.lossless is not None:
            done.append(self.lossless)
        elif self.verdict != "baseline":
            missing.append("losslessness (--gate)")
        return f"{', '.join(done) or 'nothing'}; not checked: {', '.join(missing)}"

    def _smoked(self, smoke: Smoke) -> str:
        drafts = ""
        if smoke.drafted:
            drafts = f", {smoke.accepted} of {smoke.drafted} draft tokens accepted"
        same = "same answer before and after" if smoke.same_answer else "answers agree at first"
        return (
            f"this very command served a short, a long ({smoke.long_prompt_tokens} tokens) "
            f"and a short prompt{drafts}, {same}"
        )

    def text(self, shell: Literal["sh", "powershell"], *, command_prefix: str = "") -> str:
        """The header as comments, and the command; both shells comment with ``#``.

        ``command_prefix`` is ``exec `` in a script, so that stopping it stops the server.
        """
        command = command_prefix + self.commands[shell]
        return "\n".join([*(f"# {line}" for line in self.header), command, ""])


def choose(verdict: Verdict, *, run: str) -> Standing:
    """The standing that a recipe is for.

    Raises:
        CheckFailed: no cell may win.
    """
    if verdict.winner is None:
        raise CheckFailed(
            f"{run} has no winner",
            why="no configuration was measured on all workloads without a disqualifying mark",
            fix="look at cells.csv for errors and marks; go on with `browndwarf sweep --resume`",
        )
    return verdict.winner


def _date(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M UTC")


def compose(
    standing: Standing,
    verdict: Verdict,
    *,
    commands: dict[str, str],
    argv: list[str],
    engine: str,
    machine: str,
    run: str,
    synthetic: bool,
    smoke: Smoke | None,
    lossless: str | None = None,
) -> Recipe:
    """The recipe of a standing; warnings come from the run's drift and marks."""
    warnings = [
        f"the no-MTP baseline drifted by {worst:+.0%} during the run ({d.group})"
        for d in verdict.drifts
        if d.group == standing.group and d.beyond_noise
        for worst in [max((x.change for x in d.by_workload.values()), key=abs)]
    ]
    marks = sorted({mark for cell in standing.cells for mark in cell.marks} - {"drift"})
    warnings += [f"cells of this configuration are marked {mark}" for mark in marks]
    return Recipe(
        label=standing.label,
        commands=commands,
        argv=tuple(argv),
        decode_tok_s=standing.tok_s,
        speedup=(standing.speedup.mean, standing.speedup.low, standing.speedup.high),
        verdict=standing.word,
        by_workload={
            name: (i.mean, i.low, i.high) for name, i in sorted(standing.by_workload.items())
        },
        engine=engine,
        machine=machine,
        run=run,
        measured=_date(max(cell.started_unix for cell in standing.cells)),
        synthetic=synthetic,
        smoke=smoke,
        lossless=lossless,
        warnings=tuple(warnings),
    )
