"""doctor, inspect and plan from the outside: documents, exit codes, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from browndwarf.cli import run
from browndwarf.models.gguf import ModelInfo, read_model
from browndwarf.plan import compute
from gguf_files import hollow_pair, tiny_file


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute buffers by the fitted estimate: these tests are about the commands."""

    def refuse(*_: object, **__: object) -> None:
        raise compute.EngineError("no library", why="not in this test")

    monkeypatch.setattr(compute, "DrySession", refuse)


def document(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, Any]]:
    """The exit code and the one document on stdout."""
    code = run([*map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_inspect_tells_layers_head_and_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under the promised names."""
    target, head = hollow_pair(tmp_path, "gemma4-12b", layers=6)
    code, body = document(capsys, "inspect", target, "--draft", head)
    assert code == 0
    assert body["schema"] == "browndwarf/inspect/1"
    assert body["architecture"] == "gemma4"
    assert body["layers"]["sliding"] == 5
    assert body["head"] == {"kind": "none", "layers": 0}
    assert body["match"] == {"ok": True, "reasons": [], "notes": []}
    assert {"name", "type"} <= body["tensors"][0].keys()


def test_inspect_ends_with_1_when_the_drafter_does_not_belong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reasons are in the document."""
    target, _ = hollow_pair(tmp_path, "gemma4-12b", layers=6)
    _, other = hollow_pair(tmp_path, "gemma4-31b", layers=6)
    code, body = document(capsys, "inspect", target, "--draft", other)
    assert code == 1
    assert "hidden width" in body["match"]["reasons"][0]


def test_plan_gives_lines_a_verdict_and_remedies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 when it fits, 1 when it does not."""
    target, head = hollow_pair(tmp_path, "gemma4-12b", layers=12)
    common = ("plan", target, "--draft", head, "--ctx", "16k", "--parallel", "4")
    code, body = document(capsys, *common, "--gpu", "RTX 4090")
    assert code == 0
    assert body["budget"]["fits"]
    assert body["max_ctx"] > 16384
    code, body = document(capsys, *common, "--vram", "2GiB")
    assert code == 1
    assert body["schema"] == "browndwarf/plan/1"
    assert not body["budget"]["fits"]
    assert body["remedies"][0]["what"] == "parallel 1"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--vram", "8GiB", "--gpu", "RTX 4090"], 2),
        (["--gpu", "Voodoo 2"], 2),
        (["--vram", "lots"], 2),
        (["--vram", "8"], 2),
        (["--vram", "8GiB", "--margin", "-1"], 2),
        (["--vram", "8GiB", "--context-overhead", "-0.5"], 2),
        (["--vram", "8GiB", "--context-overhead", "nan"], 2),
        (["--vram", "8GiB", "--n-max", "65"], 2),
        (["--draft", ""], 2),
        (["--vram", "8GiB", "--kv", "q6_k"], 2),
        (["--vram", "8GiB", "--layers", "most"], 2),
        (["--vram", "8GiB", "--parallel", "0"], 2),
        (["--device", "CUDA7"], 3),
    ],
)
def test_impossible_options_end_with_their_code_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int
) -> None:
    """One error each, and a document under --json."""
    model = tiny_file(tmp_path / "m.gguf")
    found, body = document(capsys, "plan", model, *options)
    assert found == code
    assert body["schema"] == "browndwarf/error/1"
    assert body["error"]["what"]


def test_a_foreign_drafter_stops_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 3 with the reasons."""
    target, _ = hollow_pair(tmp_path, "qwen35-9b", layers=4)
    _, head = hollow_pair(tmp_path, "gemma4-12b", layers=6)
    code, body = document(capsys, "plan", target, "--draft", head, "--vram", "8GiB")
    assert code == 3
    assert body["error"]["kind"] == "HeadMismatch"


def test_a_plan_reads_no_tensor_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose data cannot be read is planned all the same; nothing past the header is."""
    target, _ = hollow_pair(tmp_path, "gemma4-12b", layers=6)
    longest = 0
    original = Path.open

    def watched(self: Path, *args: Any, **kwargs: Any) -> Any:
        handle = original(self, *args, **kwargs)
        if self.suffix == ".gguf" and args[:1] == ("rb",):
            read = handle.read

            def counted(size: int = -1) -> Any:
                nonlocal longest
                assert size >= 0
                data = read(size)
                longest = max(longest, handle.tell())
                return data

            handle = _Reader(handle, counted)
        return handle

    monkeypatch.setattr(Path, "open", watched)
    info: ModelInfo = read_model(target)
    assert 0 < longest < info.file_bytes / 10
    assert run(["plan", str(target), "--vram", "64GiB"]) == 0
    assert longest < info.file_bytes / 10


class _Reader:
    """A file whose ``read`` is another one."""

    def __init__(self, handle: Any, read: Any) -> None:
        self.handle, self.read = handle, read
        self.seek, self.tell = handle.seek, handle.tell

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.close()


def test_tables_are_printed_without_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same facts for people."""
    target, head = hollow_pair(tmp_path, "gemma4-12b", layers=6)
    assert run(["inspect", str(target), "--draft", str(head), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "belongs to this model" in text
    assert "blk.5.attn_q.weight" in text
    assert run(["plan", str(target), "--draft", str(head), "--vram", "1GiB"]) == 1
    text = capsys.readouterr().out
    assert "does not fit" in text
    assert "layers" in text


def test_a_bare_number_is_no_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 MiB was never meant."""
    _, body = document(capsys, "plan", tiny_file(tmp_path / "m.gguf"), "--vram", "8")
    assert body["error"]["fix"] == "write 8GiB or 8MiB"


def test_a_context_beyond_training_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no shorter context is called the largest that fits."""
    target, _ = hollow_pair(tmp_path, "gemma4-12b", layers=6)
    trained = read_model(target).context_length
    roomy = ("plan", str(target), "--vram", "999GiB")
    assert run([*roomy, "--ctx", str(trained)]) == 0
    text = capsys.readouterr().out
    assert f"largest context that fits with these options: {trained} tokens" in text
    assert "trained for" not in text
    assert run([*roomy, "--ctx", str(trained + 1)]) == 0
    text = capsys.readouterr().out
    assert f"trained for {trained} tokens" in text
    assert "largest context" not in text


def test_draft_tokens_without_a_head_are_ignored_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr; 0 is what happens anyway."""
    model = str(tiny_file(tmp_path / "m.gguf"))
    run(["plan", model, "--vram", "8GiB", "--n-max", "3"])
    assert "--n-max 3 is ignored" in capsys.readouterr().err
    run(["plan", model, "--vram", "8GiB", "--n-max", "0"])
    assert "ignored" not in capsys.readouterr().err


def test_a_plan_without_hope_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing alone, all at once, or not even that."""
    target, head = hollow_pair(tmp_path, "gemma4-12b", layers=12)
    common = ("plan", str(target), "--draft", str(head), "--ctx", "16k")
    assert run([*common, "--vram", "100MiB"]) == 1
    assert "neither are all of them together" in capsys.readouterr().out
    _, body = document(capsys, *common, "--vram", "100MiB")
    assert not body["all_enough"]
    assert not any(remedy["enough"] for remedy in body["remedies"])
    assert body["together"] == []


def test_doctor_prints_findings_and_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    """0 or 1 by whether something must be fixed."""
    code, body = document(capsys, "doctor")
    assert body["schema"] == "browndwarf/doctor/1"
    assert code == (1 if any(f["level"] == "error" for f in body["findings"]) else 0)
    assert run(["doctor"]) == code


def test_a_shape_is_planned_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BROWNDWARF_CACHE", str(tmp_path))
    words = ("plan", "--synthetic", "gemma4-tiny:Q4_0", "--vram", "8GiB")
    code, first = document(capsys, *words)
    assert code == 0
    _, again = document(capsys, *words)
    assert again == first
    names = {line["name"] for line in first["budget"]["lines"]}
    assert any("draft" in name for name in names)
    code, refused = document(capsys, "plan", "demo", "--synthetic", "gemma4-tiny")
    assert code == 2
    code, refused = document(capsys, "plan", "--synthetic", "gemma5", "--vram", "8GiB")
    assert code == 2
    assert "gemma4-12b" in str(refused)
