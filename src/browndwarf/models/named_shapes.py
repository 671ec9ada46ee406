"""Dimensions of models by name, for files that are made rather than downloaded.

Qwen3.5 and Qwen3.6 have the same shapes. Boundary: numbers only; ``hollow`` writes headers of them,
``filled`` random weights.

Example:
    >>> SHAPES["gemma4-12b"].layers, scaled(SHAPES["gemma4-12b"], layers=12, vocab=4096).vocab
    (48, 4096)
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class HollowShape:
    """A model's dimensions. Pairs are (sliding, full); ``recurrent_every`` counts a hybrid's
    period; ``shared`` is the number of last layers without a cache of their own."""

    arch: str
    layers: int
    width: int
    ff: int
    heads: int
    kv_heads: tuple[int, int]
    head_dim: tuple[int, int]
    vocab: int
    window: int = 0
    window_every: int = 0
    shared: int = 0
    per_layer: int = 0
    experts: int = 0
    experts_used: int = 0
    expert_ff: int = 0
    recurrent_every: int = 0
    state_heads: int = 32
    nextn: int = 0
    tied: bool = True
    full_has_v: bool = True
    head_width: int = 1024
    head_layers: int = 4
    head_ff: int = 4096

    def sliding(self, layer: int) -> bool:
        """Whether a layer attends to a window only."""
        return bool(self.window_every) and (layer + 1) % self.window_every != 0


SHAPES: dict[str, HollowShape] = {
    "gemma4-12b": HollowShape(
        "gemma4", 48, 3840, 15360, 16, (8, 1), (256, 512), 262144, window=1024, window_every=6,
        full_has_v=False, head_ff=8192,
    ),
    "gemma4-31b": HollowShape(
        "gemma4", 60, 5376, 21504, 32, (16, 4), (256, 512), 262144, window=1024, window_every=6,
        full_has_v=False, head_ff=8192,
    ),
    "gemma4-26b-a4b": HollowShape(
        "gemma4", 30, 2816, 2112, 16, (8, 2), (256, 512), 262144, window=1024, window_every=6,
        experts=128, experts_used=8, expert_ff=704, full_has_v=False,
    ),
    "gemma4-e4b": HollowShape(
        "gemma4", 42, 2560, 10240, 8, (2, 2), (256, 512), 262144, window=512, window_every=6,
        shared=18, per_layer=256, head_width=256, head_ff=2048,
    ),
    "qwen35-9b": HollowShape(
        "qwen35", 32, 4096, 12288, 16, (4, 4), (256, 256), 248320, recurrent_every=4, nextn=1,
        tied=False,
    ),
    "qwen35-27b": HollowShape(
        "qwen35", 64, 5120, 17408, 24, (4, 4), (256, 256), 248320, recurrent_every=4,
        state_heads=48, nextn=1, tied=False,
    ),
    "qwen35-35b-a3b": HollowShape(
        "qwen35moe", 40, 2048, 512, 16, (2, 2), (256, 256), 248320, recurrent_every=4,
        nextn=1, tied=False, experts=256, experts_used=8, expert_ff=512,
    ),
    "gemma4-tiny": HollowShape(
        "gemma4", 6, 512, 1024, 4, (2, 1), (64, 128), 4096, window=256, window_every=6,
        full_has_v=False, head_width=256, head_layers=2, head_ff=512,
    ),
    "llama-8b": HollowShape(
        "llama", 32, 4096, 14336, 32, (8, 8), (128, 128), 128256, tied=False,
    ),
}  # fmt: skip
"""The published sizes of each family, as their configurations give them; a tiny one to try out."""


def scaled(shape: HollowShape, *, layers: int, vocab: int) -> HollowShape:
    """The same widths with fewer layers and a smaller vocabulary.

    Layers without a cache read that of the last two before them, which must be a sliding and a
    full one: the number of layers with a cache stays a multiple of the pattern's period.
    """
    every = shape.window_every or 1
    own = max(1, round(layers * (1 - shape.shared / shape.layers) / every)) * every
    shared = max(0, layers - own) if shape.shared else 0
    return replace(shape, layers=layers, vocab=vocab, shared=shared)
