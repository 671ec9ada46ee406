"""Bytes, token counts, durations: parse what people write, format what they read.

Memory is binary throughout (1 MiB = 2**20 bytes), because devices and llama.cpp count so.
``8GB`` is accepted and read as 8 GiB: a card sold as "8 GB" holds 8 GiB.

Example:
    >>> parse_bytes("7.5GiB") == int(7.5 * GIB)
    True
    >>> parse_count("16k"), format_bytes(1536 * MIB), format_duration(75)
    (16384, '1.50 GiB', '1m 15s')
"""

from __future__ import annotations

import math
import re

from browndwarf.errors import UsageError

KIB = 2**10
MIB = 2**20
GIB = 2**30

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*$", re.IGNORECASE)
_FACTOR = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 2**40}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str, *, default_unit: str = "") -> int:
    """Bytes from ``8GiB``, ``7900M`` or ``512``; a bare number takes ``default_unit``.

    Raises:
        UsageError: the text is no size.
    """
    match = _SIZE.match(text)
    if match is None:
        raise UsageError(
            f"{text!r} is not a size",
            why="a size is a number and a unit",
            fix="write it like 8GiB, 7900MiB or 512MiB",
        )
    number, unit, suffix = match.groups()
    factor = _FACTOR[(unit or ("" if suffix else default_unit)).lower()]
    return int(float(number) * factor)


def parse_count(text: str) -> int:
    """A token count from ``4096``, ``4k`` or ``1m``; ``k`` is 1024, as context sizes are."""
    match = re.fullmatch(r"\s*(\d+)\s*([km]?)\s*", text, re.IGNORECASE)
    if match is None:
        raise UsageError(
            f"{text!r} is not a count", why="a count is a whole number", fix="write 4096 or 4k"
        )
    return int(match[1]) * _FACTOR[match[2].lower()]


def parse_duration(text: str) -> float:
    """Seconds from ``90``, ``10m``, ``1h30m`` or ``250ms``."""
    bare = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*", text)
    if bare:
        return float(bare[1])
    compact = text.strip().lower().replace(" ", "")
    parts = _DURATION.findall(compact)
    if not parts or "".join(n + u for n, u in parts) != compact:
        raise UsageError(
            f"{text!r} is not a duration",
            why="a duration is numbers with units",
            fix="write 90s, 10m or 1h30m",
        )
    return sum(float(n) * _SECONDS[u] for n, u in parts)


def parse_share(text: str) -> float:
    """A share from 0 to 1: ``2%`` or ``0.02``.

    Raises:
        UsageError: it is no number, or lies outside.
    """
    stripped = text.strip()
    try:
        value = float(stripped.removesuffix("%")) / (100 if stripped.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise UsageError(f"{text} is no share", fix="write e.g. 2%, or 0.02")
    return value


def mib(n_bytes: float) -> float:
    """Bytes as MiB."""
    return n_bytes / MIB


def format_bytes(n_bytes: float) -> str:
    """Three significant figures or so: ``812 B``, ``58.5 MiB``, ``6.18 GiB``."""
    size = abs(n_bytes)
    for limit, unit, digits in ((KIB, "B", 0), (MIB, "KiB", 1), (GIB, "MiB", 1)):
        if size < limit:
            scale = {"B": 1, "KiB": KIB, "MiB": MIB}[unit]
            return f"{n_bytes / scale:.{digits}f} {unit}"
    return f"{n_bytes / GIB:.2f} GiB"


def format_duration(seconds: float) -> str:
    """``0.25s``, ``42s``, ``1m 15s``, ``2h 03m``."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 10:
        return f"{seconds:.2g}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
