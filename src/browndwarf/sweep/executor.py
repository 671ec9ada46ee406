"""Run cells on this machine: make the files, start llama-server, speak to it.

The boundary: this binds the sweep's protocols (``Engine``, ``Served``, ``Chatter``) to the
engine floor; it decides nothing about what is measured.

Example:
    >>> engine = LocalEngine(build, plan, target, head)            # doctest: +SKIP
    >>> async with engine.serve(configuration, Path("s.log")) as served: ...  # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from browndwarf.engine.client import LlamaClient
from browndwarf.engine.locate import Build
from browndwarf.engine.options import ServerOptions
from browndwarf.engine.process import LlamaServer, LoadProgress
from browndwarf.engine.quantizer import quantize
from browndwarf.engine.tools import bench
from browndwarf.engine.wire import SpecCounters
from browndwarf.errors import EngineError, EngineUnsupported, ModelError, RequestFailed
from browndwarf.models.ggml_types import HIGH_PRECISION
from browndwarf.models.gguf import read_model
from browndwarf.sweep import synthetic
from browndwarf.sweep.launch import server_options
from browndwarf.sweep.pace import WAIT_S, CurvePass, Pacer, Tempo, evened_curve
from browndwarf.sweep.planned import SweepPlan
from browndwarf.sweep.probe import reference_server
from browndwarf.sweep.served import Answer, Served, Settings
from browndwarf.sweep.smoke import Reply
from browndwarf.sweep.sources import Source, ensure_variant, variant_path
from browndwarf.sweep.space import EMBEDDED, Configuration
from browndwarf.sweep.workload import Prompt

T = TypeVar("T")

#: Repetitions of each batch size; a batch takes about as long as a token. Where that is nothing
#: more of them, until each size has run for so many milliseconds, or so often.
CURVE_REPETITIONS = 20
CURVE_MS = 100.0
MOST_REPETITIONS = 60
#: Passes over all sizes beside a probe of the machine's pace, and seconds after which there is no
#: further one.
CURVE_PASSES = 8
CURVE_PATIENCE_S = 10.0


class RunningServer:
    """A live llama-server as cells and the smoke test see it."""

    def __init__(self, server: LlamaServer, client: LlamaClient) -> None:
        self._server = server
        self._client = client

    @property
    def load_s(self) -> float:
        """Seconds from the start of the process until it was healthy."""
        return self._server.load_s

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._server.pid

    async def render(self, prompt: Prompt) -> str:
        """The prompt's final text; thinking is off unless the prompt asks for it."""
        if prompt.prompt is not None:
            return prompt.prompt
        return await self._ask(
            self._client.apply_template(
                prompt.messages,
                list(prompt.tools) or None,
                chat_template_kwargs={"enable_thinking": bool(prompt.thinking)},
            )
        )

    async def complete(self, text: str, *, settings: Settings, n_predict: int, seed: int) -> Answer:
        """One streamed completion, prompt cache off."""
        return await self._ask(
            self._client.completion(
                text,
                n_predict=n_predict,
                temperature=settings.temperature,
                seed=seed,
                ignore_eos=settings.ignore_eos,
                cache_prompt=False,
                return_tokens=False,
                timeout_s=settings.request_timeout_s,
            )
        )

    async def counters(self) -> SpecCounters:
        """The server's speculative counters."""
        return await self._ask(self._client.metrics())

    async def ask(self, text: str, *, max_tokens: int) -> Reply:
        """One greedy chat turn as a user would send it; reasoning counts as text."""
        answer = await self._ask(
            self._client.chat(
                [{"role": "user", "content": text}],
                max_tokens=max_tokens,
                temperature=0.0,
            )
        )
        return _ChatReply(
            text=answer.reasoning + answer.text,
            drafted=answer.timings.draft_n,
            accepted=answer.timings.draft_n_accepted,
            prompt_tokens=answer.prompt_tokens or answer.timings.prompt_n,
        )

    def memory(self) -> dict[str, float]:
        """MiB by kind of buffer as logged, and their sum."""
        log = self._server.log
        lines = {
            f"{context}_{kind}".lower(): log.total_mib(kind, context)
            for context in ("target", "draft")
            for kind in ("model", "KV", "RS", "compute", "output")
        }
        return {name: mib for name, mib in {**lines, "buffers": log.total_mib()}.items() if mib}

    async def _ask(self, request: Awaitable[T]) -> T:
        """Await a request; when it fails because the server ended, say how it ended."""
        try:
            return await request
        except RequestFailed as error:
            raise await self._server.explain(error) from error


