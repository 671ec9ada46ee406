"""The budget as a gate: may this server be started?

``BudgetGate`` is called with server options, before a server is started for them, and answers
with an error record when the budget says that they cannot fit. It says nothing (None) when it
does not know: a model file that is still to be made, an architecture whose cache is not
understood. It never raises.

Example:
    with BudgetGate(limit, "cuda") as gate:
        gate(ServerOptions(model="t.gguf", ctx=262144))
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from browndwarf.engine.dryalloc import DryModels
from browndwarf.engine.options import ServerOptions
from browndwarf.errors import BrowndwarfError
from browndwarf.models.gguf import ModelInfo, read_model
from browndwarf.plan.compute import ComputeSource, DryCompute
from browndwarf.plan.limits import Limit
from browndwarf.plan.memory import Budget, plan_memory
from browndwarf.plan.setup import Backend, setup_from_options


class BudgetGate:
    """Keeps one worker for the pair of files that it was asked about last."""

    def __init__(
        self, limit: Limit, backend: Backend, *, compute: ComputeSource | None = None
    ) -> None:
        self._limit = limit
        self._backend: Backend = backend
        self._given = compute
        self._worker: DryCompute | None = None
        self._worker_of: DryModels | None = None
        self._models: dict[str, ModelInfo] = {}

    def __call__(self, options: ServerOptions) -> dict[str, str] | None:
        """An error record (kind, what, why, fix) when the options cannot fit."""
        try:
            budget = self.budget(options)
        except BrowndwarfError:
            return None
        if budget.fits or not budget.setup.target.shape.modelled:
            return None
        largest = sorted(budget.lines, key=lambda line: -line.mib)[:4]
        return {
            "kind": "DoesNotFit",
            "what": f"needs {budget.total_mib:.0f} MiB of {self._limit.mib:.0f} MiB",
            "why": ", ".join(f"{line.name} {line.mib:.0f}" for line in largest),
            "fix": "`browndwarf plan` ranks what could be given up; --try-anyway starts it "
            "all the same",
        }

    def budget(self, options: ServerOptions) -> Budget:
        """The budget of these options.

        Raises:
            BrowndwarfError: a file is missing or unfit, or an option impossible.
        """
        target = self._model(options.model)
        head = self._model(options.draft) if options.draft and options.speculative else None
        setup = setup_from_options(options, target, head, backend=self._backend)
        return plan_memory(setup, self._limit, self._given or self._dry(options, head))

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = self._worker_of = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _model(self, path: str) -> ModelInfo:
        if path not in self._models:
            self._models[path] = read_model(path)
        return self._models[path]

    def _dry(self, options: ServerOptions, head: ModelInfo | None) -> DryCompute:
        wanted = DryModels(
            target=options.model,
            head=str(head.path) if head is not None else None,
            gpu_layers=-1 if options.n_gpu_layers is None else options.n_gpu_layers,
        )
        if self._worker is None or self._worker_of != wanted:
            self.close()
            self._worker, self._worker_of = (
                DryCompute(wanted, known=list(self._models.values())),
                wanted,
            )
        return self._worker
