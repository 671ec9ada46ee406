"""Known faults of llama.cpp builds, as data, and the rule that says which apply.

Boundary: knows build numbers and features, runs nothing. A fault either refuses a build for
speculative work or warns; every entry names the upstream change and what to do.

Build numbers are unreliable: a shallow clone calls itself build 1. Where the number says
nothing, features found in ``--help`` bound it from below, and the rest stays unknown.

Example:
    >>> [f.id for f in known_faults(10745, frozenset({"draft-mtp"}), frozenset({"draft-mtp"}), {})]
    ['embedded-head-fails']
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

FIRST_TRUSTED_NUMBER = 100
"""Smaller numbers come from shallow clones and mean nothing."""

# A feature proves that the build is at least this new.
_FEATURE_FLOOR = {"spec-synth-rates": 10435, "spec-synth-len": 10435}

GEMMA4_MTP_NUMBER = 9549
DRAFT_KV_NUMBER = 9318


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One known fault: what goes wrong, what to do, where upstream tells of it."""

    id: str
    what: str
    fix: str
    severity: Literal["refuse", "warn"]
    upstream: str


EMBEDDED_HEAD_FAILS = Fault(
    id="embedded-head-fails",
    what="builds b10741 to b10748 cannot load an MTP head that lies inside the target's file",
    fix="use b10749 or later, or b10740 or earlier",
    severity="refuse",
    upstream="ggml-org/llama.cpp#28159",
)
OLD_SPEC_TYPE = Fault(
    id="old-spec-type",
    what="the speculation type is still called 'mtp': a build from a branch before the merge",
    fix="use a release build (b9193 or later)",
    severity="refuse",
    upstream="ggml-org/llama.cpp#22964",
)
OLD_DEFAULTS = Fault(
    id="old-defaults",
    what="without flags this build drafts 16 tokens and stops at probability 0.75",
    fix="nothing to do here (browndwarf always passes both); mind it in hand-written commands",
    severity="warn",
    upstream="ggml-org/llama.cpp#23269",
)
DRAFT_KV_IGNORED = Fault(
    id="draft-kv-ignored",
    what="the drafter's KV cache stays f16 whatever type is asked for",
    fix="use b9318 or later to quantize the drafter's KV cache",
    severity="warn",
    upstream="llama.cpp b9318",
)
NO_GEMMA4_MTP = Fault(
    id="no-gemma4-mtp",
    what="this build is too old for Gemma 4 heads (gemma4-assistant)",
    fix="use b9549 or later",
    severity="warn",
    upstream="ggml-org/llama.cpp#23398",
)
NUMBER_UNKNOWN = Fault(
    id="number-unknown",
    what="the build does not know its number (shallow clone); faults by number were not checked",
    fix="if a head fails to load, try a release build",
    severity="warn",
    upstream="",
)
OLD_RATE = Fault(
    id="old-rate",
    what="predicted_per_second may count one token too many in builds of this age",
    fix="nothing to do here: browndwarf computes rates from raw times",
    severity="warn",
    upstream="",
)

ALL_FAULTS: tuple[Fault, ...] = (
    EMBEDDED_HEAD_FAILS,
    OLD_SPEC_TYPE,
    OLD_DEFAULTS,
    DRAFT_KV_IGNORED,
    NO_GEMMA4_MTP,
    NUMBER_UNKNOWN,
    OLD_RATE,
)


def trusted_number(number: int | None) -> int | None:
    """The build number, or None where it is missing or a shallow clone's."""
    return number if number is not None and number >= FIRST_TRUSTED_NUMBER else None


def number_floor(number: int | None, features: frozenset[str]) -> int | None:
    """The build is at least this new: its own number, or what a feature proves; else None."""
    trusted = trusted_number(number)
    if trusted is not None:
        return trusted
    return max((n for name, n in _FEATURE_FLOOR.items() if name in features), default=None)


def known_faults(
    number: int | None,
    features: frozenset[str],
    spec_types: frozenset[str],
    defaults: Mapping[str, str],
) -> tuple[Fault, ...]:
    """Faults of a build, most serious first.

    Args:
        number: the build number as printed, or None.
        features: see ``probe.features_of``.
        spec_types: what ``--spec-type`` accepts.
        defaults: flag -> default as the help text states it.
    """
    found: list[Fault] = []
    trusted = trusted_number(number)
    floor = number_floor(number, features)
    if trusted is not None and 10741 <= trusted <= 10748:
        found.append(EMBEDDED_HEAD_FAILS)
    if "mtp" in spec_types and "draft-mtp" not in spec_types:
        found.append(OLD_SPEC_TYPE)
    if "draft-mtp" in features:
        if defaults.get("--spec-draft-n-max") == "16":
            found.append(OLD_DEFAULTS)
        if trusted is not None and trusted < DRAFT_KV_NUMBER:
            found.append(DRAFT_KV_IGNORED)
        if trusted is not None and trusted < GEMMA4_MTP_NUMBER:
            found.append(NO_GEMMA4_MTP)
        if floor is None or floor < 10435:
            found.append(OLD_RATE)
        if trusted is None:
            found.append(NUMBER_UNKNOWN)
    return tuple(sorted(found, key=lambda fault: fault.severity != "refuse"))
