"""One conversation in the cache: its tokens, what of them is decoded, and what a head needs next.

``tokens`` are all tokens; the first ``kept`` of them are in the target's cache. While an answer
runs there is exactly one more, chosen and not yet decoded. ``rows`` holds the hidden rows of the
last ``n_rows`` positions before the tokens that a head has not seen: row i belongs to the token at
``kept + 1 - n_rows + i`` and was computed one position earlier.

``unchanged`` counts the positions that are as they were when the slot was last saved; ``saved_as``
tells by whom, since two conversations may share a beginning whose numbers differ by rounding.

Boundary: plain data; ``prefill`` and ``speculate`` change it together with the caches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from browndwarf.decode.lookup import Lookup
from browndwarf.decode.sampling import Sampler


@dataclass(slots=True)
class Tally:
    """Sums over a conversation's steps.

    Seconds are wall time; ``verify_s`` ends when the device is done, and ``rest_s`` is what Python
    and the caches' bookkeeping took.
    """

    steps: int = 0
    tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    rest_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Wall time of all steps."""
        return self.draft_s + self.verify_s + self.sample_s + self.rest_s

    def count(self, drafted: int, accepted: int) -> None:
        """One conversation's drafts in one step."""
        while len(self.drafted) < drafted:
            self.drafted.append(0)
            self.accepted.append(0)
        for i in range(drafted):
            self.drafted[i] += 1
        for i in range(accepted):
            self.accepted[i] += 1


@dataclass(slots=True)
class Checkpoint:
    """A copy of what cannot be cut back, taken when ``position`` tokens were decoded."""

    position: int
    state: npt.NDArray[np.uint8]
    hidden: npt.NDArray[np.float32]


@dataclass(slots=True)
class Slot:
    """State of sequence ``seq``; see the module."""

    seq: int
    rows: npt.NDArray[np.float32]
    sampler: Sampler | None = None
    tokens: list[int] = field(default_factory=list)
    kept: int = 0
    n_rows: int = 1
    budget: int = 0
    unchanged: int = 0
    saved_as: object = None
    draft: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    ended: bool = False
    checkpoints: list[Checkpoint] = field(default_factory=list)
    lookup: Lookup | None = None
    tally: Tally = field(default_factory=Tally)

    @property
    def row_capacity(self) -> int:
        """Hidden rows that fit."""
        return int(self.rows.shape[0])

    def touched(self, position: int) -> None:
        """Note that the cache changed from ``position`` on; sessions save from the smallest."""
        self.unchanged = min(self.unchanged, position)
