"""Find llama.cpp builds, say what they can do, and choose one.

Boundary: looks at the file system, at ``docker`` when told, and at each build's own answers;
starts no server. Order: ``--llama-dir`` or ``--docker`` (then nothing else is searched),
``LLAMA_CPP_DIR``, ``PATH``, the build inside this Python environment.

Example:
    >>> build = choose_build(find_builds(), need=frozenset({"draft-mtp"}))  # doctest: +SKIP
    >>> build.source, build.sha  # doctest: +SKIP
    ('embedded', '0c1e570')
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from browndwarf.engine import docker as docker_
from browndwarf.engine import faults, probe
from browndwarf.engine.faults import Fault
from browndwarf.engine.probe import Probe, ProbeFailure
from browndwarf.errors import EngineNotFound, EngineUnsupported

INSTALL_HINT = (
    "run `browndwarf engine install`, or point --llama-dir (or LLAMA_CPP_DIR) at a llama.cpp build"
)
_UNSET_HINT = "correct LLAMA_CPP_DIR or unset it; `browndwarf doctor` lists what else is here"

TOOL_NAMES = (
    "llama-server",
    "llama-quantize",
    "llama-imatrix",
    "llama-perplexity",
    "llama-bench",
    "llama-batched-bench",
    "llama-tokenize",
    "llama-cli",
    "llama-fit-params",
    "llama-gguf-split",
)

_NAMED = ("--llama-dir", "LLAMA_CPP_DIR", "docker")
"""Places that the user named: nothing usable there is an error, not a reason to look further."""

_FEATURE_WORDS = {
    "draft-mtp": "MTP speculative decoding (draft-mtp)",
    "gemma4-mtp": "Gemma 4 MTP heads (gemma4-assistant)",
    "spec-synth-rates": "synthetic acceptance (--spec-synth-rates)",
    "backend-sampling": "sampling on the device (--backend-sampling)",
}


@dataclass(frozen=True)
class Build:
    """One usable llama.cpp build. ``env`` must be added to the environment of its programs."""

    server: Path
    tools: dict[str, Path] = field(hash=False)
    version: str
    number: int | None
    sha: str
    flags: frozenset[str]
    removed: frozenset[str]
    features: frozenset[str]
    spec_types: frozenset[str]
    faults: tuple[Fault, ...]
    source: str
    env: dict[str, str] = field(default_factory=dict, hash=False)
    docker_image: str | None = None
    hints: dict[str, str] = field(default_factory=dict, hash=False)
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    @property
    def label(self) -> str:
        """Short name for people: version, commit and place."""
        place = self.docker_image or str(self.server)
        return f"llama.cpp {self.version or '?'} ({self.sha or 'commit unknown'}) at {place}"

    @property
    def refusals(self) -> tuple[Fault, ...]:
        """Faults that forbid speculative work with this build."""
        return tuple(fault for fault in self.faults if fault.severity == "refuse")

    def as_record(self) -> dict[str, Any]:
        """What a saved record keeps of the engine: JSON-ready, without the flag tables."""
        return {
            "path": str(self.server),
            "version": self.version,
            "number": self.number,
            "sha": self.sha,
            "source": self.source,
            "docker_image": self.docker_image,
            "features": sorted(self.features),
            "spec_types": sorted(self.spec_types),
            "faults": [fault.id for fault in self.faults],
            "tools": sorted(self.tools),
        }


@dataclass(frozen=True)
class Candidate:
    """A place where a build may lie: either ``build``, or the ``reason`` why there is none."""

    path: str
    source: str
    build: Build | None = None
    reason: str = ""


def find_candidates(
    llama_dir: Path | None = None,
    docker: str | None = None,
    *,
    cache_dir: Path | None = None,
) -> list[Candidate]:
    """Every place searched, in order of priority, with its build or the reason for none.

    Never raises for a bad build; the ``doctor`` command shows the list as it is.
    """
    if docker is not None:
        return [_docker_candidate(docker)]
    found: list[Candidate] = []
    seen: set[Path] = set()
    for source, folder in _places(llama_dir):
        server = server_in(folder)
        if server is None:
            if source in _NAMED:
                found.append(Candidate(str(folder), source, reason=_why_empty(folder)))
            continue
        real = server.resolve()
        if real in seen:
            continue
        seen.add(real)
        try:
            found.append(Candidate(str(server), source, build=build_at(server, source, cache_dir)))
        except ProbeFailure as exc:
            found.append(Candidate(str(server), source, reason=str(exc)))
    return found


def find_builds(
    llama_dir: Path | None = None,
    docker: str | None = None,
    *,
    cache_dir: Path | None = None,
) -> list[Build]:
    """All usable builds in order of priority; empty when none is found.

    Raises:
        EngineNotFound: the place that the user named, by option or variable, holds no usable build.
    """
    candidates = find_candidates(llama_dir, docker, cache_dir=cache_dir)
    builds = [candidate.build for candidate in candidates if candidate.build is not None]
    first = candidates[0] if candidates else None
    if first is not None and first.build is None and first.source in _NAMED:
        raise EngineNotFound(
            f"no usable llama.cpp at {first.path} ({first.source})",
            why=first.reason,
            fix=_UNSET_HINT if first.source == "LLAMA_CPP_DIR" else INSTALL_HINT,
        )
    return builds


def choose_build(
    builds: Sequence[Build],
    need: frozenset[str] = frozenset({"draft-mtp"}),
    override_faults: bool = False,
) -> Build:
    """The first build that has every needed feature and no fault that refuses it.

    Raises:
        EngineNotFound: there are no builds at all.
        EngineUnsupported: none fits; the text says for each build what is wrong.
    """
    if not builds:
        raise EngineNotFound(
            "no llama.cpp build was found",
            why="searched --llama-dir, LLAMA_CPP_DIR, PATH and this Python environment",
            fix=INSTALL_HINT,
        )
    reasons: list[str] = []
    fixes: list[str] = []
    for build in builds:
        missing = sorted(need - build.features)
        refusals = () if override_faults else build.refusals
        if not missing and not refusals:
            return build
        words = [f"lacks {_FEATURE_WORDS.get(name, name)}" for name in missing]
        words += [fault.what for fault in refusals]
        fixes += [fault.fix for fault in refusals if fault.fix not in fixes]
        reasons.append(f"{build.label}: {'; '.join(words)}")
    raise EngineUnsupported(
        "no llama.cpp build here fits",
        why="\n     ".join(reasons),
        fix="; ".join([*fixes, INSTALL_HINT]),
    )


def server_in(folder: Path) -> Path | None:
    """llama-server below a folder: flat release, ``bin/``, ``build/bin/``; or the file itself."""
    names = ("llama-server.exe", "llama-server")
    if folder.is_file():
        return folder if folder.name in names else None
    for below in ("", "bin", "build/bin", "build/bin/Release", "llama.cpp/build/bin"):
        for name in names:
            path = folder / below / name
            if path.is_file():
                return path
    return None


def build_from_probe(
    server: Path,
    answers: Probe,
    *,
    source: str,
    tools: dict[str, Path] | None = None,
    docker_image: str | None = None,
) -> Build:
    """A Build from what a server said of itself, with its known faults."""
    return Build(
        server=server,
        tools={"llama-server": server} if tools is None else tools,
        version=answers.version,
        number=answers.number,
        sha=answers.sha,
        flags=answers.flags,
        removed=answers.removed,
        features=answers.features,
        spec_types=answers.spec_types,
        faults=faults.known_faults(
            answers.number, answers.features, answers.spec_types, answers.defaults
        ),
        source=source,
        env=answers.env,
        docker_image=docker_image,
        hints=answers.hints,
        choices=answers.choices,
    )


def build_at(server: Path, source: str, cache_dir: Path | None = None) -> Build:
    """The build around one llama-server.

    Raises:
        ProbeFailure: it cannot be run or does not answer like one.
    """
    server = server.absolute()
    if not os.access(server, os.X_OK):
        raise ProbeFailure("it may not be executed (chmod +x)")
    answers = probe.cached_probe(server, cache_dir=cache_dir)
    tools = {
        name: path
        for name in TOOL_NAMES
        for path in [server.with_name(name + server.suffix)]
        if path.is_file()
    }
    return build_from_probe(server, answers, source=source, tools=tools)


def _docker_candidate(image: str) -> Candidate:
    client = shutil.which("docker")
    if client is None:
        return Candidate(image, "docker", reason="there is no `docker` command on PATH")
    try:
        answers = probe.run_probe(docker_.probe_command(image))
    except ProbeFailure as exc:
        return Candidate(image, "docker", reason=str(exc))
    build = build_from_probe(
        docker_.SERVER_IN_IMAGE,
        answers,
        source="docker",
        tools={name: docker_.SERVER_IN_IMAGE.with_name(name) for name in TOOL_NAMES},
        docker_image=image,
    )
    return Candidate(image, "docker", build=build)


def _places(llama_dir: Path | None) -> Iterator[tuple[str, Path]]:
    if llama_dir is not None:
        yield "--llama-dir", llama_dir.expanduser()
        return
    if value := os.environ.get("LLAMA_CPP_DIR"):
        yield "LLAMA_CPP_DIR", Path(value).expanduser()
    which: Callable[[str], str | None] = shutil.which
    if path := which("llama-server"):
        yield "PATH", Path(path)
    for folder in dict.fromkeys(sysconfig.get_paths()[key] for key in ("platlib", "purelib")):
        yield "embedded", Path(folder)


def _why_empty(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder"
    wanted = "llama-server.exe" if sys.platform == "win32" else "llama-server"
    return f"no {wanted} in it, in its bin/ or in its build/bin/"
