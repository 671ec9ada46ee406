"""A model's vocabulary: text to tokens, tokens to bytes, and what the special ones are.

Pieces are bytes: a token may hold half a character. They are looked up once and remembered.

Example:
    vocab = Vocab(model)
    ids = vocab.tokenize("Hello", special=True)
    b"".join(vocab.piece(i) for i in ids)
"""

from __future__ import annotations

import ctypes
from typing import Any

from browndwarf.engine.native import Model
from browndwarf.errors import EngineError


class Vocab:
    """Of one model; usable as long as the model is."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._api: Any = model.library.api
        self._pointer = self._api.llama_model_get_vocab(model.pointer)
        self.size = int(self._api.llama_vocab_n_tokens(self._pointer))
        self.bos = int(self._api.llama_vocab_bos(self._pointer))
        self.eos = int(self._api.llama_vocab_eos(self._pointer))
        self.adds_bos = bool(self._api.llama_vocab_get_add_bos(self._pointer))
        self._pieces: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}

    @property
    def pointer(self) -> Any:
        """The C object, owned by the model."""
        return self._pointer

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Token ids. ``special`` reads written control tokens as such; ``add_bos`` lets the
        vocabulary put its first token in front, if it has that habit."""
        raw = text.encode()
        capacity = len(raw) + 8
        for _ in range(2):
            buffer = (ctypes.c_int32 * capacity)()
            count = self._api.llama_tokenize(
                self._pointer, raw, len(raw), buffer, capacity, add_bos, special
            )
            if count >= 0:
                return list(buffer[:count])
            capacity = -count
        raise EngineError("llama.cpp could not tokenize a text", why=f"{len(raw)} bytes of text")

    def piece(self, token: int) -> bytes:
        """A token as bytes; control tokens as they are written in templates."""
        known = self._pieces.get(token)
        if known is None:
            known = self._pieces[token] = self._piece(token)
        return known

    def _piece(self, token: int) -> bytes:
        if not 0 <= token < self.size:
            return b""
        capacity = 64
        for _ in range(2):
            buffer = ctypes.create_string_buffer(capacity)
            count = self._api.llama_token_to_piece(self._pointer, token, buffer, capacity, 0, True)
            if count >= 0:
                return buffer.raw[:count]
            capacity = -count
        return b""

    def is_end(self, token: int) -> bool:
        """Whether a token ends an answer."""
        known = self._ends.get(token)
        if known is None:
            known = bool(self._api.llama_vocab_is_eog(self._pointer, token))
            self._ends[token] = known
        return known
