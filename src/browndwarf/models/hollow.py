"""GGUF files that have a model's header and no weights: sparse, so a 31B takes a few MiB of disk.

For memory only the header counts: dry allocation and llama-server's own buffers are those of the
real model, because every tensor is there with its real type and shape. The norms are ones and
all else is zeros, so the output is meaningless; ``synthetic`` makes models that compute
something. Vocabulary entries are invented.

The file's end is set without writing it: on a file system without sparse files the full size is
allocated.

Example:
    write_hollow(Path("t.gguf"), SHAPES["gemma4-12b"])
    write_hollow_head(Path("h.gguf"), SHAPES["gemma4-12b"])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from browndwarf.models.ggml_types import GGML_TYPES, row_bytes
from browndwarf.models.gguf_read import read_header
from browndwarf.models.named_shapes import SHAPES, HollowShape, scaled

__all__ = ["SHAPES", "HollowShape", "scaled", "write_hollow", "write_hollow_head"]


def write_hollow(
    path: Path, shape: HollowShape, *, main: str = "Q4_K", embed: str = "Q6_K"
) -> None:
    """Write a target of ``shape``: matrices of type ``main``, the embedding of ``embed``."""
    table = _Table(main)
    d, n = shape.width, shape.layers
    table.add("token_embd.weight", d, shape.vocab, kind=embed)
    if not shape.tied:
        table.add("output.weight", d, shape.vocab, kind=embed)
    table.ones("output_norm.weight", d)
    if shape.arch == "gemma4":
        table.ones("rope_freqs.weight", shape.head_dim[1] // 2)
    if shape.per_layer:
        table.add("per_layer_token_embd.weight", shape.per_layer * n, shape.vocab, kind=embed)
        table.add("per_layer_model_proj.weight", d, shape.per_layer * n, kind="BF16")
        table.ones("per_layer_proj_norm.weight", shape.per_layer)
    for layer in range(n + shape.nextn):
        _layer(table, shape, layer)
    _write(path, shape.arch, shape, table, head=False)


def write_hollow_head(path: Path, shape: HollowShape, *, main: str = "Q8_0") -> None:
    """Write the gemma4-assistant drafter that belongs to a gemma4 ``shape``."""
    table = _Table(main)
    d = shape.head_width
    table.add("token_embd.weight", d, shape.vocab)
    table.ones("output_norm.weight", d)
    table.ones("rope_freqs.weight", shape.head_dim[1] // 2)
    table.add("nextn.post_projection.weight", d, shape.width)
    table.add("nextn.pre_projection.weight", 2 * shape.width, d)
    for layer in range(shape.head_layers):
        name = f"blk.{layer}."
        dim = shape.head_dim[layer == shape.head_layers - 1]
        table.add(name + "attn_q.weight", d, dim * shape.heads)
        table.add(name + "attn_output.weight", dim * shape.heads, d)
        table.ones(name + "attn_q_norm.weight", dim)
        _gemma_common(table, name, d, shape.head_ff)
    _write(path, "gemma4-assistant", shape, table, head=True)


class _Table:
    """The tensors of a file, in order."""

    def __init__(self, main: str) -> None:
        self.main = main
        self.rows: list[tuple[str, tuple[int, ...], str]] = []

    def add(self, name: str, *shape: int, kind: str = "") -> None:
        """A matrix; rows that do not fill the type's blocks take Q8_0, as when quantizing."""
        chosen = kind or self.main
        if shape[0] % GGML_TYPES[chosen].block:
            chosen = "Q8_0"
        self.rows.append((name, shape, chosen))

    def ones(self, name: str, size: int) -> None:
        """A float vector."""
        self.rows.append((name, (size,), "F32"))


def _gemma_common(table: _Table, name: str, d: int, ff: int) -> None:
    for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        table.ones(f"{name}{norm}.weight", d)
    table.ones(name + "layer_output_scale.weight", 1)
    _feed_forward(table, name, d, ff)


def _feed_forward(table: _Table, name: str, d: int, ff: int) -> None:
    table.add(name + "ffn_gate.weight", d, ff)
    table.add(name + "ffn_up.weight", d, ff)
    table.add(name + "ffn_down.weight", ff, d)


