"""Why a llama.cpp process ended, read from how it ended and from what it logged.

Boundary: pure; takes an exit and a log, returns the matching error of the exception tree with
the log's own words as the reason. The patterns come from llama.cpp's and ggml's sources.

Example:
    >>> from browndwarf.engine.spawn import Exit
    >>> log = "E srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 80"
    >>> diagnose(Exit(code=1), log).kind
    'PortTaken'
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from browndwarf.engine.logparse import starts_draft, strip_prefix
from browndwarf.engine.spawn import Exit
from browndwarf.errors import (
    BadModelFile,
    EngineUnsupported,
    EnvironmentFault,
    ModelNotFound,
    ModelUnsupported,
    PortTaken,
    ServerCrashed,
    ServerKilled,
    ServerOutOfMemory,
)


@dataclass(frozen=True)
class _Rule:
    """A pattern in the log, the error it means, what happened and what to do."""

    pattern: re.Pattern[str]
    error: type[EnvironmentFault]
    what: str
    fix: str


def _rule(pattern: str, error: type[EnvironmentFault], what: str, fix: str) -> _Rule:
    return _Rule(re.compile(pattern, re.IGNORECASE), error, what, fix)


_OTHER_BUILD = "use a newer llama.cpp build (--llama-dir, or `browndwarf engine install`)"
_NEW_COPY = "download or convert the file again; `browndwarf inspect` says what is in it"
_SMALLER = (
    "use a smaller context, fewer slots, a smaller KV type or fewer layers on the device; "
    "`browndwarf plan` says what fits"
)

# Harmless lines that speak of failed allocations.
_NOT_OOM = re.compile(
    r"pinned memory|retrying|fallback|skipping reorder|prompt cache state|async uploads", re.I
)

# First match wins, so the more telling ones come first.
_RULES: tuple[_Rule, ...] = (
    _rule(
        r"couldn't bind|address already in use",
        PortTaken,
        "the port of llama-server is taken",
        "leave the port out, so that a free one is chosen",
    ),
    _rule(
        r"out of memory|outofmemory|out of device memory|outofdevicememory|outofhostmemory"
        r"|cudamalloc failed|hipmalloc failed|cublas_status_alloc_failed"
        r"|insufficient memory|cannot allocate memory|bad_alloc"
        r"|memory allocation of size \d+ failed"
        r"|failed to allocate (?:\S+ )?buffer|failed to allocate (?:compute|graph|memory)"
        r"|failed to allocate +[\d.]+ (?:MB|MiB|bytes)"
        r"|failed to allocate buffer for (?:kv|rs) cache"
        r"|unable to allocate \S+ buffer|failed to reserve memory",
        ServerOutOfMemory,
        "llama-server ran out of memory",
        _SMALLER,
    ),
    _rule(
        r"error: invalid argument: (\S+)",
        EngineUnsupported,
        "llama-server does not know a flag",
        "check the extra flags against `llama-server --help` of this build",
    ),
    _rule(
        r"error while handling argument|the argument has been removed",
        EngineUnsupported,
        "llama-server refused a flag or its value",
        "check the flag against `llama-server --help` of this build",
    ),
    _rule(
        r"unknown model architecture|unsupported model architecture|unknown (?:pre-)?tokenizer"
        r"|missing tensor|has wrong shape|wrong number of tensors"
        r"|invalid ggml type|key not found in model",
        ModelUnsupported,
        "this llama.cpp build cannot use the model",
        _OTHER_BUILD,
    ),
    _rule(
        r"doesn't contain MTP layers|failed to create MTP context",
        ModelUnsupported,
        "the file holds no MTP head that this llama.cpp build can use",
        "give the head's own file (--draft), a model with an embedded head, or a newer build",
    ),
    _rule(
        r"failed to open (?:GGUF file|.*\.gguf)|no such file or directory.*gguf",
        ModelNotFound,
        "llama-server cannot open the model file",
        "check the path and its permissions",
    ),
    _rule(
        r"not within the file bounds|corrupted or incomplete|invalid magic"
        r"|failed to read (?:key-value|tensor|header|magic|the)|gguf_init_from\S*: failed to read"
        r"|unexpectedly reached end of file",
        BadModelFile,
        "the model file is damaged or truncated",
        _NEW_COPY,
    ),
    _rule(
        r"error while loading shared libraries|library not loaded|symbol lookup error",
        EngineUnsupported,
        "llama-server lacks a library",
        "reinstall the build, or run `browndwarf engine install`",
    ),
    _rule(
        r"failed to load (?:draft )?model|error loading model",
        ModelUnsupported,
        "llama-server could not load the model",
        _OTHER_BUILD,
    ),
)

_FAULT_SIGNALS = {
    getattr(signal, name): words
    for name, words in {
        "SIGSEGV": "segmentation fault",
        "SIGABRT": "abort (a failed assertion)",
        "SIGBUS": "bus error (a file on disk may have shrunk)",
        "SIGFPE": "arithmetic error",
        "SIGILL": "illegal instruction (the build is for another processor)",
        "SIGTRAP": "trap",
        "SIGSYS": "forbidden system call",
    }.items()
    if hasattr(signal, name)
}
_OUTSIDE_SIGNALS = {
    getattr(signal, name)
    for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGXCPU")
    if hasattr(signal, name)
}


def diagnose(exit_: Exit, log: str, *, program: str = "llama-server") -> EnvironmentFault:
    """The error that tells why a process ended without being asked to.

    Args:
        exit_: how it ended.
        log: its output, or the end of it.
        program: its name in the text.
    """
    lines = [line for line in log.splitlines() if line.strip()]
    tail = relevant_lines(lines)
    if exit_.guard_lost:
        return ServerKilled(
            f"the guard process of {program} was killed",
            why="it was ended from outside, and llama.cpp was ended with it",
            fix="run the command again; what was finished is kept",
        )
    for rule in _RULES:
        hit = _first_hit(rule, lines)
        if hit is not None:
            return rule.error(
                rule.what.replace("llama-server", program)
                + (_which(rule, lines, hit) if program == "llama-server" else ""),
                why=_join(strip_prefix(lines[hit]), tail),
                fix=rule.fix,
            )
    if exit_.signal in _OUTSIDE_SIGNALS or _asked_from_outside(exit_, lines):
        name = signal.Signals(exit_.signal).name if exit_.signal else "a signal"
        memory = exit_.signal == getattr(signal, "SIGKILL", None)
        hint = " (the kernel does this when memory runs out)" if memory else ""
        return ServerKilled(
            f"{program} was ended from outside by {name}",
            why=_join(f"it did not end by itself{hint}", tail),
            fix="check the system log for the out-of-memory killer; then run again"
            if memory
            else "run the command again; what was finished is kept",
        )
    how = (
        f"died of {_signal_words(exit_.signal)}"
        if exit_.signal is not None
        else f"ended with status {exit_.code}"
    )
    return ServerCrashed(
        f"{program} {how}",
        why=_join("", tail),
        fix="try another llama.cpp build; the log holds the details for a report upstream",
    )


def out_of_memory_line(log: str) -> str | None:
    """The first line of a log that tells of a failed allocation; None if there is none."""
    rule = next(rule for rule in _RULES if rule.error is ServerOutOfMemory)
    lines = log.splitlines()
    hit = _first_hit(rule, lines)
    return strip_prefix(lines[hit]) if hit is not None else None


def relevant_lines(lines: list[str], limit: int = 4) -> list[str]:
    """The last lines that say something: errors if there are any, else the very last."""
    errors = [
        line
        for line in lines
        if re.search(r"(?:^|\d )E |\berror\b|GGML_ASSERT|\bfailed\b|terminate called", line)
        and "exiting due to" not in line
    ]
    return [strip_prefix(line)[:300] for line in (errors or lines)[-limit:]]


def _first_hit(rule: _Rule, lines: list[str]) -> int | None:
    for index, line in enumerate(lines):
        if rule.pattern.search(line) and not (
            rule.error is ServerOutOfMemory and _NOT_OOM.search(line)
        ):
            return index
    return None


def _which(rule: _Rule, lines: list[str], hit: int) -> str:
    """Says that the drafter is meant, where loading of the drafter had begun."""
    if issubclass(rule.error, BadModelFile | ModelNotFound | ModelUnsupported):
        drafter = any(starts_draft(line) for line in lines[:hit])
        return " (the drafter)" if drafter else " (the target)"
    return ""


def _asked_from_outside(exit_: Exit, lines: list[str]) -> bool:
    """A server that handles SIGTERM ends with status 0, as if all were well."""
    return exit_.code == 0 and any("cleaning up before exit" in line for line in lines[-20:])


def _signal_words(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    words = _FAULT_SIGNALS.get(number)
    return f"{name}, {words}" if words else name


def _join(first: str, tail: list[str]) -> str:
    rest = [line for line in tail if line != first]
    return "\n     ".join(part for part in [first, *rest] if part)
