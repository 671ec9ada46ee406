"""How far a model's predictions are from a reference's: Kullback-Leibler divergence.

Boundary: llama-perplexity computes; this keeps the reference's logits in a cache whose name holds
everything that they depend on (model, text, context, chunks, KV type, engine), says beforehand how
much disk they take, and compares records.

The logits are kept as 16-bit steps over at most 16 nats (so llama.cpp's format), which moves each
log-probability by up to RESOLUTION: a divergence below that is zero.

Example:
    >>> base_bytes(n_chunks=7, ctx=512, vocab=2048)
    7339996
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from browndwarf.engine.locate import Build
from browndwarf.engine.toolrun import need_file
from browndwarf.errors import DiskFull, UsageError
from browndwarf.files import cache_folder, storage_errors
from browndwarf.models.gguf import fingerprint, read_model
from browndwarf.quality.perplexity import (
    Comparison,
    Listener,
    Run,
    check_text,
    evaluate,
    paired,
    text_sha,
    unroll,
    verdict_of,
)
from browndwarf.records import Record
from browndwarf.units import format_bytes

#: Half a step of the saved logits, in nats.
RESOLUTION = 16 / 65535 / 2
_MAGIC = b"_logits_"
_HEADER = struct.Struct("<8sIii")
#: chunk, PPL ± e, ln ratio ± e, KLD ± e, ...
_ROW = re.compile(r"^\s*\d+\s+\S+\s*±\s*\S+\s+\S+\s*±\s*\S+\s+(-?[\d.]+)\s*±")


class KldRecord(Record, frozen=True, kw_only=True):
    """Divergence of a model from a reference, in nats; ``same_top`` is a share from 0 to 1.

    ``error`` and ``same_top_error`` are llama-perplexity's standard errors.
    """

    mean: float
    error: float
    p99: float | None
    p999: float | None
    maximum: float | None
    same_top: float
    same_top_error: float
    ppl: float
    ppl_error: float
    run: Run
    reference_kv: str
    model: str
    model_fingerprint: str
    reference: str
    reference_fingerprint: str
    text_sha: str
    engine_sha: str
    chunk_means: tuple[float, ...]
    seconds: float

    @property
    def is_zero(self) -> bool:
        """Whether the mean is zero within its error and the saved logits' resolution."""
        return abs(self.mean) <= 3 * self.error + RESOLUTION


