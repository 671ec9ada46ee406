"""Cutting, shifting and filling the caches of a pair, for one conversation at a time.

``CacheKeeper`` brings a slot to hold a given prompt: it keeps the common prefix, cuts what follows
and decodes the rest. Where an engine's cache cannot be cut (recurrent layers, sliding windows
that have moved on) it goes back to a checkpoint, or starts over; what it did is in the answer's
statistics, and never changes what is generated.

Example:
    keeper.prefill(slot, prompt)      # tokens of the whole conversation; returns what was reused
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from browndwarf.decode.options import RuntimeOptions
from browndwarf.decode.pair import Pair
from browndwarf.decode.session_records import Snapshot
from browndwarf.decode.slot import Checkpoint, Slot
from browndwarf.engine.native_batch import Batch
from browndwarf.engine.native_context import PARTIAL
from browndwarf.errors import EngineError, Interrupted, RunChanged, UsageError
from browndwarf.units import MIB

_TAIL = 16
"""A checkpoint lies this many tokens before a prompt's end, because the next turn's template may
write the end differently."""
_KEEP_CHECKPOINTS = 2


class CacheKeeper:
    """Edits the caches of a pair's contexts. Not for several threads at once."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.options: RuntimeOptions = pair.options
        self.target = pair.target
        self.own_head = pair.head if pair.kind in ("nextn", "chained") else None
        self.width = pair.target.hidden_width if pair.head is not None else 0
        self.last_row = 0
        self._batch = Batch(pair.library, self.options.n_batch)
        self._head_batch = (
            Batch(pair.library, self.options.n_batch, self.width) if self.own_head else None
        )

    def slot(self, seq: int) -> Slot:
        """A new, empty conversation in sequence ``seq``."""
        rows = np.zeros((2 * self.options.n_max + 4, self.width), np.float32)
        slot = Slot(seq, rows)
        self.clear(slot)
        return slot

    def clear(self, slot: Slot) -> None:
        """Forget everything but the sampler."""
        self.target.remove(slot.seq, -1)
        if self.own_head is not None:
            self.own_head.remove(slot.seq, -1)
        slot.tokens.clear()
        slot.kept, slot.n_rows, slot.unchanged = 0, 1, 0
        slot.saved_as = None
        slot.rows[:] = 0
        slot.checkpoints.clear()

    def prefill(
        self, slot: Slot, prompt: list[int], *, cancelled: Callable[[], bool] = lambda: False
    ) -> int:
        """Hold ``prompt`` in the cache, with logits for its last token. Returns the number of
        tokens that were there already.

        Raises:
            UsageError: the prompt is empty or longer than the context.
            Interrupted: ``cancelled`` said so between two batches; the slot holds a prefix.
        """
        if not prompt:
            raise UsageError("there is nothing to go on with", why="the prompt has no tokens")
        if len(prompt) >= self.pair.n_ctx:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens and the context {self.pair.n_ctx}",
                why="at least one token must fit after it",
                fix="shorten it, load with a larger n_ctx, or allow context_shift",
            )
        reused = self.cut(slot, common_prefix(slot.tokens[: slot.kept], prompt[:-1]))
        self.catch_up(slot)
        slot.tokens = prompt[: slot.kept]
        stop = len(prompt)
        mark = stop - _TAIL if self._wants_checkpoints and stop - slot.kept > 4 * _TAIL else 0
        while slot.kept < stop:
            if cancelled():
                raise Interrupted("cancelled while reading the prompt")
            end = min(stop, slot.kept + self.options.n_batch)
            if slot.kept < mark < end:
                end = mark
            self._decode(slot, prompt[slot.kept : end], last=end == stop)
            if end == mark:
                self._checkpoint(slot)
        return reused

    def catch_up(self, slot: Slot) -> None:
        """Let a head with a cache of its own see all tokens that the target has seen."""
        head, batch, missing = self.own_head, self._head_batch, slot.n_rows - 1
        if head is None or batch is None or missing < 1:
            return
        first = slot.kept - missing
        batch.fill(np.asarray(slot.tokens[first : slot.kept], np.int32), first, slot.seq)
        batch.hidden[:missing] = slot.rows[:missing]
        self._run_head(slot, first)
        slot.rows[0] = slot.rows[missing]
        slot.n_rows = 1

    def _run_head(self, slot: Slot, first: int) -> None:
        """Decode the head's batch, whose first position is ``first``, under every layer."""
        head, batch = self.own_head, self._head_batch
        if head is None or batch is None:
            return
        if self.pair.kind != "chained":
            head.decode(batch)
            return
        for layer in range(self.pair.head_layers):
            head.remove(slot.seq, first)
            head.use_layer(layer)
            head.decode(batch)
        head.use_layer(0)

    def _decode(self, slot: Slot, tokens: list[int], *, last: bool) -> None:
        batch = self._batch
        n = len(tokens)
        batch.fill(np.asarray(tokens, np.int32), slot.kept, slot.seq)
        batch.output[n - 1] = int(last)
        slot.touched(slot.kept)
        try:
            self.target.decode(batch)
            self._feed_head(slot, n)
        except BaseException:
            self.repair(slot)
            raise
        slot.tokens.extend(tokens)
        slot.kept += n
        self.last_row = n - 1

    def _feed_head(self, slot: Slot, n: int) -> None:
        """Give a head the batch that the target has decoded, each token with the hidden row of
        the position before it, and keep the last row for what follows."""
        if not self.width:
            return
        head, batch = self.own_head, self._head_batch
        if head is not None and batch is not None:
            rows = self._batch
            batch.token[:n], batch.position[:n] = rows.token[:n], rows.position[:n]
            batch.seq[:n], batch.output[:n] = slot.seq, 0
            batch.resize(n)
            batch.hidden[0] = slot.rows[slot.n_rows - 1]
            for row in range(1, n):
                self.target.copy_hidden(row - 1, batch.hidden_address(row))
            self._run_head(slot, slot.kept)
        self.target.copy_hidden(n - 1, int(slot.rows.ctypes.data))
        slot.n_rows = 1

    # -- going back ------------------------------------------------------------------------

    def cut(self, slot: Slot, position: int) -> int:
        """Keep at most the first ``position`` tokens; returns how many are left."""
        position = min(position, slot.kept)
        if position < slot.kept:
            self.catch_up(slot)
        if position == slot.kept and not slot.tokens[position:]:
            return position
        # What was drafted ahead, or chosen and not decoded, is nobody's loss.
        del slot.tokens[position:]
        if position == slot.kept:
            return position
        slot.touched(position)
        if position > 0 and self._window_reaches(slot, position) and self._cut_to(slot, position):
            return position
        for point in sorted(slot.checkpoints, key=lambda p: -p.position):
            if point.position <= position:
                if self._return_to(slot, point):
                    return point.position
                break
        self.clear(slot)
        return 0

    def _window_reaches(self, slot: Slot, position: int) -> bool:
        window = self.pair.window
        return not window or self.target.first(slot.seq) <= max(0, position - window + 1)

    def _cut_to(self, slot: Slot, position: int) -> bool:
        if not self.target.remove(slot.seq, position):
            return False
        if self.own_head is not None:
            self.own_head.remove(slot.seq, position)
        # The hidden row before ``position`` is gone. A zero row spoils one entry of the head's
        # cache, and with it perhaps one draft.
        slot.rows[0] = 0
        slot.kept, slot.n_rows = position, 1
        slot.checkpoints = [p for p in slot.checkpoints if p.position <= position]
        return True

    def _return_to(self, slot: Slot, point: Checkpoint) -> bool:
        if not self.target.restore(slot.seq, point.state, PARTIAL):
            return False
        if not self.target.remove(slot.seq, point.position):
            return False
        if self.own_head is not None:
            self.own_head.remove(slot.seq, point.position)
        slot.rows[0] = point.hidden
        slot.n_rows = 1
        slot.kept = point.position
        del slot.tokens[point.position :]
        slot.touched(0)
        slot.checkpoints = [p for p in slot.checkpoints if p.position <= point.position]
        return True

    @property
    def _wants_checkpoints(self) -> bool:
        needed = self.pair.recurrent or self.pair.window > 0
        return needed and self.options.checkpoint_mib > 0

    def _checkpoint(self, slot: Slot) -> None:
        size = self.target.state_bytes(slot.seq, PARTIAL)
        keep = min(_KEEP_CHECKPOINTS, self.options.checkpoint_mib * MIB // max(size, 1))
        if not keep:
            return
        state = self.target.save(slot.seq, PARTIAL)
        slot.checkpoints.append(Checkpoint(slot.kept, state, slot.rows[slot.n_rows - 1].copy()))
        del slot.checkpoints[:-keep]

    def repair(self, slot: Slot) -> None:
        """After a fault in mid-step: make caches and tokens agree again."""
        del slot.tokens[slot.kept :]
        sound = self.target.remove(slot.seq, slot.kept)
        if self.own_head is not None:
            sound = self.own_head.remove(slot.seq, slot.kept) and sound
        slot.rows[0] = 0
        slot.n_rows = 1
        if not sound or not slot.kept or self.target.last(slot.seq) != slot.kept - 1:
            self.clear(slot)

    # -- at rest -----------------------------------------------------------------------------

    def capture(self, slot: Slot) -> Snapshot:
        """Everything that a conversation needs to go on elsewhere; the slot stays as it is."""
        self.catch_up(slot)
        states = {"target": self.target.save(slot.seq)}
        if self.own_head is not None:
            self.own_head.remove(slot.seq, slot.kept)
            states["head"] = self.own_head.save(slot.seq)
        margin = slot.row_capacity if self.own_head is not None else 0
        unchanged = max(0, slot.unchanged - margin)
        rows = slot.rows[: slot.n_rows].copy()
        return Snapshot(list(slot.tokens), slot.kept, rows, states, unchanged=unchanged)

    def restore(self, slot: Slot, snapshot: Snapshot) -> None:
        """Put a conversation into the cache in place of what ``slot`` holds.

        Raises:
            RunChanged: llama.cpp refuses a state; the slot is empty then.
        """
        self.clear(slot)
        decoders = {"target": self.target}
        if self.own_head is not None:
            decoders["head"] = self.own_head
        sound = set(decoders) == set(snapshot.states) and snapshot.rows.shape[1:] == (self.width,)
        for key, decoder in decoders.items():
            sound = sound and decoder.restore(slot.seq, snapshot.states[key])
        if not sound or self.target.last(slot.seq) != snapshot.kept - 1:
            self.clear(slot)
            raise RunChanged(
                "llama.cpp does not take the saved state",
                why="it was written for another cache",
                fix="ask for a resume that reads the conversation again",
            )
        slot.tokens = list(snapshot.tokens)
        slot.kept = slot.unchanged = snapshot.kept
        slot.rows[0] = snapshot.rows[-1]
        slot.n_rows = 1

    # -- outgrowing the context --------------------------------------------------------------

    def make_room(self, slot: Slot, need: int, keep: int) -> bool:
        """Forget half of what follows the first ``keep`` tokens, when fewer than ``need`` tokens
        fit; whether they fit now. Positions are moved where the caches can; else the shortened
        conversation is decoded anew."""
        if len(slot.tokens) + need <= self.pair.n_ctx:
            return True
        if not self.options.context_shift:
            return False
        keep = min(keep, slot.kept // 2)
        drop = (slot.kept - keep) // 2
        if drop < need:
            return False
        start, end = keep, keep + drop
        if self._shift(slot, start, end):
            del slot.tokens[start:end]
            slot.kept -= drop
            slot.checkpoints.clear()
            slot.touched(0)
            return True
        pending = slot.tokens[slot.kept :]
        shortened = slot.tokens[:start] + slot.tokens[end : slot.kept]
        self.clear(slot)
        self.prefill(slot, shortened)
        slot.tokens.extend(pending)
        return True

    def _shift(self, slot: Slot, start: int, end: int) -> bool:
        decoders = [self.target] + ([self.own_head] if self.own_head is not None else [])
        if self.pair.recurrent or not all(d.can_shift for d in decoders):
            return False
        for decoder in decoders:
            if not decoder.remove(slot.seq, start, end):
                raise EngineError("llama.cpp cannot forget the middle of a conversation")
            decoder.shift(slot.seq, end, -1, start - end)
        return True


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many tokens two lists begin with together."""
    n = min(len(one), len(other))
    if one[:n] == other[:n]:
        return n
    a, b = np.asarray(one[:n], np.int32), np.asarray(other[:n], np.int32)
    return int(np.argmax(a != b))
