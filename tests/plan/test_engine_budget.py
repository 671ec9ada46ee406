"""The plan against a real llama-server and a real library: trimmed to a minute."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browndwarf.engine.dryalloc import DryCase, DryModels, DrySession
from browndwarf.engine.locate import Build
from browndwarf.errors import EngineError, ModelNotFound
from browndwarf.models.gguf import read_model
from browndwarf.models.resolve import resolve_model
from browndwarf.plan.compare import Compared
from browndwarf.plan.compute import DryCompute
from browndwarf.plan.setup import Setup
from gguf_files import hollow_pair

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "budget_matrix.py"
REPACKED = "gemma4-e4b"
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def matrix() -> Any:
    """The benchmark as a module: the full matrix lives there."""
    spec = importlib.util.spec_from_file_location("budget_matrix", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def library() -> None:
    """The bindings; without them nothing here proves anything."""
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("NO llama-cpp-python, so dry allocation is not tested here")


def report(worst: Compared) -> None:
    """Show the worst line under ``pytest -s``."""
    sys.stderr.write(
        f"\nworst line: {worst.name} planned {worst.planned_mib:.2f} MiB, logged "
        f"{worst.logged_mib:.2f} MiB, {worst.excess:.3f} of the tolerance\n"
    )


@pytest.mark.slow
async def test_every_line_equals_the_servers_log(
    engine_build: Build, library: None, matrix: Any, tmp_path: Path
) -> None:
    """Every shape, some settings of each spread over the matrix; within 1 MiB or 0.5%."""
    matrix.VOCABULARY = 4096
    rows: list[Compared] = []
    for position, name in enumerate(matrix.SHAPES):
        pair = matrix.make_pair(tmp_path, name)
        models = DryModels(str(pair.target), str(pair.head) if pair.head else None)
        with DryCompute(models) as compute:
            every = list(matrix.settings(pair))
            # Only the first setting repacks, which takes seconds with the large shapes.
            repacked = every[:1] if name == REPACKED else []
            for options in [*repacked, *every[position + 2 :: 62]]:
                rows += await matrix.measure(engine_build, options, compute)
    worst = max(rows, key=lambda row: row.excess)
    report(worst)
    assert worst.ok
    assert len(rows) > 40


async def test_the_demo_pair_is_planned_to_the_mib(
    engine_build: Build, library: None, matrix: Any
) -> None:
    """Real trained files, drafting on and off."""
    try:
        target, head = resolve_model("demo"), resolve_model("demo", "head")
    except ModelNotFound as exc:
        pytest.skip(f"NO DEMO PAIR here: {exc}")
    pair = matrix.Pair("demo", target, head, True)
    rows: list[Compared] = []
    with DryCompute(DryModels(str(target), str(head))) as compute:
        for options in list(matrix.settings(pair))[::15]:
            rows += await matrix.measure(engine_build, options, compute)
    worst = max(rows, key=lambda row: row.excess)
    report(worst)
    assert worst.ok


@pytest.fixture
def session(library: None, tmp_path: Path) -> Iterator[DrySession]:
    """A worker on a small gemma4 pair."""
    target, head = hollow_pair(tmp_path, "gemma4-12b", layers=6)
    with DrySession(DryModels(str(target), str(head))) as made:
        yield made


def test_one_worker_answers_many_settings(session: DrySession) -> None:
    """More tokens a micro-batch, more memory; the drafter's buffer is beside the target's."""
    small, large = session.ask([DryCase(n_ctx=2048, ubatch=128), DryCase(n_ctx=2048)]).cases
    assert 0 < small.compute["CPU"] < large.compute["CPU"]
    assert small.draft_compute["CPU"] > 0
    again = session.ask([DryCase(n_ctx=2048, ubatch=128, draft=False)]).cases[0]
    assert again.draft_compute == {}
    assert again.compute == small.compute


def test_a_setting_that_llama_cpp_refuses_has_its_reason(session: DrySession) -> None:
    """And the worker lives on."""
    refused, fine = session.ask(
        [DryCase(n_ctx=2048, type_v="q8_0", flash_attention=False), DryCase(n_ctx=2048)]
    ).cases
    assert "quantized V cache" in refused.error
    assert fine.compute


def test_a_worker_that_cannot_load_or_dies_is_an_error_not_a_crash(
    library: None, tmp_path: Path
) -> None:
    """A file that is no model; a worker that was killed."""
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\0" * 60)
    with DrySession(DryModels(str(bad))) as broken, pytest.raises(EngineError, match="cannot load"):
        broken.ask([DryCase(n_ctx=512)])
    target, _ = hollow_pair(tmp_path, "llama-8b", layers=2)
    with DrySession(DryModels(str(target))) as victim:
        victim._process.kill()
        with pytest.raises(EngineError, match="ended with"):
            victim.ask([DryCase(n_ctx=512)])


def test_without_a_working_library_the_estimate_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan goes on."""
    target, _ = hollow_pair(tmp_path, "llama-8b", layers=2)
    with DryCompute(DryModels(str(target)), lib_path=os.fspath(tmp_path)) as compute:
        (size,) = compute.sizes([Setup(target=read_model(target))])
    assert not size.exact
    assert size.source.startswith("fitted estimate; ")
    assert size.target_mib > 0
