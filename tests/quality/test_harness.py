"""The documented command for larger suites is one that lm-evaluation-harness understands."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
from aiohttp import web

DOCS = Path(__file__).parents[2] / "docs" / "quality.md"


def command() -> list[str]:
    (line,) = (
        line for line in DOCS.read_text(encoding="utf-8").splitlines() if "lm_eval run" in line
    )
    return shlex.split(line)


def test_the_command_names_a_chat_endpoint_and_a_task() -> None:
    words = command()
    arguments = dict(
        pair.split("=", 1) for pair in words[words.index("--model_args") + 1].split(",")
    )
    assert arguments["base_url"].endswith("/v1/chat/completions")
    assert words[words.index("--tasks") + 1]
    assert "--apply_chat_template" in words


@pytest.mark.slow
async def test_the_harness_runs_it(tmp_path: Path, unused_tcp_port: int) -> None:
    if shutil.which("lm_eval") is None:
        pytest.skip("NO lm_eval HERE, so the command was not run")

    async def answer(request: web.Request) -> web.Response:
        message = {"role": "assistant", "content": "45"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"choices": [choice]})

    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "43 + 2?", "answer": "45"}))
    (tmp_path / "sums.yaml").write_text(
        "task: sums\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
        "test_split: test\noutput_type: generate_until\n"
        'doc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
        "metric_list: [{metric: exact_match}]\n"
    )
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
        words = [w.replace(":8080", f":{unused_tcp_port}") for w in command()]
        words[words.index("--tasks") + 1] = "sums"
        process = await asyncio.create_subprocess_exec(
            *[*words, "--include_path", str(tmp_path)],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
    finally:
        await runner.cleanup()
    assert process.returncode == 0, output.decode()
    assert "exact_match" in output.decode()
