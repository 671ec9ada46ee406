"""Fixtures for all tests: a real llama.cpp build where there is one, fake builds everywhere."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

from browndwarf.engine.locate import Build, choose_build, find_builds
from browndwarf.errors import EngineError
from fakes import make_build

# A busy machine must not fail a test.
settings.register_profile("browndwarf", deadline=None)
settings.load_profile("browndwarf")


# A shell starts background jobs with SIGINT ignored, and children inherit that: the tests of
# Ctrl-C would then wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def engine_build() -> Build:
    """A real build with draft-mtp; tests that need it are skipped, loudly, without one."""
    try:
        return choose_build(find_builds())
    except EngineError as exc:
        pytest.skip(f"NO LLAMA.CPP ENGINE, so this test proves nothing here: {exc}")


@pytest.fixture
def fake_build(tmp_path: Path) -> Callable[..., Build]:
    """Factory of fake builds; takes what ``fakes.make_build`` takes after the folder."""
    numbers = itertools.count()

    def make(generation: str = "current", **settings: object) -> Build:
        return make_build(tmp_path / f"fake{next(numbers)}", generation, **settings)  # type: ignore[arg-type]

    return make
