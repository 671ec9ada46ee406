"""The real llama.cpp behaves as the fakes pretend: starts, fails by name, leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from gguf import GGUFWriter

from browndwarf.engine import tools
from browndwarf.engine.client import LlamaClient
from browndwarf.engine.locate import Build
from browndwarf.engine.options import ServerOptions
from browndwarf.engine.process import LlamaServer
from browndwarf.errors import (
    BadModelFile,
    BrowndwarfError,
    EngineUnsupported,
    ModelNotFound,
    ModelUnsupported,
    PortTaken,
    RequestFailed,
    ServerKilled,
    UsageError,
)

pytestmark = pytest.mark.engine

# Without this, two threads on a busy machine spin against each other for seconds.
ENV = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
WIDTH, FF, HEADS, VOCAB = 64, 128, 2, 300


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of one layer with random weights: 300 KB, enough to serve nonsense."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    random = np.random.default_rng(7)
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_tokenizer_model("llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += [f"w{i}" for i in range(VOCAB - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (VOCAB - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = random.normal(0, 0.2, (rows, columns)).astype(np.float32)
        writer.add_tensor(name, values.astype(np.float16))

    def vector(name: str) -> None:
        writer.add_tensor(name, np.ones(WIDTH, dtype=np.float32))

    matrix("token_embd.weight", VOCAB, WIDTH)
    vector("output_norm.weight")
    matrix("output.weight", VOCAB, WIDTH)
    for name in ("attn_norm", "ffn_norm"):
        vector(f"blk.0.{name}.weight")
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        matrix(f"blk.0.{name}.weight", WIDTH, WIDTH)
    matrix("blk.0.ffn_gate.weight", FF, WIDTH)
    matrix("blk.0.ffn_up.weight", FF, WIDTH)
    matrix("blk.0.ffn_down.weight", WIDTH, FF)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def server_of(
    build: Build, model: Path, tmp_path: Path, *, port: int | None = None, **options: object
) -> LlamaServer:
    settings = {"ctx": 256, "threads": 1, **options}
    return LlamaServer(
        build,
        ServerOptions(model=str(model), **settings),  # type: ignore[arg-type]
        log_path=tmp_path / "server.log",
        env=ENV,
        port=port,
    )


async def failing(server: LlamaServer) -> BrowndwarfError:
    with pytest.raises(BrowndwarfError) as caught:
        async with server:
            pass
    return caught.value


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_the_server_serves_and_ends(engine_build: Build, tiny: Path, tmp_path: Path) -> None:
    async with server_of(engine_build, tiny, tmp_path) as server:
        async with LlamaClient(server.base_url) as client:
            streamed = await client.completion("ab", n_predict=8, ignore_eos=True, seed=1)
            whole = await client.completion(
                "ab", n_predict=8, ignore_eos=True, seed=1, stream=False
            )
            assert await client.tokenize("ab", add_special=True)
            assert (await client.props()).n_ctx == 256
            assert (await client.metrics()).drafts == 0
            with pytest.raises(RequestFailed, match="400"):
                await client.completion("ab " * 900, n_predict=8)
        assert streamed.text == whole.text
        assert len(whole.tokens) == whole.timings.predicted_n == streamed.timings.predicted_n == 8
        # A stream leaves out the ids of tokens that end in the middle of a character.
        assert set(streamed.tokens) <= set(whole.tokens)
        assert streamed.timings.draft_n == 0
        if "log-levels" in engine_build.features:
            assert server.log.total_mib("KV") > 0
    assert gone(server.pid)
    assert server.exit is not None
    assert server.exit.code == 0


async def test_killed_from_outside(engine_build: Build, tiny: Path, tmp_path: Path) -> None:
    async with server_of(engine_build, tiny, tmp_path) as server:
        os.kill(server.pid, signal.SIGKILL)
        await server.wait_exit()
        assert type(server.failure()) is ServerKilled


async def test_a_truncated_model_is_a_bad_file(
    engine_build: Build, tiny: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny.read_bytes()[:-5000])
    assert type(await failing(server_of(engine_build, broken, tmp_path))) is BadModelFile
    broken.write_bytes(tiny.read_bytes()[:900])
    assert type(await failing(server_of(engine_build, broken, tmp_path))) is BadModelFile
    broken.write_bytes(b"not a model at all")
    assert type(await failing(server_of(engine_build, broken, tmp_path))) is BadModelFile


async def test_an_unknown_architecture_is_unsupported(
    engine_build: Build, tiny: Path, tmp_path: Path
) -> None:
    strange = tmp_path / "strange.gguf"
    strange.write_bytes(tiny.read_bytes().replace(b"llama", b"lxama"))
    error = await failing(server_of(engine_build, strange, tmp_path))
    assert type(error) is ModelUnsupported
    assert "lxama" in error.why


async def test_a_model_without_a_head_is_unsupported(
    engine_build: Build, tiny: Path, tmp_path: Path
) -> None:
    server = server_of(engine_build, tiny, tmp_path, spec_type="draft-mtp")
    assert type(await failing(server)) is ModelUnsupported


async def test_a_missing_drafter_is_named(engine_build: Build, tiny: Path, tmp_path: Path) -> None:
    server = server_of(engine_build, tiny, tmp_path, draft=str(tmp_path / "no.gguf"))
    error = await failing(server)
    assert type(error) is ModelNotFound
    assert "drafter" in error.what


async def test_two_servers_cannot_share_a_port(
    engine_build: Build, tiny: Path, tmp_path: Path
) -> None:
    async with server_of(engine_build, tiny, tmp_path) as first:
        second = server_of(engine_build, tiny, tmp_path, port=first.port)
        assert type(await failing(second)) is PortTaken


async def test_wrong_flags_are_known_before_the_start(
    engine_build: Build, tiny: Path, tmp_path: Path
) -> None:
    error = await failing(server_of(engine_build, tiny, tmp_path, extra=(("bogus", None),)))
    assert type(error) is UsageError
    for flag in sorted(engine_build.removed):
        server = server_of(engine_build, tiny, tmp_path, extra=((flag, "1"),))
        assert type(await failing(server)) is EngineUnsupported


PARENT = """
import asyncio, os, signal, sys
from pathlib import Path
from browndwarf.engine.locate import build_at
from browndwarf.engine.options import ServerOptions
from browndwarf.engine.process import LlamaServer

