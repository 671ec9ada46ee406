"""Standard output and error as the system gives them: closed, full, gone, or without a width.

Python's own answers to these are tracebacks, some of them printed after the last line of ours.
``prepare`` makes the streams usable, ``sending`` translates what a write meets, and ``finish``
sends what is still buffered, so that nothing is left to fail when the interpreter ends.

Example:
    prepare()
    with sending():
        sys.stdout.write("result")
    finish()
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO, cast

from browndwarf.files import storage_error


class ReaderGone(Exception):
    """Whoever read our output has closed it (``| head``): nothing is left to say to anybody."""


def prepare() -> None:
    """Replace closed streams by the null device, and forget a terminal width of 0.

    Without a stream at 0, 1 or 2, the next file that is opened gets its number, and children
    would write into it. Rich prints nothing at all into a width of 0.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdin is None:
        sys.stdin = _null("r")
    if sys.stdout is None:
        sys.stdout = _null("w")
    if sys.stderr is None:
        sys.stderr = _null("w")
    width = os.environ.get("COLUMNS", "")
    if width.isdigit() and int(width) == 0:
        del os.environ["COLUMNS"]


def _null(mode: str) -> TextIO:
    stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 (open to the end)
    return cast(TextIO, stream)


@contextlib.contextmanager
def sending() -> Iterator[None]:
    """Around a write to stdout or stderr.

    Raises:
        ReaderGone: the other end of the pipe is closed.
        DiskFull, StorageError: the file behind the stream refuses.
    """
    try:
        yield
    except BrokenPipeError as exc:
        raise ReaderGone from exc
    except OSError as exc:
        raise storage_error(exc, Path("standard output"), "write the output") from exc


def finish() -> None:
    """Send what is buffered for stdout; what cannot be sent is dropped.

    Raises:
        ReaderGone, DiskFull, StorageError: as ``sending``.
    """
    try:
        with sending():
            sys.stdout.flush()
    except BaseException:
        drop()
        raise


def drop() -> None:
    """Turn stdout to the null device, where the interpreter's last flush cannot fail."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
