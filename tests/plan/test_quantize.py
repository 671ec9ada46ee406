"""Quantizing: what was asked for, exactly, or nothing under the file's name."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from browndwarf.engine.locate import Build
from browndwarf.errors import (
    BadModelFile,
    BrowndwarfError,
    CheckFailed,
    DiskFull,
    EngineUnsupported,
    ModelNotFound,
    RunChanged,
    UsageError,
)
from browndwarf.models import demo
from browndwarf.models.gguf import read_model
from browndwarf.plan.inputs import type_lines
from browndwarf.plan.quantization import QuantizationPlan
from browndwarf.plan.quantize import run_plan, run_type
from fakes import behave, make_build
from quantizing import TENSORS, TYPES, Act, imatrix_bytes, plan_for, small_model

posix = pytest.mark.skipif(sys.platform == "win32", reason="fakes are POSIX scripts")
pytestmark = posix


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_model(tmp_path / "source.gguf")


def test_a_plan_becomes_the_file_that_it_describes(build: Build, source: Path) -> None:
    plan, dest, steps = plan_for(source), source.with_name("out.gguf"), []
    done = run_plan(build, plan, dest, on_progress=lambda n, total: steps.append((n, total)))
    made = read_model(dest)
    assert {t.name: t.type for t in made.tensors if t.name in TYPES} == TYPES
    assert sum(t.bytes for t in made.tensors) == plan.file_bytes == done.data_bytes
    assert done.device_bytes == plan.device_bytes
    assert done.size_bytes == dest.stat().st_size
    assert steps[-1] == (len(TENSORS), len(TENSORS))
    assert not done.requantized


def test_a_dry_run_checks_all_and_writes_nothing(build: Build, source: Path) -> None:
    before = sorted(p.name for p in source.parent.iterdir())
    done = run_plan(build, plan_for(source), None)
    assert done.path is None
    assert sorted(p.name for p in source.parent.iterdir()) == before


def as_the_tool_reads(lines: str, name: str) -> str | None:
    """What llama-quantize does with its type file: in bytes, and with C's idea of letters."""
    for word in lines.encode().split():
        pattern, _, kind = word.partition(b"=")
        if re.search(pattern.lower(), name.encode()):
            return kind.decode()
    return None


NAMES = st.text(
    st.characters(categories=["L", "N", "P", "S", "Zs"]), min_size=1, max_size=8
) | st.text("aAbB01.=_ +*?()[]{}|^$\\-", min_size=1, max_size=6)


@given(st.dictionaries(NAMES, st.sampled_from(["Q4_K", "IQ3_S", "F16"]), min_size=1, max_size=8))
def test_every_tensor_gets_its_type_whatever_it_is_called(types: dict[str, str]) -> None:
    try:
        lines = type_lines(types)
    except UsageError:
        assert len(set(types.values())) > 1
        return
    for name, kind in types.items():
        assert as_the_tool_reads(lines, name) == kind.lower()


def test_names_that_only_differ_in_case_are_told() -> None:
    with pytest.raises(UsageError, match="cannot get different types"):
        type_lines({"blk.0.A": "Q4_K", "blk.0.B": "Q6_K"})
    assert type_lines({"blk.0.A": "Q4_K", "blk.0.b": "Q6_K"}).splitlines() == [
        r"^blk\.0\.b$=q6_k",
        r"^blk\.0\..$=q4_k",
    ]


def test_another_source_is_refused(build: Build, source: Path, tmp_path: Path) -> None:
    plan, dest = plan_for(source), tmp_path / "out.gguf"
    small_model(source, **{"general.name": "another"})
    with pytest.raises(RunChanged, match="not the file that the plan was made for"):
        run_plan(build, plan, dest)
    source.rename(tmp_path / "moved.gguf")
    with pytest.raises(ModelNotFound, match="that the plan was made for"):
        run_plan(build, plan, dest)
    assert not dest.exists()