async def serve():
    build = build_at(Path(sys.argv[1]), "test")
    options = ServerOptions(model=sys.argv[2], ctx=256, threads=1)
    async with LlamaServer(build, options, log_path=Path(sys.argv[3])) as server:
        print(server.pgid, flush=True)
        await asyncio.sleep(600)

asyncio.run(serve())
"""


def test_kill_9_of_the_parent_ends_the_real_server(
    engine_build: Build, tiny: Path, tmp_path: Path
) -> None:
    if engine_build.docker_image is not None:
        pytest.skip("the process group of a container is not ours to see")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(engine_build.server), str(tiny), str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENV},
    )
    assert parent.stdout is not None
    pgid = int(parent.stdout.readline())
    assert not gone(pgid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while not gone(pgid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_tools_do_what_the_parsers_expect(engine_build: Build, tiny: Path, tmp_path: Path) -> None:
    if "llama-quantize" not in engine_build.tools:
        pytest.skip("this build has no tools")
    dest = tmp_path / "q.gguf"
    result = tools.quantize(engine_build, tiny, dest, "Q4_K", threads=1)
    assert result.types["blk.0.attn_q.weight"] in ("q5_0", "q8_0", "q4_0")
    assert result.fallbacks  # rows of 64 do not divide by 256
    assert result.fallbacks[0].columns in (WIDTH, FF)
    assert dest.stat().st_size == result.size_bytes
    with pytest.raises(UsageError, match="quantized already"):
        tools.quantize(engine_build, dest, tmp_path / "r.gguf", "Q8_0")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{n * n} ab{n} cd" for n in range(90)))
    ids = tools.tokenize_file(engine_build, tiny, text)
    assert ids[0] == 1
    found = tools.perplexity(engine_build, tiny, text, ctx=64, threads=1, chunks=2)
    assert found.ppl > 1
    (row, *_) = tools.bench(engine_build, tiny, [8], 0, 1, threads=1, env=ENV)
    assert (row.n_prompt, len(row.samples_ns)) == (8, 1)
