"""llama.cpp's samplers as one chain, owned here: composed once, asked once per token.

A chain may be attached to a context, which then samples on the device; ``sample`` reads that
choice, or samples the logits itself. A grammar is kept beside the chain, as llama-server does it:
the chain's choice is tried against the grammar, and only where it is refused are all logits
filtered.

Example:
    chain = Chain(library).greedy()
    token = chain.sample(decoder, row=0)
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from browndwarf.engine.native import Handle, Library
from browndwarf.engine.native_context import Decoder
from browndwarf.engine.native_vocab import Vocab
from browndwarf.errors import UsageError

_ENTRY = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Chain(Handle):
    """A sampler chain. The ``add`` methods return the chain; order is that of the calls."""

    def __init__(self, library: Library) -> None:
        api = library.api
        pointer = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        super().__init__(api.llama_sampler_free, pointer)
        self._api: Any = api
        self._sample = api.llama_sampler_sample

    def _add(self, sampler: Any) -> Self:
        self._api.llama_sampler_chain_add(self.pointer, sampler)
        return self

    def greedy(self) -> Self:
        """Choose the most likely token."""
        return self._add(self._api.llama_sampler_init_greedy())

    def dist(self, seed: int) -> Self:
        """Choose by the probabilities; one random number is drawn per token."""
        return self._add(self._api.llama_sampler_init_dist(seed))

    def temperature(self, value: float) -> Self:
        """Divide the logits."""
        return self._add(self._api.llama_sampler_init_temp(value))

    def top_k(self, k: int) -> Self:
        """Keep the ``k`` most likely."""
        return self._add(self._api.llama_sampler_init_top_k(k))

    def top_p(self, p: float) -> Self:
        """Keep the most likely that make up ``p``."""
        return self._add(self._api.llama_sampler_init_top_p(p, 1))

    def min_p(self, p: float) -> Self:
        """Keep what is at least ``p`` times as likely as the best."""
        return self._add(self._api.llama_sampler_init_min_p(p, 1))

    def bias(self, n_vocab: int, biases: Mapping[int, float]) -> Self:
        """Add to single logits; minus infinity forbids a token."""
        table = (self._api.llama_logit_bias * len(biases))()
        for entry, (token, value) in zip(table, biases.items(), strict=True):
            entry.token, entry.bias = token, value
        return self._add(self._api.llama_sampler_init_logit_bias(n_vocab, len(biases), table))

    def penalties(
        self, n_vocab: int, last_n: int, repeat: float, frequency: float, presence: float
    ) -> Self:
        """Make tokens among the last ``last_n`` less likely."""
        return self._add(
            self._api.llama_sampler_init_penalties(n_vocab, last_n, repeat, frequency, presence)
        )

    def sample(self, decoder: Decoder, row: int) -> int:
        """Choose a token for a batch row and accept it; rows of one batch go in order."""
        return int(self._sample(self.pointer, decoder.pointer, row))

    def accept(self, token: int) -> None:
        """Tell the chain of a token that it did not choose itself."""
        self._api.llama_sampler_accept(self.pointer, token)

    def reset(self) -> None:
        """Forget all accepted tokens and start the random numbers anew."""
        self._api.llama_sampler_reset(self.pointer)

    def draw(self, times: int) -> None:
        """Skip random numbers: those that another run of this chain has used."""
        table = Candidates(self._api, 1)
        for _ in range(times):
            table.single(0)
            self._api.llama_sampler_apply(self.pointer, ctypes.byref(table.struct))


class Grammar(Handle):
    """A GBNF grammar's state within one answer."""

    def __init__(self, library: Library, vocab: Vocab, text: str, root: str = "root") -> None:
        """Parse the grammar.

        Raises:
            UsageError: llama.cpp does not understand it.
        """
        api = library.api
        pointer = api.llama_sampler_init_grammar(vocab.pointer, text.encode(), root.encode())
        if not pointer:
            raise UsageError(
                "the grammar cannot be used",
                why="llama.cpp does not understand it",
                fix=f"check its rules; the first one is called {root}",
            )
        super().__init__(api.llama_sampler_free, pointer)
        self._api: Any = api
        self._one = Candidates(api, 1)
        self._all = Candidates(api, vocab.size)

    def sample(self, chain: Chain, decoder: Decoder, row: int) -> int:
        """Choose a token that the grammar allows, and tell both of it."""
        api, every = self._api, self._all
        every.load(decoder.logits(row))
        api.llama_sampler_apply(chain.pointer, ctypes.byref(every.struct))
        token = every.chosen()
        if not self.allows(token):
            every.load(decoder.logits(row))
            api.llama_sampler_apply(self.pointer, ctypes.byref(every.struct))
            api.llama_sampler_apply(chain.pointer, ctypes.byref(every.struct))
            token = every.chosen()
        chain.accept(token)
        api.llama_sampler_accept(self.pointer, token)
        return token

    def allows(self, token: int) -> bool:
        """Whether the grammar goes on with this token."""
        self._one.single(token)
        self._api.llama_sampler_apply(self.pointer, ctypes.byref(self._one.struct))
        return bool(np.isfinite(self._one.table["logit"][0]))

    def accept(self, token: int) -> None:
        """Advance over a token."""
        self._api.llama_sampler_accept(self.pointer, token)


class Candidates:
    """llama.cpp's table of tokens with their logits, in numpy's memory."""

    def __init__(self, api: Any, size: int) -> None:
        self.table = np.zeros(size, _ENTRY)
        self._ids = np.arange(size, dtype=np.int32)
        self.struct: Any = api.llama_token_data_array()
        kind = dict(api.llama_token_data_array._fields_)["data"]
        self.struct.data = ctypes.cast(ctypes.c_void_p(self.table.ctypes.data), kind)

    def load(self, logits: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        """All tokens in order with these logits."""
        self.table["id"] = self._ids
        self.table["logit"] = logits
        self.table["p"] = 0
        self._reset(len(self.table))

    def single(self, token: int) -> None:
        """One token with logit 1."""
        self.table[0] = (token, 1.0, 0.0)
        self._reset(1)

    def _reset(self, size: int) -> None:
        self.struct.size, self.struct.selected, self.struct.sorted = size, -1, False

    def chosen(self) -> int:
        """The selected token's id."""
        return int(self.table["id"][self.struct.selected])
