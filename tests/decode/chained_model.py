"""A small random step35 model with several chained MTP layers, written as GGUF."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from browndwarf.models import synthetic

WIDTH, LAYERS, FF, HEADS, KV_HEADS, HEAD, VOCAB = 256, 4, 512, 4, 2, 64, 2048


def write_chained(path: Path, heads: int = 3) -> Path:
    """Write a target whose last ``heads`` layers are MTP layers; returns ``path``."""
    total = LAYERS + heads
    out = GGUFWriter(str(path), "step35")
    out.add_context_length(4096)
    out.add_embedding_length(WIDTH)
    out.add_feed_forward_length(FF)
    out.add_block_count(total)
    out.add_uint32("step35.nextn_predict_layers", heads)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_key_length(HEAD)
    out.add_value_length(HEAD)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_freq_base(1e6)
    out.add_rope_dimension_count(HEAD)
    out.add_expert_feed_forward_length(FF)
    out.add_sliding_window(256)
    out.add_array("step35.attention.sliding_window_pattern", [i % 4 == 1 for i in range(total)])
    synthetic._qwen_vocabulary(out, VOCAB)
    rng = np.random.default_rng(2)

    def matrix(name: str, row: int, rows: int) -> None:
        values = rng.standard_normal((rows, row), dtype=np.float32) / np.sqrt(row)
        out.add_tensor(name, values.astype(np.float16))

    def ones(name: str, size: int) -> None:
        out.add_tensor(name, np.ones(size, np.float32))

    matrix("token_embd.weight", WIDTH, VOCAB)
    matrix("output.weight", WIDTH, VOCAB)
    ones("output_norm.weight", WIDTH)
    for i in range(total):
        p = f"blk.{i}"
        ones(f"{p}.attn_norm.weight", WIDTH)
        ones(f"{p}.attn_q_norm.weight", HEAD)
        ones(f"{p}.attn_k_norm.weight", HEAD)
        matrix(f"{p}.attn_q.weight", WIDTH, HEADS * HEAD)
        matrix(f"{p}.attn_k.weight", WIDTH, KV_HEADS * HEAD)
        matrix(f"{p}.attn_v.weight", WIDTH, KV_HEADS * HEAD)
        matrix(f"{p}.attn_output.weight", HEADS * HEAD, WIDTH)
        matrix(f"{p}.attn_gate.weight", WIDTH, HEADS)
        ones(f"{p}.ffn_norm.weight", WIDTH)
        matrix(f"{p}.ffn_gate.weight", WIDTH, FF)
        matrix(f"{p}.ffn_up.weight", WIDTH, FF)
        matrix(f"{p}.ffn_down.weight", FF, WIDTH)
        if i >= LAYERS:
            matrix(f"{p}.nextn.eh_proj.weight", 2 * WIDTH, WIDTH)
            ones(f"{p}.nextn.enorm.weight", WIDTH)
            ones(f"{p}.nextn.hnorm.weight", WIDTH)
            ones(f"{p}.nextn.shared_head_norm.weight", WIDTH)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
