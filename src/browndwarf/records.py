"""Every saved thing, as a versioned typed record.

Records are frozen ``msgspec`` structs: they go to disk and to ``--json`` as they are, and come
back validated. They hold raw measurements; what can be derived is a property, or is computed
anew by the reader. Units are in the names: ``_mib``, ``_s``, ``_ms``, ``_tok_s``; shares run
from 0 to 1.

Example:
    >>> trace = RequestTrace(prompt_id="p0", repeat=0, prompt_n=10, prompt_ms=5.0,
    ...     predicted_n=9, predicted_ms=40.0, draft_n=8, draft_accepted=4)
    >>> trace.cycles, trace.ms_per_token, trace.decode_tok_s
    (4, 5.0, 200.0)
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from browndwarf.errors import RunFormatError

RECORD_VERSION = 1

CellStatus = Literal["ok", "does-not-fit", "failed", "spilled", "predicted"]

#: Why a cell was measured. The two confirming passes go through the best in opposite order.
CellRole = Literal["baseline", "mtp", "baseline-again", "confirm-a", "confirm-b"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records: immutable, keyword-only, unknown keys ignored on reading."""


class DeviceRecord(Record, frozen=True, kw_only=True):
    """One device as the engine or the driver names it. Memory in MiB."""

    name: str
    backend: str
    total_mib: float
    free_mib: float


class MachineRecord(Record, frozen=True, kw_only=True):
    """Where a measurement was made. Holds nothing that names a person or a network."""

    os: str
    cpu: str
    cores: int
    ram_mib: float
    python: str
    devices: tuple[DeviceRecord, ...] = ()


class EngineRecord(Record, frozen=True, kw_only=True):
    """Which llama.cpp made a measurement, and what it could do."""

    path: str
    version: str
    sha: str
    features: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


class ModelRecord(Record, frozen=True, kw_only=True):
    """A model file, named by content and not only by path."""

    path: str
    name: str
    architecture: str
    type: str
    size_bytes: int
    fingerprint: str


class RequestTrace(Record, frozen=True, kw_only=True):
    """One request's raw figures: the server's own timings and the client's clock.

    ``prompt_*`` and ``predicted_*`` are llama-server's ``timings`` as they came. ``ttft_s`` and
    ``total_s`` are measured by the client from the moment the request was sent. ``probe_ms`` is
    what a fixed piece of work took around the request (``sweep.pace``); 0 where nobody asked.
    """

    prompt_id: str
    repeat: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    draft_n: int = 0
    draft_accepted: int = 0
    cache_n: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0
    stop: str = ""
    text_sha: str = ""
    probe_ms: float = 0.0

    @property
    def cycles(self) -> int:
        """Verify cycles, or plain decode steps: each yields one token beside the accepted ones.

        The first token comes out of the prefill, before the server's clock starts.
        """
        return max(self.predicted_n - 1 - self.draft_accepted, 0)

    @property
    def ms_per_token(self) -> float:
        """Decode time per token, over the ``predicted_n - 1`` tokens that were timed."""
        return self.predicted_ms / max(self.predicted_n - 1, 1)

    @property
    def decode_tok_s(self) -> float:
        """Decode rate; the reciprocal of ``ms_per_token``."""
        return 1e3 / self.ms_per_token if self.predicted_ms > 0 else 0.0


class Rate(Record, frozen=True, kw_only=True):
    """A rate over repeats: ``runs`` has one figure a repeat, ``spread`` is max - min."""

    mean: float
    spread: float
    runs: tuple[float, ...]


class Acceptance(Record, frozen=True, kw_only=True):
    """Drafted and accepted tokens; ``per_position`` is unconditional, from the counters."""

    rate: float
    per_position: tuple[float, ...]
    drafted: int
    accepted: int
    drafts: int = 0


class Prediction(Record, frozen=True, kw_only=True):
    """What a model of the sweep expects of a cell that was not run, on a machine as fast as
    ``probe_ms`` says; 0 where it was not probed."""

    decode_tok_s: float
    low: float
    high: float
    probe_ms: float = 0.0


class CellRecord(Record, frozen=True, kw_only=True):
    """One configuration under one workload: what was asked, what came out, all raw timings."""

    id: str
    status: CellStatus
    options: dict[str, Any]
    target_type: str
    head_type: str | None
    n_max: int
    workload: str
    role: CellRole = "mtp"
    group: str = ""
    decode_tok_s: Rate | None = None
    prefill_tok_s: float | None = None
    ttft_ms: float | None = None
    end_to_end_s: float | None = None
    acceptance: Acceptance | None = None
    accepted_length: float | None = None
    cycle_ms: float | None = None
    memory_mib: float | None = None
    memory: dict[str, float] = {}
    watch: dict[str, float] = {}
    predicted: Prediction | None = None
    marks: tuple[str, ...] = ()
    synthetic: bool = False
    error: dict[str, str] | None = None
    traces: tuple[RequestTrace, ...] = ()
    attempts: int = 1
    seed: int = 0
    load_s: float = 0.0
    wall_s: float = 0.0
    generating_s: float = 0.0
    engine_sha: str = ""
    started_unix: float = 0.0


R = TypeVar("R", bound=Record)


def encode(record: Record) -> bytes:
    """JSON bytes of a record."""
    return msgspec.json.encode(record)


def decode(kind: type[R], data: bytes | str) -> R:
    """A record from its JSON.

    Raises:
        RunFormatError: the text is not this kind of record.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as exc:
        raise RunFormatError(
            f"a saved {kind.__name__} cannot be read",
            why=str(exc),
            fix="it was written by another version or damaged; start a new run directory",
        ) from exc