def test_a_plan_finds_its_files_in_its_own_folder(build: Build, source: Path) -> None:
    plan = plan_for(source)
    folder = source.with_name("elsewhere")
    folder.mkdir()
    source.rename(folder / source.name)
    assert run_plan(build, plan, None, beside=folder).data_bytes == plan.file_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": ()},
        {"device_bytes": 1},
        {"file_bytes": 1},
        {"base_type": "F16"},
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(
    build: Build, source: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        run_plan(build, plan_for(source, **change), source.with_name("out.gguf"))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("blk.0.odd.weight", {"type": "Q4_K"}),
        ("blk.0.odd.weight", {"type": "Q9_X"}),
        ("blk.0.odd.weight", {"bytes": 5}),
        ("blk.0.odd.weight", {"chosen": False}),
        ("blk.0.odd.weight", {"name": "blk.7.odd.weight"}),
    ],
)
def test_a_plan_with_an_impossible_tensor_is_refused(
    build: Build, source: Path, name: str, change: dict[str, Any]
) -> None:
    plan = plan_for(source)
    choices = tuple(
        msgspec.structs.replace(c, **change) if c.name == name else c for c in plan.tensors
    )
    with pytest.raises(UsageError, match="contradicts itself"):
        run_plan(build, msgspec.structs.replace(plan, tensors=choices), None)


@pytest.mark.parametrize("version", [0, 2])
def test_a_plan_of_another_version_is_told(tmp_path: Path, source: Path, version: int) -> None:
    path = tmp_path / "plan.json"
    schema = f"browndwarf/quantization-plan/{version}"
    path.write_text(json.dumps({"schema": schema, "tensors": []}), encoding="utf-8")
    with pytest.raises(UsageError, match="another version"):
        QuantizationPlan.load(path)


def test_a_dry_run_that_disagrees_stops_it_and_names_the_tensors(
    build: Build, source: Path, act: Act
) -> None:
    act(differs={"blk.0.attn_q.weight": "q5_0"})
    dest = source.with_name("out.gguf")
    with pytest.raises(EngineUnsupported, match="another file") as caught:
        run_plan(build, plan_for(source), dest)
    assert "blk.0.attn_q.weight Q8_0, not Q5_0" in caught.value.why
    assert not dest.exists()


@pytest.mark.parametrize("tamper", ["truncate", "grow", "retype", "reshape", "drop"])
def test_a_file_that_is_not_what_was_asked_for_never_gets_its_name(
    build: Build, source: Path, act: Act, tamper: str
) -> None:
    act(tamper=tamper)
    dest = source.with_name("out.gguf")
    dest.write_bytes(b"precious")
    with pytest.raises(CheckFailed, match="not what was asked for") as caught:
        run_plan(build, plan_for(source), dest, force=True)
    assert caught.value.exit_code == 1
    assert dest.read_bytes() == b"precious"
    assert not list(source.parent.glob(".*partial"))


def test_nothing_is_overwritten_unasked_and_never_the_source(build: Build, source: Path) -> None:
    plan, dest = plan_for(source), source.with_name("out.gguf")
    dest.write_bytes(b"precious")
    with pytest.raises(UsageError, match="exists already"):
        run_plan(build, plan, dest)
    assert dest.read_bytes() == b"precious"
    with pytest.raises(UsageError, match="the source itself"):
        run_plan(build, plan, source, force=True)
    with pytest.raises(UsageError, match="a folder"):
        run_plan(build, plan, source.parent, force=True)
    run_plan(build, plan, dest, force=True)
    assert dest.read_bytes() != b"precious"


def test_a_full_disk_is_told_before_and_in_mid_run(
    build: Build, source: Path, act: Act, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    dest, plan = source.with_name("out.gguf"), plan_for(source)
    act(full=True)
    answers = iter([10**9])
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**9, 0, next(answers, 0)))
    for _ in range(2):
        with pytest.raises(DiskFull):
            run_plan(build, plan, dest)
        assert not dest.exists()
        assert not list(source.parent.glob(".*partial"))


def test_the_plans_imatrix_is_the_one_that_is_used(
    build: Build, source: Path, tmp_path: Path
) -> None:
    path = tmp_path / "i.gguf"
    path.write_bytes(imatrix_bytes({"blk.0.attn_q.weight": ([[1.0] * 256], [9.0])}))
    plan = plan_for(source, imatrix=str(path), imatrix_sha256="0" * 64)
    with pytest.raises(RunChanged, match="not the importance matrix"):
        run_plan(build, plan, None)
    plan = msgspec.structs.replace(
        plan, imatrix_sha256=hashlib.sha256(path.read_bytes()).hexdigest()
    )
    found = run_plan(build, plan, None).without_imatrix
    assert found is not None
    assert "blk.0.attn_q.weight" not in found
    assert "token_embd.weight" in found
    moved = path.rename(tmp_path / "moved.gguf")
    with pytest.raises(ModelNotFound, match="importance matrix"):
        run_plan(build, plan, None)
    run_plan(build, plan, None, imatrix=moved)
    with pytest.raises(UsageError, match="without an importance matrix"):
        run_plan(build, plan_for(source), None, imatrix=moved)
    moved.write_bytes(imatrix_bytes({"blk.8.attn_q.weight": ([[1.0] * 256], [9.0])}))
    with pytest.raises(BadModelFile, match="another model"):
        run_type(build, source, None, "Q8_0", imatrix=moved)


