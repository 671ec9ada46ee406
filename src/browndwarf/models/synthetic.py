"""Small random-weight models of a given shape, written straight as GGUF.

Purpose: something that llama.cpp loads and drafts with, in a second, for both kinds of MTP
head: Gemma 4's separate drafter, and Qwen3.5's block embedded in a recurrent target. The text
they write is noise; speed, memory, formats and error paths are real.
Boundary: numpy and gguf only, no engine. For full-size shapes see `hollow`, which stores no data.
Output contract: the same shape and seed give the same bytes. An existing file is replaced.

Not covered: vocabularies worth reading, mixture-of-experts, vision.

Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> target, head = write_pair(folder, PairShape(layers=4, width=256))
    >>> sorted(path.name for path in folder.iterdir()) == sorted([target.name, head.name])
    True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType
from numpy.typing import NDArray

CONTEXT_LENGTH = 32_768
_SPACE = "\u2581"
_F16_FILE = 1

GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class PairShape:
    """A gemma4 target and its gemma4-assistant drafter; every fourth target layer is full."""

    width: int = 512
    layers: int = 8
    ff: int = 512
    heads: int = 4
    kv_heads: int = 1
    head_full: int = 128
    head_sliding: int = 64
    window: int = 256
    vocab: int = 2048
    drafter_width: int = 256
    drafter_layers: int = 2
    drafter_ff: int = 256

    def __post_init__(self) -> None:
        if self.layers % 4:
            raise ValueError("layers must be a multiple of 4: the last two must be sliding, full")
        if self.drafter_width == self.width:
            raise ValueError("llama.cpp refuses a drafter as wide as its target")

    @property
    def sliding(self) -> list[bool]:
        """Which target layers slide."""
        return [(i + 1) % 4 != 0 for i in range(self.layers)]


@dataclass(frozen=True, slots=True)
class HybridShape:
    """A qwen35 target: recurrent layers, every fourth full, and one embedded nextn block."""

    width: int = 256
    layers: int = 8
    ff: int = 512
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    state: int = 64
    key_heads: int = 2
    value_heads: int = 4
    convolution: int = 4
    vocab: int = 2048

    @property
    def recurrent(self) -> list[bool]:
        """Which trunk layers are recurrent."""
        return [(i + 1) % 4 != 0 for i in range(self.layers)]


class _Weights:
    """Adds tensors by their GGUF shapes: (row length, rows), as llama.cpp lists them."""

    def __init__(self, out: GGUFWriter, seed: int) -> None:
        self._out, self._rng = out, np.random.default_rng(seed)

    def matrix(self, name: str, row: int, rows: int) -> None:
        """Add a random F16 matrix that keeps the variance."""
        values = self._rng.standard_normal((rows, row), dtype=np.float32) / np.sqrt(row)
        self._out.add_tensor(name, values.astype(np.float16))

    def vector(self, name: str, values: NDArray[np.float32]) -> None:
        """Add an F32 tensor as it is."""
        self._out.add_tensor(name, values.astype(np.float32))

    def ones(self, name: str, size: int) -> None:
        """Add a norm weight."""
        self.vector(name, np.ones(size, np.float32))


def write_pair(
    folder: Path, shape: PairShape | None = None, *, seed: int = 0, stem: str = "synthetic"
) -> tuple[Path, Path]:
    """Write a target and its drafter; returns (target, head)."""
    s = shape or PairShape()
    target, head = folder / f"{stem}-target.gguf", folder / f"{stem}-mtp.gguf"
    _file(target, "gemma4", lambda out: _gemma_target(out, s, seed))
    _file(head, "gemma4-assistant", lambda out: _gemma_drafter(out, s, seed + 1))
    return target, head


def write_hybrid(
    path: Path, shape: HybridShape | None = None, *, seed: int = 0, nextn: bool = True
) -> Path:
    """Write a recurrent target with its MTP block inside; without ``nextn``, lacking it."""
    s = shape or HybridShape()
    _file(path, "qwen35", lambda out: _qwen(out, s, seed, nextn))
    return path


def _file(path: Path, arch: str, fill: Callable[[GGUFWriter], None]) -> None:
    out = GGUFWriter(str(path), arch)
    out.add_name(f"synthetic {arch}")
    out.add_description("Random weights for tests. Writes noise.")
    out.add_license("apache-2.0")
    out.add_file_type(_F16_FILE)
    out.add_context_length(CONTEXT_LENGTH)
    fill(out)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _gemma_keys(out: GGUFWriter, arch: str, s: PairShape, sliding: list[bool]) -> None:
    out.add_block_count(len(sliding))
    out.add_head_count(s.heads)
    out.add_head_count_kv(s.kv_heads)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_key_length(s.head_full)
    out.add_value_length(s.head_full)
    out.add_uint32(f"{arch}.attention.key_length_swa", s.head_sliding)
    out.add_uint32(f"{arch}.attention.value_length_swa", s.head_sliding)
    out.add_sliding_window(s.window)
    out.add_array(f"{arch}.attention.sliding_window_pattern", sliding)
    out.add_rope_freq_base(1e6)
    out.add_float32(f"{arch}.rope.freq_base_swa", 1e4)
    out.add_rope_dimension_count(s.head_full)
    out.add_uint32(f"{arch}.rope.dimension_count_swa", s.head_sliding)
    out.add_uint32(f"{arch}.embedding_length_per_layer_input", 0)
    _gemma_vocabulary(out, s.vocab)


def _gemma_layer(
    w: _Weights, s: PairShape, index: int, width: int, ff: int, *, slides: bool, own_kv: bool
) -> None:
    p, head = f"blk.{index}", s.head_sliding if slides else s.head_full
    w.ones(f"{p}.attn_norm.weight", width)
    w.matrix(f"{p}.attn_q.weight", width, s.heads * head)
    if own_kv:
        w.matrix(f"{p}.attn_k.weight", width, s.kv_heads * head)
        w.matrix(f"{p}.attn_v.weight", width, s.kv_heads * head)
        w.ones(f"{p}.attn_k_norm.weight", head)
    w.matrix(f"{p}.attn_output.weight", s.heads * head, width)
    w.ones(f"{p}.attn_q_norm.weight", head)
    w.ones(f"{p}.post_attention_norm.weight", width)
    w.ones(f"{p}.ffn_norm.weight", width)
    w.matrix(f"{p}.ffn_gate.weight", width, ff)
    w.matrix(f"{p}.ffn_up.weight", width, ff)
    w.matrix(f"{p}.ffn_down.weight", ff, width)
    w.ones(f"{p}.post_ffw_norm.weight", width)
    w.ones(f"{p}.layer_output_scale.weight", 1)


def _gemma_rotation(s: PairShape) -> NDArray[np.float32]:
    """Full layers rotate a quarter of the head: the other pairs get an endless wave length."""
    turned, pairs = s.head_full // 8, s.head_full // 2
    return np.array([1.0] * turned + [1e30] * (pairs - turned), np.float32)


def _gemma_target(out: GGUFWriter, s: PairShape, seed: int) -> None:
    out.add_embedding_length(s.width)
    out.add_feed_forward_length(s.ff)
    out.add_uint32("gemma4.attention.shared_kv_layers", 0)
    out.add_final_logit_softcapping(30.0)
    _gemma_keys(out, "gemma4", s, s.sliding)
    w = _Weights(out, seed)
    w.matrix("token_embd.weight", s.width, s.vocab)
    w.ones("output_norm.weight", s.width)
    w.vector("rope_freqs.weight", _gemma_rotation(s))
    for i, slides in enumerate(s.sliding):
        _gemma_layer(w, s, i, s.width, s.ff, slides=slides, own_kv=True)


def _gemma_drafter(out: GGUFWriter, s: PairShape, seed: int) -> None:
    arch, n = "gemma4-assistant", s.drafter_layers
    out.add_embedding_length(s.drafter_width)
    out.add_feed_forward_length(s.drafter_ff)
    out.add_uint32(f"{arch}.embedding_length_out", s.width)
    out.add_uint32(f"{arch}.nextn_predict_layers", n)
    out.add_uint32(f"{arch}.attention.shared_kv_layers", n)
    sliding = [True] * (n - 1) + [False]
    _gemma_keys(out, arch, s, sliding)
    w = _Weights(out, seed)
    w.matrix("token_embd.weight", s.drafter_width, s.vocab)
    w.ones("output_norm.weight", s.drafter_width)
    w.vector("rope_freqs.weight", _gemma_rotation(s))
    w.matrix("nextn.pre_projection.weight", 2 * s.width, s.drafter_width)
    w.matrix("nextn.post_projection.weight", s.drafter_width, s.width)
    for i, slides in enumerate(sliding):
        _gemma_layer(w, s, i, s.drafter_width, s.drafter_ff, slides=slides, own_kv=False)


def _qwen(out: GGUFWriter, s: HybridShape, seed: int, nextn: bool) -> None:
    out.add_embedding_length(s.width)
    out.add_feed_forward_length(s.ff)
    out.add_block_count(s.layers + nextn)
    if nextn:
        out.add_uint32("qwen35.nextn_predict_layers", 1)
    out.add_head_count(s.heads)
    out.add_head_count_kv(s.kv_heads)
    out.add_key_length(s.head)
    out.add_value_length(s.head)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_freq_base(1e6)
    turned = s.head // 2
    out.add_rope_dimension_count(turned)
    third = turned // 6
    out.add_array("qwen35.rope.dimension_sections", [turned // 2 - 2 * third, third, third, 0])
    out.add_uint32("qwen35.full_attention_interval", 4)
    out.add_ssm_conv_kernel(s.convolution)
    out.add_ssm_state_size(s.state)
    out.add_ssm_group_count(s.key_heads)
    out.add_ssm_time_step_rank(s.value_heads)
    out.add_ssm_inner_size(s.state * s.value_heads)
    _qwen_vocabulary(out, s.vocab)
    w = _Weights(out, seed)
    w.matrix("token_embd.weight", s.width, s.vocab)
    w.matrix("output.weight", s.width, s.vocab)
    w.ones("output_norm.weight", s.width)
    for i, recurrent in enumerate(s.recurrent):
        _qwen_layer(w, s, i, recurrent=recurrent)
    if nextn:
        _qwen_layer(w, s, s.layers, recurrent=False)
        p = f"blk.{s.layers}.nextn"
        w.matrix(f"{p}.eh_proj.weight", 2 * s.width, s.width)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            w.ones(f"{p}.{name}.weight", s.width)


def _qwen_layer(w: _Weights, s: HybridShape, index: int, *, recurrent: bool) -> None:
    p = f"blk.{index}"
    w.ones(f"{p}.attn_norm.weight", s.width)
    w.ones(f"{p}.post_attention_norm.weight", s.width)
    if recurrent:
        keys, values = s.state * s.key_heads, s.state * s.value_heads
        channels = 2 * keys + values
        w.matrix(f"{p}.attn_qkv.weight", s.width, channels)
        w.matrix(f"{p}.attn_gate.weight", s.width, values)
        kernel = np.full((channels, s.convolution), 1 / s.convolution, np.float32)
        w.vector(f"{p}.ssm_conv1d.weight", kernel)
        w.vector(f"{p}.ssm_dt.bias", np.zeros(s.value_heads, np.float32))
        w.vector(f"{p}.ssm_a", np.full(s.value_heads, -1.0, np.float32))
        w.matrix(f"{p}.ssm_beta.weight", s.width, s.value_heads)
        w.matrix(f"{p}.ssm_alpha.weight", s.width, s.value_heads)
        w.ones(f"{p}.ssm_norm.weight", s.state)
        w.matrix(f"{p}.ssm_out.weight", values, s.width)
    else:
        w.matrix(f"{p}.attn_q.weight", s.width, 2 * s.heads * s.head)  # query and its gate
        w.matrix(f"{p}.attn_k.weight", s.width, s.kv_heads * s.head)
        w.matrix(f"{p}.attn_v.weight", s.width, s.kv_heads * s.head)
        w.matrix(f"{p}.attn_output.weight", s.heads * s.head, s.width)
        w.ones(f"{p}.attn_q_norm.weight", s.head)
        w.ones(f"{p}.attn_k_norm.weight", s.head)
    w.matrix(f"{p}.ffn_gate.weight", s.width, s.ff)
    w.matrix(f"{p}.ffn_up.weight", s.width, s.ff)
    w.matrix(f"{p}.ffn_down.weight", s.ff, s.width)


def _gemma_vocabulary(out: GGUFWriter, size: int) -> None:
    control = ["<pad>", "<eos>", "<bos>"]
    turns = ["<|turn>", "<turn|>"]
    tokens = [*control, "<unk>", *turns, *(f"<0x{i:02X}>" for i in range(256))]
    types = [TokenType.CONTROL] * 3 + [TokenType.UNKNOWN] + [TokenType.CONTROL] * 2
    types += [TokenType.BYTE] * 256
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    plain = [*map(chr, range(33, 127)), _SPACE, "\n"]
    merges = _finish(out, tokens, types, plain, list(product([_SPACE, *letters], letters)), size)
    out.add_tokenizer_model("gemma4")
    out.add_token_scores([0.0] * size)
    out.add_token_merges(merges)
    out.add_bos_token_id(2)
    out.add_eos_token_id(1)
    out.add_unk_token_id(3)
    out.add_pad_token_id(0)
    out.add_add_bos_token(True)
    out.add_add_space_prefix(False)
    out.add_chat_template(GEMMA_TEMPLATE)


def _qwen_vocabulary(out: GGUFWriter, size: int) -> None:
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens, types = list(control), [TokenType.CONTROL] * 3
    # GPT-2's printable stand-ins for the bytes.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_in = {b: chr(b) for b in printable}
    for b in range(256):
        stand_in.setdefault(b, chr(256 + len(stand_in) - len(printable)))
    plain = [stand_in[b] for b in range(256)]
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    pairs = list(product([stand_in[32], *letters], letters))
    merges = _finish(out, tokens, types, plain, pairs, size)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen35")
    out.add_token_merges(merges)
    out.add_eos_token_id(2)
    out.add_pad_token_id(0)
    out.add_add_bos_token(False)
    out.add_chat_template(QWEN_TEMPLATE)


def _finish(
    out: GGUFWriter, tokens: list[str], types: list[TokenType], plain: list[str],
    pairs: list[tuple[str, str]], size: int,
) -> list[str]:  # fmt: skip
    """Fill a vocabulary up with merged pairs, then with spares; returns the merges."""
    tokens = [*tokens, *plain]
    room = size - len(tokens)
    if room < 1:
        raise ValueError(f"a vocabulary needs more than {len(tokens)} tokens")
    merged = pairs[:room]
    tokens += [a + b for a, b in merged]
    types = [*types, *[TokenType.NORMAL] * (len(plain) + len(merged))]
    spare = size - len(tokens)
    out.add_token_list([*tokens, *(f"<unused{i}>" for i in range(spare))])
    out.add_token_types([*types, *[TokenType.CONTROL] * spare])
    return [f"{a} {b}" for a, b in merged]
