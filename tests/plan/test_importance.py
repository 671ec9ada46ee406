"""Making an importance matrix: in segments, resumable, exact; bad input told."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from browndwarf.engine.locate import Build
from browndwarf.engine.tools import ImatrixResult, imatrix
from browndwarf.errors import (
    BrowndwarfError,
    DiskFull,
    Interrupted,
    RunChanged,
    RunFormatError,
    StorageError,
    ToolFailed,
    UsageError,
)
from browndwarf.models import demo
from browndwarf.models.gguf import read_model
from browndwarf.models.imatrix import read_imatrix
from browndwarf.plan.calibration import Text, default_text, read_texts
from browndwarf.plan.importance import SHARE, Job, collect, next_size, segment_chunks
from browndwarf.plan.importance_state import work_folder
from fakes import behave
from quantizing import Act, small_model

posix = pytest.mark.skipif(sys.platform == "win32", reason="fakes are POSIX scripts")
pytestmark = posix
WORDS = Text(b"some words", ("a.txt",))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    model = small_model(tmp_path / "model.gguf")
    return Job(model=model, dest=tmp_path / "model.imatrix.gguf", text=WORDS, ctx=512)


def parts(job: Job) -> Path:
    return job.dest.with_name(job.dest.name + ".parts")


def changed(job: Job, **changes: Any) -> Job:
    return Job(**{**{name: getattr(job, name) for name in job.__dataclass_fields__}, **changes})


def test_segments_add_up_to_one_run(build: Build, job: Job, act: Act) -> None:
    act(tokens=512 * 13 + 40, ppl=7.5)
    steps: list[int] = []
    found = collect(build, job, on_step=lambda step: steps.append(step.done))
    assert steps == [0, 4, 8, 13]
    assert (found.chunks, found.tokens, found.resumed) == (13, 13 * 512, 0)
    assert found.ppl == pytest.approx(7.5)
    assert found.coverage.missing == ("token_embd.weight",)
    entry = read_imatrix(job.dest).entries["blk.0.attn_q.weight"]
    assert entry.counts.tolist() == [13 * 512]
    assert set(entry.values.ravel().tolist()) == {2.0 * 13 * 512}
    assert not parts(job).exists()


@given(st.integers(2, 400), st.integers(1, 60), st.integers(0, 511), st.data())
def test_segments_cover_everything_and_begin_where_the_tool_can(
    whole: int, size: int, rest: int, data: st.DataObject
) -> None:
    tokens, total = whole * 512 + rest, data.draw(st.integers(1, whole))
    last_start, done = (tokens - 1) // 512 - 2, 0
    while done < total:
        # The tool's own condition, with equality on the failing side.
        assert done == 0 or (done + 2) * 512 < tokens
        take = segment_chunks(done, total, last_start, size)
        assert take >= 1
        done += take
    assert done == total


@given(st.floats(0.001, 1e4), st.floats(0, 1e4), st.integers(1, 50), st.integers(1, 64))
def test_a_segment_is_long_enough_to_make_its_start_cheap(
    pass_s: float, start_s: float, passes: int, per_pass: int
) -> None:
    result = ImatrixResult(Path("x"), None, start_s + passes * pass_s, pass_s)
    size = next_size(result, passes * per_pass, per_pass, 20.0)
    assert size % per_pass == 0
    assert size >= per_pass
    assert start_s <= SHARE * (start_s + size / per_pass * pass_s) * (1 + 1e-6) + 1e-6


def test_a_cancelled_run_goes_on_where_it_was(build: Build, job: Job, act: Act) -> None:
    act(tokens=512 * 20)
    stop = threading.Event()

    def at(step: Any) -> None:
        if step.done == 8:
            stop.set()

    with pytest.raises(Interrupted, match="interrupted") as caught:
        collect(build, job, on_step=at, cancel=stop)
    assert "8 of 20 chunks are kept" in caught.value.why
    assert not job.dest.exists()
    assert sorted(p.name for p in parts(job).iterdir() if p.name != "lock") == [
        "a.txt",
        "chunks-000008.gguf",
        "state.json",
    ]
    found = collect(build, job)
    assert (found.resumed, found.chunks) == (8, 20)
    assert read_imatrix(job.dest).entries["blk.0.attn_q.weight"].counts.tolist() == [20 * 512]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ctx": 256}, "--ctx"),
        ({"chunks": 12}, "--chunks"),
        ({"text": Text(b"other words", ("a.txt",))}, "the text"),
    ],
)
def test_a_changed_run_does_not_go_on(
    build: Build, job: Job, act: Act, changes: dict[str, Any], words: str
) -> None:
    stop_after_one(build, job, act)
    with pytest.raises(RunChanged) as caught:
        collect(build, changed(job, **changes))
    assert words in caught.value.why
    assert collect(build, changed(job, force=True, **changes)).resumed == 0


def test_a_changed_model_does_not_go_on(build: Build, job: Job, act: Act) -> None:
    stop_after_one(build, job, act)
    small_model(job.model, **{"general.name": "another"})
    with pytest.raises(RunChanged) as caught:
        collect(build, job)
    assert "the model's content" in caught.value.why


def test_a_damaged_state_is_told_and_can_be_discarded(build: Build, job: Job, act: Act) -> None:
    stop_after_one(build, job, act)
    state = parts(job) / "state.json"
    for content in (b"", state.read_bytes()[:-20]):
        state.write_bytes(content)
        with pytest.raises(RunFormatError, match="is damaged") as caught:
            collect(build, job)
        assert "--force" in caught.value.fix
    assert collect(build, changed(job, force=True)).resumed == 0


def stop_after_one(build: Build, job: Job, act: Act) -> None:
    act(tokens=512 * 20)
    stop = threading.Event()
    with pytest.raises(Interrupted):
        collect(build, job, on_step=lambda step: stop.set() if step.done else None, cancel=stop)


@pytest.mark.parametrize("free", [0, 10**9])
def test_a_file_that_was_not_written_whole_never_counts(
    build: Build, job: Job, act: Act, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    act(tokens=512 * 20, cut=True)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**9, 0, free))
    with pytest.raises(ToolFailed if free else DiskFull):
        collect(build, job)
    assert not job.dest.exists()


def test_what_cannot_be_done_is_told_and_leaves_nothing(
    build: Build, job: Job, act: Act, tmp_path: Path
) -> None:
    act(tokens=1023)
    with pytest.raises(UsageError, match="too short") as caught:
        collect(build, job)
    assert "1023 tokens" in caught.value.why
    assert not parts(job).exists()
    with pytest.raises(UsageError, match="no output"):
        collect(build, changed(job, output_tensor=True))
    with pytest.raises(UsageError, match="longer than the model's context"):
        collect(build, changed(job, ctx=4096))
    with pytest.raises(UsageError, match="a folder"):
        collect(build, changed(job, dest=tmp_path))
    with pytest.raises(UsageError, match="the source itself"):
        collect(build, changed(job, dest=job.model, force=True))
    with pytest.raises(UsageError, match="MTP head"):
        collect(build, changed(job, model=demo.HEAD))
    job.dest.write_bytes(b"precious")
    with pytest.raises(UsageError, match="exists already"):
        collect(build, job)
    assert job.dest.read_bytes() == b"precious"


def test_a_folder_of_others_is_left_alone(build: Build, job: Job, act: Act) -> None:
    act(tokens=5000)
    parts(job).mkdir()
    (parts(job) / "thesis.odt").write_bytes(b"years of work")
    with pytest.raises(StorageError, match="none of ours"):
        collect(build, changed(job, force=True))
    assert (parts(job) / "thesis.odt").read_bytes() == b"years of work"


def test_two_processes_do_not_work_in_one_folder(build: Build, job: Job, act: Act) -> None:
    act(tokens=5000)
    with (
        work_folder(parts(job)),
        pytest.raises(StorageError, match="another process"),
    ):
        collect(build, job)


def test_kills_at_any_moment_cost_one_segment_and_never_count_twice(build: Build, job: Job) -> None:
    text = job.model.with_name("text.txt")
    text.write_text("words")
    command = [sys.executable, "-m", "browndwarf", "imatrix", str(job.model), "--data", str(text)]
    command += ["-o", str(job.dest), "--llama-dir", str(build.server.parent)]
    environment = {**os.environ, **behave(tokens=512 * 42 + 9, slow=0.1)}
    rng = random.Random()
    for how in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 20
        while not (parts(job) / "state.json").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(rng.uniform(0.1, 0.6))
        process.send_signal(how)
        process.communicate(timeout=20)
        assert process.returncode in (-how, 130)
        assert not job.dest.exists()
    quick = {**os.environ, **behave(tokens=512 * 42 + 9)}
    done = subprocess.run(command, env=quick, timeout=30, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert read_imatrix(job.dest).entries["blk.0.attn_q.weight"].counts.tolist() == [42 * 512]
    assert not parts(job).exists()


def test_texts_are_joined_and_bad_ones_told(tmp_path: Path) -> None:
    first, second = tmp_path / "first.txt", tmp_path / "second part.md"
    first.write_bytes(b"\xef\xbb\xbfone\n\n")
    second.write_bytes("zwölf".encode())
    text = read_texts([first, second])
    assert text.data.decode() == "one\n\nzwölf"
    assert text.file_name == "first+second_part.txt"
    for content in (b"", b" \n", b"\xff\xfe", b"a\0b"):
        second.write_bytes(content)
        with pytest.raises(UsageError):
            read_texts([second])
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match="cannot read"):
            read_texts([path])


def test_the_packaged_texts_share_no_line_with_what_is_measured_on(tmp_path: Path) -> None:
    package = Path(demo.__file__).parents[2]
    measured = (package / "quality" / "texts" / "demo.txt").read_text(encoding="utf-8")
    for name in ("quality/questions.jsonl", "models/demo/prompts.jsonl"):
        raw = (package / name).read_text(encoding="utf-8")
        measured += raw.replace("\\n", "\n").replace('\\"', '"').replace('"', "\n")
    lines = {line.strip() for line in measured.splitlines() if len(line.strip()) >= 32}
    texts = [
        default_text(read_model(demo.TARGET)),
        default_text(read_model(small_model_at(tmp_path))),
    ]
    assert [text.sources[0].rpartition("-")[2] for text in texts] == ["demo", "general"]
    for text in texts:
        assert 100_000 < len(text.data) < 400_000
        shared = lines & {line.strip() for line in text.data.decode().splitlines()}
        assert not shared


def small_model_at(folder: Path) -> Path:
    return small_model(folder / "small.gguf")


@pytest.mark.engine
def test_the_real_tool_in_segments_gives_what_one_run_gives(
    engine_build: Build, tmp_path: Path
) -> None:
    text = default_text(read_model(demo.TARGET))
    job = Job(
        model=demo.TARGET, dest=tmp_path / "i,j.gguf", text=text, ctx=128, chunks=17,
        threads=1, segment_s=0.01,
    )  # fmt: skip
    steps: list[int] = []
    found = collect(engine_build, job, on_step=lambda step: steps.append(step.done))
    assert len(steps) > 2
    whole = tmp_path / "text.txt"
    whole.write_bytes(text.data)
    once = tmp_path / "once.gguf"
    imatrix(engine_build, demo.TARGET, whole, once, ctx=128, chunks=17, threads=1)
    expected = read_imatrix(once)
    assert found.matrix.entries.keys() == expected.entries.keys()
    for name, entry in expected.entries.items():
        got = found.matrix.entries[name]
        assert got.counts.tolist() == entry.counts.tolist()
        np.testing.assert_allclose(got.values, entry.values, rtol=1e-4)
    assert found.coverage.missing == ("token_embd.weight",)
    with pytest.raises(BrowndwarfError, match="exists already"):
        collect(engine_build, job)
