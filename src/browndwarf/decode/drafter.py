"""Asking a head for drafts: one class for each way in which heads keep their memory.

All take slots that hold exactly one token which is chosen and not yet decoded, and put their
guesses into ``slot.draft``. A batch may hold several slots; rows are reused from step to step.

Boundary: the target is not touched. The heads' caches end up holding nothing but true tokens,
except for what ``settle`` removes after the verdict.

Example:
    drafter = make_drafter(pair)
    drafter.draft(slots, n=3)
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from browndwarf.decode.lookup import Lookup
from browndwarf.decode.pair import Pair
from browndwarf.decode.slot import Slot
from browndwarf.engine.native_batch import Batch
from browndwarf.engine.native_context import Decoder

_TOP = 10
"""How sure a head is, is its best token's share among this many, as llama-server counts it."""


class Drafter(Protocol):
    """What ``speculate`` asks of a head."""

    def draft(self, slots: list[Slot], n: int) -> None:
        """Fill ``slot.draft`` with at most ``n`` tokens each."""

    def settle(self, slot: Slot) -> None:
        """Drop what was drafted beyond the token at ``slot.kept``; before it moves on."""


def make_drafter(pair: Pair) -> Drafter | None:
    """The drafter for a pair; None when it decodes plainly."""
    if pair.kind == "lookup":
        return LookupDrafter()
    if pair.head is None:
        return None
    if pair.kind == "assistant":
        return AssistantDrafter(pair, pair.head)
    if pair.kind == "nextn":
        return NextnDrafter(pair, pair.head)
    return ChainedDrafter(pair, pair.head)


class LookupDrafter:
    """Repeats what followed the same tokens before."""

    def draft(self, slots: list[Slot], n: int) -> None:
        for slot in slots:
            if slot.lookup is None:
                slot.lookup = Lookup()
            slot.draft = slot.lookup.draft(slot.tokens, min(n, slot.budget - 1))

    def settle(self, slot: Slot) -> None:
        del slot


class _HeadDrafter:
    """The part that all heads share: reading the guess, and stopping where it is unsure."""

    def __init__(self, pair: Pair, head: Decoder) -> None:
        options = pair.options
        self._head = head
        self._p_min = options.p_min
        self._device = bool(pair.device_sampling)
        rows = options.sequences * (2 * options.n_max + 4)
        self._batch = Batch(pair.library, rows, head.hidden_width)

    def settle(self, slot: Slot) -> None:
        """Forget drafted positions; the one of ``slot.kept`` holds a true token."""
        self._head.remove(slot.seq, slot.kept + 1)

    def _guess(self, row: int) -> int:
        """The head's token for a batch row; -1 where it is less sure than ``p_min``."""
        if not self._p_min:
            return self._head.sampled(row) if self._device else int(self._head.logits(row).argmax())
        if self._device:
            logits, ids = self._head.candidates(row)
            best = int(logits.argmax())
            token = int(ids[best])
        else:
            every = self._head.logits(row)
            token = int(every.argmax())
            logits = np.partition(every, -_TOP)[-_TOP:]
            best = int(logits.argmax())
        share = 1.0 / float(np.exp(logits - logits[best]).sum())
        return token if share >= self._p_min else -1

    def _collect(self, slots: list[Slot], rows: list[int], n: int) -> tuple[list[Slot], list[int]]:
        """Take one guess per slot; returns who goes on, and its row in the batch."""
        going, places = [], []
        for slot, row in zip(slots, rows, strict=True):
            token = self._guess(row)
            if token < 0:
                continue
            slot.draft.append(token)
            if len(slot.draft) < min(n, slot.budget - 1):
                going.append(slot)
                places.append(row)
        return going, places

    def _follow(self, slots: list[Slot], rows: list[int], ahead: bool) -> list[int]:
        """Batch the last guess of each slot with the head's own hidden row."""
        batch = self._batch
        # Rows are read before they are overwritten: row i never comes after place i.
        for i, (slot, row) in enumerate(zip(slots, rows, strict=True)):
            position = slot.kept + (len(slot.draft) if ahead else 0)
            batch.put(i, slot.draft[-1], position, slot.seq, 1)
            self._head.copy_hidden(row, batch.hidden_address(i))
        batch.resize(len(slots))
        return list(range(len(slots)))


