"""llama.cpp's command-line tools as typed calls: quantize, perplexity, imatrix, bench, tokenize.

Boundary: runs one tool to its end and reads its output; whether a result is good is decided
elsewhere. Calls block; from asyncio use ``asyncio.to_thread`` with a ``cancel`` event. Ctrl-C,
a time limit and our own death end the tool with its process group.

Example:
    >>> perplexity(build, Path("model.gguf"), Path("text.txt"), ctx=512).ppl  # doctest: +SKIP
    7.12
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from browndwarf.engine import toolparse
from browndwarf.engine.locate import Build
from browndwarf.engine.quantizer import QuantizeResult, quantize
from browndwarf.engine.toolparse import BenchRow, Fallback, PerplexityResult
from browndwarf.engine.toolrun import (
    OnLine,
    ToolResult,
    need_file,
    run_tool,
    tail_of,
    tool_flags,
)
from browndwarf.errors import ToolFailed

__all__ = [
    "BenchRow",
    "Fallback",
    "ImatrixResult",
    "PerplexityResult",
    "QuantizeResult",
    "ToolResult",
    "bench",
    "imatrix",
    "perplexity",
    "quantize",
    "run_tool",
    "tokenize_file",
    "tool_flags",
]


@dataclass(frozen=True)
class ImatrixResult:
    """An importance matrix, and the perplexity that the tool measured on the way.

    ``pass_s`` is what it says of its first pass over ``max(1, 2048 // ctx)`` chunks, in seconds.
    """

    path: Path
    ppl: float | None
    seconds: float
    pass_s: float | None = None


def perplexity(
    build: Build,
    model: Path,
    text: Path,
    *,
    ctx: int = 512,
    chunks: int | None = None,
    threads: int | None = None,
    save_base: Path | None = None,
    base: Path | None = None,
    extra: Sequence[str] = (),
    timeout_s: float | None = None,
    on_line: OnLine | None = None,
    cancel: threading.Event | None = None,
) -> PerplexityResult:
    """Perplexity of a model over a text; with ``base``, the divergence from saved logits.

    Args:
        ctx: tokens per chunk.
        save_base: write this model's logits here, to compare others with.
        base: logits of the reference model, saved by an earlier call with ``save_base``.

    Raises:
        ToolFailed: also when the output holds no result, as for a text that is too short.
    """
    need_file(model)
    need_file(text)
    args = ["-m", str(model), "-f", str(text), "-c", str(ctx), *_common(build, threads)]
    if chunks is not None:
        args += ["--chunks", str(chunks)]
    if base is not None:
        need_file(base)
        args += ["--kl-divergence-base", str(base), "--kl-divergence"]
    elif save_base is not None:
        args += ["--kl-divergence-base", str(save_base)]
    done = run_tool(
        build,
        "llama-perplexity",
        [*args, *extra],
        timeout_s=timeout_s,
        on_line=on_line,
        cancel=cancel,
        read_only=[p for p in (model, text, base) if p is not None],
        writable=[save_base.parent] if save_base is not None else [],
    )
    result = toolparse.parse_perplexity(done.output, done.seconds)
    if result is None:
        raise ToolFailed(
            "llama-perplexity gave no result",
            why=tail_of(done.output),
            fix=f"give it a longer text: at least {2 * ctx} tokens",
        )
    return result


def imatrix(
    build: Build,
    model: Path,
    text: Path,
    dest: Path,
    *,
    ctx: int = 512,
    chunks: int | None = None,
    from_chunk: int = 0,
    add_to: Path | None = None,
    process_output: bool = False,
    layers: int | None = None,
    threads: int | None = None,
    extra: Sequence[str] = (),
    timeout_s: float | None = None,
    on_line: OnLine | None = None,
    cancel: threading.Event | None = None,
) -> ImatrixResult:
    """Collect an importance matrix over a text; ``dest`` appears complete or not at all.

    The tool does not look whether its own writing succeeded: read the file before relying on it.

    Args:
        chunks: at most so many, counted from ``from_chunk``.
        from_chunk: first chunk of the text. More than two whole chunks must follow it.
        add_to: an earlier result, whose sums and counts are added to.
        process_output: collect for ``output.weight`` too.
        layers: on the device; None lets llama.cpp fit them to its memory.

    Raises:
        ToolFailed and others: as ``run_tool``.
    """
    need_file(model)
    need_file(text)
    partial = dest.with_name(f".{secrets.token_hex(4)}.partial.{dest.name}")
    args = ["-m", str(model), "-f", str(text), "-c", str(ctx), "-o", str(partial)]
    if layers is not None:
        args += [*_common(build, None, tool="llama-imatrix"), "-ngl", str(layers)]
    if threads is not None:
        args += ["-t", str(threads)]
    if chunks is not None:
        args += ["--chunks", str(chunks)]
    if from_chunk:
        args += ["--chunk", str(from_chunk)]
    if add_to is not None:
        need_file(add_to)
        args += ["--in-file", _csv_field(add_to)]
    if process_output:
        args.append("--process-output")
    try:
        done = run_tool(
            build,
            "llama-imatrix",
            [*args, *extra],
            timeout_s=timeout_s,
            on_line=on_line,
            cancel=cancel,
            read_only=[p for p in (model, text, add_to) if p is not None],
            writable=[dest.parent],
        )
        if not partial.is_file():
            raise ToolFailed(
                "llama-imatrix wrote nothing",
                why=tail_of(done.output),
                fix=f"give it a longer text: at least {2 * ctx} tokens",
            )
        partial.replace(dest)
    finally:
        partial.unlink(missing_ok=True)
    found = toolparse.parse_perplexity(done.output, done.seconds)
    return ImatrixResult(
        dest,
        found.ppl if found is not None else None,
        done.seconds,
        toolparse.pass_seconds(done.output),
    )


def bench(
    build: Build,
    model: Path,
    n_prompt: Sequence[int],
    n_gen: int = 0,
    repetitions: int = 3,
    threads: int | None = None,
    *,
    depth: int = 0,
    batch: int | None = None,
    ubatch: int | None = None,
    kv_k: str | None = None,
    kv_v: str | None = None,
    n_gpu_layers: int | None = None,
    extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    on_line: OnLine | None = None,
    cancel: threading.Event | None = None,
) -> list[BenchRow]:
    """Raw speed without a server: one row for each prompt length, one for generation.

    Raises:
        ToolFailed: also when its JSON cannot be read.
    """
    need_file(model)
    args = ["-m", str(model), "-o", "json", "-r", str(repetitions), "-n", str(n_gen)]
    args += ["-p", ",".join(map(str, n_prompt)) or "0"]
    for flag, value in (
        ("-t", threads),
        ("-d", depth or None),
        ("-b", batch),
        ("-ub", ubatch),
        ("-ctk", kv_k),
        ("-ctv", kv_v),
        ("-ngl", n_gpu_layers),
    ):
        if value is not None:
            args += [flag, str(value)]
    done = run_tool(
        build,
        "llama-bench",
        [*args, *extra],
        timeout_s=timeout_s,
        on_line=on_line,
        cancel=cancel,
        env=env,
        read_only=[model],
    )
    return toolparse.parse_bench(done.stdout)


def tokenize_file(
    build: Build,
    model: Path,
    text: Path,
    *,
    add_special: bool = True,
    parse_special: bool = True,
    timeout_s: float | None = 600.0,
) -> list[int]:
    """Token ids of a text file.

    Raises:
        ToolFailed: also when its output cannot be read.
    """
    need_file(model)
    need_file(text)
    args = ["-m", str(model), "-f", str(text), "--ids"]
    if not add_special:
        args.append("--no-bos")
    if not parse_special:
        args.append("--no-parse-special")
    done = run_tool(build, "llama-tokenize", args, timeout_s=timeout_s, read_only=[model, text])
    return toolparse.parse_ids(done.stdout)


def _common(build: Build, threads: int | None, *, tool: str = "llama-perplexity") -> list[str]:
    """Flags shared by the tools that load a model."""
    flags = tool_flags(build, tool)
    args = ["-fit", "off"] if "-fit" in flags else []
    return args + (["-t", str(threads)] if threads is not None else [])


def _csv_field(path: Path) -> str:
    """A path where the tool takes several in one word, with commas between them."""
    text = str(path)
    return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text
