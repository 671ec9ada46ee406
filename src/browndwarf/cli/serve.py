"""``browndwarf serve``: an OpenAI-compatible server over the runtime in this process.

The address goes to stdout when it answers, notes and faults to stderr. Ctrl-C and SIGTERM end it:
running answers get an error, their conversations are saved, and the exit code is 0. A second
signal ends it at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from browndwarf.cli.options import (
    AdaptiveOption,
    PairCtxOption,
    PairDraftOption,
    PairKvOption,
    PairLayersOption,
    PairNMaxOption,
    PairPMinOption,
    PairThreadsOption,
    RereadOption,
    SessionsCapOption,
)

if TYPE_CHECKING:
    from types import FrameType

    from browndwarf.cli.render import Output

_LOCAL = ("127.0.0.1", "localhost", "::1")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)


def serve(
    model: Annotated[str, typer.Argument(help="A .gguf file, demo, or hf:owner/name[:file].")],
    draft: PairDraftOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="BROWNDWARF_API_KEY", help="Key that clients must send."),
    ] = None,
    queue: Annotated[
        int, typer.Option(min=0, help="Requests that may wait while one is answered.")
    ] = 8,
    sessions: Annotated[
        Path | None,
        typer.Option("--sessions", help="Folder for conversations that requests name."),
    ] = None,
    cap: SessionsCapOption = "20GiB",
    reread: RereadOption = False,
    thinking: Annotated[
        bool, typer.Option(help="Let the model think where a request does not say.")
    ] = False,
    ctx: PairCtxOption = "4k",
    n_max: PairNMaxOption = 3,
    p_min: PairPMinOption = 0.0,
    adaptive: AdaptiveOption = False,
    kv: PairKvOption = "f16",
    layers: PairLayersOption = -1,
    threads: PairThreadsOption = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Where a request does not say; 0 is greedy.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Where a request does not say; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Where a request does not say; 1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Where a request does not say; 0 is off.")] = 0.0,
) -> None:
    """Serve a model to any OpenAI client, with MTP, tool calls and conversations on disk."""
    from browndwarf.cli.render import Output
    from browndwarf.errors import EnvironmentFault, UsageError
    from browndwarf.files import check_writable
    from browndwarf.units import parse_bytes, parse_count

    try:
        from browndwarf.decode.server import build_app
        from browndwarf.decode.server_thread import Serving, listening
    except ModuleNotFoundError as exc:
        raise EnvironmentFault(
            f"the package {exc.name} is missing",
            why="the server is made with starlette and uvicorn",
            fix="pip install 'browndwarf[serve]'",
        ) from exc
    from browndwarf.decode.llm import load
    from browndwarf.decode.openai_wire import Defaults
    from browndwarf.decode.sampling import Sampling
    from browndwarf.decode.server_runtime import LlmRuntime
    from browndwarf.decode.server_worker import Worker

    if api_key is not None and not api_key.strip():
        raise UsageError("the API key is empty", fix="give one, or leave --api-key out")
    if model == "demo" and draft is None:
        draft = "demo"
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    out = Output()
    cap_bytes, n_ctx = parse_bytes(cap), parse_count(ctx)
    if sessions is not None:
        check_writable(sessions, "keep conversations")
    # The port is taken before the model is loaded, which may take minutes.
    with (
        contextlib.closing(listening(host, port)) as sock,
        load(
            model,
            draft,
            sessions=sessions,
            sessions_cap_bytes=cap_bytes,
            n_ctx=n_ctx,
            n_max=n_max,
            p_min=p_min,
            adaptive=adaptive,
            kv_k=kv,
            kv_v=kv,
            gpu_layers=layers,
            threads=threads,
        ) as llm,
    ):
        if host not in _LOCAL and api_key is None:
            out.note("note: whoever reaches this address can use the model; see --api-key")
        worker = Worker(LlmRuntime(llm, reread=reread), queue=queue, log=lambda s: _log(out, s))
        app = build_app(worker, api_key=api_key, defaults=Defaults(sampling, thinking))
        with _signals() as stop, Serving(app, sock, worker) as serving:
            out.text(f"serving {worker.runtime.name}, head: {llm.pair.kind}, {serving.base_url}")
            # In parts, because Windows delivers no Ctrl-C to a thread that waits.
            while serving.alive and not stop.wait(0.5):
                pass
    if not stop.is_set():
        raise EnvironmentFault("the HTTP server has ended by itself", fix="start it again")
    out.note("ended")


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; the second acts as ever."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def asked(number: int, frame: FrameType | None) -> None:
        stop.set()
        restore()

    for number in before:
        signal.signal(number, asked)
    try:
        yield stop
    finally:
        restore()


def _log(out: Output, line: str) -> None:
    """A note from another thread, which must go on when nobody reads any more."""
    from browndwarf.cli.streams import ReaderGone
    from browndwarf.errors import StorageError

    with contextlib.suppress(ReaderGone, StorageError):
        out.note(line)
