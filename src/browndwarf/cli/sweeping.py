"""Compose a sweep from the floors below: what ``sweep``, ``demo`` and ``recipe`` share."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from browndwarf.cli.live import LiveSweep
from browndwarf.cli.machine import devices, memory_here
from browndwarf.cli.render import Output
from browndwarf.cli.runs import run_directory
from browndwarf.engine.locate import Build, choose_build, find_builds
from browndwarf.engine.options import ServerOptions, command_text, server_argv
from browndwarf.engine.process import LoadProgress
from browndwarf.errors import (
    EngineError,
    Interrupted,
    MachineBusy,
    StorageError,
)
from browndwarf.hardware.devices import ListedDevice, machine
from browndwarf.plan.gate import BudgetGate
from browndwarf.records import CellRecord
from browndwarf.sweep.analysis import Standing, Verdict, analyse
from browndwarf.sweep.executor import LocalEngine
from browndwarf.sweep.launch import recipe_options
from browndwarf.sweep.planned import SweepPlan
from browndwarf.sweep.quiet import MachineQuiet
from browndwarf.sweep.recipe import Recipe, choose, compose
from browndwarf.sweep.run import run_sweep
from browndwarf.sweep.setup import Prepared, engine_record, prepare, saved_plan
from browndwarf.sweep.smoke import Smoke, two_turns
from browndwarf.sweep.store import RunStore, RunView, read_run

T = TypeVar("T")

#: Tokens of the smoke test's long prompt, less where the context is small.
SMOKE_TOKENS = 1024


@dataclass(frozen=True)
class Done:
    """A finished sweep with its verdict."""

    directory: Path
    cells: tuple[CellRecord, ...]
    verdict: Verdict

    @property
    def answered(self) -> bool:
        """Whether the question was answered: a winner, and MTP judged where it was asked for."""
        asked = any(cell.head_type is not None for cell in self.cells)
        judged = self.verdict.best(speculative=True) is not None
        return self.verdict.winner is not None and (judged or not asked)


def find_engine(plan: SweepPlan) -> Build:
    """The build that the plan asks for, or the best one here, able to draft.

    Raises:
        EngineNotFound, EngineUnsupported: there is none.
    """
    builds = find_builds(Path(plan.llama_dir) if plan.llama_dir else None, plan.docker)
    need = (
        {"draft-mtp"}
        if any(g.candidates for g in plan.axes.groups()) or any(plan.axes.n_max)
        else set()
    )
    if plan.synth_rates:
        need.add("spec-synth-rates")
    return choose_build(builds, frozenset(need))


def new_directory(name: str) -> Path:
    """A fresh folder below ``runs/``, named by what is measured and when."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{name}-{stamp}"


def start(plan: SweepPlan, directory: Path, out: Output, *, patience_s: float) -> Done:
    """Begin a run in a new directory and measure it to the end."""
    build = find_engine(plan)
    prepared = prepare(plan, build, on_make=_told(out))
    saved = msgspec.to_builtins(prepared.plan)
    with RunStore.create(directory, plan=saved, identity=prepared.identity) as store:
        listed = _devices(build)
        store.set_meta("machine", msgspec.to_builtins(machine(listed or [])))
        store.set_meta("engine", msgspec.to_builtins(engine_record(build)))
        store.set_meta("models", msgspec.to_builtins(prepared.models))
        return _measure(prepared, build, listed, store, out, patience_s)


def resume(
    directory: Path,
    out: Output,
    *,
    patience_s: float,
    allow_busy: bool,
    try_anyway: bool,
    fast: bool,
) -> Done:
    """Go on with a run where it stopped; a fast run can go on as a full one."""
    with RunStore.open(directory) as store:
        plan = saved_plan(store.meta("plan"), directory)
        plan = msgspec.structs.replace(
            plan,
            allow_busy=plan.allow_busy or allow_busy,
            try_anyway=plan.try_anyway or try_anyway,
            fast=plan.fast and fast,
        )
        build = find_engine(plan)
        prepared = prepare(plan, build, on_make=_told(out))
        store.check_identity(prepared.identity)
        store.set_meta("plan", msgspec.to_builtins(prepared.plan))
        return _measure(prepared, build, _devices(build), store, out, patience_s)


