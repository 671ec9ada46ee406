"""How a model is loaded for decoding in this process, as one frozen value.

Boundary: names and limits only; ``pair`` turns them into contexts.

Example:
    >>> RuntimeOptions(n_ctx=8192, n_max=2).outputs
    3
"""

from __future__ import annotations

from dataclasses import dataclass

from browndwarf.errors import UsageError


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """Settings of a loaded pair. None leaves llama.cpp's own default in place.

    Args:
        n_ctx: tokens of context per sequence.
        sequences: conversations that can be in the cache at once.
        n_max: draft tokens per step, at most.
        p_min: drafting stops where the head is less sure than this.
        adaptive: choose 1 to ``n_max`` by what was measured, while running.
        backend_sampling: sample on the device where the sampling allows it; None does so on a
            GPU, and not on a CPU, where the engine's own sampling is the slower one.
        gpu_layers: -1 puts all layers on the device.
        kv_k, kv_v: types of the target's cache; ``draft_kv`` of a head's own cache.
        swa_full: keep whole sliding-window layers, so that any rewind and shift is cheap.
        context_shift: forget the middle of a conversation that outgrows the context.
        checkpoint_mib: host memory per conversation for copies of states that cannot be cut back.
            The windows of a 12B with an f16 cache take 320 MiB a copy.
        recurrent_rollback: let the engine keep ``n_max`` earlier recurrent states.
        synthetic: acceptance per position, made up: right speed, invalid text.
        synthetic_seed: of that draw.
    """

    n_ctx: int = 4096
    sequences: int = 1
    n_max: int = 3
    p_min: float = 0.0
    adaptive: bool = False
    backend_sampling: bool | None = None
    n_batch: int = 2048
    n_ubatch: int = 512
    threads: int | None = None
    gpu_layers: int = -1
    kv_k: str = "f16"
    kv_v: str = "f16"
    draft_kv: str = "f16"
    flash_attention: bool | None = None
    swa_full: bool = False
    context_shift: bool = False
    checkpoint_mib: int = 1024
    recurrent_rollback: bool = True
    synthetic: tuple[float, ...] | None = None
    synthetic_seed: int = 1

    def __post_init__(self) -> None:
        for name, low, high in (
            ("n_ctx", 16, 2**24),
            ("sequences", 1, 64),
            ("n_max", 0, 32),
            ("p_min", 0.0, 1.0),
            ("n_batch", 32, 2**20),
            ("n_ubatch", 16, 2**20),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise UsageError(
                    f"{name} cannot be {value}", why=f"it is from {low} to {high}", fix="change it"
                )

    @property
    def outputs(self) -> int:
        """Rows of logits per sequence and step: the drafts and one more."""
        return self.n_max + 1
