"""Weights that llama.cpp's CPU backend stores a second time, in a layout for its kernels.

Where the processor has the instructions, matrices of some types are copied into a
``CPU_REPACK`` buffer at load. The file stays mapped, from its first to its last tensor that is
used as it is, so such weights count twice in the log and in resident memory (the mapped pages can
be dropped under pressure). ``--no-repack`` turns it off. Rules after
``ggml_repack_get_optimal_repack_type`` of llama.cpp (commit 0c1e570); RISC-V is left out.

Example:
    repacked_types(frozenset({"avx2"}))["Q4_K"]     # 8: the rows must be a multiple of this
"""

from __future__ import annotations

from collections.abc import Iterable

from browndwarf.models.gguf import ModelInfo, Tensor

_RULES: tuple[tuple[str, dict[str, int]], ...] = (
    ("avx2", {"Q4_0": 8, "Q4_K": 8, "IQ4_NL": 8, "MXFP4": 8}),
    ("avx512f", {"Q2_K": 8}),
    (
        "asimddp",
        {
            "Q4_0": 4, "IQ4_NL": 4, "MXFP4": 4, "Q8_0": 4, "Q1_0": 4,
            "Q4_K": 8, "Q5_K": 8, "Q6_K": 8,
        },
    ),
)  # fmt: skip

_LOOKED_UP = ("token_embd.", "per_layer_token_embd.", "position_embd.", "token_types.")


def repacked_types(flags: frozenset[str]) -> dict[str, int]:
    """Types that a processor with these flags repacks, with the divisor of the row count."""
    found: dict[str, int] = {}
    for flag, types in _RULES:
        if flag in flags:
            found |= types
    return found


def cpu_weight_bytes(
    model: ModelInfo, used: Iterable[Tensor], types: dict[str, int], *, mapped: bool
) -> int:
    """Bytes of the CPU's weight buffers together: what is used as it is, and the copies.

    Mapped parts span from their first to their last tensor that is used as it is.
    """
    spans: dict[int, tuple[int, int]] = {}
    plain = copies = 0
    for tensor in used:
        if _repacks(tensor, types):
            copies += tensor.bytes
            continue
        plain += tensor.bytes
        first, last = spans.get(tensor.part, (tensor.offset, 0))
        end = tensor.offset + tensor.bytes
        spans[tensor.part] = (min(first, tensor.offset), max(last, end))
    embedding = model.by_name.get("token_embd.weight")
    if model.tied and embedding is not None and _fits(embedding, types):
        copies += embedding.bytes
    if mapped:
        plain = sum(last - first for first, last in spans.values())
    return plain + copies


def is_copied(tensor: Tensor, types: dict[str, int], *, tied: bool) -> bool:
    """Whether a tensor is stored a second time; a tied embedding is, as the output matrix."""
    if tensor.name == "token_embd.weight":
        return tied and _fits(tensor, types)
    return _repacks(tensor, types)


def _repacks(tensor: Tensor, types: dict[str, int]) -> bool:
    looked_up = tensor.name.startswith(_LOOKED_UP) or ".nextn.embed_tokens" in tensor.name
    return not looked_up and _fits(tensor, types)


def _fits(tensor: Tensor, types: dict[str, int]) -> bool:
    divisor = types.get(tensor.type)
    return divisor is not None and len(tensor.shape) > 1 and tensor.shape[1] % divisor == 0