def _told(out: Output) -> Callable[[str], None]:
    return lambda name: out.note(f"making {name}")


def _measure(
    prepared: Prepared,
    build: Build,
    listed: list[ListedDevice] | None,
    store: RunStore,
    out: Output,
    patience_s: float,
) -> Done:
    plan = prepared.plan
    # The embedded build is pinned: that it does not know its number says nothing.
    for fault in build.faults if build.source != "embedded" else ():
        out.note(f"note: {fault.what}. {fault.fix}")
    for note in prepared.notes:
        out.note(f"note: {note}")
    out.note(f"engine: {build.label}")
    out.note(f"run: {store.directory}")
    with LiveSweep(out.console) as live, memory_gate(build, listed) as fits:
        engine = local_engine(
            prepared,
            build,
            listed,
            fits,
            on_make=lambda name: live.note(f"making {name}"),
            on_load=live.loading,
        )

        def on_wait(share: float) -> None:
            live.waiting(f"waiting for quiet: others use {share:.0%} of the processors")

        quiet = MachineQuiet(patience_s=None if plan.allow_busy else patience_s, on_wait=on_wait)
        try:
            cells = run_async(run_sweep(plan, store, engine, quiet, live))
        except (KeyboardInterrupt, asyncio.CancelledError) as exc:
            raise Interrupted(
                "interrupted",
                why=f"{len(store.cells())} finished cells are kept; no server is left running",
                fix=f"browndwarf sweep --resume {shlex.quote(str(store.directory))}",
            ) from exc
        except (MachineBusy, StorageError) as error:
            kept = f"{len(store.cells())} finished cells are kept"
            raise type(error)(
                error.what,
                why=f"{error.why}\n{kept}",
                fix=f"{error.fix}\nthen go on: browndwarf sweep --resume "
                f"{shlex.quote(str(store.directory))}",
            ) from error
    return Done(store.directory, cells, analyse(cells, allow_busy=plan.allow_busy))


def local_engine(
    prepared: Prepared,
    build: Build,
    listed: list[ListedDevice] | None,
    fits: Callable[[ServerOptions], dict[str, str] | None],
    *,
    on_make: Callable[[str], None],
    on_load: Callable[[LoadProgress], None] | None = None,
) -> LocalEngine:
    """llama.cpp here for a prepared plan. ``listed``: its devices; None where nobody can tell."""
    return LocalEngine(
        build,
        prepared.plan,
        prepared.target,
        prepared.head,
        fits=fits,
        device_mib=listed[0].total_mib if listed and len(listed) == 1 else None,
        paced=listed == [],
        on_make=on_make,
        on_load=on_load,
    )


def _devices(build: Build) -> list[ListedDevice] | None:
    """The devices; None where the build cannot tell, which is no reason not to measure."""
    try:
        return devices(build)
    except EngineError:
        return None


