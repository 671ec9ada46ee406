"""A server's life: it starts, every way to fail has its own error, and it always ends."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from browndwarf.engine.client import LlamaClient
from browndwarf.engine.locate import Build
from browndwarf.engine.options import ServerOptions
from browndwarf.engine.process import LlamaServer, LoadProgress
from browndwarf.errors import (
    BadModelFile,
    BrowndwarfError,
    EngineUnsupported,
    ModelNotFound,
    ModelUnsupported,
    PortTaken,
    RequestFailed,
    ServerCrashed,
    ServerHung,
    ServerKilled,
    ServerOutOfMemory,
)
from fakes import behave

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="fakes are POSIX scripts")

Factory = Callable[..., Build]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def options(tmp_path: Path) -> ServerOptions:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    return ServerOptions(model=str(model))


@pytest.fixture
def serve(
    fake_build: Factory, options: ServerOptions, tmp_path: Path
) -> Callable[..., LlamaServer]:
    def make(build: Build | None = None, **settings: object) -> LlamaServer:
        keys = ("load_timeout_s", "stall_timeout_s", "on_progress", "port", "grace_s")
        ours = {key: settings.pop(key) for key in keys if key in settings}
        used = settings.pop("options", options)
        return LlamaServer(
            build or fake_build(),
            used,  # type: ignore[arg-type]
            log_path=tmp_path / "server.log",
            env=behave(**settings),
            **ours,  # type: ignore[arg-type]
        )

    return make


async def failing(server: LlamaServer) -> BrowndwarfError:
    with pytest.raises(BrowndwarfError) as caught:
        async with server:
            pass
    assert server.pid == 0 or gone(server.pid)
    return caught.value


async def test_a_server_starts_answers_and_leaves_nothing(
    serve: Callable[..., LlamaServer],
) -> None:
    seen: list[LoadProgress] = []
    async with serve(load_s=0.3, on_progress=seen.append) as server:
        assert server.running
        assert server.load_s > 0.2
        assert os.getpgid(server.pid) == server.pgid == server.pid
        assert os.getpgid(server.pid) != os.getpgid(0)
        assert server.failure() is None
        assert server.log.buffers[0].mib == 17.5
        async with LlamaClient(server.base_url) as client:
            assert (await client.completion("x", n_predict=4)).text == " w0 w1 w2 w3"
    assert not server.running
    assert server.failure() is None
    assert gone(server.pid)
    assert seen
    assert seen[-1].phase == "loading model"


async def test_stopping_twice_is_harmless(serve: Callable[..., LlamaServer]) -> None:
    async with serve() as server:
        await server.stop()
        await server.stop()
    assert gone(server.pid)


async def test_a_server_that_ignores_sigterm_is_killed(
    serve: Callable[..., LlamaServer],
) -> None:
    async with serve(ignore_term=True, grace_s=0.2) as server:
        pass
    assert gone(server.pid)
    assert server.exit is not None
    assert server.exit.signal == signal.SIGKILL


async def test_a_grandchild_ends_with_the_server(
    serve: Callable[..., LlamaServer], tmp_path: Path
) -> None:
    note = tmp_path / "grandchild"
    async with serve(grandchild=str(note)):
        grandchild = int(note.read_text())
        assert not gone(grandchild)
    assert gone(grandchild)


async def test_a_crash_at_load_by_exit_status(serve: Callable[..., LlamaServer]) -> None:
    error = await failing(serve(log=["0.0 E something odd happened"], exit=1))
    assert type(error) is ServerCrashed
    assert "status 1" in error.what
    assert "something odd" in error.why


async def test_a_crash_at_load_by_signal(serve: Callable[..., LlamaServer]) -> None:
    error = await failing(serve(load="segv"))
    assert type(error) is ServerCrashed
    assert "SIGSEGV" in error.what


@pytest.mark.parametrize(
    "line",
    [
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9.00 MiB on device 0: "
        "cudaMalloc failed: out of memory",
        "CUDA error: out of memory",
        "E alloc_tensor_range: failed to allocate CUDA0 buffer of size 1073741824",
        "ggml_vulkan: Device memory allocation of size 1073741824 failed.",
        "ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
        "E ggml_aligned_malloc: insufficient memory (attempted to allocate  43.81 MB)",
        "E llama_init_from_model: failed to initialize the context: failed to allocate buffer "
        "for kv cache",
        "E llama_model_load: error loading model: unable to allocate CUDA0 buffer",
        "E init: failed to allocate compute pp buffers",
        "ggml_metal_buffer_init: error: failed to allocate buffer, size =  1024.00 MiB",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
async def test_running_out_of_memory_is_told_from_a_crash(
    serve: Callable[..., LlamaServer], line: str
) -> None:
    error = await failing(serve(log=[line], exit=1))
    assert type(error) is ServerOutOfMemory
    assert "context" in error.fix


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("E error loading model: unknown model architecture: 'gemmaX'", ModelUnsupported),
        ("E missing tensor 'blk.0.attn_q.weight'", ModelUnsupported),
        ("W context type MTP requested but model doesn't contain MTP layers", ModelUnsupported),
        (
            "E error loading model: tensor 'a' data is not within the file bounds, "
            "model is corrupted or incomplete",
            BadModelFile,
        ),
        ("E gguf_init_from_reader: failed to read key-value pairs", BadModelFile),
        ("E gguf_init_from_reader: invalid magic characters: 'hell'", BadModelFile),
        ("E gguf_init_from_file: failed to open GGUF file 'x.gguf' (No such)", ModelNotFound),
        ("error: invalid argument: --bogus", EngineUnsupported),
    ],
)
async def test_what_the_log_says_at_load_decides_the_error(
    serve: Callable[..., LlamaServer], line: str, expected: type[BrowndwarfError]
) -> None:
    assert type(await failing(serve(log=[line], exit=1))) is expected


async def test_a_silent_server_is_hung(serve: Callable[..., LlamaServer]) -> None:
    error = await failing(serve(load="hang", stall_timeout_s=0.6, grace_s=0.2))
    assert type(error) is ServerHung
    assert "no sign of life" in error.what


async def test_a_server_that_is_never_healthy_is_hung(
    serve: Callable[..., LlamaServer],
) -> None:
    error = await failing(serve(load="never", load_timeout_s=0.8))
    assert type(error) is ServerHung
    assert "not ready" in error.what


async def test_a_taken_port_is_known_before_the_start(
    serve: Callable[..., LlamaServer],
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        error = await failing(serve(port=other.getsockname()[1]))
    assert type(error) is PortTaken


async def test_a_lost_race_for_a_free_port_is_run_again(
    serve: Callable[..., LlamaServer],
) -> None:
    async with serve(bind="second-time") as server:
        assert server.running


async def test_a_port_lost_again_and_again_is_reported(
    serve: Callable[..., LlamaServer],
) -> None:
    assert type(await failing(serve(bind="never"))) is PortTaken


async def test_another_server_on_our_port_is_noticed(
    serve: Callable[..., LlamaServer],
) -> None:
    assert type(await failing(serve(serves="/other/model-b.gguf"))) is PortTaken


async def test_missing_files_are_known_before_the_start(
    serve: Callable[..., LlamaServer], options: ServerOptions, tmp_path: Path
) -> None:
    missing = str(tmp_path / "nope.gguf")
    error = await failing(serve(options=ServerOptions(model=missing)))
    assert type(error) is ModelNotFound
    draft = ServerOptions(model=options.model, draft=missing)
    error = await failing(serve(options=draft))
    assert type(error) is ModelNotFound
    assert "drafter" in error.what


async def test_a_crash_in_mid_request_is_explained(
    serve: Callable[..., LlamaServer],
) -> None:
    async with serve(request="crash") as server, LlamaClient(server.base_url) as client:
        with pytest.raises(RequestFailed) as caught:
            await client.completion("x", n_predict=4)
        reason = await server.explain(caught.value)
    assert type(reason) is ServerCrashed
    assert "SIGSEGV" in reason.what


async def test_running_out_of_memory_in_mid_request_is_explained(
    serve: Callable[..., LlamaServer],
) -> None:
    words = ["CUDA error: out of memory"]
    server = serve(request="crash", signal="SIGABRT", last_words=words)
    async with server, LlamaClient(server.base_url) as client:
        with pytest.raises(RequestFailed) as caught:
            await client.completion("x", n_predict=4)
        assert type(await server.explain(caught.value)) is ServerOutOfMemory


async def test_a_failed_request_to_a_living_server_stays_as_it_is(
    serve: Callable[..., LlamaServer],
) -> None:
    async with serve(request="error") as server, LlamaClient(server.base_url) as client:
        with pytest.raises(RequestFailed) as caught:
            await client.completion("x", n_predict=4)
        assert await server.explain(caught.value) is caught.value


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_server_ended_from_outside_was_killed(
    serve: Callable[..., LlamaServer], number: signal.Signals
) -> None:
    async with serve() as server:
        os.kill(server.pid, number)
        await server.wait_exit()
        assert type(server.failure()) is ServerKilled


async def test_the_guard_killed_takes_the_server_with_it(
    serve: Callable[..., LlamaServer], tmp_path: Path
) -> None:
    note = tmp_path / "grandchild"
    async with serve(grandchild=str(note)) as server:
        guard = psutil.Process(server.pid).ppid()
        assert guard != os.getpid()
        os.kill(guard, signal.SIGKILL)
        await server.wait_exit()
        assert type(server.failure()) is ServerKilled
    for pid in (server.pid, int(note.read_text())):
        await until_gone(pid)


async def test_a_cancelled_start_leaves_nothing(serve: Callable[..., LlamaServer]) -> None:
    started: asyncio.Future[LoadProgress] = asyncio.get_running_loop().create_future()

    def tell(progress: LoadProgress) -> None:
        if not started.done():
            started.set_result(progress)

    server = serve(load="never", on_progress=tell)

    async def enter() -> None:
        async with server:
            pass

    task = asyncio.create_task(enter())
    await started
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(server.pid)


async def test_llama_arg_variables_do_not_reach_the_server(
    serve: Callable[..., LlamaServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "17")
    async with serve() as server:
        assert "LLAMA_ARG_CTX_SIZE" not in psutil.Process(server.pid).environ()


async def test_a_program_that_cannot_be_executed(
    serve: Callable[..., LlamaServer], fake_build: Factory
) -> None:
    build = fake_build()
    build.server.write_text("not a program")
    error = await failing(serve(build))
    assert type(error) is EngineUnsupported


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(20):
        while not gone(pid):
            await asyncio.sleep(0.01)


async def test_a_container_is_run_by_name_and_removed_at_the_end(
    serve: Callable[..., LlamaServer],
    fake_build: Factory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside = fake_build()
    client, notes = tmp_path / "client" / "docker", tmp_path / "notes"
    client.parent.mkdir()
    # A docker that notes its command, and runs the server of the "image" with its flags.
    client.write_text(
        f"""#!/bin/sh
echo "$@" >> {notes}
[ "$1" = run ] || exit 0
while [ "$1" != image:tag ]; do shift; done; shift
exec {inside.server} "$@"
"""
    )
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}{os.pathsep}{os.environ['PATH']}")
    build = dataclasses.replace(
        inside, server=Path("/app/llama-server"), docker_image="image:tag", source="docker"
    )
    async with serve(build) as server:
        assert server.running
        ran = notes.read_text()
        assert f"-p 127.0.0.1:{server.port}:{server.port}" in ran
        assert "/model.gguf:ro" in ran
        name = server.command[server.command.index("--name") + 1]
    assert f"rm -f {name}" in notes.read_text()
