"""Bytes that follow from the header: weights on the device, KV caches, recurrent state.

Formulas, each from llama.cpp (commit 0c1e570) and checked against its server's log lines:

- weights (``llama_model::load_tensors``): the input embedding, ``per_layer_token_embd`` and the
  centroid tables of some drafters never go to a GPU; a tied embedding goes there once more as
  the output matrix; nextn tensors are loaded only when drafting.
- KV of a layer (``llama_kv_cache``): streams x cells x (K row + V row), rows in the cache type.
  Without flash attention V is stored transposed at the widest layer's width.
- recurrent state (``llama_memory_recurrent``): slots x (1 + n_max when drafting) x
  (convolution + state) x 4 bytes per layer.
- an assistant drafter keeps no cache; nextn layers keep one over the target's whole context.

Example:
    kv_bytes(setup).full + kv_bytes(setup).sliding
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from browndwarf.models.ggml_types import row_bytes
from browndwarf.models.gguf import Block, ModelInfo, Tensor
from browndwarf.plan.repack import cpu_weight_bytes, repacked_types
from browndwarf.plan.setup import Setup

_HOST_ONLY = frozenset(
    {
        "token_embd.weight",
        "position_embd.weight",
        "token_types.weight",
        "per_layer_token_embd.weight",
    }
)
Place = Literal["device", "host", "unused"]
_UNUSED = ("mtp.masked_embd", "masked_embd", "nextn.masked_embd")


@dataclass(frozen=True, slots=True)
class Placed:
    """Bytes by place."""

    device: int
    host: int


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes of the target's attention caches on the device, by layer kind; ``host`` is the rest."""

    full: int
    sliding: int
    host: int


def tensor_place(setup: Setup, tensor: Tensor) -> Place:
    """Where one tensor of the target counts. On a CPU all that is loaded is ``device``.

    A tied embedding is ``device``: its copy as the output matrix goes there. Its other copy stays
    in RAM.
    """
    if not setup.draft and _is_nextn(setup.target, tensor):
        return "unused"
    if setup.on_cpu:
        return "device"
    if tensor.name in _HOST_ONLY:
        output = tensor.name == "token_embd.weight" and setup.target.tied
        return "device" if output else "host"
    layer = _layer_of(tensor)
    return "device" if layer is None or setup.on_device(layer) else "host"


def target_weights(setup: Setup) -> Placed:
    """Where the target's weights go. On a CPU all are ``device``, repacked copies included."""
    places = [(t, tensor_place(setup, t)) for t in setup.target.tensors]
    if setup.on_cpu:
        used = [t for t, place in places if place != "unused"]
        return Placed(_on_cpu(setup, setup.target, used), 0)
    device = sum(t.bytes for t, place in places if place == "device")
    host = sum(t.bytes for t, place in places if place == "host")
    return Placed(device, host + _tied_copy(setup.target))


def head_weights(setup: Setup) -> Placed:
    """Where a separate drafter's weights go; nothing for an embedded one."""
    if setup.head is None or not setup.draft:
        return Placed(0, 0)
    used = [t for t in setup.head.tensors if not t.name.startswith(_UNUSED)]
    if setup.on_cpu:
        return Placed(_on_cpu(setup, setup.head, used), 0)
    host = sum(t.bytes for t in used if t.name in _HOST_ONLY)
    total = sum(t.bytes for t in used)
    return Placed(total - host + _tied_copy(setup.head), host)


def kv_bytes(setup: Setup) -> KvBytes:
    """The target's attention caches."""
    sums = {"full": 0, "sliding": 0, "host": 0}
    blocks = [b for b in setup.target.blocks if b.part == "trunk" and b.own_kv]
    for block in blocks:
        cells = setup.sliding_cells if block.kind == "sliding" else setup.cells
        row = _kv_row(block, setup, blocks, setup.kv_k, setup.kv_v)
        place = block.kind if setup.on_device(block.index) else "host"
        sums[place] += setup.streams * cells * row
    return KvBytes(sums["full"], sums["sliding"], sums["host"])


def draft_kv_bytes(setup: Setup) -> int:
    """The cache of nextn layers; 0 for an assistant, which reads the target's."""
    owner = setup.head or setup.target
    if not setup.draft or owner.head.kind != "nextn":
        return 0
    blocks = [b for b in owner.blocks if b.part == "head" and b.own_kv]
    total = 0
    for block in blocks:
        cells = setup.sliding_cells if block.kind == "sliding" else setup.cells
        row = _kv_row(block, setup, blocks, setup.draft_kv_k, setup.draft_kv_v)
        total += setup.streams * cells * row
    return total


def recurrent_bytes(setup: Setup) -> int:
    """Convolution and recurrent states of all slots, f32."""
    layers = sum(b.kind == "recurrent" and b.part == "trunk" for b in setup.target.blocks)
    numbers = setup.target.shape.state_r + setup.target.shape.state_s
    return layers * numbers * 4 * setup.parallel * setup.state_copies


def flash_scratch_bytes(setup: Setup) -> int:
    """What CUDA's flash attention unpacks of a quantized cache: one layer's K and V as f16.

    llama.cpp issue #23907: it comes out of the backend's pool at run time, grows with the cells
    that are in use, and is in no log line. 0 where the cache is not quantized.
    """
    if setup.backend not in ("cuda", "rocm") or setup.on_cpu or not setup.flash_attention:
        return 0
    quantized_k = setup.kv_k not in ("f32", "f16", "bf16")
    quantized_v = setup.kv_v not in ("f32", "f16", "bf16")
    worst = 0
    for block in setup.target.blocks:
        if block.own_kv and block.part == "trunk" and setup.on_device(block.index):
            cells = setup.sliding_cells if block.kind == "sliding" else setup.cells
            width = block.k_width * quantized_k + block.v_width * quantized_v
            worst = max(worst, setup.streams * cells * width * 2)
    return worst


def output_bytes(setup: Setup) -> int:
    """The host buffer for logits and hidden states of one batch's outputs, f32."""
    outputs = min(setup.batch, setup.parallel * (1 + setup.drafted))
    width = setup.target.vocab + (setup.target.shape.hidden_out if setup.draft else 0)
    return outputs * width * 4


def _on_cpu(setup: Setup, model: ModelInfo, used: list[Tensor]) -> int:
    types = repacked_types(setup.repack)
    return cpu_weight_bytes(model, used, types, mapped=setup.mapped)


def _kv_row(block: Block, setup: Setup, blocks: list[Block], type_k: str, type_v: str) -> int:
    k_row = row_bytes(type_k, block.k_width) if block.k_width else 0
    v_width = block.v_width
    if v_width and not setup.flash_attention:
        v_width = max(b.v_width for b in blocks)
    return k_row + (row_bytes(type_v, v_width) if v_width else 0)


def _layer_of(tensor: Tensor) -> int | None:
    """The layer a tensor belongs to; None for those that go with the output."""
    parts = tensor.name.split(".", 2)
    if parts[0] == "blk" and len(parts) > 2 and parts[1].isdigit():
        return int(parts[1])
    if tensor.name.startswith(("per_layer_model_proj", "per_layer_proj_norm", "rope_freqs")):
        return 0
    return None


def _is_nextn(model: ModelInfo, tensor: Tensor) -> bool:
    if not model.shape.nextn_layers or model.is_head:
        return False
    layer = _layer_of(tensor)
    return layer is not None and layer >= len(model.blocks) - model.shape.nextn_layers


def _tied_copy(model: ModelInfo) -> int:
    embedding = model.by_name.get("token_embd.weight")
    return embedding.bytes if model.tied and embedding is not None else 0