def _layer(table: _Table, shape: HollowShape, layer: int) -> None:
    name, d = f"blk.{layer}.", shape.width
    if shape.arch.startswith("qwen35"):
        _qwen_layer(table, shape, layer, name)
        return
    full = not shape.sliding(layer)
    dim, kv = shape.head_dim[full], shape.kv_heads[full]
    table.add(name + "attn_q.weight", d, dim * shape.heads)
    table.add(name + "attn_output.weight", dim * shape.heads, d)
    if layer < shape.layers - shape.shared:
        table.add(name + "attn_k.weight", d, dim * kv)
        if shape.arch != "gemma4" or not full or shape.full_has_v:
            table.add(name + "attn_v.weight", d, dim * kv)
        if shape.arch == "gemma4":
            table.ones(name + "attn_k_norm.weight", dim)
    if shape.arch == "llama":
        table.ones(name + "attn_norm.weight", d)
        table.ones(name + "ffn_norm.weight", d)
        _feed_forward(table, name, d, shape.ff)
        return
    table.ones(name + "attn_q_norm.weight", dim)
    _gemma_common(table, name, d, shape.ff)
    if shape.experts:
        table.rows.append((name + "ffn_gate_inp.weight", (d, shape.experts), "F32"))
        table.ones(name + "ffn_gate_inp.scale", d)
        for norm in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            table.ones(f"{name}{norm}.weight", d)
        table.add(name + "ffn_gate_up_exps.weight", d, 2 * shape.expert_ff, shape.experts)
        table.add(name + "ffn_down_exps.weight", shape.expert_ff, d, shape.experts)
    if shape.per_layer:
        table.add(name + "inp_gate.weight", d, shape.per_layer)
        table.add(name + "proj.weight", shape.per_layer, d)
        table.ones(name + "post_norm.weight", d)


_STATE, _GROUPS, _CONV = 128, 16, 4


def _qwen_layer(table: _Table, shape: HollowShape, layer: int, name: str) -> None:
    d = shape.width
    table.ones(name + "attn_norm.weight", d)
    table.ones(name + "post_attention_norm.weight", d)
    if layer < shape.layers and (layer + 1) % shape.recurrent_every:
        rank = shape.state_heads
        values = _STATE * rank
        conv = 2 * _STATE * _GROUPS + values
        table.add(name + "attn_qkv.weight", d, conv)
        table.add(name + "attn_gate.weight", d, values)
        table.rows.append((name + "ssm_conv1d.weight", (_CONV, conv), "F32"))
        table.ones(name + "ssm_dt.bias", rank)
        table.ones(name + "ssm_a", rank)
        table.add(name + "ssm_beta.weight", d, rank)
        table.add(name + "ssm_alpha.weight", d, rank)
        table.ones(name + "ssm_norm.weight", _STATE)
        table.add(name + "ssm_out.weight", values, d)
    else:
        dim, kv = shape.head_dim[1], shape.kv_heads[1]
        table.add(name + "attn_q.weight", d, 2 * dim * shape.heads)
        table.add(name + "attn_k.weight", d, dim * kv)
        table.add(name + "attn_v.weight", d, dim * kv)
        table.add(name + "attn_output.weight", dim * shape.heads, d)
        table.ones(name + "attn_q_norm.weight", dim)
        table.ones(name + "attn_k_norm.weight", dim)
    if shape.experts:
        ff = shape.expert_ff
        table.rows.append((name + "ffn_gate_inp.weight", (d, shape.experts), "F32"))
        table.add(name + "ffn_gate_exps.weight", d, ff, shape.experts)
        table.add(name + "ffn_up_exps.weight", d, ff, shape.experts)
        table.add(name + "ffn_down_exps.weight", ff, d, shape.experts)
        table.ones(name + "ffn_gate_inp_shexp.weight", d)
        table.add(name + "ffn_gate_shexp.weight", d, ff)
        table.add(name + "ffn_up_shexp.weight", d, ff)
        table.add(name + "ffn_down_shexp.weight", ff, d)
    else:
        _feed_forward(table, name, d, shape.ff)
    if layer >= shape.layers:
        table.add(name + "nextn.eh_proj.weight", 2 * d, d)
        for norm in ("enorm", "hnorm", "shared_head_norm"):
            table.ones(f"{name}nextn.{norm}.weight", d)


def _vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens, types (1 normal, 2 unknown, 3 control, 6 byte) and merges of an invented BPE."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    kinds = [3, 3, 3, 2] + [6] * 256
    letters = [chr(code) for code in range(33, 127)] + ["\u2581"]
    small = [chr(code) for code in range(97, 123)]
    merges = [f"{a} {b}" for a in ["\u2581", *small] for b in small]
    words = letters + [merge.replace(" ", "") for merge in merges]
    tokens += words[: size - len(tokens)]
    tokens += [f"w{i}q" for i in range(size - len(tokens))]
    kinds += [1] * (size - len(kinds))
    return tokens, kinds, merges


