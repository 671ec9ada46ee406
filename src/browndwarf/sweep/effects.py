"""What a group costs that was not measured: the sum of what its settings cost one by one.

Layers on the host, a quantized cache and sampling on the device each add milliseconds to a step,
or take some away, and hardly touch each other. So of a grid over several such axes only a star is
measured: one group, and those that differ from it in a single setting. The others are put
together from the differences. That is an assumption; whoever uses it must allow for an error.

Pure: from configurations to numbers.

Example:
    >>> from browndwarf.sweep.space import Axes
    >>> axes = Axes(target_type=("Q4_0",), kv=("f16", "q8_0"), layers=(None, 40))
    >>> a, b, c, d = [group.baseline for group in axes.groups()]
    >>> Effects({a: (10.0,), b: (12.0,), c: (15.0,)}).of(d)
    (17.0,)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from browndwarf.sweep.space import Configuration, Group

Values = tuple[float, ...]
#: A sum of effects is never taken below this share of the smallest measured value.
LEAST_SHARE = 0.2


class Effects:
    """Measured values per baseline; ``of`` adds up what was not measured.

    ``signed``: the values are differences, which may be negative; others are times, of which no
    sum comes near zero.
    """

    def __init__(self, known: Mapping[Configuration, Values], *, signed: bool = False) -> None:
        self._known, self._signed = dict(known), signed

    def measured(self, base: Configuration) -> bool:
        """Whether the values of this group were measured."""
        return base in self._known

    def of(self, base: Configuration) -> Values | None:
        """The group's values, measured or added up; None where a part is missing."""
        if base in self._known:
            return self._known[base]
        best: tuple[int, Values] | None = None
        for reference, values in self._known.items():
            steps = changes(reference, base)
            parts = [self._known.get(msgspec.structs.replace(reference, **s)) for s in steps]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts) or (best is not None and best[0] <= len(steps)):
                continue
            width = min(map(len, (values, *known)))
            made = tuple(
                values[i] + sum(part[i] - values[i] for part in known) for i in range(width)
            )
            best = (len(steps), made)
        if best is None:
            return None
        if self._signed:
            return best[1]
        floor = LEAST_SHARE * min((v[0] for v in self._known.values() if v), default=0.0)
        return tuple(max(value, floor) for value in best[1])


def changes(a: Configuration, b: Configuration) -> list[dict[str, object]]:
    """What turns ``a`` into ``b``, one setting at a time; each extra option counts by itself."""
    found: list[dict[str, object]] = [
        {name: getattr(b, name)}
        for name in a.__struct_fields__
        if name != "extra" and getattr(a, name) != getattr(b, name)
    ]
    mine, theirs = dict(a.extra), dict(b.extra)
    for name, value in theirs.items():
        if mine.get(name) != value:
            found.append({"extra": tuple(sorted({**mine, name: value}.items()))})
    return found


def star(groups: Sequence[Group], centre: int = 0) -> list[Group]:
    """The group at ``centre`` and those that differ from it in one setting."""
    if not groups:
        return []
    middle = groups[centre]
    near = [g for g in groups if len(changes(middle.baseline, g.baseline)) == 1]
    return [middle, *near]
