"""From metadata keys to a model's shape: what each layer attends to, how wide, and what it keeps.

``read_shape`` turns a header into one ``Block`` per layer, in llama.cpp's own sense: whether the
layer caches keys and values for the whole context, for a sliding window, or a recurrent state,
and with how many numbers per token. The rules follow ``llama_model_base::load_hparams`` and each
architecture's ``load_arch_hparams``. Values that no model has (negative widths, a million
layers) end in ``BadModelFile``.

Not covered: attention that caches something else than K and V per head (latent attention with an
indexer, chunked attention); for such architectures ``Shape.modelled`` is False, and budgets say
so.

Example:
    shape = read_shape(read_header(path))
    [block.kind for block in shape.blocks].count("sliding")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from browndwarf.models.gguf_faults import broken
from browndwarf.models.gguf_read import ArrayValue, Header, Scalar

MAX_LAYERS = 1024
MAX_WIDTH = 2**24

BlockKind = Literal["full", "sliding", "recurrent"]

_WINDOW_PERIOD: dict[str, tuple[int, bool]] = {
    # architecture: (period, the full layer comes first in it)
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gemma-embedding": (6, False),
    "cohere2": (4, False),
    "cohere2moe": (4, True),
    "exaone4": (4, False),
    "exaone-moe": (4, False),
    "olmo2": (4, False),
    "gpt-oss": (2, False),
    "afmoe": (4, False),
    "smallthinker": (4, True),
    "plamo3": (8, False),
    "laguna": (4, True),
    "mellum": (4, False),
}
"""Architectures whose files may leave the window pattern to llama.cpp."""

_WINDOW_PATTERN_ONLY = frozenset({"gemma4", "gemma4-assistant", "mimo2", "step35", "granite-swa"})
_NO_HEADS_IS_RECURRENT = frozenset(
    {"jamba", "granitehybrid", "lfm2", "lfm2moe", "plamo2", "kimi-linear", "bailingmoe3"}
)
_INTERVAL = frozenset({"qwen35", "qwen35moe", "qwen3next", "minimax-01"})
_ALL_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_NOT_MODELLED = frozenset(
    {"deepseek32", "deepseek4", "glm-dsa", "llama4", "falcon-h1", "minimax-m3", "t5", "bert"}
)


@dataclass(frozen=True, slots=True)
class Block:
    """One layer. Head counts and widths are per token; ``own_kv`` is False where the layer reads
    another one's cache. ``part`` is ``head`` for nextn layers and for a drafter's layers."""

    index: int
    kind: BlockKind
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    own_kv: bool
    feed_forward: int
    part: Literal["trunk", "head"]

    @property
    def k_width(self) -> int:
        """Numbers of K that one token adds to this layer's cache."""
        return self.kv_heads * self.k_dim

    @property
    def v_width(self) -> int:
        """Numbers of V that one token adds to this layer's cache."""
        return self.kv_heads * self.v_dim


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything about a model's layers that its metadata states.

    ``state_r`` and ``state_s`` are the numbers of one recurrent layer's convolution and
    recurrent state per sequence. ``modelled`` says that this file's cache is understood.
    """

    blocks: tuple[Block, ...]
    hidden_width: int
    hidden_out: int
    context_length: int
    nextn_layers: int
    sliding_window: int
    shared_kv_layers: int
    per_layer_width: int
    experts: int
    experts_used: int
    rope_base: float
    rope_base_sliding: float
    state_r: int
    state_s: int
    modelled: bool


def read_shape(header: Header) -> Shape:
    """The shape that a header describes.

    Raises:
        BadModelFile: a required key is missing, of another type, or absurd.
    """
    keys = Keys(header.path, header.metadata)
    arch = keys.architecture
    total = keys.whole("block_count", limit=MAX_LAYERS)
    hidden = keys.whole("embedding_length")
    nextn = keys.whole("nextn_predict_layers", 0, limit=MAX_LAYERS)
    if total < 1 or nextn > total:
        raise broken(header.path, f"it has {total} layers, {nextn} of them nextn")
    trunk = total - nextn
    heads = keys.per_layer("attention.head_count", total, 0)
    kv_heads = keys.per_layer("attention.head_count_kv", total, None) or heads
    feed_forward = keys.per_layer("feed_forward_length", total, 0) or (0,) * total
    default_dim = hidden // heads[0] if heads and heads[0] else 0
    k_dim = keys.whole("attention.key_length", default_dim)
    v_dim = keys.whole("attention.value_length", default_dim)
    k_swa = keys.whole("attention.key_length_swa", k_dim)
    v_swa = keys.whole("attention.value_length_swa", v_dim)
    latent = keys.whole("attention.key_length_mla", 0) > 0
    shared = keys.whole("attention.shared_kv_layers", 0, limit=MAX_LAYERS)
    window = keys.whole("attention.sliding_window", 0)
    sliding = _sliding(keys, arch, total, trunk, window)
    recurrent = _recurrent(keys, arch, total, trunk, kv_heads)
    own_from_start = total if arch == "gemma4-assistant" else total - shared
    blocks = tuple(
        Block(
            index=i,
            kind="recurrent" if recurrent[i] else "sliding" if sliding[i] else "full",
            heads=heads[i],
            kv_heads=kv_heads[i],
            k_dim=k_swa if sliding[i] else k_dim,
            v_dim=0 if latent else v_swa if sliding[i] else v_dim,
            own_kv=not recurrent[i] and arch != "gemma4-assistant" and i < own_from_start,
            feed_forward=feed_forward[i],
            part="head" if i >= trunk else "trunk",
        )
        for i in range(total)
    )
    state_r, state_s = _state(keys, hidden)
    return Shape(
        blocks=blocks,
        hidden_width=hidden,
        hidden_out=keys.whole("embedding_length_out", hidden),
        context_length=keys.whole("context_length", 0, limit=2**40),
        nextn_layers=nextn,
        sliding_window=window if any(sliding) else 0,
        shared_kv_layers=shared,
        per_layer_width=keys.whole("embedding_length_per_layer_input", 0),
        experts=keys.whole("expert_count", 0),
        experts_used=max(keys.per_layer("expert_used_count", total, 0) or (0,)),
        rope_base=keys.real("rope.freq_base", 10000.0),
        rope_base_sliding=keys.real("rope.freq_base_swa", keys.real("rope.freq_base", 10000.0)),
        state_r=state_r,
        state_s=state_s,
        modelled=arch not in _NOT_MODELLED and arch not in _ALL_RECURRENT,
    )


class Keys:
    """Typed look-ups in metadata, under the architecture's prefix."""

    def __init__(self, path: Path, metadata: Mapping[str, Scalar | ArrayValue]) -> None:
        self.path = path
        self.metadata = metadata
        self.architecture = self.text("general.architecture")
        if not self.architecture:
            raise broken(path, "general.architecture is missing")

    def text(self, key: str) -> str:
        """A string under its full name; empty when absent or of another type."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""

    def get(self, key: str) -> Scalar | ArrayValue | None:
        """The value under the architecture's prefix."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def whole(self, key: str, default: int | None = None, *, limit: int = MAX_WIDTH) -> int:
        """A whole number from 0 to ``limit``."""
        value = self.get(key)
        if isinstance(value, ArrayValue) and value.values:
            value = value.values[0]
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
            said = "missing" if value is None else f"{str(value)[:40]!r}"
            raise broken(self.path, f"{self.architecture}.{key} is {said}")
        return value

    def real(self, key: str, default: float) -> float:
        """A number."""
        value = self.get(key)
        return float(value) if isinstance(value, int | float) else default

    def per_layer(self, key: str, total: int, default: int | None) -> tuple[int, ...]:
        """One whole number per layer, from an array or from one number for all.

        Empty when the key is absent and ``default`` is None.
        """
        value = self.get(key)
        if value is None and default is None:
            return ()
        if not isinstance(value, ArrayValue):
            return (self.whole(key, default),) * total
        numbers = value.values or ()
        if len(numbers) < total:
            raise broken(self.path, f"{key} has {value.count} entries for {total} layers")
        for number in numbers[:total]:
            if isinstance(number, str | float) or not 0 <= number <= MAX_WIDTH:
                raise broken(self.path, f"{key} holds {str(number)[:40]!r}")
        return tuple(int(n) for n in numbers[:total])


