"""The command line that asks for the same sweep again, told from the plan that it saved.

The boundary: text only. What a plan does not hold is named instead: prompts that came from a
user's file are saved in the run, but not where they came from.

Example:
    >>> command(plan, models)                                      # doctest: +SKIP
    'browndwarf sweep m.gguf --draft h.gguf --target-types as-is --head-types Q8_0,Q6_K ...'
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from browndwarf.models import demo
from browndwarf.records import ModelRecord
from browndwarf.sweep.planned import SweepPlan
from browndwarf.sweep.sources import AS_IS
from browndwarf.sweep.space import EMBEDDED
from browndwarf.sweep.workload import PACKAGED, Workload, from_rows, packaged


def command(plan: SweepPlan, models: Sequence[ModelRecord] = ()) -> str | None:
    """The command; None where ``why_not`` has a reason."""
    if why_not(plan):
        return None
    words = ["browndwarf", "sweep", *_models(plan), *_axes(plan, models), *_settings(plan)]
    return shlex.join([*words, *_conduct(plan)])


def why_not(plan: SweepPlan) -> str:
    """Why the command cannot be told; "" where it can."""
    of_demo = plan.model == _demo_target()
    unknown = [w.name for w in plan.workloads if not _is_packaged(w, of_demo)]
    if not unknown:
        return ""
    return (
        f"The command cannot be told: the prompts of {', '.join(unknown)} came from a file, or "
        "from another installation's demo. The run holds the prompts, but not where they came from."
    )


def _is_packaged(workload: Workload, of_demo: bool) -> bool:
    count = len(workload.prompts)
    rows = demo.prompts(workload.name) if of_demo else []
    if rows:
        known = from_rows(workload.name, rows)
    elif workload.name in PACKAGED:
        known = packaged(workload.name)
    else:
        return False
    return known.head(count).fingerprint == workload.fingerprint


def _demo_target() -> str:
    return str(demo.TARGET.absolute())


def _models(plan: SweepPlan) -> Iterator[str]:
    spec = plan.synthetic
    model, draft = (spec.model, spec.draft) if spec else (plan.model, plan.draft)
    name = "demo" if model == _demo_target() else model
    if spec is not None:
        yield from ("--synthetic", spec.shape or str(name))
    else:
        yield str(name)
    own = draft == str(demo.HEAD.absolute())
    if draft is not None and not (own and name == "demo"):
        yield from ("--draft", "demo" if own else draft)


def _axes(plan: SweepPlan, models: Sequence[ModelRecord]) -> Iterator[str]:
    """Every axis that was given or has a default of its own, as the command line spells it."""
    axes = plan.axes
    own = models[0].type if models and plan.synthetic is None else None
    yield from ("--target-types", _listed(AS_IS if t == own else t for t in axes.target_type))
    heads = [h for h in axes.head_type if h != EMBEDDED or len(axes.head_type) > 1]
    if heads:
        yield from ("--head-types", _listed(heads))
    yield from ("--n-max", _listed(axes.n_max))
    optional = {
        "--p-min": axes.p_min,
        "--draft-kv": axes.draft_kv,
        "--ubatch": axes.ubatch,
        "--threads": axes.threads,
    }
    for flag, values in optional.items():
        if values != (None,):
            yield from (flag, _listed(values))
    yield from ("--layers", _listed("all" if n is None else n for n in axes.layers))
    yield from ("--kv", _listed(axes.kv), "--ctx", _listed(axes.ctx))
    yield from ("--parallel", _listed(axes.parallel))
    yield from (
        "--backend-sampling",
        _listed("on" if on else "off" for on in axes.backend_sampling),
    )
    for name, given in axes.extra:
        yield from ("--axis", f"{name}={_listed(given)}")


def _settings(plan: SweepPlan) -> Iterator[str]:
    settings = plan.settings
    yield from ("--workload", _listed(w.name for w in plan.workloads))
    yield from ("--prompts", str(settings.prompts), "--repeats", str(settings.repeats))
    yield from ("--precision", f"{settings.precision:g}", "--tokens", str(settings.n_predict))
    yield from ("--seed", str(settings.seed), "--temperature", f"{settings.temperature:g}")
    if not settings.ignore_eos:
        yield "--natural-end"
    if plan.synth_rates:
        yield from ("--rates", _listed(plan.synth_rates))


def _conduct(plan: SweepPlan) -> Iterator[str]:
    """How the sweep goes about it, and with which engine."""
    yield "--fast" if plan.fast else "--full"
    if plan.budget_s is not None:
        yield from ("--budget", f"{plan.budget_s:g}s")
    if plan.allow_busy:
        yield "--allow-busy"
    if plan.try_anyway:
        yield "--try-anyway"
    if plan.llama_dir is not None:
        yield from ("--llama-dir", plan.llama_dir)
    if plan.docker is not None:
        yield from ("--docker", plan.docker)


def _listed(values: Iterable[object]) -> str:
    return ",".join(map(str, values))
