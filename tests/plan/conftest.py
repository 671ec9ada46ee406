"""A build whose fake tools do their work, and misbehave when told to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from browndwarf.engine.locate import Build
from fakes import behave
from quantizing import Act, working_build


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A build that works; ``act`` makes it misbehave."""
    return working_build(tmp_path / "build")


@pytest.fixture
def act(monkeypatch: pytest.MonkeyPatch) -> Act:
    """Call it with what ``fake_tools`` describes."""

    def go(**behaviour: Any) -> None:
        monkeypatch.setenv("FAKE_LLAMA", behave(**behaviour)["FAKE_LLAMA"])

    return go
