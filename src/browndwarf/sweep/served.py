"""What the sweep needs of a running server, and how it is asked: protocols and settings.

The boundary: no server is started or spoken to here; ``executor`` binds these to llama-server,
tests to fakes.

Example:
    >>> Settings(repeats=5).prompts
    4
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from browndwarf.sweep.pace import Pacer, Tempo
from browndwarf.sweep.space import Configuration
from browndwarf.sweep.workload import Prompt

#: Relative standard error of a cell's cycle time that is good enough.
PRECISION = 0.02


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How cells are measured; the same for all cells of a run.

    ``precision``: the relative standard error of a cell's cycle time from which on it is not
    repeated more often than ``repeats`` says; 0 never repeats more often.
    """

    repeats: int = 3
    precision: float = PRECISION
    prompts: int = 4
    n_predict: int = 128
    temperature: float = 0.0
    seed: int = 1
    ignore_eos: bool = True
    request_timeout_s: float = 600.0
    synthetic: bool = False


@dataclass(frozen=True)
class Observation:
    """What was seen beside a cell: marks, memory in MiB, and other figures (power, heat)."""

    marks: tuple[str, ...] = ()
    memory: dict[str, float] = field(default_factory=dict)
    watch: dict[str, float] = field(default_factory=dict)


#: Called after a cell: what was seen since it was last called.
Observer = Callable[[], Observation]


class Timings(Protocol):
    """llama-server's ``timings`` of one request."""

    @property
    def cache_n(self) -> int: ...
    @property
    def prompt_n(self) -> int: ...
    @property
    def prompt_ms(self) -> float: ...
    @property
    def predicted_n(self) -> int: ...
    @property
    def predicted_ms(self) -> float: ...
    @property
    def draft_n(self) -> int: ...
    @property
    def draft_n_accepted(self) -> int: ...


class Answer(Protocol):
    """One finished completion."""

    @property
    def text(self) -> str: ...
    @property
    def timings(self) -> Timings: ...
    @property
    def ttft_s(self) -> float: ...
    @property
    def total_s(self) -> float: ...
    @property
    def stop(self) -> str: ...


class Counters(Protocol):
    """The server's speculative counters since its start."""

    @property
    def drafts(self) -> int: ...
    @property
    def draft_tokens(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def per_position(self) -> Sequence[int]: ...


class Served(Protocol):
    """A running server, as a cell sees it."""

    @property
    def load_s(self) -> float: ...
    @property
    def pid(self) -> int: ...

    async def render(self, prompt: Prompt) -> str:
        """The prompt's final text, through the model's chat template where it has messages."""

    async def complete(self, text: str, *, settings: Settings, n_predict: int, seed: int) -> Answer:
        """One completion with the prompt cache off. Raises a ServerError when it fails."""

    async def counters(self) -> Counters: ...

    def memory(self) -> dict[str, float]:
        """MiB by kind of buffer as the server logged it, and their sum as ``buffers``."""


class Quiet(Protocol):
    """Knows whether other work takes the machine."""

    async def settle(self) -> None:
        """Wait until the machine is quiet. Raises MachineBusy when it does not become so."""

    def watch(self, served: Served) -> AbstractContextManager[Observer]:
        """Watch the machine beside this server while the context is open."""


class Engine(Protocol):
    """Starts a server for a configuration."""

    @property
    def sha(self) -> str: ...

    @property
    def device_mib(self) -> float | None:
        """Memory of the one device in use; None without one, or with several."""

    async def prepare(self, configuration: Configuration) -> None:
        """Make the files that the configuration needs. Raises ToolFailed or DiskFull."""

    def serve(
        self, configuration: Configuration, log_path: Path
    ) -> AbstractAsyncContextManager[Served]: ...

    def pacing(self, log_path: Path) -> AbstractAsyncContextManager[Pacer | None]:
        """A probe of the machine's speed while the context is open; None without one."""

    async def batch_curve(
        self, configuration: Configuration, tokens: int, tempo: Tempo | None = None
    ) -> tuple[float, ...]:
        """Milliseconds of a batch of 1 to ``tokens`` tokens; empty where it cannot be told.
        ``tempo`` waits for the machine's fast pace, and evens them out."""

    def does_not_fit(self, configuration: Configuration) -> dict[str, str] | None:
        """Why the configuration cannot fit, as an error record; None when it may."""
