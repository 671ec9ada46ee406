"""The embedded pair and a random recurrent model, loaded in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Idle OpenMP threads that spin would slow down whatever else the machine does.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from browndwarf.decode.llm import LLM, load
from browndwarf.engine.native import load_library
from browndwarf.engine.native_context import require_mtp
from browndwarf.errors import EngineError
from browndwarf.models import demo, synthetic


@pytest.fixture(scope="session")
def library() -> None:
    """llama.cpp in this process; tests that need it are skipped, loudly, without it."""
    try:
        require_mtp(load_library())
    except EngineError as exc:
        pytest.skip(f"NO LLAMA.CPP LIBRARY, so this test proves nothing here: {exc}")


@pytest.fixture
def loaded(library: None) -> Iterator[Callable[..., LLM]]:
    """Factory of loaded pairs; all are closed at the end."""
    opened: list[LLM] = []

    def make(model: Path | str = demo.TARGET, draft: Any = demo.HEAD, **settings: Any) -> LLM:
        settings.setdefault("n_ctx", 1024)
        # Steps of a small model are shorter than waking a second thread.
        settings.setdefault("threads", 1)
        llm = load(model, draft, **settings)
        opened.append(llm)
        return llm

    yield make
    for llm in opened:
        llm.close()


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random qwen35 model with its MTP block inside."""
    return synthetic.write_hybrid(tmp_path_factory.mktemp("models") / "hybrid.gguf")
