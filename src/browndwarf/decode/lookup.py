"""Drafts without a head: what followed the same few tokens earlier in the conversation.

Example:
    >>> look = Lookup()
    >>> look.draft([1, 2, 3, 4, 1, 2, 3], 2)
    [4, 1]
"""

from __future__ import annotations

_LONGEST, _SHORTEST = 3, 2


class Lookup:
    """An index over one growing list of tokens; it follows cuts of the list by itself."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        self._seen: list[int] = []

    def draft(self, tokens: list[int], n: int) -> list[int]:
        """Up to ``n`` tokens that may follow; empty when the end is new."""
        self._follow(tokens)
        for width in range(_LONGEST, _SHORTEST - 1, -1):
            if len(tokens) <= width:
                continue
            place = self._places.get(tuple(tokens[-width:]))
            if place is not None and place < len(tokens):
                return tokens[place : place + n]
        return []

    def _follow(self, tokens: list[int]) -> None:
        """Index every group of tokens by the place that follows it, the last one excepted."""
        done = len(self._seen)
        if done > len(tokens) or self._seen[-8:] != tokens[max(0, done - 8) : done]:
            self._places.clear()
            self._seen.clear()
            done = 0
        for end in range(max(done, 1), len(tokens)):
            for width in range(_SHORTEST, _LONGEST + 1):
                if end >= width:
                    self._places[tuple(tokens[end - width : end])] = end
        self._seen.extend(tokens[done:])
