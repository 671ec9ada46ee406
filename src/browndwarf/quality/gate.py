"""The lossless check behind a recommendation, as a function from server options to a record.

Boundary: what a recipe makes of the record, and of a check that was not made, is said in
``sweep.recipe``.

Example:
    >>> record = await llama_gate(build, prompts, log)(options)     # doctest: +SKIP
    >>> record.require()                                            # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from browndwarf.engine.locate import Build
from browndwarf.engine.options import ServerOptions
from browndwarf.quality.arms import LlamaArms
from browndwarf.quality.lossless import LosslessRecord, Settings, check_lossless

LosslessGate = Callable[[ServerOptions], Coroutine[Any, Any, LosslessRecord]]


def llama_gate(
    build: Build,
    prompts: Sequence[object],
    log_path: Path,
    *,
    tokens: int = 64,
    env: Mapping[str, str] | None = None,
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
) -> LosslessGate:
    """A greedy lossless check of whatever options it is given, on one slot."""

    async def gate(options: ServerOptions) -> LosslessRecord:
        one = msgspec.structs.replace(options, parallel=1, verbosity=4)
        return await check_lossless(
            LlamaArms(build, one, log_path, env=env),
            prompts,
            Settings(n_max=options.n_max or 3, tokens=tokens),
            on_progress=on_progress,
        )

    return gate
