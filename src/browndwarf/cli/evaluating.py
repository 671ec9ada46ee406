"""Compose the quality gates from the floors below: what the ``eval`` commands do."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from browndwarf.cli.machine import chosen_build
from browndwarf.cli.render import Output
from browndwarf.cli.sweeping import run_async
from browndwarf.engine.client import LlamaClient
from browndwarf.engine.locate import Build
from browndwarf.engine.options import ServerOptions, axis_to_option
from browndwarf.engine.process import LlamaServer
from browndwarf.engine.quantizer import quantize
from browndwarf.errors import EngineUnsupported, Interrupted, UsageError
from browndwarf.models.ggml_types import parse_kv
from browndwarf.models.gguf import check_head, fingerprint, mismatch, read_model
from browndwarf.models.resolve import resolve_model
from browndwarf.quality import questions as question_sets
from browndwarf.quality.arms import LlamaArms
from browndwarf.quality.divergence import KldRecord, compare_kld, measure_kld
from browndwarf.quality.lossless import LosslessRecord, Settings, check_lossless
from browndwarf.quality.perplexity import Comparison, PplRecord, Run, compare_ppl, measure_ppl
from browndwarf.quality.quiz import HttpAsker, QuizComparison, QuizRecord, compare_quiz, run_quiz
from browndwarf.records import Record
from browndwarf.sweep import workload
from browndwarf.sweep.sources import Source, ensure_variant, parse_type
from browndwarf.units import parse_count

T = TypeVar("T")
R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Texts:
    """The words of ``eval ppl`` and ``eval kld``."""

    model: str
    text: Path | None
    kv: str
    ctx: str
    chunks: int | None
    layers: str
    threads: int | None
    llama_dir: str | None
    docker: str | None

    @property
    def runs(self) -> list[Run]:
        """One for each context and KV type, the first KV type of a context being its base."""
        return [
            Run(ctx=parse_count(c), kv=k, chunks=self.chunks, layers=_layers(self.layers),
                threads=self.threads)
            for c in _split(self.ctx)
            for k in map(parse_kv, _split(self.kv))
        ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """The words of ``eval lossless``."""

    model: str
    draft: str | None
    n_max: str
    target_types: str
    head_types: str
    prompts: str
    count: int
    tokens: int
    temperature: float
    seed: int
    seeds: int
    kv: str
    ctx: str
    layers: str
    threads: int | None
    option: tuple[str, ...]
    llama_dir: str | None
    docker: str | None


@dataclass(frozen=True, kw_only=True)
class Quizzing:
    """The words of ``eval quiz``."""

    model: str | None
    base_url: str | None
    draft: str | None
    n_max: int
    thinking: str
    questions: str | None
    max_tokens: int
    kv: str
    ctx: str
    layers: str
    threads: int | None
    name: str
    api_key_env: str
    llama_dir: str | None
    docker: str | None


def perplexities(words: Texts, out: Output) -> list[PplRecord]:
    """A record for each context and KV type."""
    runs = words.runs
    build = chosen_build(words.llama_dir, words.docker)
    model, text = resolve_model(words.model), _text(words)
    records = []
    for run in runs:
        out.note(f"{model.name}, KV {run.kv}, {run.ctx} tokens a chunk")
        records.append(measure_ppl(build, model, text, run, on_note=out.note))
    return records


def divergences(words: Texts, reference: str, reference_kv: str, out: Output) -> list[KldRecord]:
    """A record for each context and KV type."""
    runs, reference_kv = words.runs, parse_kv(reference_kv)
    build = chosen_build(words.llama_dir, words.docker)
    model, base, text = (
        resolve_model(words.model),
        resolve_model(reference),
        _text(words, reference),
    )
    records = []
    for run in runs:
        out.note(f"{model.name} against {base.name}, KV {run.kv}, {run.ctx} tokens a chunk")
        records.append(
            measure_kld(build, model, base, text, run, reference_kv=reference_kv, on_note=out.note)
        )
    return records


def losslessness(words: Decoding, out: Output) -> list[LosslessRecord]:
    """A record for each target type, head type and n_max."""
    build = chosen_build(words.llama_dir, words.docker, need="draft-mtp")
    prompts = [p for name in _split(words.prompts) for p in _prompts(words, name)]
    target = resolve_model(words.model)
    draft = words.draft or ("demo" if words.model == "demo" else None)
    head = resolve_model(draft, "head") if draft else None
    if head is not None:
        match = check_head(read_model(target), read_model(head))
        if not match.ok:
            raise mismatch(read_model(target), read_model(head), match)
    records = []
    for target_type in _split(words.target_types):
        target_file = _variant(build, target, target_type, out)
        for head_type in _split(words.head_types) if head else ["embedded"]:
            head_file = _variant(build, head, head_type, out) if head else None
            for n_max in _split(words.n_max):
                options = _server(words, target_file, head_file, _positive(n_max))
                setup = f"{target_type} target, {head_type} head, n_max {n_max}"
                out.note(setup)
                records.append(_check(build, options, prompts, words, setup, out))
    return records


def _check(
    build: Build,
    options: ServerOptions,
    prompts: list[workload.Prompt],
    words: Decoding,
    setup: str,
    out: Output,
) -> LosslessRecord:
    settings = Settings(
        n_max=options.n_max or 3,
        tokens=words.tokens,
        temperature=words.temperature,
        seed=words.seed,
        seeds=words.seeds,
        setup=setup,
    )

    def progress(stage: str, done: int, total: int) -> None:
        if done and done % max(1, total // 4) == 0:
            out.note(f"  {stage}: {done} of {total}")

    with tempfile.TemporaryDirectory(prefix="browndwarf-eval-") as folder:
        arms = LlamaArms(build, options, Path(folder) / "server.log")
        return _run(check_lossless(arms, prompts, settings, on_progress=progress))


def _server(
    words: Decoding | Quizzing, target: Path, head: Path | None, n_max: int | None
) -> ServerOptions:
    kv_k, _, kv_v = parse_kv(words.kv).partition(":")
    fields: dict[str, Any] = {}
    extra: list[tuple[str, str | None]] = []
    for text in words.option if isinstance(words, Decoding) else ():
        name, _, value = text.partition("=")
        made = axis_to_option(name, value)
        extra += made.pop("extra", ())
        fields |= made
    options: dict[str, Any] = {
        "model": str(target),
        "draft": str(head) if head else None,
        "spec_type": "draft-mtp" if n_max else None,
        "n_max": n_max,
        "ctx": parse_count(words.ctx),
        "kv_k": kv_k,
        "kv_v": kv_v or kv_k,
        "n_gpu_layers": _layers(words.layers),
        "threads": words.threads,
    }
    return ServerOptions(**options | fields, extra=tuple(extra))


def quizzed(words: Quizzing, out: Output) -> QuizRecord:
    """The quiz, on a server of our own or on the user's."""
    if (words.model is None) == (words.base_url is None):
        raise UsageError(
            "name a model or an endpoint, not both",
            fix="browndwarf eval quiz MODEL, or browndwarf eval quiz --base-url URL",
        )
    modes: dict[str, tuple[bool | None, ...]] = {
        "on": (True,),
        "off": (False,),
        "both": (False, True),
        "default": (None,),
    }
    if words.thinking not in modes:
        raise UsageError(f"thinking is not {words.thinking!r}", fix=f"use {', '.join(modes)}")
    asked = question_sets.load(words.questions or ("demo" if words.model == "demo" else "general"))
    thinking = modes[words.thinking]
    total = len(asked) * len(thinking)
    out.note(f"{total} questions")

    def progress(done: int, total: int) -> None:
        if done and done % max(1, total // 4) == 0:
            out.note(f"  {done} of {total}")

    async def ask(client: LlamaClient, name: str) -> QuizRecord:
        asker = HttpAsker(client, model=words.name, max_tokens=words.max_tokens)
        return await run_quiz(asker, asked, thinking=thinking, model=name, on_progress=progress)

    async def remote(url: str) -> QuizRecord:
        key = os.environ.get(words.api_key_env)
        async with LlamaClient(url.rstrip("/").removesuffix("/v1"), api_key=key) as client:
            return await ask(client, words.name or url)

    async def local(model: str) -> QuizRecord:
        build = chosen_build(
            words.llama_dir, words.docker, need="draft-mtp" if words.draft else None
        )
        target = resolve_model(model)
        head = resolve_model(words.draft, "head") if words.draft else None
        options = _server(words, target, head, words.n_max if head else None)
        with tempfile.TemporaryDirectory(prefix="browndwarf-eval-") as folder:
            server = LlamaServer(build, options, log_path=Path(folder) / "server.log")
            async with server, LlamaClient(server.base_url) as client:
                return await ask(client, target.name)

    if words.base_url is not None:
        return _run(remote(words.base_url))
    assert words.model is not None
    return _run(local(words.model))


def against_ppl(path: Path, records: list[PplRecord]) -> Comparison:
    """The first record against a saved document's first."""
    return compare_ppl(_saved(path, "eval-ppl", PplRecord), records[0])


def against_kld(path: Path, records: list[KldRecord]) -> Comparison:
    """The first record against a saved document's first."""
    return compare_kld(_saved(path, "eval-kld", KldRecord), records[0])


def against_quiz(path: Path, record: QuizRecord) -> QuizComparison:
    """A quiz against a saved document."""
    return compare_quiz(_saved(path, "eval-quiz", QuizRecord), record)


def _saved(path: Path, kind: str, record: type[R]) -> R:
    try:
        data = msgspec.json.decode(path.read_bytes())
        if data.get("schema") != f"browndwarf/{kind}/1":
            raise UsageError(
                f"{path} is no document of this command", why=f"its schema is {data.get('schema')}"
            )
        return msgspec.convert(data["records"][0] if "records" in data else data, record)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError, AttributeError) as exc:
        raise UsageError(
            f"{path} cannot be compared with", why=str(exc), fix="save one with --json > FILE"
        ) from exc


