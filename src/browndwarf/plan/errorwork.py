"""The work behind the error table: one job a tensor, over several processes.

A job holds all that a process needs (where the rows are, the types, the weights of the columns),
so workers can be started afresh on every system. Each loads llama.cpp's library once, leaves Ctrl-C
to the parent, stops within one type when the parent asks it to, and ends when the parent does.
Jobs go out longest first; at any time a worker holds one block of rows, twice, as f32.

Example:
    for result in run_jobs(jobs, workers=2): ...
"""

from __future__ import annotations

import concurrent.futures as futures
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.synchronize import Event

import numpy as np
from numpy.typing import NDArray

from browndwarf.engine.native_quant import load_quantizer
from browndwarf.errors import EngineUnsupported, Interrupted
from browndwarf.models.ggml_types import GGML_TYPES
from browndwarf.models.rows import Place, sample_rows

Floats = NDArray[np.float32]

_SECONDS = {
    "Q8_0": 0.005, "Q4_0": 0.03, "Q4_1": 0.03, "Q5_0": 0.03, "Q5_1": 0.03, "IQ4_NL": 0.2,
    "Q6_K": 0.03, "Q5_K": 0.1, "Q4_K": 0.1, "Q3_K": 0.04, "Q2_K": 0.12, "IQ4_XS": 0.2,
    "IQ3_S": 0.3, "IQ3_XXS": 0.5, "IQ2_S": 0.7, "IQ2_XS": 0.7, "IQ2_XXS": 0.7,
}  # fmt: skip
"""Rough seconds per million elements, for the order of jobs and the progress."""
RANDOM_ELEMENTS = 2**17
_START_UP = 2.0
"""Seconds of work below which further processes are not worth their start."""


@dataclass(frozen=True)
class Job:
    """One tensor's measurements. ``importance`` is for the quantizer, ``weights`` for the
    measure; both (matrices or 1, columns), None for all columns alike."""

    place: Place
    types: tuple[str, ...]
    per_tensor: int
    importance: Floats | None
    weights: Floats | None

    @property
    def expected_s(self) -> float:
        """A rough guess of the time on one core."""
        rows = self.place.matrices * self.place.sampled_rows(self.per_tensor)
        each = sum(_SECONDS.get(kind, 0.2) for kind in self.types)
        return rows * self.place.columns / 1e6 * each + 1e-3


@dataclass(frozen=True)
class JobResult:
    """Relative errors by type, and CPU seconds: in ggml's quantizer, and in all. ``empty``: the
    tensor holds only zeros, as in files that have a header and no data; the errors are then those
    of normally distributed random rows."""

    name: str
    errors: dict[str, float]
    quantize_s: float
    total_s: float
    empty: bool = False


def run_jobs(
    jobs: Sequence[Job],
    workers: int,
    on_progress: Callable[[float], None] = lambda _: None,
    cancel: threading.Event | None = None,
) -> Iterator[JobResult]:
    """Results as they come.

    Raises:
        Interrupted: ``cancel`` was set.
        EngineUnsupported: a worker died, which only a fault in llama.cpp's library does.
        BrowndwarfError: as ``measure``.
    """
    order = sorted(jobs, key=lambda job: -job.expected_s)
    total, done = sum(job.expected_s for job in order), 0.0
    if workers < 2 or total < _START_UP:
        for job in order:
            if cancel is not None and cancel.is_set():
                raise Interrupted("measuring quantization errors was cancelled")
            yield measure(job)
            done += job.expected_s
            on_progress(done / total)
        return
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with futures.ProcessPoolExecutor(
        workers, context, initializer=_start, initargs=(stop,)
    ) as pool:
        try:
            # Not futures.wait: Ctrl-C inside of it can leave locks held that the pool needs to end.
            ready: queue.SimpleQueue[futures.Future[JobResult]] = queue.SimpleQueue()
            expected = {}
            for job in order:
                future = pool.submit(measure, job)
                expected[future] = job.expected_s
                future.add_done_callback(ready.put)
            while expected:
                if cancel is not None and cancel.is_set():
                    raise Interrupted("measuring quantization errors was cancelled")
                try:
                    future = ready.get(timeout=0.2)
                except queue.Empty:
                    continue
                done += expected.pop(future)
                yield future.result()
                on_progress(done / total)
        except futures.BrokenExecutor as exc:
            raise EngineUnsupported(
                "a process that measures quantization errors died",
                why=str(exc) or "it gave no reason",
                fix="leave the type out that was added last, or use another build",
            ) from exc
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def measure(job: Job) -> JobResult:
    """The errors of one tensor.

    Raises:
        ModelNotFound, BadModelFile: the rows cannot be read.
        EngineUnsupported: the library does not know a type.
    """
    quantizer, place = load_quantizer(), job.place
    for kind in job.types:
        quantizer.prepare(GGML_TYPES[kind].number)
    began, spent = time.thread_time(), 0.0
    noise = dict.fromkeys(job.types, 0.0)
    signal_power = 0.0
    for matrix, packed in sample_rows(place, per_tensor=job.per_tensor):
        rows = quantizer.dequantize(packed, place.number, place.columns)
        importance, weights = _of(job.importance, matrix), _of(job.weights, matrix)
        scratch = np.square(rows)
        power = _power(scratch, weights)
        signal_power += power
        if not power:
            continue  # zeros stay zeros in every type
        for kind in job.types:
            if _stop is not None and _stop.is_set():
                raise Interrupted("measuring quantization errors was cancelled")
            number = GGML_TYPES[kind].number
            start = time.thread_time()
            there = quantizer.quantize(rows, number, importance)
            spent += time.thread_time() - start
            back = quantizer.dequantize(there, number, place.columns)
            np.subtract(back, rows, out=back)
            np.square(back, out=back)
            noise[kind] += _power(back, weights)
    if signal_power > 0:
        errors = {kind: power / signal_power for kind, power in noise.items()}
    else:
        errors = {kind: _random_error(kind, place.columns) for kind in job.types}
    total = time.thread_time() - began
    return JobResult(place.name, errors, spent, total, signal_power <= 0)


@cache
def _random_error(kind: str, columns: int) -> float:
    count = max(1, RANDOM_ELEMENTS // columns)
    rows = np.random.default_rng(0).standard_normal((count, columns), dtype=np.float32)
    quantizer, number = load_quantizer(), GGML_TYPES[kind].number
    importance = np.ones(columns, np.float32) if quantizer.requires_importance(number) else None
    back = quantizer.dequantize(quantizer.quantize(rows, number, importance), number, columns)
    return float(np.square(back - rows).sum(dtype=np.float64) / np.square(rows).sum())


def _of(rows: Floats | None, matrix: int) -> Floats | None:
    if rows is None:
        return None
    found: Floats = rows[matrix if len(rows) > 1 else 0]
    return found


def _power(squares: Floats, weights: Floats | None) -> float:
    # Column sums first: no BLAS, whose threads would get into the other processes' way.
    columns = squares.sum(axis=0).astype(np.float64)
    return float(columns.sum() if weights is None else columns @ weights.astype(np.float64))


_stop: Event | None = None
"""In a worker: set when the parent wants no more results."""


def _start(stop: Event) -> None:
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def leave() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=leave, daemon=True).start()
    load_quantizer()