@contextmanager
def memory_gate(
    build: Build, listed: list[ListedDevice] | None
) -> Iterator[Callable[[ServerOptions], dict[str, str] | None]]:
    """The memory budget as a gate before each start. Silent where it could be wrong.

    Over several devices llama.cpp splits layers by rules of its own, which the budget does not
    follow; and devices inside a container are not the ones that a build here would list.
    """
    if listed is None or len(listed) > 1 or build.docker_image is not None:
        yield lambda _: None
        return
    backend, limit = memory_here(listed)
    with BudgetGate(limit, backend) as gate:
        yield gate


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; SIGTERM ends it like Ctrl-C, so that servers are stopped in order."""

    async def main() -> T:
        task = asyncio.ensure_future(work)
        if sys.platform != "win32":
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await task

    return asyncio.run(main())


def make_recipe(view: RunView, out: Output, *, smoke: bool, gate: bool = False) -> Recipe:
    """The winner's command, tried out first unless ``smoke`` is False.

    ``gate`` also compares its greedy answers with plain decoding.

    Raises:
        CheckFailed: there is no winner, or a check failed.
    """
    plan = saved_plan(view.plan, view.directory)
    build = find_engine(plan)
    prepared = prepare(plan, build, on_make=_told(out))
    verdict = analyse(view.cells, allow_busy=view.plan["allow_busy"])
    standing = choose(verdict, run=str(view.directory))
    engine = LocalEngine(build, plan, prepared.target, prepared.head)
    run_async(engine.prepare(standing.configuration))
    options = recipe_options(engine.options(standing.configuration))
    tried = None
    if smoke:
        out.note("trying the command: a short prompt, a long one, the short one again")
        tried = run_async(_try(engine, standing, view.directory))
        tried.require()
    lossless = None
    if gate and standing.configuration.speculative:
        lossless = _lossless(build, plan, options, view.directory, out)
    machine = view.meta.get("machine", {})
    devices = ", ".join(d["name"] for d in machine.get("devices", ())) or machine.get("cpu", "?")
    commands = {
        "sh": command_text(build, options, host="127.0.0.1", port=8080, shell="posix"),
        "powershell": command_text(build, options, host="127.0.0.1", port=8080, shell="powershell"),
    }
    recipe = compose(
        standing,
        verdict,
        commands=commands,
        argv=server_argv(build, options, port=8080),
        engine=f"{build.version} ({build.sha})",
        machine=f"{devices}, {machine.get('os', '?')}",
        run=str(view.directory),
        synthetic=plan.synth_rates is not None,
        smoke=tried,
        lossless=lossless,
    )
    if plan.synthetic is None:
        return recipe
    warning = f"the model has random weights in the shape of {plan.synthetic.label}"
    return msgspec.structs.replace(recipe, warnings=(warning, *recipe.warnings))


def _lossless(
    build: Build, plan: SweepPlan, options: ServerOptions, directory: Path, out: Output
) -> str:
    """Greedy answers with and without speculation on the run's own prompts.

    Raises:
        CheckFailed: they differ by more than a near tie.
    """
    from browndwarf.quality.gate import llama_gate
    from browndwarf.quality.lossless import LosslessRecord

    prompts = [prompt for w in plan.workloads for prompt in w.prompts]
    out.note(f"checking losslessness on {len(prompts)} prompts")
    check = llama_gate(build, prompts, directory / "logs" / "lossless.log")

    async def checked() -> LosslessRecord:
        return await check(options)

    record = run_async(checked())
    record.require()
    return f"{record.verdict} against plain decoding ({record.identical} of {record.prompts} equal)"


async def _try(engine: LocalEngine, standing: Standing, directory: Path) -> Smoke:
    options = recipe_options(engine.options(standing.configuration))
    per_slot = options.ctx // max(options.parallel, 1)
    long_tokens = min(SMOKE_TOKENS, per_slot // 2)
    async with engine.serve_options(options, directory / "logs" / "smoke.log") as served:
        return await two_turns(
            served, speculative=standing.configuration.speculative, long_tokens=long_tokens
        )


def save_recipe(recipe: Recipe, directory: Path) -> list[Path]:
    """Write the recipe into its run directory in every form."""
    from browndwarf.files import atomic_write

    files = {
        "recipe.sh": "#!/bin/sh\n" + recipe.text("sh", command_prefix="exec "),
        "recipe.ps1": recipe.text("powershell"),
        "recipe.json": msgspec.json.format(msgspec.json.encode(recipe)).decode(),
    }
    paths = []
    for name, text in files.items():
        atomic_write(directory / name, text.encode())
        paths.append(directory / name)
    (directory / "recipe.sh").chmod(0o755)
    return paths


def view_run(text: str) -> RunView:
    """Read a run; see ``runs.run_directory``."""
    return read_run(run_directory(text))
