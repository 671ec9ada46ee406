"""An importance matrix made in segments, so that an interruption costs one segment at most.

Boundary: the text comes joined (``calibration``), llama-imatrix does the work, and what the result
means for quantization is decided elsewhere. What is done so far lies beside the result
(``importance_state``). Every segment is the tool's own ``--chunk`` and ``--chunks`` on the same
text, so the sums are those of one long run.

A segment is as long as it takes to make the start of the tool cheap (``SHARE``), whatever the
model's size. llama-imatrix says nothing when its own file could not be written whole: each is read
again before it counts.

Example:
    job = Job(model=Path("m.gguf"), dest=Path("m.imatrix.gguf"), text=read_texts([Path("t.txt")]))
    collect(build, job).coverage.missing
"""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from browndwarf.engine.locate import Build
from browndwarf.engine.tools import ImatrixResult, imatrix, tokenize_file
from browndwarf.errors import BadModelFile, DiskFull, Interrupted, ToolFailed, UsageError
from browndwarf.files import atomic_write, sha256_of, storage_errors
from browndwarf.models.gguf import ModelInfo, fingerprint, read_model
from browndwarf.models.imatrix import Coverage, Imatrix, check_imatrix, read_imatrix
from browndwarf.plan.calibration import Text
from browndwarf.plan.importance_state import Identity, State, clear, interrupted_run, work_folder
from browndwarf.plan.inputs import check_dest

TOKENS_PER_PASS = 2048
"""llama-imatrix puts as many chunks into one pass as this holds."""
SHARE = 0.1
"""A segment is so long that the tool's start is at most this share of it."""
SEGMENT_S = 20.0
_NEVER = ["-ofreq", "1000000"]
"""It would write the whole file every ten chunks, in the middle of a pass."""


@dataclass(frozen=True)
class Job:
    """What to collect.

    Attributes:
        ctx: tokens per chunk.
        chunks: at most so many; None for the whole text.
        output_tensor: collect for ``output.weight`` too, where the model has one.
        layers: on the device; None lets llama.cpp fit them to its memory.
        force: replace ``dest``, and begin anew where an interrupted run is another one.
        segment_s: seconds that a segment should take at least.
    """

    model: Path
    dest: Path
    text: Text
    ctx: int = 512
    chunks: int | None = None
    output_tensor: bool = False
    layers: int | None = None
    threads: int | None = None
    force: bool = False
    segment_s: float = SEGMENT_S


@dataclass(frozen=True)
class Step:
    """How far it has come, in chunks; ``left_s`` is None before the first segment is done."""

    done: int
    total: int
    ppl: float | None
    left_s: float | None


@dataclass(frozen=True)
class Collected:
    """The result.

    Attributes:
        matrix: as read again from the disk, before it got its name.
        ppl: the model's perplexity over the text.
        resumed: chunks that an interrupted run had left.
    """

    dest: Path
    sha256: str
    model_fingerprint: str
    text_sha256: str
    engine_sha: str
    matrix: Imatrix
    coverage: Coverage
    chunks: int
    tokens: int
    ppl: float | None
    seconds: float
    resumed: int


def collect(
    build: Build,
    job: Job,
    *,
    on_step: Callable[[Step], None] = lambda _: None,
    cancel: threading.Event | None = None,
) -> Collected:
    """Make the importance matrix, or finish making it. ``job.dest`` appears whole or not at all.

    Raises:
        UsageError: ``dest`` exists, the model is a head, or the text is too short.
        RunChanged: an interrupted run in the same place was another one.
        Interrupted: Ctrl-C or ``cancel``; finished segments are kept.
        DiskFull, StorageError, ToolFailed, ModelError: as they say.
    """
    info = read_model(job.model)
    _check(job, info)
    parts = job.dest.with_name(job.dest.name + ".parts")
    work = _Work(build, job, info, parts, cancel)
    with work_folder(parts):
        state = work.begin()
        resumed = state.done
        try:
            state = work.segments(state, on_step)
        except (KeyboardInterrupt, Interrupted) as exc:
            done = State.load(parts).done
            raise Interrupted(
                "interrupted",
                why=f"{done} of {state.total} chunks are kept in {parts}",
                fix="run the same command again to go on",
            ) from exc
        matrix, coverage = work.read(state.file)
        with storage_errors(job.dest, f"write {job.dest.name}"):
            digest = sha256_of(parts / state.file)
            (parts / state.file).replace(job.dest)
        shutil.rmtree(parts, ignore_errors=True)
    return Collected(
        dest=job.dest,
        sha256=digest,
        model_fingerprint=state.identity.model,
        text_sha256=state.identity.text,
        engine_sha=state.identity.engine,
        matrix=matrix,
        coverage=coverage,
        chunks=state.done,
        tokens=state.done * job.ctx,
        ppl=state.ppl,
        seconds=state.seconds,
        resumed=resumed,
    )


def segment_chunks(done: int, total: int, last_start: int, size: int) -> int:
    """How many chunks the next segment takes.

    The tool wants more than two chunks of text behind a segment's first: a segment that would leave
    its successor less takes everything.

    Args:
        last_start: the last chunk of the text that a segment may begin with.
        size: wished for.
    """
    rest = total - done
    take = min(max(size, 1), rest)
    return rest if take < rest and done + take > last_start else take


