"""The arms of a losslessness check on llama.cpp: the same server with and without speculation.

Boundary: binds the protocols of ``lossless`` to the engine floor. All requests are made with
``stream=False``, since a stream leaves out ids of tokens that end inside a character; the prompt
cache is off; with a temperature the sampler chain is the temperature alone, so that the server's
probabilities after sampling are those that a token is drawn from.

Example:
    >>> arms = LlamaArms(build, ServerOptions(model="t.gguf", draft="h.gguf", n_max=3), logs)
    >>> async with arms.plain() as model: ...                             # doctest: +SKIP
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from browndwarf.engine.answers import Completion
from browndwarf.engine.client import LlamaClient
from browndwarf.engine.locate import Build
from browndwarf.engine.options import ServerOptions
from browndwarf.engine.process import LlamaServer, LoadProgress
from browndwarf.errors import RequestFailed, UsageError
from browndwarf.quality.lossless import Question, Written
from browndwarf.quality.partings import Step
from browndwarf.quality.sampled import TOP

T = TypeVar("T")


class _Candidate(msgspec.Struct):
    id: int
    logprob: float | None = None
    prob: float | None = None

    @property
    def nats(self) -> float:
        """Log-probability, from whichever form the server chose."""
        if self.prob is not None:
            return math.log(max(self.prob, 1e-45))
        return self.logprob if self.logprob is not None else -math.inf


class _Position(_Candidate):
    top_logprobs: list[_Candidate] = []
    top_probs: list[_Candidate] = []


class LlamaModel:
    """A running llama-server as writer and judge."""

    def __init__(self, server: LlamaServer, client: LlamaClient, timeout_s: float) -> None:
        self._server, self._client = server, client
        self._timeout_s = timeout_s
        self._texts: dict[int, str] = {}

    async def encode(self, prompts: Sequence[object]) -> list[Question]:
        """Prompts as token ids, through the model's own chat template.

        A prompt has ``id``, and either ``messages`` (with optional ``tools`` and ``thinking``)
        or ``prompt``, as in JSONL workloads.
        """
        questions = []
        for number, item in enumerate(prompts, 1):
            row = msgspec.to_builtins(item)
            text = row.get("prompt")
            if text is None:
                text = await self._ask(
                    self._client.apply_template(
                        row["messages"],
                        row.get("tools") or None,
                        chat_template_kwargs={"enable_thinking": bool(row.get("thinking"))},
                    )
                )
            tokens = await self._ask(self._client.tokenize(text, add_special=True))
            questions.append(Question(row.get("id") or f"prompt-{number}", tuple(tokens)))
        return questions

    async def text(self, token: int) -> str:
        """What a token looks like."""
        if token not in self._texts:
            self._texts[token] = await self._ask(self._client.detokenize([token]))
        return self._texts[token]

    async def write(
        self, prompt: Sequence[int], *, n: int, temperature: float, seed: int
    ) -> Written:
        """Decode, by whatever means the server was started with."""
        done = await self._complete(prompt, n, temperature, seed, {})
        return Written(done.tokens, done.timings.draft_n, done.timings.draft_n_accepted)

    async def steps(
        self, prefix: Sequence[int], *, n: int, temperature: float, seed: int
    ) -> tuple[Step, ...]:
        """Decode, and tell the best candidates at every position."""
        extra = {"n_probs": TOP, "post_sampling_probs": temperature > 0}
        done = await self._complete(prefix, n, temperature, seed, extra)
        try:
            positions = msgspec.convert(
                done.raw.get("completion_probabilities") or [], list[_Position]
            )
        except msgspec.ValidationError as exc:
            raise RequestFailed("llama-server sent odd probabilities", why=str(exc)) from exc
        if [p.id for p in positions] != list(done.tokens):
            raise RequestFailed(
                "llama-server's probabilities do not belong to its tokens",
                why=f"{len(positions)} positions for {len(done.tokens)} tokens",
                fix="use a build whose /completion knows n_probs and return_tokens",
            )
        return tuple(
            Step(
                p.id,
                tuple((c.id, c.nats) for c in p.top_logprobs or p.top_probs) or ((p.id, p.nats),),
            )
            for p in positions
        )

    async def _complete(
        self,
        prompt: Sequence[int],
        n: int,
        temperature: float,
        seed: int,
        extra: Mapping[str, Any],
    ) -> Completion:
        chain = {"samplers": ["temperature"], "min_p": 0.0, "top_p": 1.0, "top_k": 0}
        done = await self._ask(
            self._client.completion(
                prompt,
                n_predict=n,
                temperature=temperature,
                seed=seed,
                stream=False,
                extra={**extra, **(chain if temperature > 0 else {})},
                timeout_s=self._timeout_s,
            )
        )
        if done.truncated:
            raise UsageError(
                "a prompt and its answer do not fit the context",
                why=f"{len(prompt)} prompt tokens and {n} new ones",
                fix="give a larger --ctx, shorter prompts or fewer --tokens",
            )
        return done

    async def _ask(self, request: Awaitable[T]) -> T:
        """Await a request; when it fails because the server ended, say how it ended."""
        try:
            return await request
        except RequestFailed as error:
            raise await self._server.explain(error) from error


class LlamaArms:
    """All arms of one setup. ``options`` is the speculative one; the others follow from it."""

    def __init__(
        self,
        build: Build,
        options: ServerOptions,
        log_path: Path,
        *,
        on_load: Callable[[LoadProgress], None] | None = None,
        request_timeout_s: float = 600.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._build, self._options = build, options
        self._log_path, self._on_load = log_path, on_load
        self._timeout_s, self._env = request_timeout_s, env

    @asynccontextmanager
    async def _serve(self, options: ServerOptions) -> AsyncIterator[LlamaModel]:
        server = LlamaServer(
            self._build, options, log_path=self._log_path, on_progress=self._on_load, env=self._env
        )
        async with server, LlamaClient(server.base_url) as client:
            yield LlamaModel(server, client, self._timeout_s)

    def speculative(self) -> Any:
        """The setup itself."""
        return self._serve(self._options)

    def plain(self) -> Any:
        """The same server without speculation."""
        return self._serve(self._plain())

    def batched(self, size: int) -> Any:
        """Without speculation, evaluating prompts ``size`` tokens at a time."""
        return self._serve(msgspec.structs.replace(self._plain(), batch=size, ubatch=size))

    def _plain(self) -> ServerOptions:
        return msgspec.structs.replace(
            self._options,
            draft=None,
            spec_type=None,
            n_max=None,
            n_min=None,
            p_min=None,
            draft_kv_k=None,
            draft_kv_v=None,
            draft_n_gpu_layers=None,
            draft_device=None,
            draft_backend_sampling=None,
            synth_rates=None,
            synth_len=None,
            # Sampling on the device names no candidates.
            backend_sampling=False,
        )
