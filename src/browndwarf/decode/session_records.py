"""What a session is made of: the conversation at rest, and the small records that the disk holds.

Boundary: data only; ``session`` reads and writes it.

Example:
    Snapshot(tokens=[2, 5], kept=1, rows=rows, states={"target": state})
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from browndwarf.decode.state_delta import StateRecord
from browndwarf.decode.state_layout import Bytes, Layout


@dataclass(slots=True)
class Snapshot:
    """A conversation at rest.

    ``states`` maps ``target`` (and ``head``, where it keeps a cache) to llama.cpp's own form.
    ``unchanged`` is the position before which nothing has changed since this conversation was
    last saved or loaded; ``layouts`` are those of the states that were saved then.
    """

    tokens: list[int]
    kept: int
    rows: np.ndarray[Any, np.dtype[np.float32]]
    states: dict[str, Bytes]
    messages: list[dict[str, Any]] = field(default_factory=list)
    sampler: dict[str, Any] = field(default_factory=dict)
    unchanged: int = 0
    layouts: dict[str, Layout] = field(default_factory=dict)


class Note(msgspec.Struct, frozen=True):
    """A record's small things. Tokens and messages continue the last record's from an index."""

    kept: int
    rows: tuple[int, int]
    tokens_from: int
    messages_from: int
    messages: list[dict[str, Any]]
    sampler: dict[str, Any]
    states: dict[str, StateRecord]


class About(msgspec.Struct, frozen=True):
    """What the manifest says of a session."""

    fingerprint: dict[str, str]
    tokens: int
    messages: int
    saved_unix: float
    full_bytes: int
    title: str = ""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One line of a listing. ``problem`` is set where a session cannot be resumed."""

    name: str
    tokens: int = 0
    messages: int = 0
    bytes: int = 0
    saved_unix: float = 0.0
    title: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save wrote: ``bytes`` now, of a state of ``state_bytes``. ``replay`` tokens are to
    be decoded again on resume."""

    bytes: int
    state_bytes: int
    appended: bool
    replay: int = 0
