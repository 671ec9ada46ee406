"""What stands behind a recommendation: a lossless check and a smoke test, or their absence.

Boundary: a sweep or a recipe knows only ``LosslessGate``, a function from server options to a
record; ``llama_gate`` makes one for real builds, tests pass a fake. The report names what was not
checked, so that a recipe's header can say it.

Example:
    >>> GateReport(smoke_passed=True).header
    ['checked: two-turn smoke test; not checked: losslessness']
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from browndwarf.engine.locate import Build
from browndwarf.engine.options import ServerOptions
from browndwarf.errors import CheckFailed
from browndwarf.quality.arms import LlamaArms
from browndwarf.quality.lossless import LosslessRecord, Settings, check_lossless
from browndwarf.records import Record

LosslessGate = Callable[[ServerOptions], Coroutine[Any, Any, LosslessRecord]]


class GateReport(Record, frozen=True, kw_only=True):
    """Which checks a setup passed; None for one that was not made.

    ``lossless`` is the record of the check; a setup without speculation needs none
    (``speculative`` False).
    """

    lossless: LosslessRecord | None = None
    smoke_passed: bool | None = None
    speculative: bool = True

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Names of the checks that were not made."""
        missing = []
        if self.speculative and self.lossless is None:
            missing.append("losslessness")
        if self.smoke_passed is None:
            missing.append("two-turn smoke test")
        return tuple(missing)

    @property
    def passed(self) -> bool:
        """Whether every check was made and held: only then a setup is recommended."""
        lossless = not self.speculative or (self.lossless is not None and self.lossless.ok)
        return lossless and bool(self.smoke_passed)

    @property
    def header(self) -> list[str]:
        """Lines for a recipe's header."""
        done = []
        if self.lossless is not None:
            r = self.lossless
            done.append(f"{r.verdict} against plain decoding, {r.identical} of {r.prompts} answers")
        if self.smoke_passed is not None:
            done.append("two-turn smoke test" + ("" if self.smoke_passed else " FAILED"))
        missing = f"; not checked: {', '.join(self.unchecked)}" if self.unchecked else ""
        return [f"checked: {', '.join(done) or 'nothing'}{missing}"]

    def require(self) -> None:
        """Raise CheckFailed unless ``passed``."""
        if self.lossless is not None:
            self.lossless.require()
        if not self.passed:
            failed = [] if self.smoke_passed is not False else ["the smoke test failed"]
            raise CheckFailed(
                "the setup is not recommended",
                why="; ".join([*failed, *(f"{name} was not checked" for name in self.unchecked)]),
                fix="run the missing checks, or print the command without --gate",
            )


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
