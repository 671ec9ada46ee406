"""The error table: how far each type moves each tensor's output.

    error = sum_j a_j (W'_j - W_j)^2 / sum_j a_j W_j^2

over a sample of rows, where W' is W after quantizing and back, exactly as llama-quantize would do
it (same library, same importance vector), and a_j is the mean square of input j from the imatrix.
So the error is the noise in the tensor's output, relative to the output itself.

Where the imatrix says nothing about a tensor, llama-quantize weighs all columns alike, and so
does the quantizer here. The measure then takes what it can: the output matrix reads the hidden
state behind the last norm, whose weight squared is a fair a_j; for others all columns count 1.
``proxied`` names these tensors.

The work is split over processes (``errorwork``); results are kept on disk under the content of
model and imatrix, the sample and ggml's commit, so that another budget costs nothing.

Not covered: errors that one tensor's quantization causes in the next; sums of errors stand for
them (docs/quantization.md).

Example:
    table = ErrorTable(model, imatrix, imatrix_sha, cache_folder("errors"))
    errors = table.measure({"blk.0.ffn_down.weight": ["Q4_K", "Q3_K"]})
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from browndwarf.engine.native_quant import load_quantizer
from browndwarf.errors import StorageError
from browndwarf.files import atomic_write
from browndwarf.models.gguf import ModelInfo, fingerprint
from browndwarf.models.rows import Place, locate_tensors, sample_rows
from browndwarf.plan.errorwork import Job, JobResult, run_jobs

SAMPLE_ROWS = 256
"""Rows per tensor; more changes an error by about a percent of itself."""
_FORMAT = 1

Errors = dict[str, dict[str, float]]
"""Tensor name -> type -> relative error."""
Floats = NDArray[np.float32]


class _Kept(msgspec.Struct):
    """What is kept on disk: the errors, and the tensors that hold no data."""

    errors: Errors = msgspec.field(default_factory=dict)
    empty: list[str] = msgspec.field(default_factory=list)


class Importance(Protocol):
    """Mean squared inputs of tensors; ``models.imatrix.Imatrix`` is one."""

    def weights(self, name: str, columns: int | None = None) -> Floats | None:
        """(matrices or 1, columns), None without data."""
        ...


class ErrorTable:
    """Measures errors, and remembers them on disk if it is given a folder.

    Raises:
        ModelNotFound, BadModelFile: the file cannot be read, or changed its shape.
    """

    def __init__(
        self,
        model: ModelInfo,
        importance: Importance | None = None,
        importance_sha: str = "",
        folder: Path | None = None,
        *,
        sample: int = SAMPLE_ROWS,
    ) -> None:
        self._model = model
        self._importance = importance
        self._sample = sample
        self._places = locate_tensors(model)
        self._path = None
        if folder is not None:
            key = "|".join(
                (
                    str(_FORMAT),
                    fingerprint(model.path),
                    importance_sha,
                    str(sample),
                    load_quantizer().commit,
                )
            )
            name = hashlib.sha256(key.encode()).hexdigest()[:24]
            self._path = folder / f"{model.path.stem[:40]}-{name}.json"
        self._kept = _load(self._path)
        self._known = self._kept.errors
        self.proxied: dict[str, str] = {}
        self.results: list[JobResult] = []

    def measure(
        self,
        wanted: Mapping[str, Sequence[str]],
        *,
        workers: int = 2,
        on_progress: Callable[[float], None] = lambda _: None,
        cancel: threading.Event | None = None,
    ) -> Errors:
        """The errors of these tensors in these types; what is known already is not done again.

        Args:
            workers: processes; 1 works in this one.
            on_progress: called with the share that is done, by expected time.

        Raises:
            Interrupted: ``cancel`` was set; what was finished is kept.
        """
        jobs = []
        for name, types in wanted.items():
            place, known = self._places[name], self._known.setdefault(name, {})
            quantizing, measuring, proxy = self._columns(place)
            if proxy:
                self.proxied[name] = proxy
            if place.type in types:
                known[place.type] = 0.0  # llama-quantize copies it
            missing = tuple(kind for kind in types if kind not in known)
            if missing:
                jobs.append(Job(place, missing, self._sample, quantizing, measuring))
        try:
            for result in run_jobs(jobs, workers, on_progress, cancel):
                self._known[result.name].update(result.errors)
                self.results.append(result)
                if result.empty:
                    self._kept.empty.append(result.name)
        finally:
            if jobs:
                _save(self._path, self._kept)
        self.proxied |= dict.fromkeys(
            (name for name in self._kept.empty if name in wanted), "no data: random rows"
        )
        return {
            name: {kind: self._known[name][kind] for kind in types}
            for name, types in wanted.items()
        }

    def covered(self, name: str) -> bool:
        """Whether the imatrix says something about a tensor."""
        return self._from_imatrix(self._places[name]) is not None

    def _columns(self, place: Place) -> tuple[Floats | None, Floats | None, str]:
        """Weights for the quantizer, weights for the measure, and what stood in for them."""
        own = self._from_imatrix(place)
        if own is not None:
            return own, own, ""
        output = "token_embd.weight" if self._model.tied else "output.weight"
        norm = self._places.get("output_norm.weight")
        if place.name == output and norm is not None and norm.columns == place.columns:
            for _, packed in sample_rows(norm, per_tensor=1):
                scale = load_quantizer().dequantize(packed, norm.number, norm.columns)
                return None, np.square(scale), "output_norm squared"
        return None, None, "all columns alike"

    def _from_imatrix(self, place: Place) -> Floats | None:
        if self._importance is None:
            return None
        found = self._importance.weights(place.name, place.columns)
        if found is None or found.shape not in (
            (1, place.columns),
            (place.matrices, place.columns),
        ):
            return None
        return found


def _load(path: Path | None) -> _Kept:
    if path is not None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(path.read_bytes(), type=_Kept)
    return _Kept()


def _save(path: Path | None, kept: _Kept) -> None:
    if path is None:
        return
    merged = _load(path)  # another process may have added to it
    for name, types in kept.errors.items():
        merged.errors.setdefault(name, {}).update(types)
    merged.empty = sorted({*merged.empty, *kept.empty})
    # A cache that cannot be written costs time, not the result.
    with contextlib.suppress(StorageError):
        atomic_write(path, msgspec.json.encode(merged))


__all__ = ["SAMPLE_ROWS", "ErrorTable", "Errors", "Importance"]
