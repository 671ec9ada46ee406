"""The one place that writes to the terminal: documents to stdout, everything else to stderr.

With ``--json`` stdout holds exactly one versioned JSON document and nothing else. Without it,
stdout holds the result that a user would pipe (a table, a command), and progress, notes and
errors go to stderr.

Example:
    >>> out = Output(json=True)
    >>> out.document("doctor", 1, {"findings": []})               # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

from browndwarf.cli.streams import ReaderGone, sending
from browndwarf.errors import BrowndwarfError, StorageError

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
        from browndwarf.cli.consoles import CheckedConsole

        return CheckedConsole(stderr=True, highlight=False)

    @cached_property
    def result(self) -> Console:
        """Results for people: stdout. Silent under ``--json``."""
        from browndwarf.cli.consoles import CheckedConsole

        # A pipe has no width; 120 keeps tables whole instead of folding them at 80.
        width = None if sys.stdout.isatty() else 120
        return CheckedConsole(highlight=False, quiet=self.json, width=width)

    def note(self, text: str) -> None:
        """One line of progress or advice, on stderr."""
        self.console.print(text, markup=False, soft_wrap=True)

    def text(self, text: str) -> None:
        """Text for a pipe, such as a command: no wrapping, no styling."""
        if not self.json:
            _send(text if text.endswith("\n") else text + "\n")

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
    _send(msgspec.json.format(data, indent=2).decode() + "\n")


def show_error(error: BrowndwarfError, *, json: bool) -> None:
    """An error as text on stderr, and as a document on stdout under ``--json``."""
    from rich.text import Text

    from browndwarf.cli.consoles import CheckedConsole

    console = CheckedConsole(stderr=True, highlight=False)
    text = Text.assemble(("error: ", "bold red"), (error.what, "bold"))
    if error.why:
        text.append(f"\n  why:  {_indent(error.why)}")
    if error.fix:
        text.append(f"\n  next: {_indent(error.fix)}")
    with contextlib.suppress(ReaderGone, StorageError):  # the document and the code say it too
        console.print(text, soft_wrap=True)
    if json:
        error_document(error)


def error_document(error: BrowndwarfError) -> None:
    """An error as the JSON document of a command that ends with it."""
    body = {"kind": error.kind, "what": error.what, "why": error.why, "fix": error.fix}
    write_json("browndwarf/error/1", {"error": body, "exit_code": error.exit_code})


def _send(text: str) -> None:
    with sending():
        sys.stdout.write(text)
        sys.stdout.flush()


def _indent(text: str) -> str:
    return text.replace("\n", "\n        ")


def _encode_other(value: object) -> object:
    if hasattr(value, "__fspath__"):
        return str(value)
    raise TypeError(f"no JSON form for {type(value).__name__}")