def base_bytes(*, n_chunks: int, ctx: int, vocab: int) -> int:
    """Size of saved logits: the header, the tokens, and for each scored token its row.

    The second half of each chunk but one token is scored; a row holds a scale, an offset and 16
    bits a vocabulary entry (llama.cpp, tools/perplexity).
    """
    row = 2 * (2 * ((vocab + 1) // 2) + 4)
    return _HEADER.size + 4 * n_chunks * ctx + n_chunks * (ctx - 1 - ctx // 2) * row


def measure_kld(
    build: Build,
    model: Path,
    reference: Path,
    text: Path,
    run: Run,
    *,
    reference_kv: str = "f16",
    cache: Path | None = None,
    on_note: Callable[[str], None] = lambda _: None,
    cancel: threading.Event | None = None,
) -> KldRecord:
    """Divergence of ``model`` from ``reference`` over a text.

    Args:
        run: settings of the model under test; the reference differs in its KV type alone.
        cache: folder for the reference's logits.

    Raises:
        UsageError: the text is too short, or the vocabularies differ.
        DiskFull: the logits would not fit, told before anything is computed.
        ToolFailed and others: as ``engine.tools.perplexity``.
    """
    need_file(model)
    need_file(reference)
    theirs, ours = read_model(reference), read_model(model)
    if theirs.vocab != ours.vocab or theirs.tokenizer.tokens != ours.tokenizer.tokens:
        raise UsageError(
            "the two models do not share a vocabulary",
            why=f"{reference.name} has {theirs.vocab} tokens, {model.name} has {ours.vocab}"
            + ("" if theirs.vocab != ours.vocab else ", but not the same ones"),
            fix="compare a model with another quantization of itself",
        )
    tokens = check_text(build, reference, text, run)
    n_chunks = min(run.chunks or tokens, tokens // run.ctx)
    base = ensure_base(
        build,
        reference,
        text,
        msgspec.structs.replace(run, kv=reference_kv),
        size=base_bytes(n_chunks=n_chunks, ctx=run.ctx, vocab=theirs.vocab),
        header=(run.ctx, theirs.vocab, n_chunks),
        folder=cache or cache_folder("logits"),
        on_note=on_note,
        cancel=cancel,
    )
    listener = Listener(on_note)
    result = evaluate(build, model, text, run, base=base, on_line=listener, cancel=cancel)
    if result.kld_mean is None:
        raise UsageError(
            f"{base} holds no logits that llama-perplexity can use",
            why="its answer has no divergence",
            fix="delete that file and run the same command again",
        )
    return KldRecord(
        mean=result.kld_mean,
        error=result.kld_error or 0.0,
        p99=result.kld_p99,
        p999=result.kld_p999,
        maximum=result.kld_max,
        same_top=result.same_top if result.same_top is not None else float("nan"),
        same_top_error=result.same_top_error or 0.0,
        ppl=result.ppl,
        ppl_error=result.ppl_error,
        run=run,
        reference_kv=reference_kv,
        model=str(model),
        model_fingerprint=fingerprint(model),
        reference=str(reference),
        reference_fingerprint=fingerprint(reference),
        text_sha=text_sha(text),
        engine_sha=build.sha or build.version,
        chunk_means=chunk_means(listener.lines),
        seconds=result.seconds,
    )


def ensure_base(
    build: Build,
    reference: Path,
    text: Path,
    run: Run,
    *,
    size: int,
    header: tuple[int, int, int],
    folder: Path,
    on_note: Callable[[str], None] = lambda _: None,
    cancel: threading.Event | None = None,
) -> Path:
    """The reference's logits, from the cache or computed into it, whole or not at all.

    Args:
        size: bytes that the file will have.
        header: (ctx, vocabulary, chunks) that it must state; a file that differs is made anew.
    """
    key = "|".join(
        [
            fingerprint(reference),
            text_sha(text),
            build.sha or build.version,
            *(f"{name}={value}" for name, value in sorted(_fields(run).items())),
        ]
    )
    name = f"{reference.stem}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.logits"
    path = folder / name
    if path.exists():
        problem = wrong_base(path, size=size, header=header)
        if problem is None:
            on_note(f"reference logits: {path} ({format_bytes(path.stat().st_size)}), kept")
            return path
        on_note(f"{path} is damaged ({problem}); computing it anew")
        path.unlink()
    with storage_errors(folder, "make the folder for reference logits"):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    if free < size + size // 50:
        fitting = max(0, free * header[2] // max(size, 1))
        raise DiskFull(
            "the reference's logits do not fit the disk",
            why=f"they take {format_bytes(size)}; {format_bytes(free)} are free in {folder}",
            fix=f"free some space, or evaluate less of the text: --chunks {fitting}"
            if fitting
            else "free some space, or let BROWNDWARF_CACHE name a folder on another disk",
        )
    on_note(f"reference logits: {format_bytes(size)} in {path}")
    partial = path.with_name(f".{secrets.token_hex(4)}.partial.{path.name}")
    try:
        evaluate(
            build,
            reference,
            text,
            run,
            save_base=partial,
            on_line=Listener(on_note),
            cancel=cancel,
        )
        problem = wrong_base(partial, size=size, header=header)
        if problem is not None:
            raise DiskFull(
                "the reference's logits were not written whole",
                why=problem,
                fix="free some space and run the same command again",
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def wrong_base(path: Path, *, size: int, header: tuple[int, int, int]) -> str | None:
    """What is wrong with saved logits; None if they are as expected."""
    try:
        with path.open("rb") as handle:
            head = handle.read(_HEADER.size)
        found = path.stat().st_size
    except OSError as exc:
        return exc.strerror or str(exc)
    if len(head) < _HEADER.size or head[:8] != _MAGIC:
        return "it holds no logits"
    stated = _HEADER.unpack(head)[1:]
    if stated != header:
        return f"it is of (ctx, vocabulary, chunks) {stated}, expected {header}"
    return None if found == size else f"it has {found} bytes, expected {size}"


def chunk_means(lines: Sequence[str]) -> tuple[float, ...]:
    """Mean divergence of each chunk, from the running means that the tool prints."""
    return unroll([float(match[1]) for line in lines if (match := _ROW.match(line))])


def compare_kld(base: KldRecord, other: KldRecord) -> Comparison:
    """Is ``other`` farther from the reference than ``base`` is?

    Raises:
        UsageError: the records have another text, context, reference or number of chunks.
    """
    for what, a, b in (
        ("text", base.text_sha, other.text_sha),
        ("context", base.run.ctx, other.run.ctx),
        ("reference", base.reference_fingerprint, other.reference_fingerprint),
        ("number of chunks", len(base.chunk_means), len(other.chunk_means)),
    ):
        if a != b:
            raise UsageError(
                f"the two records cannot be compared: another {what}",
                why=f"{a} and {b}",
                fix="measure both with the same --reference, --text, --ctx and --chunks",
            )
    if len(base.chunk_means) > 1:
        pairs = zip(base.chunk_means, other.chunk_means, strict=True)
        change, error = paired([y - x for x, y in pairs])
    else:
        change = other.mean - base.mean
        error = (base.error**2 + other.error**2) ** 0.5
    verdict = "within error" if abs(change) <= RESOLUTION else verdict_of(change, error)
    return Comparison(
        change=change, error=error, verdict=verdict, unit="nats", paired=len(base.chunk_means) > 1
    )


def _fields(run: Run) -> dict[str, object]:
    return {name: getattr(run, name) for name in run.__struct_fields__}
