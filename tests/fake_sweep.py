"""A fake engine for the sweep: no process, made-up but consistent timings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from browndwarf.errors import BrowndwarfError, ServerCrashed
from browndwarf.sweep.pace import Pacer, Tempo
from browndwarf.sweep.planned import SweepPlan
from browndwarf.sweep.served import Observation, Observer, Served, Settings
from browndwarf.sweep.space import Axes, Configuration
from browndwarf.sweep.workload import Prompt, Workload


@dataclass
class FakeTimings:
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    draft_n: int = 0
    draft_n_accepted: int = 0
    cache_n: int = 0


@dataclass
class FakeAnswer:
    text: str
    timings: FakeTimings
    ttft_s: float = 0.01
    total_s: float = 0.1
    stop: str = "limit"


@dataclass
class FakeCounters:
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()


@dataclass
class FakeServed:
    """``ms_per_step``, and ``growth`` for each token of the prompt; every draft's first token is
    accepted."""

    configuration: Configuration
    ms_per_step: float
    fail_at: int | None = None
    drafts_nothing: bool = False
    cache_n: int = 0
    accept: bool = True
    slow_every: int = 0
    growth: float = 0.0
    load_s: float = 0.01
    pid: int = 0
    requests: list[str] = field(default_factory=list)
    total: FakeCounters = field(default_factory=FakeCounters)

    async def render(self, prompt: Prompt) -> str:
        return prompt.prompt or str(prompt.messages[-1]["content"])

    async def complete(
        self, text: str, *, settings: Settings, n_predict: int, seed: int
    ) -> FakeAnswer:
        if self.fail_at is not None and len(self.requests) >= self.fail_at:
            raise ServerCrashed("the server died", why="signal 11", fix="look at the log")
        self.requests.append(text)
        n_max = 0 if self.drafts_nothing else self.configuration.n_max
        length = max(10, len(text) // 4)
        ms = self.ms_per_step + self.growth * length
        if not n_max:
            timings = FakeTimings(length, 5.0, n_predict, ms * (n_predict - 1))
        else:
            accepted = (n_predict - 1) // 2 if self.accept else 0
            steps = n_predict - 1 - accepted
            timings = FakeTimings(length, 5.0, n_predict, ms * steps, steps * n_max, accepted)
            self.total = FakeCounters(
                self.total.drafts + steps,
                self.total.draft_tokens + steps * n_max,
                self.total.accepted + accepted,
                (self.total.accepted + accepted, *[0] * (n_max - 1)),
            )
        timings.cache_n = self.cache_n
        if self.slow_every and len(self.requests) % self.slow_every == 0:
            timings.predicted_ms *= 3
        return FakeAnswer(f"{text} {seed}", timings)

    async def counters(self) -> FakeCounters:
        return self.total

    def memory(self) -> dict[str, float]:
        return {"weights": 10.0, "total": 12.0}


@dataclass
class FakeEngine:
    """Serves every configuration; ``spoil`` may change a server before it is used."""

    spoil: Callable[[FakeServed], None] = lambda _: None
    fail_start: Callable[[Configuration], BrowndwarfError | None] = lambda _: None
    misfit: Callable[[Configuration], dict[str, str] | None] = lambda _: None
    sha: str = "abc"
    device_mib: float | None = None
    pacer: Pacer | None = None
    started: list[Configuration] = field(default_factory=list)

    async def prepare(self, configuration: Configuration) -> None:
        pass

    @asynccontextmanager
    async def pacing(self, log_path: Path) -> AsyncIterator[Pacer | None]:
        yield self.pacer

    async def batch_curve(
        self, configuration: Configuration, tokens: int, tempo: Tempo | None = None
    ) -> tuple[float, ...]:
        return tuple(1.0 for _ in range(tokens))

    def does_not_fit(self, configuration: Configuration) -> dict[str, str] | None:
        return self.misfit(configuration)

    def serve(
        self, configuration: Configuration, log_path: Path
    ) -> AbstractAsyncContextManager[Served]:
        return self._serve(configuration)

    @asynccontextmanager
    async def _serve(self, configuration: Configuration) -> AsyncIterator[Served]:
        self.started.append(configuration)
        fault = self.fail_start(configuration)
        if fault is not None:
            raise fault
        served = FakeServed(configuration, 1.0 + 0.1 * configuration.n_max)
        self.spoil(served)
        yield served


class FakeQuiet:
    """A machine that is quiet, or as busy as it is told."""

    def __init__(
        self,
        error: BrowndwarfError | None = None,
        disturbed: bool = False,
        disturbances: int | None = None,
    ) -> None:
        self.error, self.disturbed, self.disturbances = error, disturbed, disturbances

    async def settle(self) -> None:
        if self.error is not None:
            raise self.error

    @contextmanager
    def watch(self, served: Served) -> Iterator[Observer]:
        yield self._observe

    def _observe(self) -> Observation:
        if self.disturbances is not None:
            self.disturbances -= 1
            self.disturbed = self.disturbances >= 0
        return Observation(marks=("busy",) if self.disturbed else ())


def plan(**axes: object) -> SweepPlan:
    """A small plan: one target, one head, n_max 1 and 2, two workloads of two prompts."""
    values = {"target_type": ("Q4_0",), "head_type": ("Q6_K",), "n_max": (1, 2)} | axes
    prompts = tuple(Prompt(id=f"p{i}", prompt=f"text {i}") for i in range(2))
    return SweepPlan(
        model="m.gguf",
        draft="h.gguf",
        axes=Axes(**values),  # type: ignore[arg-type]
        workloads=(
            Workload(name="prose", prompts=prompts),
            Workload(name="code", prompts=prompts),
        ),
        settings=Settings(repeats=3, prompts=2, n_predict=21),
        confirm=False,
    )
