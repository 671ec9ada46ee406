"""What llama-quantize itself would do: which tensors it touches, and its own mixes.

Both are asked of the tool by dry runs, which read the header and take a fraction of a second:
its rules change from release to release, and a copy of them would be wrong sooner or later.

Example:
    quantizable(build, model)                       # names of the tensors it would quantize
    stock_types(build, model, "Q4_K_M", None)       # tensor name -> type
"""

from __future__ import annotations

from pathlib import Path

from browndwarf.engine.locate import Build
from browndwarf.engine.quantizer import quantize
from browndwarf.errors import ToolFailed
from browndwarf.models.gguf import ModelInfo

STOCK = ("Q4_K_M", "Q4_K_S", "IQ4_XS", "Q3_K_M")
_PROBES = ("Q4_0", "Q5_0")


def quantizable(build: Build, model: ModelInfo) -> frozenset[str]:
    """Names of the tensors whose type llama-quantize changes.

    Two types are tried, because a tensor that has one of them already looks untouched.

    Raises:
        EngineUnsupported: the build has no llama-quantize, or one without a dry run.
        ToolFailed: it refuses the file.
    """
    before = {tensor.name: tensor.type for tensor in model.tensors}
    changed: set[str] = set()
    for kind in _PROBES:
        after = _types(build, model, kind, None, pure=True)
        changed |= {name for name, new in after.items() if new != before.get(name)}
    return frozenset(changed)


def stock_types(build: Build, model: ModelInfo, mix: str, imatrix: Path | None) -> dict[str, str]:
    """The type of every tensor in one of llama-quantize's mixes.

    Raises:
        EngineUnsupported, ToolFailed: as ``quantizable``.
    """
    return _types(build, model, mix, imatrix, pure=False)


def _types(
    build: Build, model: ModelInfo, kind: str, imatrix: Path | None, *, pure: bool
) -> dict[str, str]:
    found = quantize(
        build, model.path, None, kind,
        allow_requantize=True, imatrix=imatrix, pure=pure, dry_run=True,
    ).types  # fmt: skip
    types = {name: found_type.upper() for name, found_type in found.items()}
    lost = [tensor.name for tensor in model.tensors if tensor.name not in types]
    if lost:
        raise ToolFailed(
            "llama-quantize's dry run leaves out tensors",
            why=f"{len(lost)} of {len(model.tensors)}, such as {lost[0]}",
            fix="use the build of `browndwarf engine install`",
        )
    return types
