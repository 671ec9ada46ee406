"""What decoding asks of a context: run a batch, read results, edit and save the cache.

``Decoder`` binds the calls of one context once, because a step makes a dozen of them. Positions
are tokens from the start of a sequence; ranges are half-open and -1 means "to the end".

Example:
    decoder = Decoder(model.context(n_ctx=4096), hidden="all")
    decoder.decode(batch)
    token = decoder.sampled(0)
"""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from browndwarf.engine.native import Context, Library
from browndwarf.engine.native_batch import Batch
from browndwarf.errors import EngineError, EngineUnsupported

TESTED = "0.3.36"
_NEXTN = (
    "llama_set_embeddings_nextn",
    "llama_get_embeddings_nextn",
    "llama_get_embeddings_nextn_ith",
    "llama_set_nextn_layer_offset",
    "llama_get_ctx_other",
)
PARTIAL = 1
"""Flag of the state calls: only what cannot be cut back (recurrent states, sliding windows)."""

Bytes = npt.NDArray[np.uint8]


def require_mtp(library: Library) -> None:
    """Check that these bindings can drive an MTP head.

    The calls for it are no stable interface: they are C++ symbols that may change with any
    commit, so one version is supported, and its structures are checked by their defaults.

    Raises:
        EngineUnsupported: another version, missing symbols, or a library of another commit.
    """
    fix = f"pip install llama-cpp-python=={TESTED}, with LLAMA_CPP_LIB_PATH unset or at its build"
    if library.version != TESTED:
        raise EngineUnsupported(
            f"decoding in this process needs llama-cpp-python {TESTED}",
            why=f"{library.version} is installed, and the calls for MTP change between versions",
            fix=fix,
        )
    missing = [name for name in _NEXTN if not hasattr(library.ext, name)]
    if library.ext is None or missing:
        raise EngineUnsupported(
            "llama.cpp's library has no MTP calls",
            why=f"{library.path or 'the library'} lacks {', '.join(missing)}",
            fix=fix,
        )
    wanted = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
    context = library.api.llama_context_default_params()
    sound = (
        list(library.ext.llama_set_embeddings_nextn.argtypes) == wanted
        and (context.n_batch, context.n_ubatch, context.n_seq_max) == (2048, 512, 1)
        and (context.type_k, context.type_v, context.yarn_orig_ctx) == (1, 1, 0)
        and (context.offload_kqv, context.op_offload, context.kv_unified) == (True, True, False)
    )
    if not sound:
        raise EngineUnsupported(
            "llama.cpp's library does not match its Python bindings",
            why="its default settings come out scrambled, so its structures differ",
            fix=fix,
        )


