"""Compute buffers without an engine: the peak of the graph, in numbers per token.

At its peak a graph holds the attention masks and, for every token of a micro-batch, either the
feed-forward layer's rows or the attention's. The weights of those rows were fitted to 1,521 dry
allocations over random widths, contexts, slots and micro-batches of six families. On other random
shapes half of the estimates are within 5%, nine in ten between -17% and +22%
(``benchmarks/compute_fit.py``). Where the engine's library loads, its own answer is used instead.

Example:
    fitted_target_mib(setup), fitted_draft_mib(setup)
"""

from __future__ import annotations

from browndwarf.models.gguf import ModelInfo
from browndwarf.plan.setup import Setup
from browndwarf.units import MIB

_F32 = 4


def fitted_target_mib(setup: Setup) -> float:
    """The target's compute buffer, in MiB."""
    model = setup.target
    shape = model.shape
    own = [b for b in model.blocks if b.part == "trunk"]
    d = shape.hidden_width
    ff = max((b.feed_forward for b in own), default=0)
    q = max((b.heads * b.k_dim for b in own if b.kind != "recurrent"), default=0)
    kv = max((b.k_width for b in own if b.kind != "recurrent"), default=0)
    rows = [4 * ff + d]
    if model.layers.recurrent:
        conv = shape.state_r // 3
        rows += [4 * q + d, 3 * conv + d]
    elif model.layers.sliding:
        rows.append(5 * q // 2 + 4 * d)
    else:
        rows.append(2 * q + 2 * kv + 3 * d)
    if shape.experts_used:
        expert_ff = _expert_width(model)
        rows.append(2 * ff + shape.experts_used * (expert_ff + d))
    states = setup.parallel * setup.state_copies * shape.state_s * bool(model.layers.recurrent)
    return _masks_mib(setup) + (max(rows) * setup.real_ubatch + states) * _F32 / MIB


def fitted_draft_mib(setup: Setup) -> float:
    """The drafter's compute buffer, in MiB; 0 without one."""
    if not setup.draft:
        return 0.0
    target, owner = setup.target, setup.head or setup.target
    blocks = [b for b in owner.blocks if b.part == "head"]
    d = owner.shape.hidden_width
    ff = max((b.feed_forward for b in blocks), default=0)
    q = max((b.heads * b.k_dim for b in blocks), default=0)
    if owner.head.kind == "assistant":
        rows, masks = max(3 * ff + 4 * d, 2 * q + target.hidden_width), _masks_mib(setup)
    else:
        rows, masks = max(3 * ff, 4 * q) + 2 * d, setup.cells * setup.real_ubatch * 2 / MIB
    return masks + rows * setup.real_ubatch * _F32 / MIB


def _masks_mib(setup: Setup) -> float:
    """The f16 attention masks: cells x tokens, for full and for sliding layers."""
    kinds = {block.kind for block in setup.target.blocks if block.part == "trunk"}
    cells = setup.cells * ("full" in kinds) + setup.sliding_cells * ("sliding" in kinds)
    return cells * setup.real_ubatch * 2 / MIB


def _expert_width(model: ModelInfo) -> int:
    """A routed expert's feed-forward width, from its down projection."""
    for tensor in model.tensors:
        if tensor.name.endswith("ffn_down_exps.weight"):
            return tensor.shape[0]
    return 0