class AssistantDrafter(_HeadDrafter):
    """Reads the target's cache; every draft of a step is at the same position."""

    def draft(self, slots: list[Slot], n: int) -> None:
        batch, head = self._batch, self._head
        going = [slot for slot in slots if min(n, slot.budget - 1) > 0]
        if not going:
            return
        for i, slot in enumerate(going):
            batch.put(i, slot.tokens[slot.kept], slot.kept, slot.seq, 1)
            batch.hidden[i] = slot.rows[slot.n_rows - 1]
        batch.resize(len(going))
        rows = list(range(len(going)))
        while True:
            head.decode(batch)
            going, rows = self._collect(going, rows, n)
            if not going:
                return
            rows = self._follow(going, rows, ahead=False)

    def settle(self, slot: Slot) -> None:
        del slot


class NextnDrafter(_HeadDrafter):
    """One layer with a cache of its own. The tokens that were accepted since the last step are
    decoded in the same batch as the first guess, so catching up costs no call."""

    def draft(self, slots: list[Slot], n: int) -> None:
        batch, head = self._batch, self._head
        drafting = [slot for slot in slots if min(n, slot.budget - 1) > 0]
        if not drafting:
            for slot in slots:
                self._make_space(slot)
            return
        used, rows = 0, []
        for slot in drafting:
            used += self._catch_up(slot, used)
            batch.output[used - 1] = 1
            rows.append(used - 1)
        batch.resize(used)
        going = drafting
        while True:
            head.decode(batch)
            if going is drafting:
                for slot in going:
                    slot.n_rows = 0
            going, rows = self._collect(going, rows, n)
            if not going:
                return
            rows = self._follow(going, rows, ahead=True)

    def _catch_up(self, slot: Slot, start: int) -> int:
        batch, n = self._batch, slot.n_rows
        first = slot.kept + 1 - n
        end = start + n
        batch.token[start:end] = slot.tokens[first : slot.kept + 1]
        batch.position[start:end] = np.arange(first, slot.kept + 1)
        batch.seq[start:end] = slot.seq
        batch.output[start:end] = 0
        batch.hidden[start:end] = slot.rows[:n]
        return n

    def _make_space(self, slot: Slot) -> None:
        """Without drafts nothing catches up by itself: do it before the rows run out."""
        if slot.n_rows * 2 < slot.row_capacity:
            return
        self._batch.resize(self._catch_up(slot, 0))
        self._head.decode(self._batch)
        slot.n_rows = 0


class ChainedDrafter(_HeadDrafter):
    """One layer per draft position, each with its own cache of the whole conversation: every
    guess decodes what was accepted and guessed so far once more, under the next layer."""

    def __init__(self, pair: Pair, head: Decoder) -> None:
        super().__init__(pair, head)
        self._layers = pair.head_layers
        options = pair.options
        shape = (2 * options.n_max + 4, head.hidden_width)
        self._chain = np.zeros(shape, np.float32)

    def draft(self, slots: list[Slot], n: int) -> None:
        for slot in slots:
            self._one(slot, min(n, slot.budget - 1))

    def _one(self, slot: Slot, n: int) -> None:
        """Layer by layer: decode the accepted tokens, and the guesses under those that guess."""
        head, batch, chain = self._head, self._batch, self._chain
        true = slot.n_rows
        first = slot.kept + 1 - true
        chain[:true] = slot.rows[:true]
        sure = n > 0
        for layer in range(self._layers):
            head.remove(slot.seq, first)
            head.use_layer(layer)
            rows = true + (len(slot.draft) if sure else 0)
            tokens = (slot.tokens[first : slot.kept + 1] + slot.draft)[:rows]
            batch.fill(np.asarray(tokens, np.int32), first, slot.seq)
            batch.hidden[:rows] = chain[:rows]
            guessing = sure and len(slot.draft) < n
            batch.output[rows - 1] = int(guessing)
            head.decode(batch)
            if not guessing:
                sure = False
                continue
            token = self._guess(rows - 1)
            if token < 0:
                sure = False
                continue
            slot.draft.append(token)
            head.copy_hidden(rows - 1, int(chain[rows].ctypes.data))
        head.use_layer(0)
        slot.n_rows = 0