class Decoder:
    """One context's calls. ``hidden`` makes it hand out the rows that an MTP head takes: of
    ``all`` tokens of a batch, or of those with ``output``. Owns the context."""

    def __init__(
        self, context: Context, *, hidden: Literal["none", "all", "output"] = "none"
    ) -> None:
        library = context.model.library
        self.context = context
        self._api: Any = library.api
        self._ext: Any = library.ext
        self._pointer = context.pointer
        self._memory = self._api.llama_get_memory(context.pointer)
        self._decode = self._api.llama_decode
        self._sampled = self._api.llama_get_sampled_token_ith
        vocab = self._api.llama_model_get_vocab(context.model.pointer)
        self._n_vocab = int(self._api.llama_vocab_n_tokens(vocab))
        self._floats: Any = ctypes.c_float * self._n_vocab
        self.hidden_width = int(self._api.llama_model_n_embd_out(context.model.pointer))
        self._row_bytes = 4 * self.hidden_width
        if hidden != "none":
            self._ext.llama_set_embeddings_nextn(self._pointer, True, hidden == "output")
            self._hidden_ith = self._ext.llama_get_embeddings_nextn_ith

    @property
    def pointer(self) -> Any:
        """The C context."""
        return self._pointer

    def decode(self, batch: Batch) -> None:
        """Run a batch and wait for nothing; reading a result waits.

        Raises:
            EngineError: no room in the cache, or a fault of the engine.
        """
        status = self._decode(self._pointer, batch.struct)
        if status:
            raise _decode_error(int(status), len(batch))

    def wait(self) -> None:
        """Until all work that was handed to the devices is done."""
        self._api.llama_synchronize(self._pointer)

    def sampled(self, row: int) -> int:
        """The token that the attached sampler chose for a batch row; -1 without one."""
        return int(self._sampled(self._pointer, row))

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """The logits of a batch row with output: a view, valid until the next ``decode``.

        Raises:
            EngineError: the row has none.
        """
        pointer = self._api.llama_get_logits_ith(self._pointer, row)
        if not pointer:
            raise EngineError("llama.cpp has no logits", why=f"row {row} asked for none")
        address = ctypes.addressof(pointer.contents)
        return np.frombuffer(self._floats.from_address(address), np.float32)

    def candidates(self, row: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Logits and ids that an attached, truncating sampler left for a batch row: views."""
        api, ctx = self._api, self._pointer
        n = int(api.llama_get_sampled_logits_count_ith(ctx, row))
        m = int(api.llama_get_sampled_candidates_count_ith(ctx, row))
        if not n or n != m:
            raise EngineError("llama.cpp has no candidates", why=f"row {row} was not truncated")
        logits = api.llama_get_sampled_logits_ith(ctx, row)
        ids = api.llama_get_sampled_candidates_ith(ctx, row)
        return np.ctypeslib.as_array(logits, (n,)), np.ctypeslib.as_array(ids, (n,))

    def copy_hidden(self, row: int, address: int) -> None:
        """Copy the hidden row that belongs to a batch row to memory at ``address``."""
        ctypes.memmove(address, self._hidden_ith(self._pointer, row), self._row_bytes)

    def use_layer(self, offset: int) -> None:
        """Which of several chained heads the next ``decode`` runs."""
        self._ext.llama_set_nextn_layer_offset(self._pointer, offset)

    def shares_cache_of(self, other: Decoder) -> bool:
        """Whether this is a head that reads the other context's cache and keeps none."""
        return bool(self._ext.llama_get_ctx_other(self._pointer) == other._pointer)

    def attach(self, seq: int, chain: Any) -> bool:
        """Let a sampler chain (a C pointer, or None) choose on the device; whether it can."""
        return bool(self._api.llama_set_sampler(self._pointer, seq, chain))

    # -- the cache -------------------------------------------------------------------------

    def remove(self, seq: int, start: int, end: int = -1) -> bool:
        """Forget positions; False when the cache cannot and nothing was changed."""
        return bool(self._api.llama_memory_seq_rm(self._memory, seq, start, end))

    def shift(self, seq: int, start: int, end: int, delta: int) -> None:
        """Move the positions of a range by ``delta``; check ``can_shift`` before."""
        self._api.llama_memory_seq_add(self._memory, seq, start, end, delta)

    @property
    def can_shift(self) -> bool:
        """Whether positions can be moved at all."""
        return bool(self._api.llama_memory_can_shift(self._memory))

    def first(self, seq: int) -> int:
        """The smallest position from which all are kept; -1 when empty."""
        return int(self._api.llama_memory_seq_pos_min(self._memory, seq))

    def last(self, seq: int) -> int:
        """The largest position; -1 when empty."""
        return int(self._api.llama_memory_seq_pos_max(self._memory, seq))

    def state_bytes(self, seq: int, flags: int = 0) -> int:
        """Size of ``save``'s result."""
        return int(self._api.llama_state_seq_get_size_ext(self._pointer, seq, flags))

    def save(self, seq: int, flags: int = 0) -> Bytes:
        """One sequence's cache, in llama.cpp's own form.

        Raises:
            EngineError: llama.cpp cannot write it.
        """
        size = self.state_bytes(seq, flags)
        data: Bytes = np.empty(size, np.uint8)
        target = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        got = self._api.llama_state_seq_get_data_ext(self._pointer, target, size, seq, flags)
        if got != size:
            raise EngineError("llama.cpp could not save a sequence", why=f"{got} of {size} bytes")
        return data

    def restore(self, seq: int, data: Bytes, flags: int = 0) -> bool:
        """Put a saved sequence back in place of what ``seq`` holds; False when refused, and
        then ``seq`` is empty."""
        source = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        size = data.nbytes
        got = self._api.llama_state_seq_set_data_ext(self._pointer, source, size, seq, flags)
        if got != size:
            self.remove(seq, -1)
            return False
        return True

    def close(self) -> None:
        """Free the context."""
        self.context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _decode_error(status: int, rows: int) -> EngineError:
    reasons = {1: "no room in the cache for it", 2: "it was aborted", -1: "the batch is invalid"}
    return EngineError(
        f"llama.cpp could not decode a batch of {rows} tokens",
        why=reasons.get(status, f"its status is {status}"),
        fix="use a larger context" if status == 1 else "see the log of browndwarf.engine.llama",
    )
