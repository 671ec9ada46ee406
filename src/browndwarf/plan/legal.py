"""Which types a tensor may have, so that llama-quantize does what it is told.

llama-quantize replaces a type whose blocks do not fill the tensor's rows by another one, silently,
and stops at a type that wants an importance matrix and has none. Both are ruled out here, before
anything is chosen.

Example:
    legal_types(tensor, DEFAULT_TYPES, covered=True)
"""

from __future__ import annotations

from collections.abc import Sequence

from browndwarf.errors import UsageError
from browndwarf.models.ggml_types import GGML_TYPES, row_bytes
from browndwarf.models.gguf import Tensor

DEFAULT_TYPES = (
    "IQ2_S", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K", "IQ4_XS", "IQ4_NL", "Q4_K", "Q5_0", "Q5_K",
    "Q6_K", "Q8_0",
)  # fmt: skip
"""Every size between two and nine bits, and for rows that fill no block of 256 some of 32."""

_QUANTIZABLE = frozenset(
    {
        "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
        "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
        "MXFP4", "TQ1_0", "TQ2_0",
    }
)  # fmt: skip
_NEEDS_IMATRIX = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"})
WHOLE = "F16"
"""For rows that fill no block of any type: what llama-quantize falls back to as well."""


def parse_types(text: str) -> tuple[str, ...]:
    """Types from ``Q3_K,Q4_K``, in either case, each once.

    Raises:
        UsageError: no type, or one that llama-quantize does not make of single tensors.
    """
    names = tuple(dict.fromkeys(part.strip().upper() for part in text.split(",") if part.strip()))
    wrong = [name for name in names if name not in _QUANTIZABLE]
    if wrong or not names:
        raise UsageError(
            f"{wrong[0]!r} is no type for a tensor" if wrong else "no types are named",
            why="a tensor's type is one of "
            + ", ".join(sorted(_QUANTIZABLE))
            + "; names such as Q4_K_M are mixes of these",
            fix="write for example --types Q3_K,Q4_K,Q6_K",
        )
    return names


def legal_types(tensor: Tensor, types: Sequence[str], *, covered: bool) -> tuple[str, ...]:
    """Those of ``types`` that this tensor may have; F16 alone where none fits.

    Args:
        covered: whether the imatrix holds data of this tensor.
    """
    fits = [
        kind
        for kind in types
        if tensor.shape[0] % GGML_TYPES[kind].block == 0 and (covered or kind not in _NEEDS_IMATRIX)
    ]
    return tuple(fits) or (WHOLE,)


def tensor_bytes(tensor: Tensor, kind: str) -> int:
    """Bytes of a tensor's data in another type."""
    rows = tensor.elements // tensor.shape[0]
    return rows * row_bytes(kind, tensor.shape[0])
