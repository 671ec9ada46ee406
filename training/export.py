"""Write the trained networks as GGUF: target F32, F16 or Q8_0, drafter F32 or F16.

Boundary: names, keys and types as llama.cpp reads them; no training here.
Output contract: `write_target` and `write_drafter` make complete files that llama.cpp loads
as a pair; 1-D tensors stay F32.

A key that llama.cpp would otherwise fill in wrongly: `final_logit_softcapping` (30 if absent).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from numpy.typing import NDArray
from torch import Tensor

from training.model import Drafter, DrafterShape, Layer, Target, TargetShape
from training.tokenizer import Vocabulary

CONTEXT_LENGTH = 4096
_FILE_TYPES = {Type.F32: 0, Type.F16: 1, Type.Q8_0: 7}


@dataclass(frozen=True, slots=True)
class Card:
    """What a file says about itself."""

    name: str
    description: str
    license: str = "apache-2.0"


TARGET_CARD = Card(
    "browndwarf demo target",
    "A 17M-parameter language model in Gemma 4's architecture, trained on generated text to try "
    "MTP speculative decoding on any machine. Not for real use.",
)
DRAFTER_CARD = Card(
    "browndwarf demo drafter", "The MTP head (gemma4-assistant) of the browndwarf demo target."
)


class _Writer:
    """A GGUFWriter with the keys that both files share."""

    def __init__(self, path: Path, arch: str, card: Card, kind: Type) -> None:
        self.out, self.arch, self.kind = GGUFWriter(str(path), arch), arch, kind
        self.out.add_name(card.name)
        self.out.add_description(card.description)
        self.out.add_license(card.license)
        self.out.add_file_type(_FILE_TYPES[kind])

    def shape(self, s: TargetShape, own: TargetShape | DrafterShape, softcap: bool) -> None:
        """Write the hyperparameters; heads, windows and rotations are the target's."""
        out, arch = self.out, self.arch
        out.add_context_length(CONTEXT_LENGTH)
        out.add_embedding_length(own.width)
        out.add_block_count(own.layers)
        out.add_feed_forward_length(own.ff)
        out.add_head_count(own.heads)
        out.add_head_count_kv(s.kv_heads)
        out.add_layer_norm_rms_eps(s.eps)
        out.add_key_length(s.head_full)
        out.add_value_length(s.head_full)
        out.add_uint32(f"{arch}.attention.key_length_swa", s.head_sliding)
        out.add_uint32(f"{arch}.attention.value_length_swa", s.head_sliding)
        out.add_sliding_window(s.window)
        pattern = [own.sliding(i) for i in range(own.layers)]
        out.add_array(f"{arch}.attention.sliding_window_pattern", pattern)
        out.add_rope_freq_base(s.rope_base_full)
        out.add_float32(f"{arch}.rope.freq_base_swa", s.rope_base_sliding)
        out.add_rope_dimension_count(s.head_full)
        out.add_uint32(f"{arch}.rope.dimension_count_swa", s.head_sliding)
        out.add_uint32(f"{arch}.embedding_length_per_layer_input", 0)
        if softcap:
            out.add_final_logit_softcapping(s.softcap)

    def tokenizer(self, vocabulary: Vocabulary, template: str) -> None:
        """Write the vocabulary and the chat template."""
        out, ids = self.out, vocabulary.ids
        out.add_tokenizer_model("gemma4")
        out.add_token_list(vocabulary.tokens)
        out.add_token_scores([0.0] * len(vocabulary.tokens))
        out.add_token_types(vocabulary.types)
        out.add_token_merges([" ".join(pair) for pair in vocabulary.merges])
        out.add_bos_token_id(ids["<bos>"])
        out.add_eos_token_id(ids["<eos>"])
        out.add_unk_token_id(ids["<unk>"])
        out.add_pad_token_id(ids["<pad>"])
        out.add_add_bos_token(True)
        out.add_add_space_prefix(False)
        out.add_chat_template(template)

    def vector(self, name: str, value: Tensor | NDArray[np.float32]) -> None:
        """Write a 1-D tensor, always F32."""
        self.out.add_tensor(name, _array(value))

    def matrix(self, name: str, value: Tensor) -> None:
        """Write a matrix in the file's type."""
        array = _array(value)
        if self.kind == Type.F32:
            self.out.add_tensor(name, array)
        else:
            self.out.add_tensor(name, gguf.quants.quantize(array, self.kind), raw_dtype=self.kind)

    def layer(self, index: int, layer: Layer) -> None:
        """Write one block."""
        p = f"blk.{index}."
        self.vector(f"{p}attn_norm.weight", layer.attn_norm)
        self.matrix(f"{p}attn_q.weight", layer.q.weight)
        self.matrix(f"{p}attn_output.weight", layer.o.weight)
        self.vector(f"{p}attn_q_norm.weight", layer.q_norm)
        if layer.own_kv:
            self.matrix(f"{p}attn_k.weight", layer.k.weight)
            self.matrix(f"{p}attn_v.weight", layer.v.weight)
            self.vector(f"{p}attn_k_norm.weight", layer.k_norm)
        self.vector(f"{p}post_attention_norm.weight", layer.post_attn_norm)
        self.vector(f"{p}ffn_norm.weight", layer.ffn_norm)
        self.matrix(f"{p}ffn_gate.weight", layer.gate.weight)
        self.matrix(f"{p}ffn_up.weight", layer.up.weight)
        self.matrix(f"{p}ffn_down.weight", layer.down.weight)
        self.vector(f"{p}post_ffw_norm.weight", layer.post_ffn_norm)
        self.vector(f"{p}layer_output_scale.weight", layer.scale)

    def close(self) -> None:
        """Write everything to disk."""
        self.out.write_header_to_file()
        self.out.write_kv_data_to_file()
        self.out.write_tensors_to_file()
        self.out.close()


