"""`imatrix` and `quantize` as they are typed: documents, names of files, exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from browndwarf import cli
from browndwarf.models.gguf import read_model
from browndwarf.models.imatrix import read_imatrix
from fakes import behave
from quantizing import plan_for, small_model, working_build

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="fakes are POSIX scripts")


class Shell:
    """A folder with ``model-F16.gguf`` in it, and a build that works."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.model = small_model(folder / "model-F16.gguf")
        self._engine = str(working_build(folder / "build").server.parent)
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, dict[str, Any]]:
        code = cli.run([*words, "--llama-dir", self._engine, "--json"])
        return code, json.loads(self._capsys.readouterr().out)


@pytest.fixture
def shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_LLAMA", behave(tokens=512 * 6)["FAKE_LLAMA"])
    return Shell(tmp_path, capsys)


def test_an_imatrix_is_made_under_the_models_name(shell: Shell) -> None:
    code, document = shell("imatrix", str(shell.model), "--chunks", "5")
    assert code == 0
    assert document["schema"] == "browndwarf/imatrix/1"
    assert document["chunks"] == 5
    assert document["tokens"] == 5 * 512
    assert document["ppl"] == pytest.approx(7.5)
    assert document["missing"] == ["token_embd.weight"]
    assert document["sources"] == ["browndwarf-calibration-general"]
    assert document["model_fingerprint"].startswith("sha256:")
    assert read_imatrix(Path("model-F16.imatrix.gguf")).entries
    code, document = shell("imatrix", str(shell.model))
    assert code == 2
    assert "exists already" in document["error"]["what"]


def test_a_plan_is_carried_out(shell: Shell) -> None:
    plan_for(shell.model).save(Path("plan.json"))
    code, document = shell("quantize", "plan.json", "--dry-run")
    assert code == 0
    assert document["dry_run"]
    assert not list(shell.folder.glob("*bpw.gguf"))
    code, document = shell("quantize", "plan.json")
    assert code == 0
    assert document["schema"] == "browndwarf/quantize/1"
    (done,) = document["files"]
    assert done["device_bytes"] == plan_for(shell.model).device_bytes
    (made,) = shell.folder.glob("model-*bpw.gguf")
    assert read_model(made).weight_bytes == done["data_bytes"]
    assert shell("quantize", "plan.json")[0] == 2
    assert shell("quantize", "plan.json", "--force")[0] == 0


def test_one_file_for_each_type_or_none(shell: Shell) -> None:
    types = ["--types", "q8_0,Q5_0,Q8_0"]
    code, document = shell("quantize", str(shell.model), *types)
    assert code == 0
    assert [Path(done["path"]).name for done in document["files"]] == [
        "model-Q8_0.gguf",
        "model-Q5_0.gguf",
    ]
    # The last one exists: the first is not begun.
    Path("model-Q8_0.gguf").unlink()
    assert shell("quantize", str(shell.model), *types)[0] == 2
    assert not Path("model-Q8_0.gguf").exists()
    Path("out").mkdir()
    assert shell("quantize", str(shell.model), *types, "-o", "out")[0] == 0
    assert len(list(Path("out").iterdir())) == 2
    code, document = shell("quantize", "out/model-Q8_0.gguf", "--types", "Q4_0")
    assert code == 2
    assert "--allow-requantize" in document["error"]["fix"]


@pytest.mark.parametrize(
    "words",
    [
        ["model-F16.gguf"],
        ["model-F16.gguf", "--types", "Q9_X"],
        ["model-F16.gguf", "--types", ","],
        ["model-F16.gguf", "--types", "as-is"],
        ["model-F16.gguf", "--types", "Q8_0,Q5_0", "-o", "one.gguf"],
        ["plan.json", "--types", "Q8_0"],
        ["noplan.json"],
    ],
)
def test_impossible_words_are_usage_errors(shell: Shell, words: list[str]) -> None:
    plan_for(shell.model).save(Path("plan.json"))
    Path("noplan.json").write_text("{}", encoding="utf-8")
    code, document = shell("quantize", *words)
    assert code == 2
    assert document["error"]["fix"]


def test_what_is_missing_is_an_environment_error(shell: Shell) -> None:
    for words in (["nomodel.gguf", "--types", "Q8_0"], ["none.json"]):
        code, document = shell("quantize", *words)
        assert code == 3
        assert document["error"]["what"]
