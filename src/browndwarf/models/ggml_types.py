"""Storage types of ggml: how many bytes a row of numbers takes in each.

A type packs ``block`` consecutive elements into ``bytes`` bytes, so a tensor's first dimension
is a multiple of ``block``. The figures are ggml's file format; they are spelled here rather than
taken from the ``gguf`` package because reading a header must not cost that import, and a test
compares the two. Names of whole-file mixes (``Q4_K_M``) are here too; what a mix does to each
tensor is not.

Example:
    >>> GGML_TYPES["Q4_K"].bits_per_element, row_bytes("Q8_0", 64)
    (4.5, 68)
"""

from __future__ import annotations

from dataclasses import dataclass

from browndwarf.errors import UsageError


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One storage type: its number in files, its name, elements and bytes per block."""

    number: int
    name: str
    block: int
    bytes: int

    @property
    def bits_per_element(self) -> float:
        """Bits per stored number, scales included."""
        return 8 * self.bytes / self.block


_ALL = (
    GgmlType(0, "F32", 1, 4),
    GgmlType(1, "F16", 1, 2),
    GgmlType(2, "Q4_0", 32, 18),
    GgmlType(3, "Q4_1", 32, 20),
    GgmlType(6, "Q5_0", 32, 22),
    GgmlType(7, "Q5_1", 32, 24),
    GgmlType(8, "Q8_0", 32, 34),
    GgmlType(9, "Q8_1", 32, 40),
    GgmlType(10, "Q2_K", 256, 84),
    GgmlType(11, "Q3_K", 256, 110),
    GgmlType(12, "Q4_K", 256, 144),
    GgmlType(13, "Q5_K", 256, 176),
    GgmlType(14, "Q6_K", 256, 210),
    GgmlType(15, "Q8_K", 256, 292),
    GgmlType(16, "IQ2_XXS", 256, 66),
    GgmlType(17, "IQ2_XS", 256, 74),
    GgmlType(18, "IQ3_XXS", 256, 98),
    GgmlType(19, "IQ1_S", 256, 50),
    GgmlType(20, "IQ4_NL", 32, 18),
    GgmlType(21, "IQ3_S", 256, 110),
    GgmlType(22, "IQ2_S", 256, 82),
    GgmlType(23, "IQ4_XS", 256, 136),
    GgmlType(24, "I8", 1, 1),
    GgmlType(25, "I16", 1, 2),
    GgmlType(26, "I32", 1, 4),
    GgmlType(27, "I64", 1, 8),
    GgmlType(28, "F64", 1, 8),
    GgmlType(29, "IQ1_M", 256, 56),
    GgmlType(30, "BF16", 1, 2),
    GgmlType(34, "TQ1_0", 256, 54),
    GgmlType(35, "TQ2_0", 256, 66),
    GgmlType(39, "MXFP4", 32, 17),
    GgmlType(40, "NVFP4", 64, 36),
    GgmlType(41, "Q1_0", 128, 18),
)

GGML_TYPES: dict[str, GgmlType] = {t.name: t for t in _ALL}
TYPE_BY_NUMBER: dict[int, GgmlType] = {t.number: t for t in _ALL}

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
#: Types that lose nothing of a model when they are the source of a quantization.
HIGH_PRECISION = frozenset({"F32", "F16", "BF16", "F64"})


def parse_kv(text: str) -> str:
    """A KV cache type, or K:V where they differ, in lower case.

    Raises:
        UsageError: it is none that llama.cpp takes.
    """
    parts = text.strip().lower().split(":")
    if len(parts) > 2 or any(part not in KV_TYPES for part in parts):
        raise UsageError(
            f"{text} is no KV cache type",
            why=f"known are {', '.join(KV_TYPES)}",
            fix="write e.g. f16,q8_0, or q8_0:q4_0 for K and V",
        )
    return ":".join(parts)


"""What ``--cache-type-k`` and ``--cache-type-v`` take, largest first."""

FILE_TYPES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
    40: "Q1_0",
}
"""``general.file_type``: the mix that ``llama-quantize`` was asked for."""


def row_bytes(type_name: str, elements: int) -> int:
    """Bytes of ``elements`` consecutive numbers; names are taken in either case.

    Raises:
        UsageError: no such type, or the row is no whole number of blocks.
    """
    kind = GGML_TYPES.get(type_name.upper())
    if kind is None:
        raise UsageError(
            f"{type_name!r} is not a ggml type",
            why="the known ones are " + ", ".join(GGML_TYPES),
            fix="check the spelling",
        )
    if elements % kind.block:
        raise UsageError(
            f"{elements} elements do not fill whole {kind.name} blocks",
            why=f"{kind.name} packs {kind.block} elements at a time",
            fix="choose a type with a smaller block, such as q8_0 or f16",
        )
    return elements // kind.block * kind.bytes