@dataclass(frozen=True)
class _ChatReply:
    text: str
    drafted: int
    accepted: int
    prompt_tokens: int


class LocalEngine:
    """llama.cpp on this machine, for one model and its head.

    ``on_make`` is told the name of each model file that has to be made first, ``on_load`` how
    far a server's start has come. ``paced``: the processor computes, so its speed is probed.
    """

    def __init__(
        self,
        build: Build,
        plan: SweepPlan,
        target: Source,
        head: Source | None,
        *,
        fits: Callable[[ServerOptions], dict[str, str] | None] = lambda _: None,
        on_make: Callable[[str], None] = lambda _: None,
        on_load: Callable[[LoadProgress], None] | None = None,
        device_mib: float | None = None,
        paced: bool = False,
        load_timeout_s: float = 600.0,
        env: dict[str, str] | None = None,
    ) -> None:
        self._build, self._plan = build, plan
        self._target, self._head = target, head
        self._fits, self._on_make, self._on_load = fits, on_make, on_load
        self._device_mib, self._paced = device_mib, paced
        self._load_timeout_s = load_timeout_s
        self._env = env

    @property
    def sha(self) -> str:
        """The engine's commit, or its version where the build does not know it."""
        return self._build.sha or self._build.version

    @property
    def device_mib(self) -> float | None:
        """Memory of the one device in use."""
        return self._device_mib

    async def prepare(self, configuration: Configuration) -> None:
        """Make the target and head files that are missing; cancelling stops llama-quantize."""
        wanted = [(self._target, configuration.target_type)]
        head_type = configuration.head_type
        if self._head is not None and head_type not in (None, EMBEDDED):
            wanted.append((self._head, str(head_type)))
        for source, type_name in wanted:
            cancel = threading.Event()
            try:
                await asyncio.to_thread(self._make, source, type_name, cancel)
            except asyncio.CancelledError:
                cancel.set()
                raise

    async def batch_curve(
        self, configuration: Configuration, tokens: int, tempo: Tempo | None = None
    ) -> tuple[float, ...]:
        """Milliseconds of a batch of 1 to ``tokens`` tokens, from llama-bench.

        The median over repetitions; with a ``tempo`` over several passes too, each evened out by
        the probe before and after it. Empty where the build has no llama-bench, or it fails: the
        model does without.
        """
        if "llama-bench" not in self._build.tools:
            return ()
        if tempo is None:
            found = await self._curve_pass(configuration, tokens, CURVE_REPETITIONS)
            return evened_curve([CurvePass(found, 1.0, 1.0)] if found else [])
        passes: list[CurvePass] = []
        begun, waited, repetitions = time.monotonic(), 0.0, CURVE_REPETITIONS
        patience_s = WAIT_S if self._plan.patient else 0.0
        while len(passes) < CURVE_PASSES:
            before, spent = await tempo.settle(max(patience_s - waited, 0.0))
            waited += spent
            found = await self._curve_pass(configuration, tokens, repetitions)
            if not found:
                return ()
            wanted = min(int(CURVE_MS / found[0]), MOST_REPETITIONS)
            repetitions = max(wanted, CURVE_REPETITIONS)
            passes.append(CurvePass(found, before, await tempo.take()))
            if time.monotonic() - begun - waited > CURVE_PATIENCE_S:
                break  # a large model: one pass sees fast spells and slow ones
        return evened_curve(passes, tempo.limit, tempo.fast)

    async def _curve_pass(
        self, configuration: Configuration, tokens: int, repetitions: int
    ) -> tuple[float, ...]:
        """Milliseconds for each size; empty when llama-bench fails."""
        k, v = configuration.kv_pair
        cancel = threading.Event()
        try:
            rows = await asyncio.to_thread(
                bench,
                self._build,
                Path(self.options(configuration).model),
                range(1, tokens + 1),
                repetitions=repetitions,
                threads=configuration.threads,
                ubatch=configuration.ubatch,
                kv_k=k,
                kv_v=v,
                n_gpu_layers=configuration.layers,
                cancel=cancel,
            )
        except asyncio.CancelledError:
            cancel.set()
            raise
        except EngineError:
            return ()
        found = {row.n_prompt: statistics.median(row.samples_ns) / 1e6 for row in rows}
        sizes = range(1, tokens + 1)
        return tuple(found[n] for n in sizes) if all(n in found for n in sizes) else ()

    def options(self, configuration: Configuration) -> ServerOptions:
        """The server options of a configuration, with the paths of its files."""
        head_type = configuration.head_type
        head = None
        if self._head is not None and head_type not in (None, EMBEDDED):
            head = str(variant_path(self._head, str(head_type), self.sha))
        return server_options(
            configuration,
            str(variant_path(self._target, configuration.target_type, self.sha)),
            head,
            synth_rates=self._plan.synth_rates,
        )

    def does_not_fit(self, configuration: Configuration) -> dict[str, str] | None:
        """What the memory budget says against it; None when it fits or nobody knows."""
        return self._fits(self.options(configuration))

    @asynccontextmanager
    async def pacing(self, log_path: Path) -> AsyncIterator[Pacer | None]:
        """The probe of the machine's speed; None where it is not asked for."""
        if not self._paced:
            yield None
            return
        threads = [n for n in self._plan.axes.threads if n is not None]
        async with reference_server(
            self._build, log_path, threads=min(threads, default=None)
        ) as pacer:
            yield pacer

    def serve(
        self, configuration: Configuration, log_path: Path
    ) -> AbstractAsyncContextManager[Served]:
        """A running server for a configuration."""
        return self.serve_options(self.options(configuration), log_path)

    @asynccontextmanager
    async def serve_options(
        self, options: ServerOptions, log_path: Path
    ) -> AsyncIterator[RunningServer]:
        """A running server for exactly these options."""
        server = LlamaServer(
            self._build,
            options,
            log_path=log_path,
            load_timeout_s=self._load_timeout_s,
            on_progress=self._on_load,
            env=self._env,
        )
        async with (
            server,
            LlamaClient(server.base_url, timeout_s=self._plan.settings.request_timeout_s) as client,
        ):
            yield RunningServer(server, client)

    def _make(self, source: Source, type_name: str, cancel: threading.Event) -> None:
        def make(path: Path, dest: Path, name: str) -> None:
            if source.shape is not None:
                synthetic.write(source, dest, name)
                return
            requantize = source.type not in HIGH_PRECISION
            result = quantize(
                self._build, path, dest, name, allow_requantize=requantize, cancel=cancel
            )
            if result.fallbacks:
                dest.unlink(missing_ok=True)
                first = result.fallbacks[0]
                raise EngineUnsupported(
                    f"{path.name} cannot be quantized to {name}",
                    why=f"{len(result.fallbacks)} tensors fall back to other types, first: {first}",
                    fix="choose a type whose block size divides the model's row lengths "
                    "(Q8_0, Q5_0 and Q4_0 need 32; K-quants need 256)",
                )

        ensure_variant(source, type_name, self.sha, make, on_make=self._on_make, intact=_readable)


def _readable(path: Path) -> bool:
    """Whether a cached file's header and length are sound."""
    try:
        read_model(path)
    except ModelError:
        return False
    return True
