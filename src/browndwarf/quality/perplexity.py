"""Perplexity as a record that can be compared: per-chunk losses, not only the final figure.

Boundary: runs ``engine.tools.perplexity``, checks the text first, and keeps llama-perplexity's
running estimates, from which the loss of each chunk follows: with running perplexity P_k after k
chunks, chunk k's mean loss is ``k ln P_k - (k - 1) ln P_(k-1)`` nats. Two records over one text are
compared chunk by chunk, so that the difference's error is far smaller than either record's.

Example:
    >>> record = measure_ppl(build, Path("m.gguf"), Path("t.txt"), Run(ctx=512))  # doctest: +SKIP
    >>> compare_ppl(base, record).sentence                                        # doctest: +SKIP
    'worse by 1.31% ± 0.12%'
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from browndwarf.engine.locate import Build
from browndwarf.engine.toolrun import tool_flags
from browndwarf.engine.tools import PerplexityResult, perplexity, tokenize_file
from browndwarf.errors import StorageError, ToolFailed, UsageError
from browndwarf.models.gguf import fingerprint
from browndwarf.records import Record

_RUNNING = re.compile(r"\[(\d+)\](-?[\d.]+|nan|inf),")
# The tool writes "... - ETA" to one stream and the figure to the other.
_ETA = re.compile(r"(\d+\.\d+) (minutes)\b")
#: Standard errors beyond which two means differ (95%).
Z = 1.96

Verdict = Literal["within error", "worse", "better"]


class Run(Record, frozen=True, kw_only=True):
    """How a text is evaluated: tokens per chunk, KV cache type, layers on the device."""

    ctx: int = 512
    kv: str = "f16"
    chunks: int | None = None
    layers: int | None = None
    threads: int | None = None


class PplRecord(Record, frozen=True, kw_only=True):
    """Perplexity of a model over a text; ``error`` is llama-perplexity's standard error.

    ``chunk_losses`` are mean losses in nats per token, one a chunk.
    """

    ppl: float
    error: float
    run: Run
    model: str
    model_fingerprint: str
    text_sha: str
    engine_sha: str
    chunk_losses: tuple[float, ...]
    seconds: float


class Comparison(Record, frozen=True, kw_only=True):
    """Of two records. ``change`` is relative for perplexity, absolute nats for divergence.

    ``error`` is the change's standard error; ``worse`` means more than Z of them.
    """

    change: float
    error: float
    verdict: Verdict
    unit: Literal["%", "nats"]
    paired: bool = True

    @property
    def sentence(self) -> str:
        """For people, such as ``worse by 1.31% ± 0.12%`` (± is the 95% half-width)."""
        scale, digits = (100.0, 2) if self.unit == "%" else (1.0, 5)
        unit = "%" if self.unit == "%" else " nats"
        half = f"{Z * self.error * scale:.{digits}f}{unit}"
        if self.verdict == "within error":
            return f"within error: {self.change * scale:+.{digits}f}{unit} ± {half}"
        return f"{self.verdict} by {abs(self.change) * scale:.{digits}f}{unit} ± {half}"


def measure_ppl(
    build: Build,
    model: Path,
    text: Path,
    run: Run,
    *,
    on_note: Callable[[str], None] = lambda _: None,
    cancel: threading.Event | None = None,
) -> PplRecord:
    """Evaluate a text.

    Raises:
        UsageError: the text is shorter than two chunks, or no text.
        ToolFailed, ModelNotFound and others: as ``engine.tools.perplexity``.
    """
    check_text(build, model, text, run)
    listener = Listener(on_note)
    result = evaluate(build, model, text, run, on_line=listener, cancel=cancel)
    return PplRecord(
        ppl=result.ppl,
        error=result.ppl_error,
        run=run,
        model=str(model),
        model_fingerprint=fingerprint(model),
        text_sha=text_sha(text),
        engine_sha=build.sha or build.version,
        chunk_losses=chunk_losses(listener.lines),
        seconds=result.seconds,
    )


class Listener:
    """Keeps a tool's lines, and passes its estimate of the time on."""

    def __init__(self, on_note: Callable[[str], None]) -> None:
        self.lines: list[str] = []
        self._on_note = on_note

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if match := _ETA.search(line):
            self._on_note(f"about {match[1]} {match[2]} left")


