"""The one place that writes to the terminal: documents to stdout, everything else to stderr.

With ``--json`` stdout holds exactly one versioned JSON document and nothing else. Without it,
stdout holds the result that a user would pipe (a table, a command), and progress, notes and
errors go to stderr.

Example:
    >>> out = Output(json=True)
    >>> out.document("doctor", 1, {"findings": []})               # doctest: +SKIP
"""

from __future__ import annotations

import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

from browndwarf.errors import BrowndwarfError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class Output:
    """Where a command writes. ``json`` asks for one document instead of text."""

    def __init__(self, *, json: bool = False) -> None:
        self.json = json

    @cached_property
    def console(self) -> Console:
        """Notes and progress: stderr."""
        from rich.console import Console

        return Console(stderr=True, highlight=False)

    @cached_property
    def result(self) -> Console:
        """Results for people: stdout. Silent under ``--json``."""
        from rich.console import Console

        # A pipe has no width; 120 keeps tables whole instead of folding them at 80.
        width = None if sys.stdout.isatty() else 120
        return Console(highlight=False, quiet=self.json, width=width)

    def note(self, text: str) -> None:
        """One line of progress or advice, on stderr."""
        self.console.print(text, markup=False, soft_wrap=True)

    def text(self, text: str) -> None:
        """Text for a pipe, such as a command: no wrapping, no styling."""
        if not self.json:
            sys.stdout.write(text if text.endswith("\n") else text + "\n")
            sys.stdout.flush()

    def table(self, table: Table) -> None:
        """A table on stdout."""
        self.result.print(table)

    def document(self, kind: str, version: int, payload: dict[str, Any]) -> None:
        """The JSON document, when it was asked for."""
        if self.json:
            write_json(f"browndwarf/{kind}/{version}", payload)


def write_json(schema: str, payload: dict[str, Any]) -> None:
    """One JSON document on stdout."""
    import msgspec

    data = msgspec.json.encode({"schema": schema, **payload}, enc_hook=_encode_other)
    sys.stdout.write(msgspec.json.format(data, indent=2).decode() + "\n")
    sys.stdout.flush()


def show_error(error: BrowndwarfError, *, json: bool) -> None:
    """An error as text on stderr, and as a document on stdout under ``--json``."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    text = Text.assemble(("error: ", "bold red"), (error.what, "bold"))
    if error.why:
        text.append(f"\n  why:  {_indent(error.why)}")
    if error.fix:
        text.append(f"\n  next: {_indent(error.fix)}")
    console.print(text, soft_wrap=True)
    if json:
        body = {"kind": error.kind, "what": error.what, "why": error.why, "fix": error.fix}
        write_json("browndwarf/error/1", {"error": body, "exit_code": error.exit_code})


def _indent(text: str) -> str:
    return text.replace("\n", "\n        ")


def _encode_other(value: object) -> object:
    if hasattr(value, "__fspath__"):
        return str(value)
    raise TypeError(f"no JSON form for {type(value).__name__}")
