"""Carry a quantization out, and prove that the file is what was asked for.

Boundary: the types come from a ``QuantizationPlan`` or are named for the whole file; which are
good is decided elsewhere. llama-quantize is asked first what it would do (a dry run): every
tensor's type and the total size are compared with what was asked, before anything is written. The
finished file is read again, tensor by tensor, before it gets its name.

Example:
    plan = QuantizationPlan.load(Path("plan.json"))
    done = run_plan(build, plan, Path("gemma-4.1bpw.gguf"))
    done.device_bytes == plan.device_bytes
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from browndwarf.engine.locate import Build
from browndwarf.engine.quantizer import QuantizeResult, quantize
from browndwarf.errors import EngineUnsupported, Interrupted, RunChanged, UsageError
from browndwarf.files import storage_errors
from browndwarf.models.ggml_types import HIGH_PRECISION
from browndwarf.models.gguf import ModelInfo, fingerprint, read_model
from browndwarf.models.imatrix import Imatrix, check_imatrix, read_imatrix
from browndwarf.plan.inputs import (
    check_dest,
    placed,
    plans_imatrix,
    plans_layout,
    possible,
    type_lines,
)
from browndwarf.plan.legal import legal_types
from browndwarf.plan.quantization import QuantizationPlan
from browndwarf.plan.verify import Layout, listed, verify

PRINTED_BYTES = 2**20 / 100
"""llama-quantize states sizes in MiB with two digits."""
_OUTSIDE = ("token_embd.weight", "per_layer_token_embd.weight", "output.weight")
"""For these llama-quantize takes any type without an imatrix."""

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Quantized:
    """A finished file, or after a dry run what it would be.

    Attributes:
        path: None after a dry run.
        type: the file's own type, as llama-quantize was given it.
        types: tensor -> type, of all tensors.
        data_bytes: of all tensors. ``size_bytes`` is the file's, 0 after a dry run.
        device_bytes: of the tensors that the plan puts on the device; None without a plan.
        requantized: tensors that were quantized already and got another type.
        without_imatrix: quantized tensors that the imatrix has no data for; None without one.
    """

    source: Path
    path: Path | None
    type: str
    types: Mapping[str, str]
    data_bytes: int
    size_bytes: int
    device_bytes: int | None
    requantized: tuple[str, ...]
    without_imatrix: tuple[str, ...] | None
    bits_per_weight: float
    seconds: float


def run_plan(
    build: Build,
    plan: QuantizationPlan,
    dest: Path | None,
    *,
    beside: Path | None = None,
    imatrix: Path | None = None,
    force: bool = False,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
    cancel: threading.Event | None = None,
) -> Quantized:
    """Make the file that a plan describes; ``dest`` None stops after the dry run.

    Args:
        beside: the plan's folder, where its files are looked for if they are not at their paths.
        imatrix: where the plan's imatrix lies now.
        on_progress: called with (tensors done, tensors in all).

    Raises:
        UsageError: the plan contradicts itself or its source, or ``dest`` exists.
        RunChanged: the source or the imatrix is not the plan's.
        EngineUnsupported: this llama-quantize would do something else.
        CheckFailed: the finished file is not what was asked for; it is gone then.
        DiskFull, ToolFailed, Interrupted: nothing stays under the name ``dest``.
    """
    source = placed(plan.source, beside, "the model that the plan was made for")
    info = read_model(source)
    if fingerprint(source) != plan.source_fingerprint:
        raise RunChanged(
            f"{source.name} is not the file that the plan was made for",
            why="its content has another fingerprint",
            fix="bring that file back, or make the plan anew",
        )
    matrix = plans_imatrix(plan, imatrix, beside, info)
    layout = plans_layout(plan, info)
    if plan.base_type.upper() in HIGH_PRECISION:
        raise UsageError(
            f"the plan's base type is {plan.base_type}",
            why="with it llama-quantize ignores the types of single tensors",
            fix="make the plan anew",
        )
    return _run(
        build, info, dest, plan.base_type, layout, matrix, plan.types, plan.device_bytes,
        allow_requantize=True, force=force, threads=threads, on_progress=on_progress,
        cancel=cancel,
    )  # fmt: skip


def run_type(
    build: Build,
    source: Path,
    dest: Path | None,
    type_name: str,
    *,
    imatrix: Path | None = None,
    allow_requantize: bool = False,
    force: bool = False,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
    cancel: threading.Event | None = None,
) -> Quantized:
    """A model or head in one of llama-quantize's own types; ``dest`` None: only a dry run.

    Raises:
        UsageError: the source is quantized already and ``allow_requantize`` is not set, a type
            needs an imatrix, or ``dest`` exists.
        EngineUnsupported: tensors would get other types, because of their row lengths.
        Others: as ``run_plan``.
    """
    info = read_model(source)
    matrix = None
    if imatrix is not None:
        matrix = read_imatrix(imatrix)
        check_imatrix(matrix, info)
    return _run(
        build, info, dest, type_name, None, matrix, {}, None,
        allow_requantize=allow_requantize, force=force, threads=threads,
        on_progress=on_progress, cancel=cancel,
    )  # fmt: skip


def requantized(info: ModelInfo, types: Mapping[str, str]) -> tuple[str, ...]:
    """Tensors that are quantized in the source and get another type."""
    return tuple(
        t.name
        for t in info.tensors
        if t.type not in HIGH_PRECISION and types.get(t.name, t.type) != t.type
    )


def _run(
    build: Build,
    info: ModelInfo,
    dest: Path | None,
    type_name: str,
    wanted: Layout | None,
    matrix: Imatrix | None,
    single: Mapping[str, str],
    device_bytes: int | None,
    *,
    allow_requantize: bool,
    force: bool,
    threads: int | None,
    on_progress: OnProgress | None,
    cancel: threading.Event | None,
) -> Quantized:
    if dest is not None:
        check_dest(dest, info, matrix, force)
    source = info.files[0]
    with tempfile.TemporaryDirectory(prefix="browndwarf-") as folder:
        types_file = None
        if single:
            types_file = Path(folder) / "types.txt"
            with storage_errors(types_file, "write the list of types"):
                types_file.write_text(type_lines(single), encoding="utf-8")

        def call(target: Path | None, layout: Layout | None = None) -> QuantizeResult:
            return quantize(
                build,
                source,
                target,
                type_name,
                allow_requantize=allow_requantize,
                tensor_type_file=types_file,
                imatrix=matrix.path if matrix is not None else None,
                threads=threads,
                dry_run=target is None,
                overwrite=force,
                on_progress=on_progress,
                check=(lambda path: verify(path, layout)) if layout is not None else None,
                cancel=cancel,
            )

        foreseen = call(None)
        types = {name: kind.upper() for name, kind in foreseen.types.items()}
        layout = wanted or _foreseen_layout(info, types, foreseen, type_name)
        _compare(build, layout, types, foreseen.size_bytes)
        again = requantized(info, types)
        if again and not allow_requantize:
            raise UsageError(
                f"{source.name} is quantized already",
                why=f"{len(again)} of its tensors would be quantized a second time, which costs "
                f"quality: {listed(again)}",
                fix="start from an F16 or BF16 file, or add --allow-requantize",
            )
        _check_imatrix_needs(info, types, matrix)
        done = foreseen if dest is None else _finish(dest, lambda: call(dest, layout))
    return Quantized(
        source=source,
        path=dest,
        type=type_name,
        types=types,
        data_bytes=layout.data_bytes,
        size_bytes=done.size_bytes if dest is not None else 0,
        device_bytes=device_bytes,
        requantized=again,
        without_imatrix=_without(info, types, matrix),
        bits_per_weight=8 * layout.data_bytes / max(info.parameters, 1),
        seconds=done.seconds,
    )


def _finish(dest: Path, job: Callable[[], QuantizeResult]) -> QuantizeResult:
    try:
        return job()
    except (KeyboardInterrupt, Interrupted) as exc:
        raise Interrupted(
            "interrupted", why=f"nothing was written to {dest}", fix="run the same command again"
        ) from exc


def _foreseen_layout(
    info: ModelInfo, types: Mapping[str, str], foreseen: QuantizeResult, type_name: str
) -> Layout:
    if foreseen.fallbacks:
        first = foreseen.fallbacks[0]
        raise EngineUnsupported(
            f"{info.path.name} cannot be quantized to {type_name}",
            why=f"{len(foreseen.fallbacks)} tensors would silently get another type: {first.tensor}"
            f" has rows of {first.columns} and would be {first.got.upper()}",
            fix="choose a type whose block size divides the row lengths "
            "(Q8_0, Q5_0, Q4_0 and IQ4_NL need 32; K-quants and most IQ types 256)",
        )
    return Layout(types=dict(types), shapes={tensor.name: tensor.shape for tensor in info.tensors})


def _compare(build: Build, layout: Layout, types: Mapping[str, str], total: int) -> None:
    """What llama-quantize says it would do, against what was asked.

    Raises:
        EngineUnsupported: they differ.
    """
    wrong = [
        f"{name} {kind}, not {types.get(name, 'named at all')}"
        for name, kind in layout.types.items()
        if types.get(name) != kind
    ] + [f"{name} unasked" for name in types if name not in layout.types]
    if not wrong and abs(total - layout.data_bytes) > PRINTED_BYTES:
        wrong = [f"{layout.data_bytes} bytes of tensors, not {total}"]
    if wrong:
        raise EngineUnsupported(
            "this llama-quantize would make another file than was asked for",
            why=f"{len(wrong)} differences, asked for: {listed(wrong, '; ')}",
            fix=f"nothing was written. {build.label} has other rules than the plan expects: use "
            "the build that the plan was made with, or make the plan anew with this one",
        )


def _check_imatrix_needs(info: ModelInfo, types: Mapping[str, str], matrix: Imatrix | None) -> None:
    lacking = [
        t.name
        for t in info.tensors
        if (kind := types.get(t.name, t.type)) != t.type
        and kind not in HIGH_PRECISION
        and t.name not in _OUTSIDE
        and (matrix is None or matrix.weights(t.name) is None)
        and possible(t, kind)
        and kind not in legal_types(t, (kind,), covered=False)
    ]
    if lacking:
        raise UsageError(
            f"{types[lacking[0]]} needs an importance matrix for {listed(lacking)}",
            why="llama-quantize refuses such a type without one" if matrix is None
            else "the given one has no data for these tensors",
            fix="choose Q3_K or larger: no importance matrix can be made of a head" if info.is_head
            else "make one with `browndwarf imatrix` and give it with --imatrix, or choose Q3_K or "
            "larger",
        )  # fmt: skip


def _without(
    info: ModelInfo, types: Mapping[str, str], matrix: Imatrix | None
) -> tuple[str, ...] | None:
    if matrix is None:
        return None
    return tuple(
        t.name
        for t in info.tensors
        if types.get(t.name, t.type) != t.type and matrix.weights(t.name) is None
    )