def evaluate(
    build: Build,
    model: Path,
    text: Path,
    run: Run,
    *,
    save_base: Path | None = None,
    base: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    cancel: threading.Event | None = None,
) -> PerplexityResult:
    """One run of llama-perplexity with a run's settings.

    Raises:
        ToolFailed: with the tool's reason, also for a result that is no number.
    """
    # The tool reads K and V types, and layers, under the server's names.
    kv_k, _, kv_v = run.kv.partition(":")
    extra = ["-ctk", kv_k, "-ctv", kv_v or kv_k]
    if "-ngl" in tool_flags(build, "llama-perplexity"):
        extra += ["-ngl", str(999 if run.layers is None else run.layers)]
    result = perplexity(
        build,
        model,
        text,
        ctx=run.ctx,
        chunks=run.chunks,
        threads=run.threads,
        save_base=save_base,
        base=base,
        extra=extra,
        on_line=on_line,
        cancel=cancel,
    )
    if not math.isfinite(result.ppl):
        raise ToolFailed(
            "the perplexity is no finite number",
            why=f"llama-perplexity printed {result.ppl}",
            fix="the model computes NaN or infinity: check the file with `browndwarf inspect`, "
            "try another KV type or build",
        )
    return result


def check_text(build: Build, model: Path, text: Path, run: Run) -> int:
    """Tokens in a text; checks that there is enough of it.

    Raises:
        UsageError: no such text, or fewer tokens than two chunks.
    """
    if not text.is_file():
        raise UsageError(f"there is no text at {text}", why="the path does not exist")
    if run.ctx < 8:
        raise UsageError(f"a context of {run.ctx} tokens is too small", fix="use 512 or more")
    tokens = len(tokenize_file(build, model, text, parse_special=False))
    if tokens < 2 * run.ctx:
        raise UsageError(
            f"{text} is too short for chunks of {run.ctx} tokens",
            why=f"it has {tokens} tokens; two chunks need {2 * run.ctx}",
            fix=f"give a longer text, or --ctx {max(8, tokens // 2)} or less",
        )
    return tokens


def text_sha(text: Path) -> str:
    """Content hash of a text file."""
    try:
        return "sha256:" + hashlib.sha256(text.read_bytes()).hexdigest()
    except OSError as exc:
        raise StorageError(f"cannot read {text}", why=exc.strerror or str(exc)) from exc


def chunk_losses(lines: Sequence[str]) -> tuple[float, ...]:
    """Losses per chunk from the running estimates ``[1]8.12,[2]7.98,...``; empty without any."""
    running = [float(m[2]) for line in lines for m in _RUNNING.finditer(line)]
    if not running or not all(math.isfinite(p) and p > 0 for p in running):
        return ()
    return unroll([math.log(p) for p in running])


def unroll(means: Sequence[float]) -> tuple[float, ...]:
    """Values whose running means these are."""
    totals = [mean * (i + 1) for i, mean in enumerate(means)]
    return tuple(b - a for a, b in zip([0.0, *totals], totals, strict=False))


def compare_ppl(base: PplRecord, other: PplRecord) -> Comparison:
    """Is ``other`` worse than ``base`` on the same text?

    Raises:
        UsageError: the records are not of the same text, context and number of chunks.
    """
    _same("text", base.text_sha, other.text_sha)
    _same("context", base.run.ctx, other.run.ctx)
    a, b = base.chunk_losses, other.chunk_losses
    if len(a) != len(b):
        raise _unlike("number of chunks", len(a), len(b))
    if len(a) > 1:
        change, error = paired([y - x for x, y in zip(a, b, strict=True)])
    else:
        change = math.log(other.ppl / base.ppl)
        error = math.hypot(base.error / base.ppl, other.error / other.ppl)
    return Comparison(
        change=math.expm1(change),
        error=error * math.exp(change),
        verdict=verdict_of(change, error),
        unit="%",
        paired=len(a) > 1,
    )


def paired(differences: Sequence[float]) -> tuple[float, float]:
    """Mean of paired differences, and its standard error (sample deviation over sqrt n)."""
    n = len(differences)
    mean = math.fsum(differences) / n
    variance = math.fsum((d - mean) ** 2 for d in differences) / (n - 1)
    return mean, math.sqrt(variance / n)


def verdict_of(change: float, error: float) -> Verdict:
    """``within error`` up to Z standard errors."""
    if abs(change) <= Z * error:
        return "within error"
    return "worse" if change > 0 else "better"


def _same(what: str, a: object, b: object) -> None:
    if a != b:
        raise _unlike(what, a, b)


def _unlike(what: str, a: object, b: object) -> UsageError:
    return UsageError(
        f"the two records cannot be compared: another {what}",
        why=f"{a} and {b}",
        fix="measure both with the same --text, --ctx and --chunks",
    )
