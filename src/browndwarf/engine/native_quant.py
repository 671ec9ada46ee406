"""ggml's quantizers and dequantizers on numpy arrays, as llama-quantize itself calls them.

The functions live in ggml's base library, which ``native`` loads beside libllama. Calls go through
ctypes and so run without Python's global lock. Types are ggml's numbers, because a file's header
states those. What would end the process inside the library (a row that fills no whole blocks, a
type that cannot do without an importance vector) is refused here.

Not covered: types that ggml can only read; ``float16`` and the like need no quantizer.

Example:
    quantizer = load_quantizer()
    packed = quantizer.quantize(rows, Q4_K, importance)
    back = quantizer.dequantize(packed, Q4_K, rows.shape[1])
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from browndwarf.engine.native import load_library
from browndwarf.errors import EngineUnsupported, UsageError

_F32 = 0
_NAMES = (
    "libggml-base.so", "libggml-base.dylib", "ggml-base.dll", "libggml-base.dll",
    "libggml.so", "libggml.dylib", "ggml.dll", "libggml.dll",
)  # fmt: skip
"""Newest builds keep the quantizers in ggml-base, older ones in ggml."""

_ToFloat = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _Traits(ctypes.Structure):
    """The head of ``ggml_type_traits``."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
    )


class Quantizer:
    """The quantizers of one loaded library. Safe to use from several threads."""

    def __init__(self, library: Any) -> None:
        self._chunk = library.ggml_quantize_chunk
        self._chunk.restype = ctypes.c_size_t
        self._chunk.argtypes = (
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
            ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
        )  # fmt: skip
        self._requires = library.ggml_quantize_requires_imatrix
        self._requires.restype, self._requires.argtypes = ctypes.c_bool, (ctypes.c_int,)
        self._traits_of = library.ggml_get_type_traits
        self._traits_of.restype = ctypes.POINTER(_Traits)
        self._traits_of.argtypes = (ctypes.c_int,)
        self._init = library.ggml_quantize_init
        self._init.restype, self._init.argtypes = None, (ctypes.c_int,)
        self.commit = _text(library, "ggml_commit")
        self.version = _text(library, "ggml_version")

    def requires_importance(self, number: int) -> bool:
        """Whether a type cannot be quantized to without an importance vector."""
        return bool(self._requires(number))

    def prepare(self, number: int) -> None:
        """Build a type's tables now; otherwise the first ``quantize`` does, in its time."""
        self._traits(number)
        self._init(number)

    def quantize(
        self,
        rows: NDArray[np.float32],
        number: int,
        importance: NDArray[np.float32] | None = None,
    ) -> NDArray[np.uint8]:
        """Rows of numbers as packed bytes, one row of bytes for each.

        Args:
            rows: (rows, columns), contiguous.
            importance: one weight for each column, as llama-quantize takes them from an imatrix.

        Raises:
            UsageError: a shape or a missing importance vector that the library would die of.
            EngineUnsupported: the library does not know the type.
        """
        traits = self._traits(number)
        name = traits.type_name.decode()
        count, columns = rows.shape
        if columns % traits.blck_size:
            raise UsageError(
                f"rows of {columns} elements do not fill whole {name} blocks",
                why=f"{name} packs {traits.blck_size} elements at a time",
                fix="choose a type with a smaller block",
            )
        if importance is None and self.requires_importance(number):
            raise UsageError(
                f"{name} needs an importance matrix",
                why="its quantizer weighs every column",
                fix="give one with --imatrix, or leave the type out",
            )
        source = np.ascontiguousarray(rows, np.float32)
        weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
        if weights is not None and weights.shape != (columns,):
            raise UsageError(
                f"an importance vector of {weights.size} does not fit rows of {columns}",
                why="it holds one weight for each column",
                fix="use the imatrix of this very model",
            )
        packed = np.empty((count, columns // traits.blck_size * traits.type_size), np.uint8)
        written = self._chunk(
            number,
            source.ctypes.data,
            packed.ctypes.data,
            0,
            count,
            columns,
            None if weights is None else weights.ctypes.data,
        )
        if written != packed.nbytes:
            raise EngineUnsupported(
                f"llama.cpp's library does not quantize to {name}",
                why=f"it wrote {written} of {packed.nbytes} bytes",
                fix="leave the type out",
            )
        return packed

    def dequantize(
        self, packed: NDArray[np.uint8], number: int, columns: int
    ) -> NDArray[np.float32]:
        """Packed rows as numbers, (rows, columns). Also for F32, F16 and BF16.

        Raises:
            EngineUnsupported: the library does not know the type, or cannot read it.
        """
        count = packed.shape[0]
        packed = np.ascontiguousarray(packed)
        if number == _F32:
            return packed.view(np.float32).reshape(count, columns)
        traits = self._traits(number)
        if not traits.to_float:
            raise EngineUnsupported(
                f"llama.cpp's library cannot read {traits.type_name.decode()}",
                fix="start from an F16, BF16 or Q8_0 file",
            )
        if packed.shape[1] * traits.blck_size != columns * traits.type_size:
            raise ValueError("the packed rows have another length")
        values = np.empty((count, columns), np.float32)
        _ToFloat(traits.to_float)(packed.ctypes.data, values.ctypes.data, values.size)
        return values

    def _traits(self, number: int) -> _Traits:
        # ggml asserts on a number beyond its table; the largest known one is far below this.
        traits = self._traits_of(number).contents if 0 <= number < 43 else None
        if traits is None or not traits.type_name or traits.blck_size < 1:
            raise EngineUnsupported(
                f"llama.cpp's library knows no type {number}", fix="leave the type out"
            )
        found: _Traits = traits
        return found


@cache
def load_quantizer() -> Quantizer:
    """The quantizers of the library that ``native`` loads.

    Raises:
        EngineNotFound: as ``load_library``.
        EngineUnsupported: ggml's library is not beside it, or lacks a function.
    """
    folder = Path(load_library().path)
    tried = []
    for name in _NAMES:
        if not (folder / name).is_file():
            continue
        try:
            return Quantizer(ctypes.CDLL(str(folder / name)))
        except (OSError, AttributeError) as exc:
            tried.append(f"{name}: {exc}")
    raise EngineUnsupported(
        "llama.cpp's quantizers are not available to Python",
        why="; ".join(tried) or f"no ggml library in {folder}",
        fix="run `browndwarf engine install`, or point LLAMA_CPP_LIB_PATH at a build's lib folder",
    )


def _text(library: Any, name: str) -> str:
    function = getattr(library, name, None)
    if function is None:
        return ""
    function.restype, function.argtypes = ctypes.c_char_p, ()
    return (function() or b"").decode("utf-8", "replace")
