"""Compile llama.cpp, its server and its tools into this Python environment.

Boundary: drives pip (or uv) and checks the result; nothing is downloaded but the pinned
package and its build dependencies. One source package gives the server, the tools and the
library that ``native`` loads, all of one commit. A second run finds its work done.

Example:
    >>> install("cpu", on_line=print).features  # doctest: +SKIP
    frozenset({'draft-mtp', ...})
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from browndwarf.engine import locate, run
from browndwarf.engine.diagnose import relevant_lines
from browndwarf.engine.locate import Build
from browndwarf.engine.probe import ProbeFailure
from browndwarf.engine.spawn import SpawnFailure
from browndwarf.errors import EngineNotFound, EngineUnsupported, ToolFailed, UsageError

Backend = Literal["cpu", "cuda", "vulkan", "metal", "hip"]
OnLine = Callable[[str], None]

PACKAGE = "llama-cpp-python==0.3.36"
_COMMON_CMAKE = (
    "-DLLAVA_BUILD=OFF",  # the tools bring mtmd themselves; twice stops CMake
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_TOOLS_INSTALL=ON",
    "-DLLAMA_OPENSSL=OFF",
)


@dataclass(frozen=True)
class _Backend:
    """What a backend needs: CMake flags, a library that proves it, and a compiler."""

    cmake: tuple[str, ...]
    library: str
    compiler: str | None = None
    hint: str = ""


_BACKENDS: dict[str, _Backend] = {
    "cpu": _Backend((), "ggml-cpu"),
    "cuda": _Backend(
        ("-DGGML_CUDA=ON",), "ggml-cuda", "nvcc", "install the CUDA toolkit and put nvcc on PATH"
    ),
    "vulkan": _Backend(
        ("-DGGML_VULKAN=ON",), "ggml-vulkan", "glslc", "install the Vulkan SDK (it has glslc)"
    ),
    "metal": _Backend(("-DGGML_METAL=ON",), "ggml-metal"),
    "hip": _Backend(("-DGGML_HIP=ON",), "ggml-hip", "hipcc", "install ROCm and put hipcc on PATH"),
}


def parse_backend(text: str) -> Backend:
    """A backend from its name.

    Raises:
        UsageError: there is no such backend.
    """
    names: tuple[Backend, ...] = get_args(Backend)
    for name in names:
        if name == text.strip().lower():
            return name
    raise UsageError(f"{text!r} is no backend", fix=f"use one of {', '.join(names)}")


def cmake_args(backend: Backend, platform: str = sys.platform) -> str:
    """CMAKE_ARGS of the build. The run path lets programs find the libraries beside them."""
    flags = [*_COMMON_CMAKE, *_BACKENDS[backend].cmake]
    if platform == "darwin":
        flags.append("-DCMAKE_INSTALL_RPATH=@loader_path/../lib")
        if backend == "cpu":
            flags.append("-DGGML_METAL=OFF")
    elif platform != "win32":
        flags.append("-DCMAKE_INSTALL_RPATH=$ORIGIN/../lib")
    return " ".join(flags)


def installed(backend: Backend = "cpu", *, folder: Path | None = None) -> Build | None:
    """The embedded build if it is there, starts, and has the backend; else None."""
    try:
        return _check(backend, folder or _site_packages(sys.executable))
    except _NotReady:
        return None


def install(
    backend: Backend = "cpu",
    *,
    force: bool = False,
    python: str = sys.executable,
    on_line: OnLine | None = None,
    timeout_s: float = 3 * 3600,
) -> Build:
    """Make sure that the environment of ``python`` holds a working llama.cpp.

    Args:
        force: compile again even if all is there.
        on_line: called with each line of the installer's output, and with our own remarks.

    Raises:
        EngineNotFound: no compiler, or pip failed.
        EngineUnsupported: it was built but does not work.
        ToolFailed: the time limit was reached.
    """
    say = on_line or (lambda line: None)
    folder = _site_packages(python)
    if not force:
        try:
            return _check(backend, folder)
        except _NotReady as exc:
            say(str(exc))
    check_compilers(backend)
    present = (folder / "llama_cpp").is_dir()
    # What is there has no tools, or was built for another processor or backend: pip would call
    # it fine. And pip's cache of built wheels does not know about CMAKE_ARGS.
    _pip(python, backend, fresh=force or present, say=say, timeout_s=timeout_s)
    try:
        return _check(backend, folder)
    except _NotReady as exc:
        say(f"{exc}; compiling again without pip's cache")
    _pip(python, backend, fresh=True, say=say, timeout_s=timeout_s)
    try:
        return _check(backend, folder)
    except _NotReady as exc:
        raise EngineUnsupported(
            "llama.cpp was compiled but does not work",
            why=str(exc),
            fix="use a release of llama.cpp instead (--llama-dir), and report this",
        ) from exc


class _NotReady(Exception):
    """The embedded build is missing or unfit; the text says how."""


def _check(backend: Backend, folder: Path) -> Build:
    server = locate.server_in(folder)
    if server is None:
        raise _NotReady(f"no llama-server in {folder / 'bin'} yet")
    if backend != "cpu" and not any(
        path
        for below in ("lib", "bin", "llama_cpp/lib")
        for path in (folder / below).glob(f"*{_BACKENDS[backend].library}*")
    ):
        raise _NotReady(f"the llama.cpp in {folder} was compiled without {backend}")
    try:
        return locate.build_at(server, "embedded")
    except ProbeFailure as exc:
        raise _NotReady(f"{server} does not work: {exc}") from exc


def check_compilers(backend: Backend) -> None:
    """Look for what compiling needs, before minutes are spent.

    Raises:
        EngineNotFound: something is missing; the text says what to install.
    """
    names = ("cl", "clang-cl", "g++") if sys.platform == "win32" else ("c++", "g++", "clang++")
    if not os.environ.get("CXX") and not any(shutil.which(name) for name in names):
        fixes = {
            "win32": "install the Visual Studio Build Tools (C++) and use their prompt",
            "darwin": "run `xcode-select --install`",
        }
        raise EngineNotFound(
            "llama.cpp cannot be compiled here",
            why=f"there is no C++ compiler ({', '.join(names)}) on PATH",
            fix=fixes.get(sys.platform, "install g++ (Debian: `apt install g++`)")
            + ", or point --llama-dir at a release of llama.cpp",
        )
    needed = _BACKENDS[backend]
    if needed.compiler is not None and shutil.which(needed.compiler) is None:
        raise EngineNotFound(
            f"llama.cpp cannot be compiled for {backend} here",
            why=f"there is no {needed.compiler} on PATH",
            fix=f"{needed.hint}, or point --llama-dir at a release of llama.cpp",
        )
    if backend == "metal" and sys.platform != "darwin":
        raise UsageError("metal exists on macOS only", fix="use cpu, cuda, vulkan or hip")


def pip_command(python: str, *, fresh: bool, has_pip: bool = True) -> list[str]:
    """argv of the installer; uv stands in where the environment has no pip."""
    if has_pip:
        command = [python, "-m", "pip", "install", "--disable-pip-version-check", "-v"]
        again = ["--no-cache-dir", "--force-reinstall", "--no-deps"]
    else:
        command = ["uv", "pip", "install", "--python", python, "-v"]
        again = ["--no-cache", "--reinstall-package", "llama-cpp-python"]
    return [*command, *(again if fresh else []), PACKAGE]


def _pip(python: str, backend: Backend, *, fresh: bool, say: OnLine, timeout_s: float) -> None:
    has_pip = _run_python(python, "import pip") is not None
    if not has_pip and shutil.which("uv") is None:
        raise EngineNotFound(
            "this Python environment has neither pip nor uv",
            why=f"`{python} -m pip` does not work",
            fix=f"run `{python} -m ensurepip`",
        )
    say(f"compiling llama.cpp for {backend}; this takes some minutes")
    env = {**os.environ, "CMAKE_ARGS": cmake_args(backend), "FORCE_CMAKE": "1"}
    try:
        done = run.run(
            pip_command(python, fresh=fresh, has_pip=has_pip),
            env=env,
            timeout_s=timeout_s,
            on_line=say,
        )
    except SpawnFailure as exc:
        raise EngineNotFound("the installer does not start", why=str(exc)) from exc
    if done.timed_out:
        raise ToolFailed(
            f"compiling did not end within {timeout_s:g} s", fix="try again on a faster machine"
        )
    if done.exit.code != 0:
        lines = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        raise EngineNotFound(
            "llama.cpp could not be compiled",
            why="\n     ".join(relevant_lines(lines)),
            fix="see the output above; or point --llama-dir at a release of llama.cpp",
        )


def _site_packages(python: str) -> Path:
    if python == sys.executable:
        return Path(sysconfig.get_paths()["platlib"])
    text = _run_python(python, "import sysconfig,json;print(json.dumps(sysconfig.get_paths()))")
    try:
        return Path(json.loads(text or "")["platlib"])
    except (ValueError, KeyError) as exc:
        raise UsageError(f"{python} is not a working Python", fix="check the path") from exc


def _run_python(python: str, code: str) -> str | None:
    """Output of a line of Python; None if it fails."""
    try:
        done = run.run([python, "-c", code], env=os.environ, timeout_s=60)
    except SpawnFailure:
        return None
    return done.stdout if done.exit.code == 0 else None