def _text(words: Texts, reference: str | None = None) -> Path:
    if words.text is not None:
        return words.text
    if "demo" not in (words.model, reference):
        raise UsageError("no text to evaluate", fix="name one: --text FILE")
    return Path(str(resources.files("browndwarf.quality").joinpath("texts", "demo.txt")))


def _prompts(words: Decoding, name: str) -> tuple[workload.Prompt, ...]:
    if words.model == "demo":
        from browndwarf.models import demo

        if rows := demo.prompts(name):
            return workload.from_rows(name, rows).head(words.count).prompts
    return workload.load(name).head(words.count).prompts


def _variant(build: Build, path: Path, type_name: str, out: Output) -> Path:
    """The model in another type, from the cache that sweeps use."""
    name = parse_type(type_name)
    info = read_model(path)
    source = Source(path=str(path), type=info.file_type, fingerprint=fingerprint(path))

    def make(source_path: Path, dest: Path, wanted: str) -> None:
        requantize = source.type not in ("F32", "F16", "BF16")
        done = quantize(build, source_path, dest, wanted, allow_requantize=requantize)
        if done.fallbacks:
            dest.unlink(missing_ok=True)
            raise EngineUnsupported(
                f"{source_path.name} cannot be quantized to {wanted}",
                why=f"{len(done.fallbacks)} tensors fall back to other types",
                fix="choose a type whose block size divides the model's row lengths",
            )

    return ensure_variant(
        source, name, build.sha or build.version, make,
        on_make=lambda made: out.note(f"making {made} of {path.name}"),
    )  # fmt: skip


def _layers(text: str) -> int | None:
    if text.lower() in ("all", "-1"):
        return None
    return _positive(text) if text != "0" else 0


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{text} is not a positive number")
    return int(text)


def _split(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError("an empty list", fix="write values with commas between them")
    return parts


def _run(job: Coroutine[Any, Any, T]) -> T:
    try:
        return run_async(job)
    except (KeyboardInterrupt, asyncio.CancelledError) as exc:
        raise Interrupted("interrupted", why="no server is left running") from exc
