"""What a quantization is given, checked and put into llama-quantize's words.

Boundary: files and plans in, a ``Layout`` and a list of types out; ``quantize`` runs the tool.

llama-quantize reads the types of single tensors as regular expressions: names are lower-cased,
the first that matches anywhere in a tensor's name wins, white space ends one, comments are not
allowed, and all are ignored when the file's own type is F16. ``type_lines`` writes what stays
exact under these rules.

Example:
    type_lines({"blk.3.ffn_down.weight": "IQ3_S"})     # '^blk\\.3\\.ffn_down\\.weight$=iq3_s\\n'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from browndwarf.errors import ModelNotFound, RunChanged, UsageError
from browndwarf.files import sha256_of, storage_errors
from browndwarf.models.ggml_types import HIGH_PRECISION
from browndwarf.models.gguf import ModelInfo, Tensor
from browndwarf.models.imatrix import Imatrix, check_imatrix, read_imatrix
from browndwarf.plan.legal import legal_types, tensor_bytes
from browndwarf.plan.quantization import QuantizationPlan
from browndwarf.plan.verify import Layout, listed


def type_lines(types: Mapping[str, str]) -> str:
    """The content of llama-quantize's ``--tensor-type-file``: one expression for each tensor.

    Raises:
        UsageError: two names cannot be told apart by such expressions.
    """
    exact: list[tuple[str, str, str]] = []
    loose: list[tuple[str, str, str]] = []
    for name, kind in types.items():
        if "\n" in name or "\r" in name:
            raise UsageError(f"the tensor {name!r} has a line break in its name")
        # An upper-case letter would be lower-cased, a space would end the word, and an equals
        # sign would end the name: any character stands for them.
        body = re.sub(r"[\\^$.|?*+()\[\]{}]", r"\\\g<0>", name)
        body, count = re.subn(r"[A-Z\s=]", ".", body, flags=re.ASCII)
        (loose if count else exact).append((f"^{body}$", name, kind))
    for index, (_, name, kind) in enumerate(loose):
        for pattern, other, other_kind in [*exact, *loose[:index]]:
            if other_kind != kind and re.search(pattern.encode(), name.encode()):
                raise UsageError(
                    f"the tensors {name} and {other} cannot get different types",
                    why="llama-quantize lower-cases the names that it is given",
                    fix="give both the same type",
                )
    return "".join(f"{pattern}={kind.lower()}\n" for pattern, _, kind in [*exact, *loose])


def plans_imatrix(
    plan: QuantizationPlan, given: Path | None, beside: Path | None, info: ModelInfo
) -> Imatrix | None:
    """The plan's importance matrix, checked; from ``given`` where that is named.

    Raises:
        RunChanged: it is another one.
        UsageError: the plan has none.
        ModelNotFound, BadModelFile: as ``read_imatrix``.
    """
    if plan.imatrix is None:
        if given is not None:
            raise UsageError(
                "the plan was made without an importance matrix",
                why="its types were not chosen for one",
                fix="leave --imatrix out, or make the plan anew with it",
            )
        return None
    path = given or placed(plan.imatrix, beside, "the plan's importance matrix")
    matrix = read_imatrix(path)
    with storage_errors(path, f"read {path.name}"):
        digest = sha256_of(path)
    if digest != (plan.imatrix_sha256 or "").removeprefix("sha256:"):
        raise RunChanged(
            f"{path.name} is not the importance matrix that the plan was made with",
            why="its content has another SHA-256",
            fix="bring that file back, or make the plan anew",
        )
    check_imatrix(matrix, info)
    return matrix


def plans_layout(plan: QuantizationPlan, info: ModelInfo) -> Layout:
    """What the plan asks for.

    Raises:
        UsageError: it contradicts itself or its source.
    """
    names = [choice.name for choice in plan.tensors]
    if len(set(names)) != len(names) or set(names) != info.by_name.keys():
        odd = sorted(set(names) ^ info.by_name.keys()) or names
        raise _bad_plan(f"its tensors are not those of {info.path.name}: {listed(odd)}")
    for choice in plan.tensors:
        tensor = info.by_name[choice.name]
        kind = choice.type.upper()
        if not choice.chosen and kind != tensor.type:
            raise _bad_plan(f"{choice.name} is copied, but is {tensor.type} and not {kind}")
        if choice.chosen and kind not in HIGH_PRECISION and not possible(tensor, kind):
            raise _bad_plan(f"{choice.name} cannot be {kind}: its rows are {tensor.shape[0]} long")
        if choice.bytes != tensor_bytes(tensor, kind) or choice.elements != tensor.elements:
            raise _bad_plan(f"{choice.name} has another size as {kind}")
    device = sum(choice.bytes for choice in plan.tensors if choice.device)
    if device != plan.device_bytes or sum(c.bytes for c in plan.tensors) != plan.file_bytes:
        raise _bad_plan("its sums are not those of its tensors")
    return Layout(
        types={choice.name: choice.type.upper() for choice in plan.tensors},
        shapes={tensor.name: tensor.shape for tensor in info.tensors},
        device=frozenset(choice.name for choice in plan.tensors if choice.device),
        device_bytes=plan.device_bytes,
    )


def _bad_plan(why: str) -> UsageError:
    return UsageError("the plan contradicts itself or its model", why=why, fix="make the plan anew")


def possible(tensor: Tensor, kind: str) -> bool:
    """Whether a tensor's rows fill whole blocks of a type."""
    try:
        return kind in legal_types(tensor, (kind,), covered=True)
    except KeyError:
        return False


def placed(named: str, beside: Path | None, what: str) -> Path:
    """A file of the plan: at its path, or in the plan's own folder.

    Raises:
        ModelNotFound: it is at neither place.
    """
    path = Path(named)
    candidates = [path] if beside is None else [path, beside / path, beside / path.name]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ModelNotFound(
        f"{what} is not at {named}",
        why="the file was moved or removed since",
        fix="put it back, or into the plan's folder",
    )


def check_dest(dest: Path, info: ModelInfo, matrix: Imatrix | None, force: bool) -> None:
    """Whether a file may be written.

    Raises:
        UsageError: it exists, is a folder, or is one of the inputs.
    """
    inputs = [*info.files, *([matrix.path] if matrix is not None else [])]
    if any(dest.exists() and dest.samefile(path) for path in inputs):
        raise UsageError(
            f"{dest} is the source itself", why="it would be lost", fix="name another file"
        )
    if dest.is_dir():
        raise UsageError(f"{dest} is a folder", fix="name a file: --output NAME.gguf")
    if dest.exists() and not force:
        raise UsageError(
            f"{dest} exists already",
            why="a file is never overwritten unasked",
            fix="name another file with --output, or add --force",
        )
