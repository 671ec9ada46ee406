"""The sweep itself: walk the groups, measure what is missing, save every cell at once.

A full sweep measures group by group: the no-MTP baseline, the candidates, the baseline again. A
fast one asks ``search`` what to measure next. Both end with the best few and their baselines side
by side, twice. A server is started once per configuration. Whatever was saved before is not
measured again, except cells that failed. A fault of one server costs its own cells only; a fault
of the disk or a busy machine stops the sweep with everything saved.

The boundary: ``Engine`` starts servers and ``Quiet`` watches the machine (``served``); both are
given, so that fakes fit. Progress goes to a listener as events; nothing is printed here.

Example:
    >>> await run_sweep(plan, store, engine, listen=print)         # doctest: +SKIP
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from browndwarf.errors import EngineError, EngineNotFound, ModelError, ServerError
from browndwarf.records import CellRecord
from browndwarf.sweep.analysis import analyse, configuration_of, grid, to_confirm
from browndwarf.sweep.cell import Job, failed, measure, predicted, unmeasured
from browndwarf.sweep.cliff import spilled
from browndwarf.sweep.events import Again, CellDone, Finished, Listener, Measuring, Started
from browndwarf.sweep.model import FactorModel
from browndwarf.sweep.pace import Pace, Pacer, Tempo
from browndwarf.sweep.planned import SweepPlan, confirm_jobs, group_jobs
from browndwarf.sweep.search import (
    REFINEMENTS,
    Estimate,
    estimates,
    exploration_cells,
    explored_groups,
    finalists,
    next_step,
)
from browndwarf.sweep.served import Engine, Observer, Quiet, Served
from browndwarf.sweep.space import Configuration, Group, cell_id
from browndwarf.sweep.store import RunStore
from browndwarf.sweep.workload import Workload, for_steps

#: How often a cell is measured at most when others disturb it.
ATTEMPTS = 3
#: How many are confirmed beside their baselines.
CONFIRMED = 3
#: How long one of a fast sweep's first cells waits for the machine's fast pace, in seconds: all
#: else rests on it.
EXPLORING_WAIT_S = 20.0
#: Marks that another try may lift.
WORTH_A_RETRY = frozenset({"busy", "unsteady"})


async def measure_jobs(
    plan: SweepPlan,
    store: RunStore,
    engine: Engine,
    quiet: Quiet,
    jobs: Iterable[Job],
    *,
    go_on: Callable[[], bool] = lambda: True,
    listen: Listener = lambda _: None,
) -> tuple[CellRecord, ...]:
    """Measure just these jobs, in this order, while ``go_on``; return all cells of the store.

    Raises:
        StorageError, MachineBusy, EngineNotFound: as ``run_sweep``.
    """
    async with engine.pacing(store.directory / "logs" / "pace.log") as pacer:
        walk = _Walk(plan, store, engine, quiet, listen, pacer)
        for job in jobs:
            if not go_on():
                break
            await walk.job(job, plan.workloads)
    return store.cells()


async def run_sweep(
    plan: SweepPlan,
    store: RunStore,
    engine: Engine,
    quiet: Quiet,
    listen: Listener = lambda _: None,
) -> tuple[CellRecord, ...]:
    """Measure every cell of the plan that the store lacks; return all cells.

    Raises:
        StorageError, MachineBusy, EngineNotFound: the sweep stops; saved cells stay.
    """
    async with engine.pacing(store.directory / "logs" / "pace.log") as pacer:
        return await _Walk(plan, store, engine, quiet, listen, pacer).run()


class _Walk:
    """One pass over the plan."""

    def __init__(
        self,
        plan: SweepPlan,
        store: RunStore,
        engine: Engine,
        quiet: Quiet,
        listen: Listener,
        pacer: Pacer | None,
    ) -> None:
        self._plan, self._store, self._engine = plan, store, engine
        self._quiet, self._listen = quiet, listen
        self._tempo = Tempo(pacer) if pacer is not None else None
        self._have = {c.id: c for c in store.cells() if c.status not in ("failed", "predicted")}
        self._seen = dict(self._have)
        self._total = plan.grid_cells
        self._measured, self._exploring = 0, plan.fast
        self._generating = sum(c.generating_s for c in self._have.values())
        self._clock = time.perf_counter()
        self._earlier_wall: float = store.meta("wall_s") or 0.0

    async def run(self) -> tuple[CellRecord, ...]:
        self._listen(Started(self._total, len(self._have)))
        if self._plan.fast:
            await self._explore()
        else:
            if self._engine.device_mib is not None:
                # The reference that a spill is seen against.
                await self._batch_curves(self._plan.axes.groups())
            for job in self._plan.jobs():
                await self.job(job, self._plan.workloads)
        await self._slow_ones_again()
        self._exploring = False
        if self._plan.confirm:
            jobs = confirm_jobs(self._best())
            self._total += len(jobs) * len(self._plan.workloads)
            for job in jobs:
                await self.job(job, self._plan.workloads)
        if self._plan.fast:
            self._predict()
        wall, share = self._overhead()
        self._store.write_csv()
        self._listen(Finished(wall, share))
        return self._store.cells()

    async def _explore(self) -> None:
        """Measure what settles most, until the winner is separated or the budget is spent."""
        names, plain = [w.name for w in self._plan.workloads], for_steps(self._plan.workloads)
        explored = exploration_cells(self._plan.axes, names, plain)
        self._total = max(explored + REFINEMENTS * len(names), len(self._have))
        while not self._budget_spent():
            groups = explored_groups(self._plan.axes, list(self._seen.values()))
            curves = await self._batch_curves(groups)
            step = next_step(
                self._plan.axes,
                names,
                list(self._seen.values()),
                curves,
                plain=plain,
                allow_busy=self._plan.allow_busy,
            )
            if step is None:
                break
            chosen = [w for w in self._plan.workloads if w.name in step.workloads]
            await self.job(step.job, chosen)
        self._total = len(self._have)

    async def _slow_ones_again(self) -> None:
        """Measure once more what ran while the machine was slow: it may be faster now.

        Of few cells each counts for much, and evening out is a makeshift.
        """
        if not self._plan.patient:
            return
        pace = Pace(self._seen.values())
        slow = [c for c in grid(self._seen.values()) if c.attempts == 1 and pace.slow(c)]
        if slow:
            self._listen(Again(len(slow)))
        by_job: dict[Job, list[Workload]] = {}
        for cell in slow:
            job = Job(configuration=configuration_of(cell), role=cell.role, group=cell.group)
            named = [w for w in self._plan.workloads if w.name == cell.workload]
            by_job.setdefault(job, []).extend(named)
        for job, workloads in by_job.items():
            if self._budget_spent():
                return
            await self._configuration(job, workloads)

    @property
    def _patience_s(self) -> float | None:
        """How long a cell waits for the fast pace; None is what is usual."""
        if not self._plan.patient:
            return 0.0
        return EXPLORING_WAIT_S if self._exploring else None

    def _better(self, cell: CellRecord) -> CellRecord:
        """Of a cell and its earlier measurement the one that ran more at the fast pace."""
        earlier = self._seen.get(cell.id)
        if earlier is None or earlier.status != "ok":
            return cell
        pace = Pace([*self._seen.values(), cell])
        chosen = max(cell, earlier, key=pace.fast_share)
        return msgspec.structs.replace(chosen, attempts=earlier.attempts + cell.attempts)

    async def _batch_curves(self, groups: Sequence[Group]) -> dict[str, tuple[float, ...]]:
        """Per group, the cost of batches of 1 to n_max + 1 tokens; measured once per run."""
        curves: dict[str, tuple[float, ...]] = {
            name: tuple(values) for name, values in (self._store.meta("curves") or {}).items()
        }
        deepest = max(self._plan.axes.n_max, default=0)
        missing = [group for group in groups if group.label not in curves and deepest]
        for group in missing:
            # Sampling is no part of the batch that is timed.
            same = msgspec.structs.replace(group.baseline, backend_sampling=False)
            if same.group_label() not in curves:
                curves[same.group_label()] = await self._batch_curve(same, deepest + 1)
            curves[group.label] = curves[same.group_label()]
        if missing:
            self._store.set_meta("curves", curves)
        return curves

    async def _batch_curve(self, base: Configuration, tokens: int) -> tuple[float, ...]:
        if not self._plan.allow_busy:
            await self._quiet.settle()
        try:
            await self._engine.prepare(base)
            return await self._engine.batch_curve(base, tokens, self._tempo)
        except (EngineError, ModelError):
            return ()  # its cells will say what is wrong

    def _budget_spent(self) -> bool:
        limit = self._plan.budget_s
        return limit is not None and time.perf_counter() - self._clock >= limit

    def _best(self) -> Sequence[Configuration]:
        """Whom to confirm: the fastest measured ones, or by the model in a fast sweep."""
        if not self._plan.fast:
            cells = grid(self._store.cells())
            return to_confirm(analyse(cells, allow_busy=self._plan.allow_busy))
        fitting = (c for c in finalists(self._estimates()) if self._may_fit(c))
        chosen = list(itertools.islice(fitting, CONFIRMED))
        wanted = {c.baseline(): None for c in chosen} | dict.fromkeys(chosen)
        return tuple(wanted) if len(wanted) > 1 else ()

    def _may_fit(self, configuration: Configuration) -> bool:
        return self._plan.try_anyway or self._engine.does_not_fit(configuration) is None

    def _estimates(self) -> list[Estimate]:
        # The grid alone, so that a resumed run confirms the same ones.
        cells = grid(self._seen.values())
        names = [w.name for w in self._plan.workloads]
        return estimates(
            self._plan.axes,
            names,
            cells,
            self._store.meta("curves") or {},
            allow_busy=self._plan.allow_busy,
        )

    def _predict(self) -> None:
        """Save what the model expects of the cells that were not run."""
        cells = self._store.cells()
        model = FactorModel(
            cells, self._store.meta("curves") or {}, allow_busy=self._plan.allow_busy
        )
        known = {(configuration_of(c).key(), c.workload) for c in cells if c.status != "predicted"}
        tight = any(c.status == "does-not-fit" for c in cells)
        for group in self._plan.axes.groups():
            for job in group_jobs(group):
                if job.role == "baseline-again":
                    continue
                missing = [
                    w
                    for w in self._plan.workloads
                    if (job.configuration.key(), w.name) not in known
                ]
                # Where memory is tight a prediction is worth nothing without the budget's word.
                if missing and tight and self._does_not_fit(job, missing):
                    continue
                for workload in missing:
                    made = model.predict(job.configuration, workload.name)
                    if made is not None:
                        cell = self._labelled(predicted(job, workload.name, made))
                        self._store.save(cell, flush=False)

    async def job(self, job: Job, workloads: Sequence[Workload]) -> None:
        """Measure what the store lacks of a job."""
        missing = [w for w in workloads if _id(job, w) not in self._have]
        if missing:
            await self._configuration(job, missing)

    async def _configuration(self, job: Job, workloads: list[Workload]) -> None:
        if not self._plan.allow_busy:
            await self._quiet.settle()
        self._listen(Measuring(job))
        left = list(workloads)
        log_path = self._store.directory / "logs" / f"{_id(job, workloads[0])}.log"
        try:
            await self._engine.prepare(job.configuration)
            # Only now: the budget reads the files that were just made.
            if self._does_not_fit(job, workloads):
                return
            async with self._engine.serve(job.configuration, log_path) as served:
                with self._quiet.watch(served) as observe:
                    for index, workload in enumerate(workloads):
                        cell = await self._measure(
                            served, job, workload, observe, warm_up=index == 0
                        )
                        self._save(self._better(cell))
                        left.remove(workload)
        except EngineNotFound:
            raise
        except (EngineError, ModelError) as error:
            # This configuration's fault, not the sweep's: say so in its cells and go on.
            for workload in left:
                self._save(failed(job, workload.name, error, seed=self._plan.settings.seed))
        except ExceptionGroup as group:
            # Several slots fail together when the server dies; one reason is enough.
            fault, rest = group.split(ServerError)
            if fault is None or rest is not None:
                raise
            for workload in left:
                self._save(failed(job, workload.name, _first(fault), seed=self._plan.settings.seed))

    async def _measure(
        self, served: Served, job: Job, workload: Workload, observe: Observer, *, warm_up: bool
    ) -> CellRecord:
        """A cell; measured again, a few times at most, when it was disturbed."""
        spent = 0.0
        for attempt in range(1, ATTEMPTS + 1):
            cell = await measure(
                served,
                job,
                workload,
                self._plan.settings,
                warm_up=warm_up and attempt == 1,
                observe=observe,
                tempo=self._tempo,
                wait_s=self._patience_s,
            )
            spent += cell.generating_s
            if self._plan.allow_busy or not WORTH_A_RETRY.intersection(cell.marks):
                break
            if attempt < ATTEMPTS:
                await self._quiet.settle()
        curve = (self._store.meta("curves") or {}).get(job.group, ())
        if spilled(cell, device_mib=self._engine.device_mib, curve=curve):
            cell = msgspec.structs.replace(cell, marks=(*cell.marks, "spilled"))
        return msgspec.structs.replace(cell, attempts=attempt, generating_s=spent)

    def _does_not_fit(self, job: Job, workloads: list[Workload]) -> bool:
        """Ask the budget; record the cells with its figures when it says no."""
        if self._plan.try_anyway:
            return False
        misfit = self._engine.does_not_fit(job.configuration)
        if misfit is None:
            return False
        for workload in workloads:
            self._save(unmeasured(job, workload.name, "does-not-fit", misfit))
        return True

    def _save(self, cell: CellRecord) -> None:
        cell = self._labelled(cell)
        self._store.save(cell)
        self._have[cell.id] = self._seen[cell.id] = cell
        self._measured += 1
        self._generating += cell.generating_s
        self._overhead()
        # A run that goes on by newer rules can confirm more than was counted.
        self._total = max(self._total, len(self._have))
        left = self._total - len(self._have)
        pace = (time.perf_counter() - self._clock) / self._measured
        self._listen(CellDone(cell, len(self._have), self._total, pace * left))

    def _labelled(self, cell: CellRecord) -> CellRecord:
        return msgspec.structs.replace(
            cell, engine_sha=self._engine.sha, synthetic=self._plan.settings.synthetic
        )

    def _overhead(self) -> tuple[float, float]:
        """Wall time so far over all passes, and the share of it that made no tokens."""
        wall = self._earlier_wall + time.perf_counter() - self._clock
        share = max(0.0, 1 - self._generating / wall) if wall else 0.0
        self._store.set_metas({"wall_s": wall, "overhead_share": share})
        return wall, share


def _id(job: Job, workload: Workload) -> str:
    return cell_id(job.configuration, workload.name, job.role)


def _first(group: BaseExceptionGroup[ServerError]) -> ServerError:
    for member in group.exceptions:
        return member if isinstance(member, ServerError) else _first(member)
    raise AssertionError("an exception group is never empty")
