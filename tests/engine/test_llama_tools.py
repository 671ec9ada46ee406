"""Tools run to their end, report what they did, and leave nothing half-made."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from browndwarf.engine import run, toolparse, tools
from browndwarf.engine.locate import Build
from browndwarf.errors import (
    BadModelFile,
    DiskFull,
    EngineUnsupported,
    Interrupted,
    ModelNotFound,
    ServerOutOfMemory,
    StorageError,
    ToolFailed,
    UsageError,
)
from fakes import behave

posix = pytest.mark.skipif(sys.platform == "win32", reason="fakes are POSIX scripts")
DRY = "  --dry-run\n      predict\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.gguf"
    path.write_bytes(b"GGUF" * 256)
    return path


@pytest.fixture
def act(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def go(**behaviour: Any) -> None:
        for key, value in behave(**behaviour).items():
            monkeypatch.setenv(key, value)

    return go


QUANTIZE_OUTPUT = """[   1/   3] token_embd.weight    - [   512,   2048,      1,      1], type =    f16, converting to q6_K .. size =     2.00 MiB ->     0.82 MiB
[   2/   3] blk.0.attn_norm.weight - [   512,      1,      1,      1], type =    f32, size =    0.002 MiB
warning: blk.0.ffn_down.weight    - ncols    100 not divisible by 256 (required for type    q4_K) -> falling back to    q5_0
[   3/   3] blk.0.ffn_down.weight - [   100,      1,      1,      1], type =    f16, converting to q5_0 .. size =     2.00 MiB ->     0.82 MiB
llama_model_quantize_impl: quant size  =     1.50 MiB (4.90 BPW)
"""  # noqa: E501


@posix
def test_quantize_reports_types_and_fallbacks(
    fake_build: Callable[..., Build], source: Path, act: Callable[..., None]
) -> None:
    act(stdout=QUANTIZE_OUTPUT)
    dest, steps = source.with_name("out.gguf"), []
    result = tools.quantize(
        fake_build(tool_help=DRY),
        source,
        dest,
        "Q4_K",
        allow_requantize=True,
        tensor_types={"ffn_down": "q4_K"},
        threads=2,
        on_progress=lambda done, total: steps.append((done, total)),
    )
    assert result.types == {
        "token_embd.weight": "q6_K",
        "blk.0.attn_norm.weight": "f32",
        "blk.0.ffn_down.weight": "q5_0",
    }
    (fallback,) = result.fallbacks
    assert (fallback.tensor, fallback.wanted, fallback.got) == (
        "blk.0.ffn_down.weight",
        "q4_K",
        "q5_0",
    )
    assert result.size_bytes == dest.stat().st_size == 4
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert sorted(p.name for p in dest.parent.glob("*.gguf*")) == ["out.gguf", "source.gguf"]


def test_a_remark_inside_a_progress_line_does_not_hide_the_type() -> None:
    text = """[   1/   2] token_embd.weight - [   512,   2048,      1,      1], type =   q8_0,