def test_a_type_that_needs_an_imatrix_is_refused_before_the_run(build: Build, source: Path) -> None:
    types = {**TYPES, "blk.0.ffn_down.weight": "IQ2_XS"}
    with pytest.raises(UsageError, match="needs an importance matrix"):
        run_plan(build, plan_for(source, types), source.with_name("out.gguf"))


def test_a_build_without_lists_of_types_is_told(source: Path, tmp_path: Path) -> None:
    old = make_build(tmp_path / "old", tool_help="  --dry-run\n      predict\n")
    with pytest.raises(EngineUnsupported, match="no list of types"):
        run_plan(old, plan_for(source), None)


def test_requantizing_has_to_be_allowed_and_is_reported(build: Build, source: Path) -> None:
    first, second = source.with_name("q8.gguf"), source.with_name("q5.gguf")
    run_type(build, source, first, "Q8_0")
    with pytest.raises(UsageError, match="quantized already"):
        run_type(build, first, second, "Q5_0")
    assert not second.exists()
    done = run_type(build, first, second, "Q5_0", allow_requantize=True)
    assert len(done.requantized) == len(TYPES)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_an_interrupted_run_leaves_nothing_under_the_name(
    build: Build, source: Path, how: signal.Signals
) -> None:
    dest, plan = source.with_name("out.gguf"), source.with_name("plan.json")
    plan_for(source).save(plan)
    command = [sys.executable, "-m", "browndwarf", "quantize", str(plan), "-o", str(dest)]
    command += ["--llama-dir", str(build.server.parent)]
    environment = {**os.environ, **behave(slow=0.15)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: bool(list(source.parent.glob(".out.gguf.*partial"))), process)
    time.sleep(random.Random().uniform(0, 0.5))
    process.send_signal(how)
    _, errors = process.communicate(timeout=20)
    assert not dest.exists()
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "nothing was written" in errors
        assert not list(source.parent.glob(".*partial"))
        return
    done = subprocess.run(command, env={**os.environ, **behave()}, timeout=20, check=False)
    assert done.returncode == 0
    assert dest.exists()
    assert not list(source.parent.glob(".*partial"))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.engine
def test_the_real_tool_makes_exactly_what_was_planned(engine_build: Build, tmp_path: Path) -> None:
    info = read_model(demo.TARGET)
    kinds = ["Q3_K", "Q4_K", "Q6_K", "Q5_0", "Q8_0", "IQ4_NL"]
    matrices = [t.name for t in info.tensors if len(t.shape) > 1]
    rng = random.Random(5)
    plan = plan_for(demo.TARGET, {name: rng.choice(kinds) for name in matrices})
    done = run_plan(engine_build, plan, tmp_path / "out.gguf", threads=2)
    made = read_model(tmp_path / "out.gguf")
    assert sum(t.bytes for t in made.tensors) == plan.file_bytes
    assert {t.name: t.type for t in made.tensors} == {c.name: c.type for c in plan.tensors}
    assert len(done.requantized) == sum(plan.types[n] != "Q8_0" for n in matrices)


@pytest.mark.engine
def test_heads_are_quantized_and_impossible_types_told(engine_build: Build, tmp_path: Path) -> None:
    done = run_type(engine_build, demo.HEAD, tmp_path / "head.gguf", "Q6_K")
    assert set(done.types.values()) <= {"F32", "F16", "Q6_K"}
    assert done.size_bytes < demo.HEAD.stat().st_size / 2
    with pytest.raises(BrowndwarfError, match="needs an importance matrix") as caught:
        run_type(engine_build, demo.HEAD, tmp_path / "x.gguf", "IQ2_XS")
    assert "of a head" in caught.value.fix
