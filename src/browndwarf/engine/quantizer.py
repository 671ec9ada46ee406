"""llama-quantize as a typed call: a GGUF of other types, complete or not at all.

Boundary: which types are good is decided elsewhere (``plan``); this writes what it is told,
checks the disk first, and reports what each tensor became.

Example:
    >>> quantize(build, Path("head-F16.gguf"), Path("head-Q4_K.gguf"), "Q4_K").fallbacks
    ()
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from browndwarf.engine import toolparse
from browndwarf.engine.locate import INSTALL_HINT, Build
from browndwarf.engine.toolparse import Fallback
from browndwarf.engine.toolrun import OnLine, ToolResult, need_file, run_tool, tool_flags
from browndwarf.errors import (
    BrowndwarfError,
    DiskFull,
    EngineUnsupported,
    StorageError,
    ToolFailed,
    UsageError,
)
from browndwarf.files import check_writable, place
from browndwarf.units import format_bytes

DISK_RESERVE_BYTES = 32 << 20
"""Room for metadata (mostly the vocabulary), which the prediction leaves out."""


@dataclass(frozen=True)
class QuantizeResult:
    """A quantized file (None after a dry run).

    Attributes:
        types: tensor name -> type in the result.
        fallbacks: tensors that got another type than asked for, because of their shape.
        size_bytes: of the file; after a dry run, of the tensors as predicted.
    """

    path: Path | None
    types: dict[str, str]
    fallbacks: tuple[Fallback, ...]
    size_bytes: int
    seconds: float


def quantize(
    build: Build,
    source: Path,
    dest: Path | None,
    type: str,
    *,
    allow_requantize: bool = False,
    tensor_types: Mapping[str, str] | Sequence[tuple[str, str]] | None = None,
    tensor_type_file: Path | None = None,
    imatrix: Path | None = None,
    pure: bool = False,
    leave_output: bool = False,
    output_type: str | None = None,
    embedding_type: str | None = None,
    threads: int | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    extra: Sequence[str] = (),
    timeout_s: float | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    check: Callable[[Path], None] | None = None,
    cancel: threading.Event | None = None,
) -> QuantizeResult:
    """Quantize a GGUF. ``dest`` appears complete or not at all.

    Args:
        type: the file's type, such as ``Q4_K_M``; the rule for tensors not named.
        tensor_types: tensor name pattern -> type, for single tensors.
        tensor_type_file: the same as ``PATTERN=TYPE`` lines, for more than a command line holds.
        dry_run: predict sizes and types, write nothing (``dest`` may be None).
        overwrite: replace an existing ``dest``.
        extra: any other argument of llama-quantize, as it is.
        on_progress: called with (tensors done, tensors in all).
        check: called with the finished file before it gets its name; what it raises keeps the
            file from appearing.

    Raises:
        ModelNotFound: no ``source``.
        UsageError: ``dest`` exists, or is missing for a real run.
        DiskFull: before the run or in its middle; the temporary file is gone then.
        ToolFailed and others: as ``run_tool``.
    """
    need_file(source)
    if imatrix is not None:
        need_file(imatrix)
    if tensor_type_file is not None:
        need_file(tensor_type_file)
    pairs = list(tensor_types.items() if isinstance(tensor_types, Mapping) else tensor_types or ())
    args: list[str] = []
    for wanted, flag in (
        (allow_requantize, "--allow-requantize"),
        (pure, "--pure"),
        (leave_output, "--leave-output-tensor"),
    ):
        if wanted:
            args.append(flag)
    for value, flag in (
        (imatrix, "--imatrix"),
        (tensor_type_file, "--tensor-type-file"),
        (output_type, "--output-tensor-type"),
        (embedding_type, "--token-embedding-type"),
    ):
        if value is not None:
            args += [flag, str(value)]
    for name, kind in pairs:
        args += ["--tensor-type", f"{name}={kind}"]
    args += extra
    read_only = [p for p in (source, imatrix, tensor_type_file) if p is not None]

    def call(mode: list[str], target: list[str], on_line: OnLine | None) -> ToolResult:
        tail = [type, *([str(threads)] if threads is not None else [])]
        return run_tool(
            build,
            "llama-quantize",
            [*mode, *args, str(source), *target, *tail],
            timeout_s=timeout_s,
            on_line=on_line,
            cancel=cancel,
            read_only=read_only,
            writable=[Path(t).parent for t in target],
        )

    flags = tool_flags(build, "llama-quantize")
    can_predict = "--dry-run" in flags
    # A container is not asked for its help: there the tool itself refuses what it does not know.
    for needed, flag, what in (
        (dry_run, "--dry-run", "no dry run"),
        (tensor_type_file is not None, "--tensor-type-file", "no list of types"),
    ):
        if needed and flag not in flags and build.docker_image is None:
            raise EngineUnsupported(
                f"this llama-quantize has {what}",
                why=f"{flag} is not in its help ({build.label})",
                fix=INSTALL_HINT,
            )
    if dry_run:
        done = call(["--dry-run"], [], None)
        return _quantized(None, done, toolparse.quantized_bytes(done.output) or 0)
    if dest is None:
        raise UsageError("no file to write to", fix="name a destination, or ask for a dry run")
    if dest.exists() and not overwrite:
        raise _exists(dest)
    _clear_leftovers(dest)
    predicted = source.stat().st_size
    if can_predict:
        try:
            prediction = call(["--dry-run"], [], None)
        except ToolFailed as exc:
            raise _clearer(exc, type) from exc
        predicted = toolparse.quantized_bytes(prediction.output) or predicted
    _check_disk(dest, predicted + min(DISK_RESERVE_BYTES, source.stat().st_size // 8))
    partial = dest.with_name(f".{dest.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        done = call([], [str(partial)], _progress(on_progress))
        _sync(partial)
        size = partial.stat().st_size
        if check is not None:
            check(partial)
        place(partial, dest, overwrite=overwrite)
    except ToolFailed as exc:
        if _ran_full(exc, dest, predicted, partial):
            raise _disk_full(dest, predicted) from exc
        raise _clearer(exc, type) from exc
    except FileExistsError as exc:
        raise _exists(dest) from exc
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(dest, predicted) from exc
        raise StorageError(f"cannot write {dest}", why=str(exc), fix="check the folder") from exc
    finally:
        partial.unlink(missing_ok=True)
    return _quantized(dest, done, size)


def _clear_leftovers(dest: Path) -> None:
    """Remove what runs for the same file left when they were killed: it may fill the disk."""
    for path in dest.parent.glob(f".{glob.escape(dest.name)}.*.partial"):
        pid = path.name.removesuffix(".partial").rpartition(".")[2].partition("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False


def _exists(dest: Path) -> UsageError:
    return UsageError(
        f"{dest} exists already",
        why="a file is never overwritten unasked",
        fix="name another file, or ask to overwrite it",
    )


def _progress(on_progress: Callable[[int, int], None] | None) -> OnLine | None:
    if on_progress is None:
        return None

    def on_line(line: str) -> None:
        if (step := toolparse.quantize_step(line)) is not None:
            on_progress(*step)

    return on_line


def _quantized(path: Path | None, done: ToolResult, size: int) -> QuantizeResult:
    return QuantizeResult(
        path=path,
        types=toolparse.tensor_types(done.output),
        fallbacks=toolparse.fallbacks(done.output),
        size_bytes=size,
        seconds=done.seconds,
    )


def _check_disk(dest: Path, needed: int) -> None:
    try:
        free = shutil.disk_usage(dest.parent).free
    except OSError as exc:
        raise StorageError(
            f"cannot write to {dest.parent}", why=str(exc), fix="create the folder first"
        ) from exc
    # A read-only file system may have no room either, but that is not what is wrong with it.
    check_writable(dest.parent, f"write {dest.name}")
    if free < needed:
        raise _disk_full(dest, needed)


def _disk_full(dest: Path, needed: int) -> DiskFull:
    free = shutil.disk_usage(dest.parent).free
    return DiskFull(
        f"not enough room for {dest.name}",
        why=f"it needs {format_bytes(needed)}; {format_bytes(free)} are free in {dest.parent}",
        fix="free some space, or write to another disk",
    )


def _clearer(error: ToolFailed, type: str) -> BrowndwarfError:
    """llama-quantize's two common refusals in words that say what to do."""
    if "requantizing from type" in error.why:
        return UsageError(
            "the source is quantized already",
            why=error.why,
            fix="start from an F16 or BF16 file, or allow requantizing (quality suffers)",
        )
    if "ftype" in error.why:
        return UsageError(
            f"llama-quantize knows no type {type}",
            why=error.why,
            fix="see `llama-quantize --help` for the list, such as Q4_K_M, Q8_0 or IQ4_NL",
        )
    return error


def _ran_full(error: ToolFailed, dest: Path, predicted: int, partial: Path) -> bool:
    """Whether a failed run was a full disk: llama-quantize says only "iostream error"."""
    if "No space left on device" in error.why:
        return True
    written = partial.stat().st_size if partial.exists() else 0
    try:
        free = shutil.disk_usage(dest.parent).free
    except OSError:
        return False
    return "iostream error" in error.why and free < max(predicted - written, 1 << 20)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
