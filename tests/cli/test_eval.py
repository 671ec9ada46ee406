"""The eval commands: shapes, exit codes, bad words; on the real engine what they promise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from browndwarf import cli
from browndwarf.engine.locate import Build
from browndwarf.engine.toolrun import run_tool
from browndwarf.models import demo


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = cli.run([*words, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "words",
    [
        ["quiz"],
        ["quiz", "demo", "--base-url", "http://127.0.0.1:1"],
        ["quiz", "--base-url", "http://127.0.0.1:1", "--thinking", "maybe"],
        ["quiz", "--base-url", "http://127.0.0.1:1", "--questions", "none.yaml"],
    ],
)
def test_impossible_words_are_usage_errors(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = run_json(capsys, "eval", *words)
    assert code == 2
    assert document["error"]["fix"] or document["error"]["why"]


def test_a_dead_endpoint_is_an_environment_error(
    capsys: pytest.CaptureFixture[str], unused_tcp_port: int
) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}/v1"
    code, document = run_json(capsys, "eval", "quiz", "--base-url", url)
    assert code == 3
    assert "after 0 of 16 answers" in document["error"]["what"]


def engine(build: Build) -> list[str]:
    """One thread: two that wait for each other crawl while anything else computes."""
    return ["--threads", "1", "--llama-dir", str(build.server.parent)]


@pytest.mark.engine
def test_ppl_is_what_llama_perplexity_prints(
    engine_build: Build, capsys: pytest.CaptureFixture[str], cache: None
) -> None:
    words = ["--ctx", "256", "--chunks", "2", *engine(engine_build)]
    code, document = run_json(capsys, "eval", "ppl", "demo", *words)
    assert code == 0
    text = Path(cli.__file__).parents[1] / "quality" / "texts" / "demo.txt"
    args = ["-m", str(demo.TARGET), "-f", str(text), "-c", "256", "--chunks", "2", "-t", "1"]
    printed = run_tool(engine_build, "llama-perplexity", args).output
    final = re.search(r"Final estimate: PPL = (\S+) \+/- (\S+)", printed)
    assert final is not None
    assert document["ppl"] == float(final[1])
    assert document["error"] == float(final[2])
    assert document["schema"] == "browndwarf/eval-ppl/1"


@pytest.mark.engine
def test_a_model_does_not_diverge_from_itself_and_its_logits_are_kept(
    engine_build: Build, capsys: pytest.CaptureFixture[str], cache: None, tmp_path: Path
) -> None:
    words = ["eval", "kld", "demo", "--reference", "demo", "--ctx", "256", "--chunks", "2"]
    words += engine(engine_build)
    code, document = run_json(capsys, *words)
    assert code == 0
    assert abs(document["mean"]) <= 3 * document["error"] + 16 / 65535 / 2
    assert document["same_top"] > 0.99
    (kept,) = (tmp_path / "cache" / "browndwarf" / "logits").iterdir()
    assert kept.stat().st_size < 4 << 20
    kept.write_bytes(b"damaged")
    saved = tmp_path / "kld.json"
    saved.write_text(json.dumps(document))
    code, again = run_json(capsys, *words, "--against", str(saved))
    assert code == 0
    assert again["mean"] == document["mean"]
    assert again["comparison"]["verdict"] == "within error"


@pytest.mark.engine
@pytest.mark.slow
def test_speculation_of_the_embedded_pair_is_lossless(
    engine_build: Build, capsys: pytest.CaptureFixture[str], cache: None
) -> None:
    words = ["eval", "lossless", "demo", "--count", "1", "--tokens", "48", "--n-max", "1,3"]
    code, document = run_json(capsys, *words, *engine(engine_build))
    assert code == 0
    assert document["verdict"] in ("identical", "near-ties")
    assert document["prompts"] == 8
    assert document["mismatches"] == []


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_server_that_accepts_drafts_at_random_is_caught(
    engine_build: Build, capsys: pytest.CaptureFixture[str], cache: None, temperature: str
) -> None:
    """llama-server's synthetic acceptance is a broken verifier made to order."""
    words = ["eval", "lossless", "demo", "--count", "2", "--tokens", "48", "--seeds", "3"]
    words += ["--temperature", temperature, "--option", "synth_rates=0.9:0.8:0.7"]
    code, document = run_json(capsys, *words, *engine(engine_build))
    assert code == 1
    assert document["verdict"] in ("mismatch", "lossy")


@pytest.mark.engine
@pytest.mark.slow
def test_the_quiz_runs_on_the_embedded_pair(
    engine_build: Build, capsys: pytest.CaptureFixture[str], tmp_path: Path, cache: None
) -> None:
    code, document = run_json(capsys, "eval", "quiz", "demo", *engine(engine_build))
    assert code == 0
    assert 0 < document["score"] <= 1
    assert {"id", "ok"} <= set(document["questions"][0])
    saved = tmp_path / "quiz.json"
    saved.write_text(json.dumps(document))
    words = ["--draft", "demo", "--against", str(saved), *engine(engine_build)]
    code, again = run_json(capsys, "eval", "quiz", "demo", *words)
    assert code == 0
    assert again["comparison"]["lost"] == []
