"""A loaded target with its MTP head: two models, two contexts, and what kind of head it is.

``open_pair`` checks that the files belong together before it loads anything. Heads:
``assistant`` reads the target's cache, ``nextn`` keeps a cache of its own and runs one layer,
``chained`` has one layer per draft position, ``lookup`` needs no head at all and drafts what
followed the same tokens earlier, and ``none`` decodes plainly.

Boundary: nothing is decoded here.

Example:
    with open_pair(target, draft=head, options=RuntimeOptions()) as pair:
        pair.kind, pair.target.hidden_width
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from browndwarf.decode.options import RuntimeOptions
from browndwarf.engine.native import Context, Library, Model, load_library
from browndwarf.engine.native_context import Decoder, require_mtp
from browndwarf.engine.native_sampler import Chain
from browndwarf.engine.native_vocab import Vocab
from browndwarf.errors import UsageError
from browndwarf.models.heads import check_head, mismatch
from browndwarf.models.info import ModelInfo, read_model

HeadKind = Literal["none", "assistant", "nextn", "chained", "lookup"]
_MTP = 1
_DRAFT_TOP_K = 10


class Pair:
    """Open models and contexts; a context manager. Made by ``open_pair``."""

    def __init__(
        self,
        info: ModelInfo,
        head_info: ModelInfo | None,
        draft: Path | str | None,
        options: RuntimeOptions,
    ) -> None:
        self.info = info
        self.head_info = head_info
        self.options = options
        self.head: Decoder | None = None
        self.kind: HeadKind = "lookup" if draft == "lookup" else "none"
        self._stack = ExitStack()
        try:
            self._open(draft)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, draft: Path | str | None) -> None:
        options = self.options
        library = load_library()
        self.library: Library = library
        self.device_sampling = options.backend_sampling
        if self.device_sampling is None:
            self.device_sampling = options.gpu_layers != 0 and library.offloads
        drafting = options.n_max > 0 and (
            self.head_info is not None or (draft is None and self.info.head.kind == "nextn")
        )
        if drafting:
            require_mtp(library)
        self.model = self._load(self.info, drafting)
        head_model = self.model if self.head_info is None else self._load(self.head_info, True)
        speculative = drafting or self.kind == "lookup"
        self._fields: dict[str, Any] = {
            "n_ctx": options.n_ctx * options.sequences,
            "n_batch": options.n_batch,
            "n_ubatch": min(options.n_ubatch, options.n_batch),
            "n_seq_max": options.sequences,
            "n_threads": options.threads or usable_cores(),
            "n_threads_batch": options.threads or usable_cores(),
            "swa_full": options.swa_full,
            "kv_unified": False,
            "flash_attn_type": -1
            if options.flash_attention is None
            else int(options.flash_attention),
        }
        outputs = options.outputs if speculative else 1
        context = self.model.context(
            n_rs_seq=options.n_max if speculative and options.recurrent_rollback else 0,
            n_outputs_max=outputs * options.sequences,
            n_outputs_max_per_seq=outputs,
            type_k=library.ggml_type(options.kv_k),
            type_v=library.ggml_type(options.kv_v),
            **self._fields,
        )
        self._stack.callback(context.close)
        self.target = Decoder(context, hidden="all" if drafting else "none")
        self.vocab = Vocab(self.model)
        if drafting:
            self._open_head(head_model, context)

    def _load(self, info: ModelInfo, mtp: bool) -> Model:
        model = self.library.model(info.path, n_gpu_layers=self.options.gpu_layers, load_mtp=mtp)
        self._stack.callback(model.close)
        return model

    def _open_head(self, model: Model, target: Context) -> None:
        options = self.options
        context = model.context(
            n_rs_seq=0,
            n_outputs_max=options.sequences,
            n_outputs_max_per_seq=1,
            type_k=self.library.ggml_type(options.draft_kv),
            type_v=self.library.ggml_type(options.draft_kv),
            ctx_type=_MTP,
            other=target,
            **self._fields,
        )
        self.head = Decoder(context, hidden="output")
        # A head's argmax is enough unless p_min asks how sure it is.
        for seq in range(options.sequences if self.device_sampling else 0):
            chain = Chain(self.library)
            chain = chain.top_k(_DRAFT_TOP_K) if options.p_min > 0 else chain.greedy()
            self._stack.callback(chain.close)
            self.head.attach(seq, chain.pointer)
        self._stack.callback(context.close)
        layers = int(self.library.api.llama_model_n_layer_nextn(model.pointer))
        if self.head.shares_cache_of(self.target):
            self.kind = "assistant"
        else:
            self.kind = "chained" if layers > 1 else "nextn"
        self.head_layers = max(1, layers)

    @property
    def n_max(self) -> int:
        """Draft tokens per step that this head can give, at most."""
        if self.kind == "none":
            return 0
        if self.kind == "chained":
            return min(self.options.n_max, self.head_layers)
        return self.options.n_max

    @property
    def n_ctx(self) -> int:
        """Tokens per sequence."""
        return self.target.context.n_ctx // self.options.sequences

    @property
    def window(self) -> int:
        """Width of the sliding window where layers forget what lies behind it, else 0."""
        return 0 if self.options.swa_full else self.model.window

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a running state that cannot be cut back."""
        return self.model.recurrent

    def close(self) -> None:
        """Free contexts, then models."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_pair(
    target: Path | str,
    *,
    draft: Path | str | None = None,
    options: RuntimeOptions | None = None,
) -> Pair:
    """Load a target, and the head that ``draft`` names.

    ``draft`` is a file, ``"none"``, ``"lookup"``, or None for the target's own head, if it has
    one.

    Raises:
        ModelNotFound, BadModelFile: a file is missing or unsound.
        HeadMismatch: the head does not belong to the target.
        EngineError: llama.cpp's library is missing, unfit, or refuses.
    """
    options = options or RuntimeOptions()
    info = read_model(target)
    head_info: ModelInfo | None = None
    if info.is_head:
        raise UsageError(
            f"{info.path.name} is a drafter, not a model",
            why="it only guesses for its target",
            fix="give the target, and this file as its head",
        )
    if draft is not None and str(draft) not in ("none", "lookup"):
        head_info = read_model(draft)
        match = check_head(info, head_info)
        if not match.ok:
            raise mismatch(info, head_info, match)
    return Pair(info, head_info, draft, options)


def usable_cores() -> int:
    """Cores for computing: physical ones, and no more than this process may use."""
    import psutil

    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))
