"""A batch of tokens for ``llama_decode``, allocated once and filled in place.

Numpy owns the memory and the C structure points into it, so that a step of decoding writes a few
numbers and allocates nothing. A batch with ``width`` also carries one row of numbers per token:
what an MTP head takes beside the token.

Not covered: images, and tokens that belong to more than one sequence.

Example:
    batch = Batch(load_library(), capacity=512)
    batch.fill(np.array([2, 10, 11], np.int32), position=0, seq=0)
    batch.output[2] = 1
    context.decode(batch)
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from browndwarf.engine.native import Library

Ints = npt.NDArray[np.int32]


class Batch:
    """Arrays of ``capacity`` rows; ``len`` of them are decoded. Rows keep what they held.

    ``token``, ``position``, ``seq`` (int32) and ``output`` (int8: whether logits are wanted) have
    one entry a row, ``hidden`` has shape (capacity, width). All may be written directly.
    """

    def __init__(self, library: Library, capacity: int, width: int = 0) -> None:
        api = library.api
        self.capacity = capacity
        self.token: Ints = np.zeros(capacity, np.int32)
        self.position: Ints = np.zeros(capacity, np.int32)
        self.seq: Ints = np.zeros(capacity, np.int32)
        self.output: npt.NDArray[np.int8] = np.zeros(capacity, np.int8)
        self.hidden: npt.NDArray[np.float32] = np.zeros((capacity, width), np.float32)
        self.row_bytes = width * 4
        self._one = np.ones(capacity, np.int32)
        self._seq_pointers: npt.NDArray[np.uint64] = np.uint64(self.seq.ctypes.data) + np.arange(
            capacity, dtype=np.uint64
        ) * np.uint64(4)
        self.struct: Any = api.llama_batch()
        self.struct.token = _pointer(api, "token", self.token)
        self.struct.pos = _pointer(api, "pos", self.position)
        self.struct.n_seq_id = _pointer(api, "n_seq_id", self._one)
        self.struct.seq_id = _pointer(api, "seq_id", self._seq_pointers)
        self.struct.logits = _pointer(api, "logits", self.output)
        if width:
            self.struct.embd = _pointer(api, "embd", self.hidden)
        self._hidden_address = int(self.hidden.ctypes.data)

    def __len__(self) -> int:
        return int(self.struct.n_tokens)

    def put(self, row: int, token: int, position: int, seq: int, output: int) -> None:
        """Set one row, without its hidden numbers."""
        self.token[row] = token
        self.position[row] = position
        self.seq[row] = seq
        self.output[row] = output

    def resize(self, rows: int) -> None:
        """How many rows, from the first, are decoded."""
        self.struct.n_tokens = rows

    def fill(self, tokens: Ints, position: int, seq: int) -> None:
        """Take consecutive tokens of one sequence as the whole batch, none with output."""
        n = len(tokens)
        self.token[:n] = tokens
        self.position[:n] = np.arange(position, position + n, dtype=np.int32)
        self.seq[:n] = seq
        self.output[:n] = 0
        self.resize(n)

    def hidden_address(self, row: int) -> int:
        """Where row ``row`` of ``hidden`` begins, for ``memmove``."""
        return self._hidden_address + row * self.row_bytes


def _pointer(api: Any, field: str, array: npt.NDArray[Any]) -> Any:
    kind = dict(api.llama_batch._fields_)[field]
    return ctypes.cast(ctypes.c_void_p(array.ctypes.data), kind)
