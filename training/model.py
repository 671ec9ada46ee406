"""The two networks: a Gemma-4-shaped target and a `gemma4-assistant` drafter.

Boundary: shapes and forward passes as llama.cpp computes them; `train` owns losses and data.
Output contract: tensors are batch-first. ``B`` rows, ``T`` tokens, ``W`` target width, ``V``
vocabulary; a mask is True where a query (second-last axis) sees a cell (last axis).

What llama.cpp fixes, and this follows:
  * attention scale 1; q and k are RMS-normed with a weight, v without; four norms a layer and
    a scalar at its end; embeddings are scaled by sqrt(W) and tied to the output; logits are
    soft-capped.
  * the full-attention layers rotate the first quarter of the head only.
  * the drafter has no keys or values of its own: its sliding layers read the target's
    second-last layer, its full layers the last one; its query stands at the position of the
    token sampled last, and sees what lies before it, not itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Sizes of the target; every row length is a multiple of 256, so K-quants apply."""

    vocab: int = 2048
    width: int = 512
    layers: int = 20
    ff: int = 256
    heads: int = 4
    kv_heads: int = 1
    head_full: int = 128
    head_sliding: int = 64
    window: int = 128
    rope_base_full: float = 1e6
    rope_base_sliding: float = 1e4
    rotated_share: float = 0.25
    softcap: float = 30.0
    eps: float = 1e-6

    def sliding(self, layer: int) -> bool:
        """Three sliding layers, then a full one."""
        return (layer + 1) % 4 != 0


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """Sizes of the drafter; its width differs from the target's, as llama.cpp demands."""

    width: int = 256
    layers: int = 2
    ff: int = 256
    heads: int = 4

    def sliding(self, layer: int) -> bool:
        """All layers but the last slide."""
        return layer < self.layers - 1


@dataclass(frozen=True, slots=True)
class Rope:
    """Cosines and sines, each (T, head/2)."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def table(cls, length: int, head: int, base: float, share: float, device: torch.device) -> Rope:
        """Build the table; beyond ``share`` of the pairs nothing is rotated."""
        index = torch.arange(head // 2, dtype=torch.float64, device=device)
        frequency = torch.where(index < head * share / 2, base ** (-2 * index / head), 0.0)
        angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequency
        return cls(angle.cos().float(), angle.sin().float())


@dataclass(frozen=True, slots=True)
class View:
    """What one kind of layer sees: its rotation and its mask (B or 1, 1, T, T)."""

    rope: Rope
    mask: Tensor


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in float32."""
    y = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps).to(x.dtype)
    return y if weight is None else y * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head/2) of (B, heads, T, head)."""
    first, second = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A matrix without bias, initialised to keep the variance."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


class Layer(nn.Module):
    """One block; with ``own_kv`` it makes keys and values, without it reads given ones."""

    def __init__(
        self, width: int, ff: int, heads: int, kv_heads: int, head: int, depth: int, eps: float,
        *, own_kv: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads, self.head, self.eps = heads, kv_heads, head, eps
        self.q = linear(width, heads * head)
        self.o = linear(heads * head, width)
        self.q_norm = nn.Parameter(torch.full((head,), head**-0.25))
        if own_kv:
            self.k = linear(width, kv_heads * head)
            self.v = linear(width, kv_heads * head)
            self.k_norm = nn.Parameter(torch.full((head,), head**-0.25))
        self.own_kv = own_kv
        self.gate = linear(width, ff)
        self.up = linear(width, ff)
        self.down = linear(ff, width)
        self.attn_norm = nn.Parameter(torch.ones(width))
        self.post_attn_norm = nn.Parameter(torch.full((width,), (2 * depth) ** -0.5))
        self.ffn_norm = nn.Parameter(torch.ones(width))
        self.post_ffn_norm = nn.Parameter(torch.full((width,), (2 * depth) ** -0.5))
        self.scale = nn.Parameter(torch.ones(1))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.head)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor,
        k: Tensor | None = None, v: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the new (B, T, width) and the keys and values (B, kv_heads, T, head)."""
        a = rms(x, self.attn_norm, self.eps)
        q = rms(self._split(self.q(a), self.heads), self.q_norm, self.eps).transpose(1, 2)
        q = rotate(q, cos, sin)
        if self.own_kv:
            k = rms(self._split(self.k(a), self.kv_heads), self.k_norm, self.eps).transpose(1, 2)
            k = rotate(k, cos, sin)
            v = rms(self._split(self.v(a), self.kv_heads), None, self.eps).transpose(1, 2)
        assert k is not None
        assert v is not None
        group = self.heads // self.kv_heads
        v = v.to(q.dtype)
        y = nn.functional.scaled_dot_product_attention(
            q, k.to(q.dtype).repeat_interleave(group, 1), v.repeat_interleave(group, 1),
            attn_mask=mask, scale=1.0,
        )  # fmt: skip
        y = self.o(y.transpose(1, 2).flatten(2))
        x = x + rms(y, self.post_attn_norm, self.eps)
        f = rms(x, self.ffn_norm, self.eps)
        f = self.down(nn.functional.gelu(self.gate(f), approximate="tanh") * self.up(f))
        return (x + rms(f, self.post_ffn_norm, self.eps)) * self.scale, k, v


