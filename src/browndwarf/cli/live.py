"""The sweep as it happens: a live table with an estimate on a terminal, plain lines elsewhere.

Everything goes to stderr. The table keeps the last rows that fit; the whole story is printed
at the end by ``tables``.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from browndwarf.engine.process import LoadProgress
from browndwarf.records import CellRecord
from browndwarf.sweep.events import Again, CellDone, Event, Finished, Measuring, Started
from browndwarf.sweep.space import Configuration
from browndwarf.units import format_bytes, format_duration

ROWS = 14


class LiveSweep:
    """A listener for ``run_sweep``. Use as a context manager around the sweep."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: list[CellRecord] = []
        self._base: dict[tuple[str, str], float] = {}
        self._now = ""
        self._said = ""
        self._done = self._total = 0
        self._eta = float("inf")
        self._eta_at = time.monotonic()
        self._live = Live(
            get_renderable=self._render, console=console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def note(self, text: str) -> None:
        """A line above the table, such as a file being made."""
        self._console.print(text, markup=False, soft_wrap=True)

    def waiting(self, text: str) -> None:
        """Why nothing is measured at the moment."""
        if self._console.is_terminal:
            self._now = text
        elif text[:16] != self._said[:16]:
            self.note(text)
        self._said = text

    def loading(self, progress: LoadProgress) -> None:
        """How far the start of a server has come; only slow ones are worth a word."""
        if progress.elapsed_s < 2:
            return
        share = "" if progress.share is None else f" {progress.share:.0%}"
        resident = format_bytes(progress.rss_bytes)
        self.waiting(f"{progress.phase}{share}, {resident} resident")

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self._done, self._total = event.done, event.total
            again = f", {event.done} already there" if event.done else ""
            self.note(f"{event.total} cells to measure{again}")
        elif isinstance(event, Measuring):
            self._now = event.job.configuration.label()
            self._said = ""
        elif isinstance(event, CellDone):
            self._cell(event)
        elif isinstance(event, Again):
            self.note(f"the machine was slow during {event.cells} cells: they are measured again")
        elif isinstance(event, Finished):
            self._now = ""

    def _cell(self, event: CellDone) -> None:
        cell = event.cell
        self._done, self._total = event.done, event.total
        self._eta, self._eta_at = event.eta_s, time.monotonic()
        if cell.role == "baseline" and cell.decode_tok_s is not None:
            self._base[cell.group, cell.workload] = cell.decode_tok_s.mean
        self._rows.append(cell)
        if not self._console.is_terminal:
            left = format_duration(event.eta_s)
            self.note(f"[{event.done}/{event.total}, {left} left] {self._line(cell)}")

    def _line(self, cell: CellRecord) -> str:
        columns = self._columns(cell)
        return f"{columns[0]:<34} {columns[1]:<8} {columns[2]:>14} {columns[3]:>7} {columns[4]}"

    def _columns(self, cell: CellRecord) -> tuple[str, str, str, str, str]:
        name = msgspec.convert(cell.options, Configuration).label()
        if cell.role not in ("baseline", "mtp"):
            name += " (again)" if cell.role == "baseline-again" else " (confirm)"
        if cell.decode_tok_s is None:
            reason = (cell.error or {}).get("what", "")
            return name, cell.workload, cell.status, "", reason
        base = self._base.get((cell.group, cell.workload))
        ratio = f"{cell.decode_tok_s.mean / base:.2f}x" if base else ""
        notes = []
        if cell.acceptance is not None:
            notes.append(f"{cell.acceptance.rate:.0%} accepted")
        notes += cell.marks
        rate = f"{cell.decode_tok_s.mean:.1f} tok/s"
        return name, cell.workload, rate, ratio, ", ".join(notes)

    def _render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False)
        for title in ("configuration", "workload", "decode", "vs no MTP", ""):
            table.add_column(title, no_wrap=True)
        for cell in self._rows[-ROWS:]:
            table.add_row(*self._columns(cell))
        eta = max(0.0, self._eta - (time.monotonic() - self._eta_at))
        status = Text(
            f"{self._done}/{self._total}  about {format_duration(eta)} left  {self._now}",
            overflow="ellipsis",
            no_wrap=True,
        )
        bar = ProgressBar(total=max(self._total, 1), completed=self._done, width=40)
        return Group(table, bar, status)
