"""Axes and cells: what a sweep may vary, and in which order it is measured.

A ``Configuration`` is one way to start llama-server. Configurations that differ only in the
speculative part (head type, n_max, p_min) form a group: they share one no-MTP baseline, which
is measured first and again at the end of the group, so that drift of the machine shows.

The boundary: this module knows names and order, no files and no processes.

Example:
    >>> axes = Axes(target_type=("Q4_0",), head_type=("Q8_0", "Q6_K"), n_max=(1, 2))
    >>> [g.label for g in axes.groups()], len(axes.groups()[0].candidates)
    (['Q4_0'], 4)
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection
from typing import Any

import msgspec

from browndwarf.errors import UsageError

NO_HEAD = "none"
EMBEDDED = "embedded"

#: Axis names that are part of speculation: they don't exist in a baseline.
SPECULATIVE = ("head_type", "n_max", "p_min", "draft_kv")


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """One way to start the server. ``head_type`` None means no speculation.

    ``layers`` None means all on the device; ``kv`` is one cache type, or ``K:V``; ``extra``
    holds other server options as (name, value) pairs, sorted by name.
    """

    target_type: str
    head_type: str | None = None
    n_max: int = 0
    p_min: float | None = None
    layers: int | None = None
    kv: str = "f16"
    draft_kv: str | None = None
    ctx: int = 4096
    parallel: int = 1
    ubatch: int | None = None
    backend_sampling: bool = False
    threads: int | None = None
    extra: tuple[tuple[str, str], ...] = ()

    @property
    def speculative(self) -> bool:
        """Whether this configuration drafts at all."""
        return self.head_type is not None

    @property
    def kv_pair(self) -> tuple[str, str]:
        """Cache types of K and of V."""
        k, _, v = self.kv.partition(":")
        return k, v or k

    def baseline(self) -> Configuration:
        """The same machine settings without speculation."""
        return msgspec.structs.replace(self, head_type=None, n_max=0, p_min=None, draft_kv=None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values as JSON knows them, for records."""
        made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return made

    def key(self) -> str:
        """A stable short identity of the settings."""
        canonical = msgspec.json.encode(self, order="sorted")
        return hashlib.sha256(canonical).hexdigest()[:10]

    def label(self, hide: Collection[str] = ()) -> str:
        """Short and readable: ``Q4_0 + Q6_K n3``; settings off their defaults are added.

        ``hide`` leaves settings out, given as they are shown (``ctx=2048``).
        """
        head = f"{self.head_type} n{self.n_max}" if self.speculative else "no MTP"
        shown = [text for text in self.settings() if text not in hide]
        return " ".join([f"{self.target_type} + {head}", *shown])

    def settings(self) -> list[str]:
        """Settings off their defaults, beside types, head and n_max: ``["ctx=2048"]``."""
        return self._settings(speculative=True)

    def group_label(self, hide: Collection[str] = ()) -> str:
        """The label of what a baseline and its candidates share."""
        shown = [text for text in self._settings(speculative=False) if text not in hide]
        return " ".join([self.target_type, *shown])

    def _settings(self, *, speculative: bool) -> list[str]:
        defaults = Configuration(target_type="")
        skip = {"target_type", "head_type", "n_max", "extra"}
        if not speculative:
            skip |= set(SPECULATIVE)
        parts = [
            f"{name}={getattr(self, name)}"
            for name in self.__struct_fields__
            if name not in skip and getattr(self, name) != getattr(defaults, name)
        ]
        return parts + [f"{name}={value}" for name, value in self.extra]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A baseline and the speculative configurations that are compared with it."""

    baseline: Configuration
    candidates: tuple[Configuration, ...]

    @property
    def label(self) -> str:
        """Readable name, e.g. ``Q4_0 kv=q8_0``."""
        return self.baseline.group_label()


class Axes(msgspec.Struct, frozen=True, kw_only=True):
    """The values of every axis; the grid is their product.

    ``head_type`` may contain ``none`` (the baseline is measured in any case) or ``embedded``
    for a head inside the target's file. ``n_max`` 0 is the baseline as well.
    """

    target_type: tuple[str, ...]
    head_type: tuple[str, ...] = ()
    n_max: tuple[int, ...] = (1, 2, 3, 4)
    p_min: tuple[float | None, ...] = (None,)
    layers: tuple[int | None, ...] = (None,)
    kv: tuple[str, ...] = ("f16",)
    draft_kv: tuple[str | None, ...] = (None,)
    ctx: tuple[int, ...] = (4096,)
    parallel: tuple[int, ...] = (1,)
    ubatch: tuple[int | None, ...] = (None,)
    backend_sampling: tuple[bool, ...] = (False,)
    threads: tuple[int | None, ...] = (None,)
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def groups(self) -> tuple[Group, ...]:
        """All groups, in axis order; inside a group the candidates by head, n_max, p_min."""
        return tuple(self._group(base) for base in self._baselines())

    def _baselines(self) -> list[Configuration]:
        shared = ("target_type", "layers", "kv", "ctx", "parallel", "ubatch",
                  "backend_sampling", "threads")  # fmt: skip
        names = sorted(name for name, _ in self.extra)
        if len(set(names)) != len(names):
            raise UsageError(
                "an axis is given twice",
                why=f"axes: {', '.join(names)}",
                fix="write all values of an axis in one --axis NAME=v1,v2",
            )
        extra_values = [dict(self.extra)[name] for name in names]
        found: dict[str, Configuration] = {}
        for values in itertools.product(*(getattr(self, name) for name in shared)):
            for pairs in itertools.product(*extra_values):
                base = Configuration(
                    **dict(zip(shared, values, strict=True)),
                    extra=tuple(zip(names, pairs, strict=True)),
                )
                found.setdefault(base.key(), base)
        return list(found.values())

    def _group(self, base: Configuration) -> Group:
        found: dict[str, Configuration] = {}
        for head, n_max, p_min, draft_kv in itertools.product(
            self.head_type, self.n_max, self.p_min, self.draft_kv
        ):
            if head == NO_HEAD or n_max == 0:
                continue
            made = msgspec.structs.replace(
                base, head_type=head, n_max=n_max, p_min=p_min, draft_kv=draft_kv
            )
            found.setdefault(made.key(), made)
        return Group(baseline=base, candidates=tuple(found.values()))


def cell_id(configuration: Configuration, workload: str, role: str) -> str:
    """Identity of a cell inside a run: readable, file-name safe, unique by settings."""
    head = (
        f"{configuration.head_type}.n{configuration.n_max}" if configuration.head_type else "base"
    )
    tail = "" if role in ("baseline", "mtp") else f".{role.removeprefix('baseline-')}"
    return f"{configuration.target_type}.{head}.{workload}.{configuration.key()}{tail}"