def _sliding(keys: Keys, arch: str, total: int, trunk: int, window: int) -> tuple[bool, ...]:
    none = (False,) * total
    if window == 0 or (arch not in _WINDOW_PERIOD and arch not in _WINDOW_PATTERN_ONLY):
        return none
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, ArrayValue):
        flags = keys.per_layer("attention.sliding_window_pattern", total, None)
        return tuple(bool(flag) for flag in flags)
    period, full_first = _WINDOW_PERIOD.get(arch, (0, False))
    period = keys.whole("attention.sliding_window_pattern", period)
    if period == 0:
        return none
    full_at = 0 if full_first else period - 1
    return tuple(i < trunk and i % period != full_at for i in range(total))


def _recurrent(
    keys: Keys, arch: str, total: int, trunk: int, kv_heads: tuple[int, ...]
) -> tuple[bool, ...]:
    if arch in _ALL_RECURRENT:
        return (True,) * total
    if arch in _NO_HEADS_IS_RECURRENT:
        return tuple(heads == 0 for heads in kv_heads)
    if arch == "nemotron_h" or arch == "nemotron_h_moe":
        dense = keys.per_layer("feed_forward_length", total, 0)
        return tuple(i < trunk and kv_heads[i] == 0 and dense[i] == 0 for i in range(total))
    if arch not in _INTERVAL:
        return (False,) * total
    flags = keys.per_layer("attention.recurrent_layers", total, None)
    if flags:
        return tuple(bool(flag) for flag in flags)
    interval = max(1, keys.whole("full_attention_interval", 4))
    return tuple(i < trunk and (i + 1) % interval != 0 for i in range(total))


def _state(keys: Keys, hidden: int) -> tuple[int, int]:
    """Numbers of (convolution, recurrent) state per layer and sequence: ``llama_hparams::n_embd_r``
    and ``n_embd_s``."""
    short = keys.whole("shortconv.l_cache", 0)
    if short:
        return hidden * (short - 1), 0
    conv = keys.whole("ssm.conv_kernel", 0)
    inner = keys.whole("ssm.inner_size", 0)
    state = keys.whole("ssm.state_size", 0)
    groups = keys.whole("ssm.group_count", 0)
    return max(0, conv - 1) * (inner + 2 * groups * state), state * inner
