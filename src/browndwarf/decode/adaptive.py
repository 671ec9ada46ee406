"""How many tokens to draft next, from what was measured while running.

The expected tokens of a step with n drafts are 1 + a1 + a1 a2 + ..., where a_i is how often the
i-th draft was accepted when those before it were; the cost is the measured time of such steps.
The best ratio is used, and every now and then a neighbour is tried, so that a change of text or
load is noticed. All averages forget slowly.

Example:
    chooser = Chooser(4)
    n = chooser.choose()
    chooser.record(n, drafted=n, accepted=2, seconds=0.012)
"""

from __future__ import annotations

_WARM_UP = 3
_EVERY = 48
_FORGET = 0.98
_COST_FORGET = 0.9


class Chooser:
    """For one stream of steps. ``n_max`` 0 means that there is nothing to choose."""

    def __init__(self, n_max: int) -> None:
        self.n_max = n_max
        self._tried = [0.0] * n_max
        self._hit = [0.0] * n_max
        self._cost: dict[int, float] = {}
        self._samples = [0] * (n_max + 1)
        self._steps = 0
        self._best = min(2, n_max)

    @property
    def best(self) -> int:
        """The present choice, exploration left out."""
        return self._best

    def choose(self) -> int:
        """Drafts for the next step."""
        if not self.n_max:
            return 0
        for n in range(1, self.n_max + 1):
            if self._samples[n] < _WARM_UP:
                return n
        if self._steps % _EVERY == 0:
            around = [n for n in (self._best - 1, self._best + 1) if 1 <= n <= self.n_max]
            if around:
                return min(around, key=lambda n: self._samples[n])
        return self._best

    def record(self, n: int, *, drafted: int, accepted: int, seconds: float) -> None:
        """Learn from a step that was to draft ``n``."""
        if not n:
            return
        self._steps += 1
        self._samples[n] += 1
        for i in range(min(drafted, accepted + 1)):
            self._tried[i] = _FORGET * self._tried[i] + 1
            self._hit[i] = _FORGET * self._hit[i] + (i < accepted)
        if drafted == n:
            # The first steps of a size build its graph and would be remembered as slow.
            old = self._cost.get(n) if self._samples[n] > 2 else None
            blend = seconds if old is None else _COST_FORGET * old + (1 - _COST_FORGET) * seconds
            self._cost[n] = min(blend, 3 * old) if old is not None else blend
        self._best = max(range(1, self.n_max + 1), key=self._rate)

    def expected(self, n: int) -> float:
        """Tokens per step with ``n`` drafts."""
        total, reach = 1.0, 1.0
        for i in range(n):
            reach *= self._hit[i] / self._tried[i] if self._tried[i] else 0.5
            total += reach
        return total

    def _rate(self, n: int) -> float:
        cost = self._cost.get(n)
        return self.expected(n) / cost if cost else 0.0