def next_size(result: ImatrixResult, chunks: int, per_pass: int, segment_s: float) -> int:
    """Chunks for the next segment, from how long the last one of ``chunks`` took."""
    passes = math.ceil(chunks / per_pass)
    pass_s = result.pass_s if result.pass_s else result.seconds / passes
    start_s = max(result.seconds - passes * pass_s, 0.0)
    wish_s = max(segment_s, start_s * (1 - SHARE) / SHARE)
    return per_pass * max(1, math.ceil(wish_s / max(pass_s, 1e-3)))


class _Work:
    """One run in its folder."""

    def __init__(
        self,
        build: Build,
        job: Job,
        info: ModelInfo,
        parts: Path,
        cancel: threading.Event | None,
    ) -> None:
        self.build = build
        self.job = job
        self.info = info
        self.parts = parts
        self.cancel = cancel
        self.text = parts / job.text.file_name

    def begin(self) -> State:
        """The state to go on from, saved; the text lies in the folder, and nothing superfluous."""
        job, parts = self.job, self.parts
        identity = Identity(
            model=fingerprint(job.model),
            text=job.text.sha256,
            engine=self.build.sha or self.build.version,
            ctx=job.ctx,
            chunks=job.chunks,
            output_tensor=job.output_tensor,
        )
        state = interrupted_run(parts, identity, force=job.force)
        clear(parts, state)
        atomic_write(self.text, job.text.data)
        if state is not None:
            return state
        tokens = len(tokenize_file(self.build, job.model, self.text, parse_special=False))
        if tokens < 2 * job.ctx:
            raise UsageError(
                "the text is too short",
                why=f"it has {tokens} tokens; two chunks of {job.ctx} need {2 * job.ctx}",
                fix=f"give more text, or --ctx {max(8, tokens // 2)} or less",
            )
        total = min(job.chunks or tokens, tokens // job.ctx)
        state = State(identity=identity, tokens=tokens, total=total)
        state.save(parts)
        return state

    def segments(self, state: State, on_step: Callable[[Step], None]) -> State:
        """All that is left to do, one segment after the other."""
        job, total = self.job, state.total
        per_pass = size = max(1, TOKENS_PER_PASS // job.ctx)
        last_start = (state.tokens - 1) // job.ctx - 2
        on_step(Step(state.done, total, state.ppl, None))
        while state.done < total:
            take = segment_chunks(state.done, total, last_start, size)
            name = f"chunks-{state.done + take:06d}.gguf"
            result = imatrix(
                self.build,
                job.model,
                self.text,
                self.parts / name,
                ctx=job.ctx,
                chunks=take,
                from_chunk=state.done,
                add_to=self.parts / state.file if state.file else None,
                process_output=job.output_tensor,
                layers=job.layers,
                threads=job.threads,
                extra=_NEVER,
                cancel=self.cancel,
            )
            self.read(name)
            ppl = result.ppl or math.nan
            known = math.isfinite(ppl) and ppl > 0
            state = msgspec.structs.replace(
                state,
                done=state.done + take,
                file=name,
                log_ppl=state.log_ppl + (take * math.log(ppl) if known else 0.0),
                ppl_chunks=state.ppl_chunks + (take if known else 0),
                seconds=state.seconds + result.seconds,
            )
            state.save(self.parts)
            left_s = (total - state.done) * result.seconds / take
            on_step(Step(state.done, total, state.ppl, left_s))
            size = next_size(result, take, per_pass, job.segment_s)
        return state

    def read(self, name: str) -> tuple[Imatrix, Coverage]:
        """A segment's file as it is on the disk."""
        try:
            matrix = read_imatrix(self.parts / name)
        except BadModelFile as exc:
            expected = 4 * sum(t.shape[0] for t in self.info.tensors if len(t.shape) > 1)
            full = shutil.disk_usage(self.parts).free < max(expected, 1 << 20)
            (self.parts / name).unlink(missing_ok=True)
            if full:
                raise DiskFull(
                    "llama-imatrix could not write its result: no space left",
                    why=f"{exc.what} ({exc.why})",
                    fix="free some space and run the same command again; what was finished is kept",
                ) from exc
            raise ToolFailed(
                "llama-imatrix wrote no sound importance matrix",
                why=f"{exc.what}: {exc.why}",
                fix="try another build of llama.cpp",
            ) from exc
        return matrix, check_imatrix(matrix, self.info)


def _check(job: Job, info: ModelInfo) -> None:
    if info.is_head:
        raise UsageError(
            f"{job.model.name} is an MTP head",
            why="a head computes nothing without its target, so no inputs can be collected",
            fix="quantize heads without an importance matrix; Q8_0 and Q6_K need none",
        )
    if job.output_tensor and info.tied:
        raise UsageError(
            f"{job.model.name} has no output.weight to collect for",
            why="its output matrix is the input embedding (tied)",
            fix="leave --output-tensor out",
        )
    if job.ctx < 8:
        raise UsageError(f"chunks of {job.ctx} tokens are too small", fix="use --ctx 512")
    if 0 < info.context_length < job.ctx:
        raise UsageError(
            f"chunks of {job.ctx} tokens are longer than the model's context",
            why=f"it was trained with {info.context_length} tokens",
            fix="use --ctx 512",
        )
    check_dest(job.dest, info, None, job.force)