def _write(path: Path, arch: str, shape: HollowShape, table: _Table, *, head: bool) -> None:
    import gguf

    out = gguf.GGUFWriter(str(path), arch)
    _keys(out, arch, shape, head)
    tokens, kinds, merges = _vocabulary(shape.vocab)
    bpe = shape.arch == "gemma4"
    out.add_tokenizer_model("gemma4" if bpe else "llama")
    out.add_token_list(tokens)
    out.add_token_scores([0.0] * len(tokens))
    out.add_token_types(kinds)
    if bpe:
        out.add_token_merges(merges)
    out.add_bos_token_id(2)
    out.add_eos_token_id(1)
    out.add_unk_token_id(3)
    for name, dims, kind in table.rows:
        rows = 1
        for size in dims[1:]:
            rows *= size
        n_bytes = row_bytes(kind, dims[0]) * rows
        raw = getattr(gguf.GGMLQuantizationType, kind)
        # The writer takes a quantized tensor's last axis in bytes, as its data arrays have it.
        last = row_bytes(kind, dims[0]) if GGML_TYPES[kind].block > 1 else dims[0]
        np_shape = (*reversed(dims[1:]), last)
        dtype = np.dtype(np.uint8 if GGML_TYPES[kind].block > 1 else np.float32)
        out.add_tensor_info(name, np_shape, dtype, n_bytes, raw_dtype=raw)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_ti_data_to_file()
    out.close()
    _stretch(path)


def _stretch(path: Path) -> None:
    """Set the file's full length, and the float vectors to ones."""
    header = read_header(path, complete=False)
    with path.open("r+b") as handle:
        end = max(t.offset + t.bytes for t in header.tensors)
        handle.truncate(header.data_offset + -(-end // 32) * 32)
        for tensor in header.tensors:
            if tensor.type == "F32" and len(tensor.shape) == 1:
                handle.seek(header.data_offset + tensor.offset)
                handle.write(np.ones(tensor.elements, np.float32).tobytes())


def _keys(out: Any, arch: str, shape: HollowShape, head: bool) -> None:
    layers = shape.head_layers if head else shape.layers + shape.nextn
    numbers: dict[str, int] = {
        "context_length": 262144,
        "embedding_length": shape.head_width if head else shape.width,
        "block_count": layers,
        "feed_forward_length": shape.head_ff if head else shape.ff,
        "attention.head_count": shape.heads,
        "attention.key_length": shape.head_dim[1],
        "attention.value_length": shape.head_dim[1],
    }
    floats = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6}
    if shape.arch == "gemma4":
        pattern = [layer < layers - 1 if head else shape.sliding(layer) for layer in range(layers)]
        out.add_array(f"{arch}.attention.head_count_kv", [shape.kv_heads[not s] for s in pattern])
        out.add_array(f"{arch}.attention.sliding_window_pattern", pattern)
        numbers |= {
            "attention.key_length_swa": shape.head_dim[0],
            "attention.value_length_swa": shape.head_dim[0],
            "attention.sliding_window": shape.window,
            "attention.shared_kv_layers": layers if head else shape.shared,
            "embedding_length_per_layer_input": 0 if head else shape.per_layer,
            "rope.dimension_count": shape.head_dim[1],
            "rope.dimension_count_swa": shape.head_dim[0],
        }
        floats["rope.freq_base_swa"] = 1e4
    else:
        numbers["attention.head_count_kv"] = shape.kv_heads[1]
        numbers["rope.dimension_count"] = shape.head_dim[1]
    if head:
        numbers |= {"embedding_length_out": shape.width, "nextn_predict_layers": layers}
    elif shape.experts:
        numbers |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.experts_used,
            "expert_feed_forward_length": shape.expert_ff,
        }
    if arch.startswith("qwen35"):
        if shape.experts:
            numbers["expert_shared_feed_forward_length"] = shape.expert_ff
        out.add_array(f"{arch}.rope.dimension_sections", [11, 11, 10, 0])
        numbers |= {
            "rope.dimension_count": 64,
            "nextn_predict_layers": shape.nextn,
            "full_attention_interval": shape.recurrent_every,
            "ssm.conv_kernel": _CONV,
            "ssm.inner_size": _STATE * shape.state_heads,
            "ssm.state_size": _STATE,
            "ssm.time_step_rank": shape.state_heads,
            "ssm.group_count": _GROUPS,
        }
    for key, value in numbers.items():
        out.add_uint32(f"{arch}.{key}", value)
    for key, real in floats.items():
        out.add_float32(f"{arch}.{key}", real)