KV = tuple[Tensor, Tensor]


class Target(nn.Module):
    """The language model."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        s = self.shape = shape
        if not s.sliding(s.layers - 2) or s.sliding(s.layers - 1):
            raise ValueError("the last two layers must be sliding, full: the drafter reads both")
        self.embedding = nn.Parameter(torch.randn(s.vocab, s.width) * s.width**-0.5)
        self.layers = nn.ModuleList(
            Layer(s.width, s.ff, s.heads, s.kv_heads,
                  s.head_sliding if s.sliding(i) else s.head_full, s.layers, s.eps, own_kv=True)
            for i in range(s.layers)
        )  # fmt: skip
        self.norm = nn.Parameter(torch.ones(s.width))

    def views(self, documents: Tensor, *, strict: bool = False) -> tuple[View, View]:
        """Return the sliding and the full view of packed rows.

        ``documents`` (B, T) numbers the documents of a row; no token sees another document.
        ``strict`` is the drafter's view: only what lies before; the first token of a document,
        which then sees nothing, sees itself, or a softmax over nothing would give NaN.
        """
        s, length, device = self.shape, documents.shape[1], documents.device
        position = torch.arange(length, device=device)
        back = position[:, None] - position[None, :]
        same = documents[:, :, None] == documents[:, None, :]
        seen = same & (back >= (1 if strict else 0))
        near = seen & (back < s.window)
        if strict:
            alone = ~seen.any(-1, keepdim=True) & (back == 0)
            seen, near = seen | alone, near | alone
        sliding = Rope.table(length, s.head_sliding, s.rope_base_sliding, 1.0, device)
        full = Rope.table(length, s.head_full, s.rope_base_full, s.rotated_share, device)
        return View(sliding, near[:, None]), View(full, seen[:, None])

    def embed(self, tokens: Tensor) -> Tensor:
        """Scaled embeddings (B, T, W)."""
        return nn.functional.embedding(tokens, self.embedding) * math.sqrt(self.shape.width)

    def forward(self, tokens: Tensor, views: tuple[View, View]) -> tuple[Tensor, KV, KV]:
        """Return the normed hidden state (B, T, W) and the last sliding and full layers' KV."""
        x, kv = self.embed(tokens), []
        for i, layer in enumerate(self.layers):
            view = views[0 if self.shape.sliding(i) else 1]
            x, k, v = layer(x, view.rope.cos, view.rope.sin, view.mask)
            kv.append((k, v))
        return rms(x, self.norm, self.shape.eps), kv[-2], kv[-1]

    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped logits (..., V)."""
        cap = self.shape.softcap
        return torch.tanh(hidden @ self.embedding.T.to(hidden.dtype) / cap) * cap


class Drafter(nn.Module):
    """The MTP head: one step predicts the token after the one it is fed."""

    def __init__(self, target: TargetShape, shape: DrafterShape) -> None:
        super().__init__()
        self.target, self.shape = target, shape
        self.embedding = nn.Parameter(torch.randn(target.vocab, shape.width) * shape.width**-0.5)
        self.pre = linear(2 * target.width, shape.width)
        self.post = linear(shape.width, target.width)
        self.layers = nn.ModuleList(
            Layer(shape.width, shape.ff, shape.heads, target.kv_heads,
                  target.head_sliding if shape.sliding(i) else target.head_full,
                  shape.layers, target.eps, own_kv=False)
            for i in range(shape.layers)
        )  # fmt: skip
        self.norm = nn.Parameter(torch.ones(shape.width))

    def step(
        self, embedded: Tensor, hidden: Tensor, sliding: KV, full: KV, views: tuple[View, View]
    ) -> tuple[Tensor, Tensor]:
        """One draft step for every position as anchor at once.

        ``embedded`` (B, T, W): the target's scaled embedding of the token fed in; ``hidden``
        (B, T, W): the target's hidden state one position back, or the step before's output.
        Returns logits (B, T, V), without soft-cap, and the next hidden state.
        """
        x = self.pre(torch.cat((embedded.to(hidden.dtype), hidden), -1))
        for i, layer in enumerate(self.layers):
            slides = self.shape.sliding(i)
            view, kv = (views[0], sliding) if slides else (views[1], full)
            x, _, _ = layer(x, view.rope.cos, view.rope.sin, view.mask, *kv)
        y = rms(x, self.norm, self.target.eps)
        return y @ self.embedding.T.to(y.dtype), self.post(y)
