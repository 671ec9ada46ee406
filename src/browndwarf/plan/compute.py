"""Compute buffers: asked from the engine, or estimated where its library does not load.

``ComputeSource`` is the seam. ``DryCompute`` has llama.cpp reserve its graphs without memory
(``engine.dryalloc``), in a worker, for many settings at once; the graphs of a CPU library gave
the very figures of a CUDA build in every case compared (docs/memory.md), so they stand for both.
``FittedCompute`` (``fitted``) is a model of the same graphs for when there is no library.

Example:
    with DryCompute(DryModels(target="t.gguf")) as source:
        source.sizes([setup, setup.with_(ubatch=256)])
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from browndwarf.engine.dryalloc import DryCase, DryModels, DryResult, DrySession
from browndwarf.errors import BrowndwarfError, EngineError
from browndwarf.models.gguf import ModelInfo, read_model
from browndwarf.models.lean import write_lean
from browndwarf.plan.fitted import fitted_draft_mib, fitted_target_mib
from browndwarf.plan.setup import Setup


@dataclass(frozen=True, slots=True)
class ComputeSizes:
    """MiB of the target's and the drafter's compute buffer, and where the figures come from."""

    target_mib: float
    draft_mib: float
    source: str
    exact: bool


class ComputeSource(Protocol):
    """Sizes compute buffers of setups that share their target and head."""

    def sizes(self, setups: Sequence[Setup]) -> list[ComputeSizes]:
        """One answer per setup, in order."""
        ...


class DryCompute:
    """Asks llama.cpp about one target and head; remembers answers. Close it after use.

    Where the file system allows it, llama.cpp is given headers without vocabularies
    (``models.lean``): they size the same buffers in half the time.

    The worker starts at once, so that it loads while the caller goes on. A setting that
    llama.cpp refuses, or all of them when the worker fails, gets the fitted estimate, and the
    source says why.
    """

    def __init__(
        self,
        models: DryModels,
        *,
        lib_path: str | None = None,
        known: Sequence[ModelInfo] = (),
    ) -> None:
        """``known`` are models whose headers the caller has read already."""
        self._known: dict[DryCase, DryResult] = {}
        self._version = ""
        self._fault = ""
        self._fallback = FittedCompute()
        self._session: DrySession | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="browndwarf-plan-")
        try:
            lean = _lean(models, Path(self._folder.name), {str(m.path): m for m in known})
            self._session = DrySession(lean, lib_path=lib_path)
        except EngineError as exc:
            self._fault = exc.why

    def sizes(self, setups: Sequence[Setup]) -> list[ComputeSizes]:
        """See ``ComputeSource``."""
        cases = {_case(setup) for setup in setups}
        missing = [case for case in cases if case not in self._known]
        if missing and self._session is not None:
            try:
                reply = self._session.ask(missing)
            except EngineError as exc:
                self._fault = exc.why
                self._session = None
            else:
                self._version = reply.version
                self._known.update(zip(missing, reply.cases, strict=True))
        return [self._answer(setup) for setup in setups]

    def close(self) -> None:
        """End the worker; answers stay known."""
        if self._session is not None:
            self._session.close()
            self._session = None
            self._fault = self._fault or "the worker was closed"
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _answer(self, setup: Setup) -> ComputeSizes:
        result = self._known.get(_case(setup))
        if result is None or result.error:
            guess = self._fallback.sizes([setup])[0]
            why = self._fault if result is None else result.error
            source = f"{guess.source}; {why[:160]}" if why else guess.source
            return ComputeSizes(guess.target_mib, guess.draft_mib, source, False)
        return ComputeSizes(
            _largest(result.compute),
            _largest(result.draft_compute),
            f"llama.cpp, dry allocation (llama-cpp-python {self._version})",
            True,
        )


class FittedCompute:
    """The estimate of ``fitted``; no engine needed."""

    def sizes(self, setups: Sequence[Setup]) -> list[ComputeSizes]:
        """See ``ComputeSource``."""
        return [
            ComputeSizes(
                fitted_target_mib(setup),
                fitted_draft_mib(setup),
                "fitted estimate",
                False,
            )
            for setup in setups
        ]


def _lean(models: DryModels, folder: Path, known: dict[str, ModelInfo]) -> DryModels:
    """The same models as lean copies; unchanged where that cannot be.

    Not on Windows, where a file's length is allocated when it is set, and not for split models.
    """
    if os.name != "posix":
        return models
    made: list[str | None] = []
    for name, path in (("target.gguf", models.target), ("head.gguf", models.head)):
        if path is None:
            made.append(None)
            continue
        try:
            info = known.get(path) or read_model(path)
            if len(info.files) > 1:
                return models
            write_lean(info.path, folder / name, vocab=info.vocab)
        except (BrowndwarfError, OSError):
            return models
        made.append(str(folder / name))
    return msgspec.structs.replace(models, target=str(made[0]), head=made[1])


def _largest(by_device: dict[str, float]) -> float:
    """The device's buffer; a second one is the host's staging buffer, which is smaller."""
    return max(by_device.values(), default=0.0)


def _case(setup: Setup) -> DryCase:
    return DryCase(
        n_ctx=setup.n_ctx,
        parallel=setup.parallel,
        unified=setup.unified,
        batch=setup.batch,
        ubatch=setup.ubatch,
        type_k=setup.kv_k,
        type_v=setup.kv_v,
        draft=setup.draft,
        draft_type_k=setup.draft_kv_k,
        draft_type_v=setup.draft_kv_v,
        n_max=setup.n_max,
        swa_full=setup.swa_full,
        flash_attention=setup.flash_attention,
    )
