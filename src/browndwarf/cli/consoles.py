"""Rich's consoles, with our errors: what a stream refuses is raised, not swallowed or ended on."""

from __future__ import annotations

from typing import Any, NoReturn

from rich.console import Console

from browndwarf.cli.streams import ReaderGone, sending


class CheckedConsole(Console):
    """A console that raises ``ReaderGone`` or ``StorageError`` where a write fails."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's.

        Raises:
            ReaderGone, DiskFull, StorageError: as ``streams.sending``.
        """
        with sending():
            super().print(*objects, **options)

    def on_broken_pipe(self) -> NoReturn:
        """Rich would end the process with 1."""
        raise ReaderGone