====== llama_model_quantize_impl: did not find weights for token_embd.weight
converting to q4_K .. size =     1.06 MiB ->     0.56 MiB
[   2/   2] output_norm.weight - [   512,      1,      1,      1], type =    f32, size = 0.002 MiB
"""
    assert toolparse.tensor_types(text) == {
        "token_embd.weight": "q4_K",
        "output_norm.weight": "f32",
    }


@posix
def test_a_dry_run_writes_nothing(
    fake_build: Callable[..., Build], source: Path, act: Callable[..., None]
) -> None:
    act(stdout=QUANTIZE_OUTPUT)
    result = tools.quantize(fake_build(tool_help=DRY), source, None, "Q4_K", dry_run=True)
    assert result.path is None
    assert result.size_bytes == int(1.5 * 2**20)
    with pytest.raises(EngineUnsupported, match="dry run"):
        tools.quantize(fake_build(), source, None, "Q4_K", dry_run=True)


@posix
def test_nothing_is_overwritten_unasked(
    fake_build: Callable[..., Build], source: Path, act: Callable[..., None]
) -> None:
    act()
    build, dest = fake_build(), source.with_name("out.gguf")
    dest.write_bytes(b"precious")
    with pytest.raises(UsageError, match="exists already"):
        tools.quantize(build, source, dest, "Q4_K")
    assert dest.read_bytes() == b"precious"
    tools.quantize(build, source, dest, "Q4_K", overwrite=True)
    assert dest.read_bytes() == b"GGUF"


@posix
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("llama_model_quantize: failed to quantize: something odd", ToolFailed),
        ("failed to quantize: requantizing from type q8_0 is disabled", UsageError),
        ("llama_quantize: missing ftype", UsageError),
        ("failed: tensor 'x' data is not within the file bounds", BadModelFile),
        ("ggml_aligned_malloc: insufficient memory", ServerOutOfMemory),
        ("write failed: No space left on device", DiskFull),
    ],
)
def test_a_failed_run_leaves_no_file_behind(
    fake_build: Callable[..., Build],
    source: Path,
    act: Callable[..., None],
    line: str,
    expected: type[Exception],
) -> None:
    act(log=[line], exit=1)
    dest = source.with_name("out.gguf")
    with pytest.raises(expected) as caught:
        tools.quantize(fake_build(), source, dest, "Q4_K")
    assert type(caught.value) is expected
    assert [p.name for p in dest.parent.glob("*gguf*")] == ["source.gguf"]
    assert not list(dest.parent.glob(".*.partial"))


@posix
def test_a_full_disk_is_known_before_the_run(
    fake_build: Callable[..., Build], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10, 9, 1))
    dest = source.with_name("out.gguf")
    with pytest.raises(DiskFull, match=r"out\.gguf"):
        tools.quantize(fake_build(), source, dest, "Q4_K")
    assert not dest.exists()


@posix
def test_a_disk_that_fills_in_mid_run_is_told_by_its_free_space(
    fake_build: Callable[..., Build],
    source: Path,
    act: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What llama-quantize says on a full disk, word for word, names no disk.
    act(log=["llama_model_quantize: failed to quantize: basic_ios::clear: iostream error"], exit=1)
    usage = namedtuple("usage", "total used free")
    answers = iter([10**9])
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**9, 0, next(answers, 0)))
    with pytest.raises(DiskFull):
        tools.quantize(fake_build(), source, source.with_name("out.gguf"), "Q4_K")
    assert not list(source.parent.glob(".*.partial"))


@posix
def test_missing_files_and_folders(
    fake_build: Callable[..., Build], source: Path, tmp_path: Path
) -> None:
    build = fake_build()
    with pytest.raises(ModelNotFound):
        tools.quantize(build, tmp_path / "nope", tmp_path / "o", "Q4_K")
    with pytest.raises(StorageError):
        tools.quantize(build, source, tmp_path / "no" / "such" / "o", "Q4_K")
    with pytest.raises(UsageError):
        tools.quantize(build, source, None, "Q4_K")


@posix
def test_a_tool_that_the_build_lacks(fake_build: Callable[..., Build]) -> None:
    with pytest.raises(EngineUnsupported, match="no llama-fit-params"):
        tools.run_tool(fake_build(), "llama-fit-params", [])


@posix
def test_a_tool_that_crashes_or_hangs(
    fake_build: Callable[..., Build], act: Callable[..., None], tmp_path: Path
) -> None:
    build = fake_build()
    act(tool="segv")
    with pytest.raises(ToolFailed, match="SIGSEGV"):
        tools.run_tool(build, "llama-bench", [])
    note = tmp_path / "grandchild"
    act(tool="hang", grandchild=str(note))
    with pytest.raises(ToolFailed, match="did not end"):
        tools.run_tool(build, "llama-bench", [], timeout_s=0.6)
    assert gone(int(note.read_text()))


@posix
def test_a_tool_can_be_cancelled_from_another_thread(
    fake_build: Callable[..., Build], act: Callable[..., None]
) -> None:
    act(tool="hang", stdout="started")
    cancel = threading.Event()
    with pytest.raises(Interrupted):
        tools.run_tool(
            fake_build(), "llama-bench", [], cancel=cancel, on_line=lambda line: cancel.set()
        )


@posix
def test_ctrl_c_ends_the_tool_and_its_children(
    fake_build: Callable[..., Build], act: Callable[..., None], tmp_path: Path
) -> None:
    note = tmp_path / "grandchild"
    act(tool="hang", grandchild=str(note), stdout="started")

    def interrupt(line: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tools.run_tool(fake_build(), "llama-bench", [], on_line=interrupt)
    assert gone(int(note.read_text()))


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@posix
def test_output_comes_line_by_line_and_apart() -> None:
    lines: list[str] = []
    script = "printf 'a\\nb\\r'; printf 'oops' >&2; printf 'c'"
    done = run.run(["sh", "-c", script], env=dict(os.environ), on_line=lines.append)
    assert sorted(lines) == ["a", "b", "c", "oops"]
    assert (done.stdout, done.stderr, done.exit.code) == ("a\nb\rc", "oops", 0)


@posix
def test_much_output_does_not_block() -> None:
    done = run.run(["sh", "-c", "yes | head -c 3000000"], env=dict(os.environ))
    assert len(done.stdout) == 3_000_000


@posix
def test_perplexity_and_divergence(
    fake_build: Callable[..., Build], source: Path, act: Callable[..., None]
) -> None:
    build = fake_build()
    act(stdout="Final estimate: PPL = 7.1234 +/- 0.04567")
    result = tools.perplexity(build, source, source, chunks=2, threads=1)
    assert (result.ppl, result.ppl_error, result.kld_mean) == (7.1234, 0.04567, None)
    act(stdout=KLD)
    result = tools.perplexity(build, source, source, base=source)
    assert (result.ppl, result.base_ppl) == (8.5, 8.25)
    assert (result.kld_mean, result.kld_error, result.kld_p999) == (0.0125, 0.0005, 0.9)
    assert (result.same_top, result.same_top_error) == (0.925, 0.005)
    act(stdout="no numbers")
    with pytest.raises(ToolFailed, match="no result"):
        tools.perplexity(build, source, source)


KLD = """Mean PPL(Q)                   :   8.500000 ±   0.100000
Mean PPL(base)                :   8.250000 ±   0.100000
Mean    KLD:   0.012500 ±   0.000500
Maximum KLD:   2.500000
99.9%   KLD:   0.900000
99.0%   KLD:   0.200000
Median  KLD:   0.002000
Same top p: 92.500 ± 0.500 %
"""


@posix
def test_imatrix_appears_whole_or_not_at_all(
    fake_build: Callable[..., Build], source: Path, act: Callable[..., None]
) -> None:
    build, dest = fake_build(), source.with_name("im.gguf")
    act(stdout="Final estimate: PPL = 7.1 +/- 0.1")
    assert tools.imatrix(build, source, source, dest).ppl == 7.1
    assert dest.exists()
    dest.unlink()
    act(writes=False)
    with pytest.raises(ToolFailed, match="wrote nothing"):
        tools.imatrix(build, source, source, dest)
    assert not dest.exists()


@posix
def test_bench_rows_are_typed(
    fake_build: Callable[..., Build], source: Path, act: Callable[..., None]
) -> None:
    build = fake_build()
    row = '{"n_prompt": 16, "n_gen": 0, "avg_ts": 9.5, "samples_ns": [5, 6], "new_key": {}}'
    act(stdout=f"[ {row} ]", log=["noise on stderr [1]"])
    (found,) = tools.bench(build, source, [16, 32], 8, 2, threads=1)
    assert (found.n_prompt, found.avg_ts, found.samples_ns) == (16, 9.5, (5, 6))
    act(stdout="segfault")
    with pytest.raises(ToolFailed, match="cannot be read"):
        tools.bench(build, source, [16])


@posix
def test_token_ids(
    fake_build: Callable[..., Build], source: Path, act: Callable[..., None]
) -> None:
    build = fake_build()
    act(stdout="[2, 375, 348]")
    assert tools.tokenize_file(build, source, source, add_special=False) == [2, 375, 348]
    act(stdout="nothing")
    with pytest.raises(ToolFailed):
        tools.tokenize_file(build, source, source)


@given(st.text())
def test_any_tool_output_is_survived(text: str) -> None:
    toolparse.tensor_types(text)
    toolparse.fallbacks(text)
    toolparse.quantized_bytes(text)
    toolparse.parse_perplexity(text, 1.0)
    for parse in (toolparse.parse_bench, toolparse.parse_ids):
        try:
            parse(text)
        except ToolFailed:
            continue
