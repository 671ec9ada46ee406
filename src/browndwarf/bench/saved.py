"""A benchmark run on disk: ``bench.json``, ``points.csv``, ``traces.jsonl``, ``server.log``.

Boundary: writes and reads run directories, and gives ``compare`` its figures from the raw
traces. ``bench.json`` names everything that a figure depends on: machine, server, command,
dataset, plan.

Example:
    >>> record = read_run(Path("runs/base-1"))       # doctest: +SKIP
    >>> run_data(Path("runs/base-1"))[8].decode_tok_s   # doctest: +SKIP
    202.2
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from browndwarf.bench.compare import PointData, RunData, Sample
from browndwarf.bench.dataset import Loaded
from browndwarf.bench.endpoint import Endpoint
from browndwarf.bench.metrics import PointRecord, request_figures
from browndwarf.bench.run import Plan
from browndwarf.bench.traces import read_traces
from browndwarf.errors import RunFormatError, UsageError
from browndwarf.files import atomic_write, storage_errors
from browndwarf.records import EngineRecord, MachineRecord, Record

SCHEMA = "browndwarf/bench-run/1"
RECORD = "bench.json"
TRACES = "traces.jsonl"
POINTS = "points.csv"


class DatasetRecord(Record, frozen=True, kw_only=True):
    """Where the prompts came from and what was left out."""

    source: str
    kind: str
    prompts: int
    seen: int
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    synthetic: bool = False


class BenchRecord(Record, frozen=True, kw_only=True):
    """A whole run. ``stopped`` is why it ended early; empty if it did not."""

    label: str
    created: str
    plan: Plan
    endpoint: Endpoint
    dataset: DatasetRecord
    points: tuple[PointRecord, ...]
    machine: MachineRecord | None = None
    engine: EngineRecord | None = None
    command: tuple[str, ...] = ()
    load_s: float | None = None
    stopped: str = ""
    schema: str = SCHEMA


def dataset_record(source: str, loaded: Loaded) -> DatasetRecord:
    """What a run keeps of its dataset; of a path only the file's name."""
    return DatasetRecord(
        source=Path(source).name,
        kind=loaded.kind,
        prompts=len(loaded.prompts),
        seen=loaded.seen,
        dropped=dict(loaded.dropped),
        warnings=tuple(loaded.warnings),
        synthetic=loaded.synthetic,
    )


def write_run(folder: Path, record: BenchRecord) -> None:
    """Write ``bench.json`` and ``points.csv``.

    Raises:
        DiskFull, StorageError: the disk refuses.
    """
    data = msgspec.json.format(msgspec.json.encode(record), indent=1)
    atomic_write(folder / RECORD, data + b"\n")
    atomic_write(folder / POINTS, points_csv(record.points).encode())


def read_run(folder: Path) -> BenchRecord:
    """The record of a run directory.

    Raises:
        UsageError: there is none.
        RunFormatError: it is damaged or of another version.
    """
    path = folder / RECORD
    if not path.is_file():
        raise UsageError(
            f"{folder} is no benchmark run",
            why=f"there is no {path}",
            fix="name a directory that `browndwarf bench run --out` wrote",
        )
    with storage_errors(path, "read the run"):
        data = path.read_bytes()
    try:
        record = msgspec.json.decode(data, type=BenchRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RunFormatError(f"{path} cannot be read", why=str(exc), fix="run it again") from exc
    if record.schema != SCHEMA:
        raise RunFormatError(
            f"{path} is of another version",
            why=f"{record.schema}, not {SCHEMA}",
            fix="run it again with this version",
        )
    return record


def run_data(folder: Path) -> RunData:
    """Figures for a comparison, of every point with a concurrency, from the raw traces.

    A prompt that was used several times in a point counts as several, in order.
    """
    record = read_run(folder)
    samples: dict[int, dict[str, Sample]] = {
        point.concurrency: {} for point in record.points if point.concurrency is not None
    }
    used: Counter[tuple[float, str]] = Counter()
    path = folder / TRACES
    if not path.is_file():
        raise UsageError(
            f"{folder} holds no traces", why=f"there is no {path}", fix="run the benchmark again"
        )
    for trace in read_traces(path, on_bad=lambda number: None):
        if trace.status != "ok" or trace.warmup or trace.point not in samples:
            continue
        key = (trace.point, trace.prompt_id)
        used[key] += 1
        figures = request_figures(trace)
        samples[int(trace.point)][f"{trace.prompt_id}#{used[key]}"] = Sample(
            trace.n, figures.total_s, figures.ttft_s, figures.tpot_s
        )
    return {
        point.concurrency: PointData(
            decode_tok_s=point.decode_tok_s,
            samples=samples[point.concurrency],
            completed=point.completed,
            failed=sum(point.errors.values()),
        )
        for point in record.points
        if point.concurrency is not None
    }


def points_csv(points: Sequence[PointRecord]) -> str:
    """One row a point, nested figures as ``ttft_ms.p50`` and so on."""
    rows = [_flat(msgspec.to_builtins(point)) for point in points]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, dict):
            flat |= _flat(item, f"{prefix}{name}.")
        elif isinstance(item, list | tuple):
            flat[prefix + name] = "; ".join(str(x) for x in item)
        else:
            flat[prefix + name] = item
    return flat