def _array(value: Tensor | NDArray[np.float32]) -> NDArray[np.float32]:
    if isinstance(value, Tensor):
        value = value.detach().float().cpu().numpy()
    return np.ascontiguousarray(value, np.float32)


def _rotated(s: TargetShape) -> NDArray[np.float32]:
    """Divisors of the full layers' frequencies: 1 where rotated, so large it stops elsewhere."""
    pairs, turned = s.head_full // 2, int(s.head_full * s.rotated_share / 2)
    return np.array([1.0] * turned + [1e30] * (pairs - turned), np.float32)


def write_target(
    path: Path, target: Target, vocabulary: Vocabulary, template: str, kind: Type = Type.Q8_0,
    card: Card = TARGET_CARD,
) -> None:  # fmt: skip
    """Write the target."""
    out = _Writer(path, "gemma4", card, kind)
    out.shape(target.shape, target.shape, softcap=True)
    out.out.add_uint32("gemma4.attention.shared_kv_layers", 0)
    out.tokenizer(vocabulary, template)
    out.matrix("token_embd.weight", target.embedding)
    out.vector("output_norm.weight", target.norm)
    out.vector("rope_freqs.weight", _rotated(target.shape))
    for i, layer in enumerate(target.layers):
        assert isinstance(layer, Layer)
        out.layer(i, layer)
    out.close()


def write_drafter(
    path: Path, drafter: Drafter, vocabulary: Vocabulary, template: str, kind: Type = Type.F16,
    card: Card = DRAFTER_CARD,
) -> None:  # fmt: skip
    """Write the drafter."""
    arch, shape = "gemma4-assistant", drafter.shape
    out = _Writer(path, arch, card, kind)
    out.shape(drafter.target, shape, softcap=False)
    out.out.add_uint32(f"{arch}.embedding_length_out", drafter.target.width)
    out.out.add_uint32(f"{arch}.nextn_predict_layers", shape.layers)
    out.out.add_uint32(f"{arch}.attention.shared_kv_layers", shape.layers)
    out.tokenizer(vocabulary, template)
    out.matrix("token_embd.weight", drafter.embedding)
    out.vector("output_norm.weight", drafter.norm)
    out.vector("rope_freqs.weight", _rotated(drafter.target))
    out.matrix("nextn.pre_projection.weight", drafter.pre.weight)
    out.matrix("nextn.post_projection.weight", drafter.post.weight)
    for i, layer in enumerate(drafter.layers):
        assert isinstance(layer, Layer)
        out.layer(i, layer)
    out.close()
