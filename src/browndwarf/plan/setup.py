"""What would be started: the inputs of a memory budget, and llama.cpp's rounding of them.

A ``Setup`` is a target, perhaps a head, and the options that decide memory. Its derived
quantities follow ``llama_context``'s constructor and ``llama_kv_cache_iswa`` (cells, streams,
padding), for llama.cpp of commit 0c1e570.

Example:
    setup = Setup(target=read_model("t.gguf"), n_ctx=16384, parallel=4)
    setup.cells, setup.streams, setup.sliding_cells
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from browndwarf.engine.options import ServerOptions
from browndwarf.errors import UsageError
from browndwarf.hardware.devices import cpu_flags
from browndwarf.models.ggml_types import KV_TYPES
from browndwarf.models.gguf import ModelInfo

Backend = Literal["cuda", "rocm", "vulkan", "metal", "sycl", "cpu", "other"]

PAD = 256
DEFAULT_BATCH, DEFAULT_UBATCH, DEFAULT_SLOTS = 2048, 512, 4
MAX_SLOTS = 256
MAX_DRAFT = 64

_ROLLS_BACK = frozenset(
    {
        "qwen35", "qwen35moe", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe",
        "bailingmoe3", "kimi-k3", "glm5-next", "qwen4exp", "deepseek4",
    }
)  # fmt: skip
"""Recurrent families that keep earlier states for rejected drafts (``n_rs_seq``)."""


@dataclass(frozen=True)
class Setup:
    """One configuration. ``draft`` without ``head`` means the target's own nextn layers;
    ``gpu_layers`` None puts every layer on the device and counts as llama.cpp's ``-ngl`` does.
    On a CPU, ``repack`` are the processor's instruction sets if the engine may copy weights into
    another layout (see ``plan.repack``), and ``mapped`` says that the file is memory-mapped.

    Raises:
        UsageError: a value that llama.cpp would refuse.
    """

    target: ModelInfo
    head: ModelInfo | None = None
    draft: bool = False
    n_ctx: int = 4096
    parallel: int = 1
    unified: bool = False
    batch: int = DEFAULT_BATCH
    ubatch: int = DEFAULT_UBATCH
    kv_k: str = "f16"
    kv_v: str = "f16"
    draft_kv_k: str = "f16"
    draft_kv_v: str = "f16"
    n_max: int = 3
    swa_full: bool = False
    flash_attention: bool = True
    gpu_layers: int | None = None
    backend: Backend = "cuda"
    repack: frozenset[str] = frozenset()
    mapped: bool = True

    def __post_init__(self) -> None:
        for name, low, high in (
            ("n_ctx", 1, 2**31 - PAD),
            ("parallel", 1, MAX_SLOTS),
            ("batch", 1, 2**20),
            ("ubatch", 1, 2**20),
            ("n_max", 0, MAX_DRAFT),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise UsageError(
                    f"{name} is {value}",
                    why=f"it must lie between {low} and {high}",
                    fix="choose a value in between",
                )
        for name in ("kv_k", "kv_v", "draft_kv_k", "draft_kv_v"):
            if getattr(self, name) not in KV_TYPES:
                raise UsageError(
                    f"{getattr(self, name)!r} is no type for a KV cache",
                    why="llama.cpp takes " + ", ".join(KV_TYPES),
                    fix="choose one of these",
                )
        if not self.flash_attention and self.kv_v not in ("f32", "f16", "bf16"):
            raise UsageError(
                f"a {self.kv_v} V cache needs flash attention",
                why="llama.cpp refuses quantized V without it",
                fix="leave flash attention on, or keep V at f16",
            )

    @property
    def drafted(self) -> int:
        """Draft tokens per cycle that buffers are made for."""
        return self.n_max if self.draft else 0

    @property
    def cells(self) -> int:
        """KV cells per stream of a full-attention layer."""
        whole = _pad(self.n_ctx)
        return whole if self.unified else _pad(whole // self.parallel)

    @property
    def streams(self) -> int:
        """Separate caches: one per slot, or one for all."""
        return 1 if self.unified else self.parallel

    @property
    def real_ctx(self) -> int:
        """The context that llama.cpp makes of ``n_ctx``, over all slots."""
        return self.cells * self.streams

    @property
    def trained_ctx(self) -> int:
        """The context over all slots that the model was trained for; 0 when it does not say."""
        return self.target.context_length * self.parallel

    @property
    def real_ubatch(self) -> int:
        """Tokens per graph evaluation after llama.cpp's limits."""
        return min(self.n_ctx, self.batch, self.ubatch)

    @property
    def sliding_cells(self) -> int:
        """KV cells per stream of a sliding-window layer of the target."""
        if self.swa_full:
            return self.cells
        window = self.target.shape.sliding_window * (self.parallel if self.unified else 1)
        return _pad(min(self.cells, window + self.real_ubatch))

    @property
    def state_copies(self) -> int:
        """Recurrent states kept per slot: the current one, and one per draft token."""
        rolls = self.target.architecture in _ROLLS_BACK
        return 1 + (self.drafted if rolls else 0)

    @property
    def on_cpu(self) -> bool:
        """Whether the whole model lives in RAM."""
        return self.backend == "cpu" or self.gpu_layers == 0

    def on_device(self, layer: int) -> bool:
        """Whether a layer of the target is offloaded; -ngl N is the output and N - 1 layers."""
        if self.gpu_layers is None or self.on_cpu:
            return True
        return layer >= len(self.target.blocks) + 1 - self.gpu_layers

    def with_(self, **changes: Any) -> Setup:
        """A copy with other values."""
        return replace(self, **changes)


def _pad(value: int) -> int:
    return -(-value // PAD) * PAD


def setup_from_options(
    options: ServerOptions, target: ModelInfo, head: ModelInfo | None, *, backend: Backend
) -> Setup:
    """The setup that a server with these options would have.

    A context of 0 is the model's own length; an unset unified cache is separate caches, as
    llama-server does when the number of slots is given.
    """
    drafting = options.effective_spec_type == "draft-mtp"
    return Setup(
        target=target,
        head=head if drafting else None,
        draft=drafting,
        n_ctx=options.ctx or target.context_length or 4096,
        parallel=options.parallel,
        unified=bool(options.kv_unified),
        batch=options.batch or DEFAULT_BATCH,
        ubatch=options.ubatch or DEFAULT_UBATCH,
        kv_k=options.kv_k,
        kv_v=options.kv_v,
        draft_kv_k=options.draft_kv_k or "f16",
        draft_kv_v=options.draft_kv_v or "f16",
        n_max=3 if options.n_max is None else options.n_max,
        swa_full=options.swa_full,
        flash_attention=options.flash_attn != "off",
        gpu_layers=options.n_gpu_layers,
        backend=backend,
        repack=frozenset() if ("--no-repack", None) in options.extra else cpu_flags(),
        mapped=options.load_mode in (None, "auto", "mmap"),
    )
