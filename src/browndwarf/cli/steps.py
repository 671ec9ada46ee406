"""How far a long job has come: a bar on a terminal, a few plain lines elsewhere; all on stderr.

Example:
    with Steps(out, "quantizing") as steps:
        steps.at(3, 281)
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from browndwarf.cli.render import Output

LINE_EVERY_S = 10.0


class Steps:
    """Use as a context manager around the job. ``what`` completes "is ..."."""

    def __init__(self, out: Output, what: str) -> None:
        self._out = out
        self._what = what
        self._said = time.monotonic()
        self._live = out.console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=out.console,
            transient=True,
        )
        self._task = self._bar.add_task(what, total=None, note="")

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()

    def at(self, done: int, total: int, note: str = "") -> None:
        """``done`` of ``total`` are finished."""
        self._bar.update(self._task, completed=done, total=total, note=note)
        now = time.monotonic()
        if not self._live and now - self._said >= LINE_EVERY_S:
            self._said = now
            self._out.note(f"{self._what}: {done} of {total}" + (f", {note}" if note else ""))
