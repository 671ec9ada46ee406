"""Facts in a llama-server log: buffers, offloaded layers, acceptance, phase of loading.

Boundary: text in, values out; never raises on odd lines. Why a server ended is read from the
log by ``diagnose``.

Example:
    >>> parse_log("load_tensors:   CPU_Mapped model buffer size =    17.50 MiB").buffers[0].mib
    17.5
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

_PREFIX = re.compile(r"^(?:\d+\.\d\d\.\d{3}\.\d{3} )?([DITWE]) ")
_BUFFER = re.compile(r"(\S+)\s+(model|KV|RS|compute|output) buffer size\s*=\s*([\d.]+) MiB")
_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
_ACCEPTANCE = re.compile(
    r"draft acceptance(?: rate)? = *([\d.]+) *\( *(\d+) accepted / *(\d+) generated\)"
    r"(?:, mean len = *([\d.]+))?"
)
_PER_POSITION = re.compile(r"acc per pos = \(([\d., ]+)\)")


@dataclass(frozen=True)
class BufferLine:
    """One buffer as logged: ``mib`` on ``device``; ``context`` is the target's or the drafter's."""

    device: str
    kind: Literal["model", "KV", "RS", "compute", "output"]
    mib: float
    context: Literal["target", "draft"]


@dataclass(frozen=True)
class AcceptanceLine:
    """One request's acceptance as logged; ``per_position`` is empty below verbosity 4."""

    rate: float
    accepted: int
    generated: int
    mean_length: float | None
    per_position: tuple[float, ...] = ()


@dataclass(frozen=True)
class LogFacts:
    """All facts of a log so far. ``offloaded`` is (layers on the device, layers in all)."""

    buffers: tuple[BufferLine, ...] = ()
    offloaded: tuple[int, int] | None = None
    draft_offloaded: tuple[int, int] | None = None
    acceptance: tuple[AcceptanceLine, ...] = ()
    warnings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()

    def total_mib(
        self,
        kind: str | None = None,
        context: str | None = None,
        device: str | None = None,
    ) -> float:
        """Sum of the buffers that match."""
        return sum(
            b.mib
            for b in self.buffers
            if kind in (None, b.kind)
            and context in (None, b.context)
            and device in (None, b.device)
        )


def parse_log(text: str) -> LogFacts:
    """Every fact in a log.

    A buffer counts as the drafter's from the line on that announces the draft model or the
    MTP context.
    """
    buffers: list[BufferLine] = []
    offloaded: dict[str, tuple[int, int]] = {}
    acceptance: list[AcceptanceLine] = []
    warnings: list[str] = []
    errors: list[str] = []
    context: Literal["target", "draft"] = "target"
    for line in text.splitlines():
        if starts_draft(line):
            context = "draft"
        if "sched_reserve: reserving" in line:  # replaces what was reserved before
            buffers = [b for b in buffers if b.kind != "compute" or b.context != context]
        level = _PREFIX.match(line)
        if level is not None and level[1] == "W":
            warnings.append(line[level.end() :].strip())
        elif level is not None and level[1] == "E":
            errors.append(line[level.end() :].strip())
        if match := _BUFFER.search(line):
            buffers.append(BufferLine(match[1], _kind(match[2]), float(match[3]), context))
        elif match := _OFFLOADED.search(line):
            offloaded[context] = (int(match[1]), int(match[2]))
        elif match := _ACCEPTANCE.search(line):
            mean = float(match[4]) if match[4] else None
            acceptance.append(AcceptanceLine(float(match[1]), int(match[2]), int(match[3]), mean))
        elif (match := _PER_POSITION.search(line)) and acceptance:
            last = acceptance[-1]
            acceptance[-1] = AcceptanceLine(
                last.rate, last.accepted, last.generated, last.mean_length, _numbers(match[1])
            )
    return LogFacts(
        buffers=tuple(buffers),
        offloaded=offloaded.get("target"),
        draft_offloaded=offloaded.get("draft"),
        acceptance=tuple(acceptance),
        warnings=tuple(warnings),
        errors=tuple(errors),
    )


def starts_draft(line: str) -> bool:
    """Whether loading of the drafter begins with this line."""
    return "loading draft model" in line or "creating MTP draft context" in line


def strip_prefix(line: str) -> str:
    """A log line without time and level."""
    match = _PREFIX.match(line)
    return (line[match.end() :] if match else line).strip()


def phase_of(lines: Iterable[str], before: str = "starting") -> str:
    """How far loading has come: starting, loading model, loading drafter, warming up, ready."""
    phase = before
    for line in lines:
        if starts_draft(line):
            phase = "loading drafter"
        elif "loading model" in line and phase == "starting":
            phase = "loading model"
        elif "warming up" in line:
            phase = "warming up"
        elif "model loaded" in line or "server is listening" in line:
            phase = "ready"
    return phase


def dots_share(text: str) -> float | None:
    """Share loaded, from the row of up to 100 dots that some builds print; None without one."""
    rows = re.findall(r"^\.{1,}\s*$", text, re.MULTILINE)
    return min(1.0, len(rows[-1].strip()) / 100) if rows else None


def _numbers(text: str) -> tuple[float, ...]:
    values: list[float] = []
    for part in text.split(","):
        try:
            values.append(float(part))
        except ValueError:
            continue
    return tuple(values)


def _kind(text: str) -> Literal["model", "KV", "RS", "compute", "output"]:
    kinds: tuple[Literal["model", "KV", "RS", "compute", "output"], ...] = (
        "model",
        "KV",
        "RS",
        "compute",
        "output",
    )
    return next(kind for kind in kinds if kind == text)
