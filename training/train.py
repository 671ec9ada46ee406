"""Train the target, then the drafter against the frozen target.

Boundary: losses, schedules and loops; the networks are in `model`, the rows in `data`.
Output contract: each loop runs for a given number of seconds (the learning rate follows the
clock, so a slower device trains less, never longer) and returns what it saw as a `Log`.

Regime: AdamW (0.9, 0.95), weight decay 0.01 on matrices, peak 3e-3, 3% warm-up, cosine to
2%, gradient norm clipped at 1, bfloat16 where the device has it.
The drafter's loss is the cross-entropy on the target's own argmax over four unrolled steps,
weighted by 0.8 to the power of the step, with the gradient flowing through its hidden state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from training.data import Rows
from training.model import Drafter, DrafterShape, Target, TargetShape

PEAK, WARM_UP, FLOOR = 3e-3, 0.03, 0.02
STEPS, STEP_DECAY = 4, 0.8
Say = Callable[[str], None]


@dataclass(slots=True)
class Log:
    """What a loop saw."""

    seconds: float = 0.0
    updates: int = 0
    tokens: int = 0
    loss: float = math.nan
    acceptance: list[float] = field(default_factory=list)


def rate(progress: float) -> float:
    """Learning rate at a share of the time."""
    if progress < WARM_UP:
        return PEAK * progress / WARM_UP
    wave = 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))
    return PEAK * (FLOOR + (1 - FLOOR) * wave)


def optimizer(model: nn.Module, fused: bool) -> torch.optim.AdamW:
    """AdamW with decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=fused)


def batches(rows: Rows, size: int, device: torch.device, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield (tokens, documents, weights) of ``size`` rows without end, reshuffled each epoch."""
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rows.tokens).to(device)
    documents = torch.from_numpy(rows.documents).to(device)
    weights = torch.from_numpy(rows.weights).to(device)
    while True:
        order = torch.from_numpy(rng.permutation(len(tokens))).to(device)
        for start in range(0, len(order) - size + 1, size):
            pick = order[start : start + size]
            yield tokens[pick].long(), documents[pick], weights[pick].float()


def cast(device: torch.device) -> AbstractContextManager[Any]:
    """Bfloat16 arithmetic on a GPU, float32 elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def _next_token_loss(target: Target, hidden: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
    logits = target.logits(hidden[:, :-1]).float().flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].flatten()
    return (loss * weight).sum() / weight.sum()


def train_target(
    shape: TargetShape, rows: Rows, seconds: float, size: int, device: torch.device, say: Say,
    *, seed: int = 0, compiled: bool = False,
) -> tuple[Target, Log]:  # fmt: skip
    """Train a target for ``seconds``."""
    torch.manual_seed(seed)
    target = Target(shape).to(device)
    loss_of = _next_token_loss
    if compiled:
        for layer in target.layers:
            layer.compile()
        loss_of = torch.compile(_next_token_loss)
    adam = optimizer(target, device.type == "cuda")
    log, source, started = Log(), batches(rows, size, device, seed), time.monotonic()
    say(f"target: {sum(p.numel() for p in target.parameters()) / 1e6:.2f}M parameters")
    while (progress := (time.monotonic() - started) / seconds) < 1:
        for group in adam.param_groups:
            group["lr"] = rate(progress)
        tokens, documents, weights = next(source)
        with cast(device):
            hidden, _, _ = target(tokens, target.views(documents))
            loss = loss_of(target, hidden, tokens, weights)
        adam.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        adam.step()
        log.updates += 1
        log.tokens += tokens.numel()
        if log.updates in (1, 10, 50) or log.updates % 100 == 0:
            log.loss = float(loss.detach())
            if not math.isfinite(log.loss):
                raise RuntimeError(f"loss is {log.loss} after {log.updates} updates")
            used = time.monotonic() - started
            say(f"target {log.updates}: loss {log.loss:.4f}, {log.tokens / used / 1e6:.3f}M tok/s")
    log.loss, log.seconds = float(loss.detach()), time.monotonic() - started
    return target, log


def shifted(x: Tensor, by: int) -> Tensor:
    """Move (B, T, ...) forward in time by ``by``, zeros at the end."""
    if by == 0:
        return x
    return torch.cat((x[:, by:], x.new_zeros(x.shape[0], by, *x.shape[2:])), 1)


def _step_loss(logits: Tensor, wanted: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    loss = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), wanted.flatten(), reduction="none"
    )
    return (loss * weight.flatten()).sum() / weight.sum(), logits.argmax(-1) == wanted


def train_drafter(
    target: Target, shape: DrafterShape, rows: Rows, seconds: float, size: int,
    device: torch.device, say: Say, *, seed: int = 1, compiled: bool = False,
) -> tuple[Drafter, Log]:  # fmt: skip
    """Train a drafter for ``seconds``; `Log.acceptance` is conditional, per step."""
    torch.manual_seed(seed)
    target.eval().requires_grad_(False)
    drafter = Drafter(target.shape, shape).to(device)
    step_loss = torch.compile(_step_loss) if compiled else _step_loss
    if compiled:
        for layer in drafter.layers:
            layer.compile()
    adam = optimizer(drafter, device.type == "cuda")
    log, source, started = Log(), batches(rows, size, device, seed), time.monotonic()
    counts = torch.zeros(STEPS, 2, device=device)
    say(f"drafter: {sum(p.numel() for p in drafter.parameters()) / 1e6:.2f}M parameters")
    scale = sum(STEP_DECAY**k for k in range(STEPS))
    while (progress := (time.monotonic() - started) / seconds) < 1:
        for group in adam.param_groups:
            group["lr"] = rate(progress)
        tokens, documents, weights = next(source)
        total = torch.zeros((), device=device)
        with cast(device):
            with torch.no_grad():
                hidden, sliding, full = target(tokens, target.views(documents))
                best = target.logits(hidden).argmax(-1)
                views = target.views(documents, strict=True)
            current = torch.cat((torch.zeros_like(hidden[:, :1]), hidden[:, :-1]), 1)
            written = (weights == 1.0).float()
            first = documents != shifted(documents.flip(1), 1).flip(1)
            first[:, 0] = True
            live = ~first & (documents >= 0)
            for k in range(STEPS):
                embedded = target.embed(shifted(tokens, k))
                logits, current = drafter.step(embedded, current, sliding, full, views)
                # Row p, step k predicts token p + k + 1 of the same document.
                same = (shifted(documents + 1, k + 1) == documents + 1) & (~first)
                weight = (same & (documents >= 0)).float() * shifted(written, k + 1)
                loss, hit = step_loss(logits, shifted(best, k), weight)
                total = total + STEP_DECAY**k * loss / scale
                with torch.no_grad():
                    asked = live & (weight > 0)
                    counts[k, 0] += (asked & hit).sum()
                    counts[k, 1] += asked.sum()
                    live = asked & hit & (shifted(tokens, k + 1) == shifted(best, k))
        adam.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        adam.step()
        log.updates += 1
        log.tokens += tokens.numel()
        if log.updates in (1, 10) or log.updates % 100 == 0:
            log.loss, used = float(total.detach()), time.monotonic() - started
            log.acceptance = [round(float(a / b.clamp(min=1)), 4) for a, b in counts]
            counts.zero_()
            if not math.isfinite(log.loss):
                raise RuntimeError(f"loss is {log.loss} after {log.updates} updates")
            speed = log.tokens / used / 1e6
            say(f"drafter {log.updates}: loss {log.loss:.4f}, {log.acceptance}, {speed:.3f}M tok/s")
    log.seconds = time.monotonic() - started
    return drafter, log
