"""The step: draft, verify, accept, rewind. One or several conversations move together.

The target decodes the chosen token and its drafts in one batch and samples at every row; drafts
are kept while they agree, and the first other choice (or the one after the last draft) is the next
token. So each step yields one token more than it accepts, and every token is the target's own.

What was rejected is cut from the caches. Where the engine cannot cut (recurrent layers without
rollback), the state before the batch is put back and the accepted tokens are decoded again.

A fault or Ctrl-C in mid-step leaves caches and tokens in agreement, if need be by forgetting the
conversation's cache; the tokens chosen by then are kept in ``slot.tokens``.

Example:
    loop = Speculator(pair, keeper)
    loop.begin(slot)                   # after a prefill: the first token
    while not slot.ended:
        loop.step([slot])
        slot.fresh                     # what this step added
"""

from __future__ import annotations

import random
from time import perf_counter

from browndwarf.decode.adaptive import Chooser
from browndwarf.decode.cache import CacheKeeper
from browndwarf.decode.drafter import make_drafter
from browndwarf.decode.pair import Pair
from browndwarf.decode.slot import Slot
from browndwarf.engine.native_batch import Batch
from browndwarf.engine.native_context import PARTIAL, Bytes
from browndwarf.errors import EngineError


class Speculator:
    """Steps over slots of one pair. Not for several threads at once."""

    def __init__(self, pair: Pair, keeper: CacheKeeper) -> None:
        options = pair.options
        self.pair = pair
        self.chooser = Chooser(pair.n_max) if options.adaptive else None
        self._keeper = keeper
        self._drafter = make_drafter(pair)
        self._target = pair.target
        self._batch = Batch(pair.library, options.sequences * options.outputs)
        self._all_rows = keeper.own_head is not None
        self._hidden = pair.head is not None
        self._copy_back = pair.recurrent and not _rolls_back(pair)
        self._synthetic = options.synthetic
        self._random = random.Random(options.synthetic_seed)

    def begin(self, slot: Slot) -> None:
        """Choose the token after a prefill."""
        slot.fresh.clear()
        slot.ended = False
        slot.draft.clear()
        self._append(slot, self._choose(slot, self._keeper.last_row))

    def step(self, slots: list[Slot], n: int | None = None) -> None:
        """Advance all slots by one step with ``n`` drafts each, or what the options say.

        Slots that have ended must not be given. ``slot.fresh`` has the new tokens.

        Raises:
            EngineError: llama.cpp failed; the slots are usable again.
        """
        begun = perf_counter()
        if n is None:
            n = self.chooser.choose() if self.chooser else self.pair.n_max
        saved: list[Bytes] = []
        try:
            for slot in slots:
                slot.draft.clear()
                slot.fresh.clear()
            if n and self._drafter is not None:
                self._drafter.draft(slots, n)
            drafted = perf_counter()
            if self._copy_back:
                saved = [self._target.save(slot.seq, PARTIAL) for slot in slots]
            rows = self._verify(slots)
            verified = perf_counter()
            for slot, row in zip(slots, rows, strict=True):
                self._accept(slot, row)
            chosen = perf_counter()
            for i, (slot, row) in enumerate(zip(slots, rows, strict=True)):
                self._settle(slot, row, saved[i] if saved else None)
        except BaseException:
            for slot in slots:
                self._keeper.repair(slot)
            raise
        done = perf_counter()
        for slot in slots:
            tally = slot.tally
            tally.steps += 1
            tally.draft_s += drafted - begun
            tally.verify_s += verified - drafted
            tally.sample_s += chosen - verified
            tally.rest_s += done - chosen
        if self.chooser is not None:
            longest = max(slots, key=lambda s: len(s.draft))
            accepted = len(longest.fresh) - 1
            self.chooser.record(
                n, drafted=len(longest.draft), accepted=accepted, seconds=done - begun
            )

    def _verify(self, slots: list[Slot]) -> list[int]:
        """Decode all slots' chosen tokens and drafts; returns each slot's first row."""
        batch, used, rows = self._batch, 0, []
        for slot in slots:
            rows.append(used)
            position = slot.kept
            batch.put(used, slot.tokens[position], position, slot.seq, 1)
            used += 1
            for token in slot.draft:
                position += 1
                batch.put(used, token, position, slot.seq, 1)
                used += 1
        batch.resize(used)
        self._target.decode(batch)
        self._target.wait()
        return rows

    def _accept(self, slot: Slot, row: int) -> None:
        """Fill ``slot.fresh``: drafts that agree, and the target's own choice after them."""
        fresh, budget = slot.fresh, slot.budget
        if self._synthetic is not None:
            self._accept_at_random(slot, row)
            return
        for i, guess in enumerate(slot.draft):
            token = self._choose(slot, row + i)
            fresh.append(token)
            if token != guess or len(fresh) >= budget or self.pair.vocab.is_end(token):
                break
        else:
            fresh.append(self._choose(slot, row + len(slot.draft)))

    def _accept_at_random(self, slot: Slot, row: int) -> None:
        """Accept by made-up rates: position i with rates[i], given that those before were."""
        rates = self._synthetic or ()
        before = 1.0
        for i, guess in enumerate(slot.draft):
            self._choose(slot, row + i)
            rate = rates[i] if i < len(rates) else 0.0
            if len(slot.fresh) + 1 >= slot.budget or self._random.random() * before >= rate:
                break
            before = rate
            slot.fresh.append(guess)
        slot.fresh.append(self._choose(slot, row + len(slot.fresh)))

    def _settle(self, slot: Slot, row: int, saved: Bytes | None) -> None:
        """Cut what was rejected, keep the hidden rows, and move on."""
        keeper, fresh, drafts = self._keeper, slot.fresh, len(slot.draft)
        moved = len(fresh)
        if self._drafter is not None:
            self._drafter.settle(slot)
        if self._hidden:
            self._keep_rows(slot, row, moved)
        slot.touched(slot.kept)
        start = slot.kept
        if moved <= drafts and not self._target.remove(slot.seq, start + moved):
            self._return(slot, saved, moved)
        slot.kept = start + moved
        slot.tally.count(drafts, moved - 1)
        for token in fresh:
            self._append_only(slot, token)
        if not keeper.make_room(slot, self.pair.n_max + 2, keep=0) and not slot.ended:
            slot.ended = len(slot.tokens) + 1 >= self.pair.n_ctx
            slot.budget = min(slot.budget, self.pair.n_ctx - len(slot.tokens) - 1)

    def _keep_rows(self, slot: Slot, row: int, moved: int) -> None:
        address = int(slot.rows.ctypes.data)
        if not self._all_rows:
            self._target.copy_hidden(row + moved - 1, address)
            return
        width = slot.rows.strides[0]
        for i in range(moved):
            self._target.copy_hidden(row + i, address + (slot.n_rows + i) * width)
        slot.n_rows += moved

    def _return(self, slot: Slot, saved: Bytes | None, moved: int) -> None:
        """Put back the state before the batch, and decode the accepted tokens once more."""
        target, start = self._target, slot.kept
        if saved is None or not target.restore(slot.seq, saved, PARTIAL):
            raise EngineError("llama.cpp cannot undo rejected drafts", why="no state to return to")
        target.remove(slot.seq, start)
        tokens = [slot.tokens[start], *slot.fresh[: moved - 1]]
        batch = self._batch
        for i, token in enumerate(tokens):
            batch.put(i, token, start + i, slot.seq, 0)
        batch.resize(len(tokens))
        target.decode(batch)

    def _choose(self, slot: Slot, row: int) -> int:
        sampler = slot.sampler
        assert sampler is not None, "a slot needs a sampler before it decodes"
        return sampler.choose(row)

    def _append(self, slot: Slot, token: int) -> None:
        slot.fresh.append(token)
        self._append_only(slot, token)

    def _append_only(self, slot: Slot, token: int) -> None:
        slot.tokens.append(token)
        slot.budget -= 1
        slot.tally.tokens += 1
        if slot.budget <= 0 or self.pair.vocab.is_end(token):
            slot.ended = True


def _rolls_back(pair: Pair) -> bool:
    api = pair.library.api
    return int(api.llama_n_rs_seq(pair.target.pointer)) >= pair.options.n_max
