"""The machine's probe: a small llama-server that is asked for plain steps between requests.

It holds the embedded target, a few MiB, and does what the measured server does (the same engine,
the same threads), so it feels what that one feels. A request for two tokens makes one plain step
after its prompt; the median over a few of them is the answer. While nobody asks it sleeps.

The boundary: this owns the server and its clock; what the figure means is ``pace``'s.

Example:
    >>> async with reference_server(build, log_path) as pacer:      # doctest: +SKIP
    ...     await pacer.take()
    1.12
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from browndwarf.engine.client import LlamaClient
from browndwarf.engine.locate import Build
from browndwarf.engine.options import ServerOptions
from browndwarf.engine.process import LlamaServer
from browndwarf.errors import EngineError, ModelError
from browndwarf.models.resolve import resolve_model
from browndwarf.sweep.pace import Pacer

#: Steps whose median is one answer, and seconds after which no further one is asked for.
STEPS = 6
PATIENCE_S = 0.1
#: An answer holds for so many seconds. Machines were seen to change their pace within a cell.
FRESH_S = 0.03
PROMPT = "The old boat"


class ReferencePacer:
    """Asks ``step`` for the milliseconds of one plain step; see ``pace.Pacer``."""

    def __init__(
        self,
        step: Callable[[], Awaitable[float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._step, self._clock = step, clock
        self._known: tuple[float, float] | None = None

    async def take(self) -> float:
        """The median of a few steps, or the last answer while it is fresh."""
        start = self._clock()
        if self._known is not None and start - self._known[0] < FRESH_S:
            return self._known[1]
        times = [await self._step()]
        while len(times) < STEPS and self._clock() - start < PATIENCE_S:
            times.append(await self._step())
        self._known = self._clock(), statistics.median(times)
        return self._known[1]


@asynccontextmanager
async def reference_server(
    build: Build, log_path: Path, *, threads: int | None = None
) -> AsyncIterator[Pacer | None]:
    """A running reference server as a pacer; None where it cannot be started: cells are then
    measured without a probe."""
    async with AsyncExitStack() as stack:
        try:
            options = ServerOptions(
                model=str(resolve_model("demo")), ctx=256, threads=threads, metrics=False
            )
            server = await stack.enter_async_context(LlamaServer(build, options, log_path=log_path))
            client = await stack.enter_async_context(LlamaClient(server.base_url))

            async def step() -> float:
                answer = await client.completion(
                    PROMPT,
                    n_predict=2,
                    temperature=0.0,
                    seed=1,
                    ignore_eos=True,
                    cache_prompt=True,
                    return_tokens=False,
                )
                return answer.timings.predicted_ms

            await step()
            pacer = ReferencePacer(step)
        except (EngineError, ModelError):
            yield None
            return
        yield pacer
