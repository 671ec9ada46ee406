"""Installing compiles once, notices a build that does not fit, and says what is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from browndwarf.engine import install, run
from browndwarf.engine.spawn import Exit
from browndwarf.errors import EngineNotFound, EngineUnsupported, ToolFailed, UsageError
from fakes import make_engine

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="fakes are POSIX scripts")

Pip = Callable[[list[str]], int]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty environment to install into."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(install, "_site_packages", lambda python: folder)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *args: tmp_path / "cache")
    monkeypatch.setattr(install, "check_compilers", lambda backend: None)
    return folder


class Installer:
    """Stands in for pip: notes its calls and does what a list of actions says."""

    def __init__(self, *actions: Callable[[], object]) -> None:
        self.actions = list(actions)
        self.calls: list[list[str]] = []
        self.env: dict[str, str] = {}
        self.status = 0
        self.timed_out = False

    def __call__(self, argv: list[str], **settings: object) -> run.Finished:
        if "-c" not in argv:
            self.calls.append(argv)
            self.env = dict(settings["env"])  # type: ignore[call-overload]
            if self.actions:
                self.actions.pop(0)()
        return run.Finished(
            Exit(code=self.status if "-c" not in argv else 0),
            "compiling\nerror: no luck",
            "",
            1.0,
            timed_out=self.timed_out,
        )


def use(monkeypatch: pytest.MonkeyPatch, pip: Installer) -> Installer:
    monkeypatch.setattr(install.run, "run", pip)
    return pip


def test_a_second_run_finds_its_work_done(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(monkeypatch, Installer(lambda: make_engine(site)))
    assert install.installed() is None
    build = install.install("cpu")
    assert build.source == "embedded"
    assert len(pip.calls) == 1
    assert install.install("cpu") == build == install.installed()
    assert len(pip.calls) == 1


def test_the_build_is_told_about_tools_and_libraries(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = use(monkeypatch, Installer(lambda: make_engine(site)))
    install.install("cpu")
    assert pip.calls[0][-1] == "llama-cpp-python==0.3.36"
    for flag in ("-DLLAVA_BUILD=OFF", "-DLLAMA_TOOLS_INSTALL=ON", "-DLLAMA_BUILD_SERVER=ON"):
        assert flag in pip.env["CMAKE_ARGS"]


def test_run_paths_are_those_of_the_platform() -> None:
    assert "$ORIGIN/../lib" in install.cmake_args("cpu", "linux")
    assert "@loader_path/../lib" in install.cmake_args("metal", "darwin")
    assert "RPATH" not in install.cmake_args("cpu", "win32")
    assert "-DGGML_CUDA=ON" in install.cmake_args("cuda", "linux")


def test_a_cached_wheel_without_tools_is_compiled_again(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bare_wheel() -> None:
        (site / "llama_cpp").mkdir()

    pip = use(monkeypatch, Installer(bare_wheel, lambda: make_engine(site)))
    said: list[str] = []
    install.install("cpu", on_line=said.append)
    assert "--no-cache-dir" not in pip.calls[0]
    assert {"--no-cache-dir", "--force-reinstall"} <= set(pip.calls[1])
    assert any("without pip's cache" in line for line in said)


def test_a_build_for_another_processor_is_compiled_again(
    site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_engine(site, version_signal=4)

    def rebuild() -> None:
        (site / "bin").rename(tmp_path / "old")
        make_engine(site)

    use(monkeypatch, Installer(rebuild))
    said: list[str] = []
    assert install.install("cpu", on_line=said.append).number == 10800
    assert any("another processor" in line for line in said)


def test_another_backend_is_compiled_anew(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_engine(site)

    def add_library() -> None:
        (site / "lib").mkdir()
        (site / "lib" / "libggml-cuda.so").touch()

    pip = use(monkeypatch, Installer(add_library))
    install.install("cuda")
    assert "-DGGML_CUDA=ON" in pip.env["CMAKE_ARGS"]


def test_a_build_that_never_works_is_an_error(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(monkeypatch, Installer())
    with pytest.raises(EngineUnsupported, match="does not work"):
        install.install("cpu")
    assert len(pip.calls) == 2


def test_a_failed_compilation_shows_its_last_errors(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = use(monkeypatch, Installer())
    pip.status = 1
    with pytest.raises(EngineNotFound, match="no luck"):
        install.install("cpu")
    pip.timed_out = True
    with pytest.raises(ToolFailed, match="did not end"):
        install.install("cpu")


def test_missing_compilers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineNotFound, match=r"no C\+\+ compiler"):
        install.check_compilers("cpu")
    monkeypatch.setenv("CXX", "my-compiler")
    install.check_compilers("cpu")
    with pytest.raises(EngineNotFound, match="nvcc"):
        install.check_compilers("cuda")


def test_uv_stands_in_for_pip() -> None:
    assert install.pip_command("py", fresh=False, has_pip=False)[:3] == ["uv", "pip", "install"]
    assert install.pip_command("py", fresh=True)[1:4] == ["-m", "pip", "install"]


def test_backends_are_known_by_name() -> None:
    assert install.parse_backend(" CUDA ") == "cuda"
    with pytest.raises(UsageError, match="is no backend"):
        install.parse_backend("abacus")
