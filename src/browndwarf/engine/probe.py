"""What a llama-server can do, read from its ``--version`` and ``--help``.

Boundary: runs the two commands under a time limit and parses their text; where a build lies
and which build to use is ``locate``'s business. Parsers are pure and never raise on odd text.
Results are cached on disk by the path, time and size of the server and its libraries.

Example:
    >>> text = "-m, --model FNAME     model path\\n--draft N    the argument has been removed"
    >>> sorted(parse_help(text).flags), sorted(parse_help(text).removed)
    (['--model', '-m'], ['--draft'])
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from browndwarf.engine import faults
from browndwarf.files import cache_folder

PROBE_TIMEOUT_S = 20.0

_FLAG = re.compile(r"--?[A-Za-z0-9][\w.-]*")
_COMMA = re.compile(r",\s*(?=-)")
_DEFAULT = re.compile(r"\(default: ([^\s,)]+)")
_NEW_VERSION = re.compile(r"version:\s*(\S+)\s*\(build\s+(\d+),\s*commit\s+(\w+)\)")
_OLD_VERSION = re.compile(r"version:\s*(\d+)\s*\((\w+)\)")
_ANY_VERSION = re.compile(r"version:\s*(\S+)")

# feature -> any of these flags proves it
_FLAG_FEATURES: dict[str, tuple[str, ...]] = {
    "spec-draft-n-max": ("--spec-draft-n-max",),
    "spec-synth-rates": ("--spec-synth-rates",),
    "spec-synth-len": ("--spec-synth-len",),
    "backend-sampling": ("--backend-sampling",),
    "draft-backend-sampling": ("--spec-draft-backend-sampling",),
    "draft-kv-types": ("--spec-draft-type-k", "--cache-type-k-draft", "-ctkd"),
    "fit": ("--fit", "-fit"),
    "kv-unified": ("--kv-unified", "-kvu"),
    "log-jsonl": ("--log-jsonl",),
    "metrics": ("--metrics",),
    "list-devices": ("--list-devices",),
    "load-mode": ("--load-mode",),
    "slot-save": ("--slot-save-path",),
    "jinja": ("--jinja",),
    "swa-full": ("--swa-full",),
    "context-shift": ("--context-shift",),
    "cache-ram": ("--cache-ram", "-cram"),
}


class HelpText(msgspec.Struct, frozen=True, kw_only=True):
    """``--help``, parsed; ``hints`` is each flag's argument placeholder, "" for a switch."""

    flags: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
    hints: dict[str, str] = {}
    texts: dict[str, str] = {}


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What one llama-server says of itself. ``defaults``: flag -> default in the help text."""

    version: str
    number: int | None
    sha: str
    flags: frozenset[str]
    removed: frozenset[str]
    hints: dict[str, str]
    choices: dict[str, tuple[str, ...]]
    defaults: dict[str, str]
    features: frozenset[str]
    spec_types: frozenset[str]
    env: dict[str, str]


class ProbeFailure(Exception):
    """The candidate does not answer; the text says why. Stays inside the engine floor."""


def parse_version(text: str) -> tuple[str, int | None, str]:
    """(version, build number, commit) from ``--version``; ("", None, "") if there is none."""
    if match := _NEW_VERSION.search(text):
        return match[1], int(match[2]), match[3]
    if match := _OLD_VERSION.search(text):
        return f"b{match[1]}", int(match[1]), match[2]
    if match := _ANY_VERSION.search(text):
        return match[1], None, ""
    return "", None, ""


def parse_help(text: str) -> HelpText:
    """Flags, removed flags, argument placeholders and descriptions from ``--help``.

    An entry starts with a flag at the left edge; indented lines continue it.
    """
    entries: list[tuple[list[str], str, list[str]]] = []
    for line in text.splitlines():
        names, rest = _leading_flags(line)
        if names:
            hint, _, description = (
                rest.strip().partition("  ") if rest[:2] != "  " else ("", "", rest)
            )
            entries.append((names, hint.strip(), [description.strip()]))
        elif entries and line[:1].isspace():
            entries[-1][2].append(line.strip())
    flags: set[str] = set()
    removed: set[str] = set()
    hints: dict[str, str] = {}
    texts: dict[str, str] = {}
    for names, hint, lines in entries:
        description = " ".join(part for part in lines if part)
        gone = "argument has been removed" in description
        (removed if gone else flags).update(names)
        for name in names:
            hints[name] = hint
            texts[name] = description
    return HelpText(
        flags=frozenset(flags - removed), removed=frozenset(removed), hints=hints, texts=texts
    )


def _leading_flags(line: str) -> tuple[list[str], str]:
    """The flags that open a line, and what follows them."""
    names: list[str] = []
    position = 0
    while match := _FLAG.match(line, position):
        names.append(match[0])
        position = match.end()
        comma = _COMMA.match(line, position)
        if comma is None:
            break
        position = comma.end()
    return names, line[position:]


def parse_choices(hint: str, description: str) -> tuple[str, ...]:
    """Values a flag accepts, from ``{a,b}``, ``[a|b]``, ``a,b,c`` or "allowed values: a, b"."""
    if match := re.search(r"allowed values:\s*([\w.,+\s-]+?)(?=\s*\(|$)", description):
        return tuple(part.strip() for part in match[1].split(",") if part.strip())
    bare = hint.strip("[]{}<>")
    if not re.search(r"[|,]", bare) or ".." in bare:
        return ()
    return tuple(part.strip() for part in re.split(r"[|,]", bare) if part.strip())


def features_of(help_: HelpText, spec_types: frozenset[str], number: int | None) -> frozenset[str]:
    """Feature names of a build; see the table in this module, plus four that are inferred."""
    found = {name for name, any_of in _FLAG_FEATURES.items() if help_.flags.intersection(any_of)}
    if spec_types & {"draft-mtp", "mtp"}:
        found.add("draft-mtp")
    if "trace" in help_.texts.get("--verbosity", ""):
        found.add("log-levels")
    floor = faults.number_floor(number, frozenset(found))
    if floor is not None and "draft-mtp" in found and floor >= faults.GEMMA4_MTP_NUMBER:
        found.add("gemma4-mtp")
    if "spec-synth-rates" in found:
        found.add("spec-metrics")  # per-position counters came earlier than synthetic rates
    return frozenset(found)


def build_probe(version_text: str, help_text: str, env: Mapping[str, str]) -> Probe:
    """A Probe from the two texts; pure.

    Raises:
        ProbeFailure: the help text is not a llama-server's.
    """
    version, number, sha = parse_version(version_text)
    help_ = parse_help(help_text)
    if not help_.flags & {"--model", "-m"} or "--port" not in help_.flags:
        raise ProbeFailure("its --help is not that of a llama-server")
    choices = {
        name: values
        for name in help_.flags
        if (values := parse_choices(help_.hints[name], help_.texts[name]))
    }
    spec_types = frozenset(choices.get("--spec-type", ()))
    return Probe(
        version=version,
        number=number,
        sha=sha,
        flags=help_.flags,
        removed=help_.removed,
        hints={name: help_.hints[name] for name in help_.flags},
        choices=choices,
        defaults={
            name: match[1] for name in help_.flags if (match := _DEFAULT.search(help_.texts[name]))
        },
        features=features_of(help_, spec_types, number),
        spec_types=spec_types,
        env=dict(env),
    )


def library_env(server: Path) -> dict[str, str] | None:
    """Search path for shared libraries that lie near the server; None where there are none."""
    if sys.platform == "win32":
        return None
    variable = "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"
    near = [server.parent, server.parent.parent / "lib", server.parent.parent]
    holding = [str(folder) for folder in near if any(folder.glob("lib*llama*"))]
    return {variable: os.pathsep.join(holding)} if holding else None


def run_probe(command: Sequence[str], *, server: Path | None = None) -> Probe:
    """Ask ``command`` (a llama-server, or docker running one) what it is.

    Args:
        command: argv without flags.
        server: the executable, when libraries beside it may be tried.

    Raises:
        ProbeFailure: it does not start, does not end in time, or is no llama-server.
    """
    env: dict[str, str] = {}
    try:
        version = _ask(command, "--version", env)
    except ProbeFailure:
        near = library_env(server) if server is not None else None
        if near is None:
            raise
        env = near
        version = _ask(command, "--version", env)
    return build_probe(version, _ask(command, "--help", env), env)


def _ask(command: Sequence[str], flag: str, env: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            [*command, flag],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROBE_TIMEOUT_S,
            env={**os.environ, **env},
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise ProbeFailure(f"{flag} did not answer within {PROBE_TIMEOUT_S:.0f} s") from exc
    except OSError as exc:
        raise ProbeFailure(f"it does not start: {exc.strerror or exc}") from exc
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode == -getattr(signal, "SIGILL", 4):
        raise ProbeFailure("illegal instruction: it was built for another processor")
    # Older builds end --help and --version with status 1, so text counts more than status.
    if done.returncode and "version:" not in text and "--model" not in text:
        last = text.strip().splitlines()[-1:] or ["no output"]
        raise ProbeFailure(f"{flag} ended with status {done.returncode}: {last[0][:200]}")
    return text


def cached_probe(server: Path, *, cache_dir: Path | None = None) -> Probe:
    """``run_probe`` of an executable, remembered until it or a library beside it changes.

    Raises:
        ProbeFailure: as ``run_probe``; failures are not remembered.
    """
    folder = cache_dir or cache_folder("probe")
    entry = folder / f"{_fingerprint(server)}.json"
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(entry.read_bytes(), type=Probe)
    probe = run_probe([str(server)], server=server)
    with contextlib.suppress(OSError):  # an unwritable cache costs time, nothing else
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(probe))
        Path(name).replace(entry)
    return probe


def _fingerprint(server: Path) -> str:
    """Changes with the server, the libraries near it, and the code that reads its answers."""
    digest = hashlib.sha256(str(server.absolute()).encode())
    for code in (__file__, faults.__file__):
        digest.update(Path(code).read_bytes())
    near = [
        path
        for folder in (server.parent, server.parent.parent / "lib")
        for pattern in ("*llama*", "*ggml*")
        for path in folder.glob(pattern)
    ]
    for path in sorted({server, *near}):
        with contextlib.suppress(OSError):
            stat = path.stat()
            digest.update(f"{path}:{stat.st_mtime_ns}:{stat.st_size}\n".encode())
    return digest.hexdigest()[:32]
