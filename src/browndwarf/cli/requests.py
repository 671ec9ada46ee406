"""From words on the command line to a sweep plan: lists, axes, workloads, the demo's choice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from browndwarf.cli.runs import find_run
from browndwarf.engine.options import axis_to_option
from browndwarf.engine.settings import parse_switch
from browndwarf.errors import UsageError
from browndwarf.models.filled import main_type, shape_named
from browndwarf.models.ggml_types import parse_kv
from browndwarf.models.named_shapes import SHAPES
from browndwarf.models.resolve import resolve_model
from browndwarf.sweep import launch, workload
from browndwarf.sweep import synthetic as synthetic_models
from browndwarf.sweep.model import pooled_rates
from browndwarf.sweep.planned import SweepPlan
from browndwarf.sweep.served import PRECISION, Settings
from browndwarf.sweep.sources import AS_IS
from browndwarf.sweep.space import EMBEDDED, NO_HEAD, Axes
from browndwarf.sweep.store import read_run
from browndwarf.sweep.synthetic import Synthetic
from browndwarf.units import parse_count

T = TypeVar("T")

DEMO_WORKLOADS = ("prose", "code")
DEMO_HEADS = ("Q8_0", "Q6_K", "Q4_K", "Q2_K")


def split(text: str) -> list[str]:
    """The parts of a comma list, blanks dropped.

    Raises:
        UsageError: nothing is left.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError(f"{text!r} is an empty list", fix="write values separated by commas")
    return parts


def values(text: str, convert: Callable[[str], T]) -> tuple[T, ...]:
    """A comma list, each part converted; duplicates are dropped."""
    return tuple(dict.fromkeys(convert(part) for part in split(text)))


def axes(
    *,
    target_types: str,
    head_types: str | None,
    n_max: str,
    p_min: str | None,
    layers: str,
    kv: str,
    draft_kv: str | None,
    ctx: str,
    parallel: str,
    ubatch: str | None,
    backend_sampling: str,
    threads: str | None,
    extra: Sequence[str],
) -> Axes:
    """All axes of a sweep from the command line's text."""
    own: dict[str, tuple[object, ...]] = {
        "target_type": values(target_types, str),
        "head_type": values(head_types, str) if head_types else (),
        "n_max": values(n_max, _n_max),
        "p_min": values(p_min, _probability) if p_min else (None,),
        "layers": values(layers, _layers),
        "kv": values(kv, parse_kv),
        "draft_kv": values(draft_kv, parse_kv) if draft_kv else (None,),
        "ctx": values(ctx, parse_count),
        "parallel": values(parallel, _positive),
        "ubatch": values(ubatch, parse_count) if ubatch else (None,),
        "backend_sampling": values(backend_sampling, _switch),
        "threads": values(threads, _positive) if threads else (None,),
    }
    others: list[tuple[str, tuple[str, ...]]] = []
    for text in extra:
        name, equals, listed = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(
                f"--axis {text} is not NAME=v1,v2",
                fix="write for instance --axis poll=0,50",
            )
        field = launch.own_axis(name)
        if field is not None:
            raise UsageError(
                f"--axis {name} has an option of its own",
                fix=f"use --{field.replace('_', '-').replace('type', 'types')} {listed}",
            )
        for value in split(listed):
            axis_to_option(name, value)
        others.append((name.strip().lstrip("-"), tuple(dict.fromkeys(split(listed)))))
    return Axes(**own, extra=tuple(others))  # type: ignore[arg-type]


def plan(
    model: str | None,
    draft: str | None,
    the_axes: Axes,
    *,
    workloads: str,
    prompts: int,
    repeats: int,
    tokens: int,
    seed: int,
    temperature: float,
    natural_end: bool,
    rates: str | None,
    allow_busy: bool,
    llama_dir: str | None,
    docker: str | None,
    precision: float = PRECISION,
    try_anyway: bool = False,
    fast: bool = False,
    budget_s: float | None = None,
    synthetic: str | None = None,
) -> SweepPlan:
    """The plan of a sweep. MODEL ``demo`` brings its own head and held-out prompts.

    With ``synthetic`` there is no MODEL: random weights of that shape or header take its place.
    """
    spec = None
    if synthetic is not None:
        if rates is None:
            raise UsageError(
                "a synthetic model needs its acceptance given",
                why="random weights accept nothing, so speculation would only cost",
                fix="give --rates .80,.54,.43, or --rates RUN: the acceptance that a run measured",
            )
        spec, the_axes = _synthetic(synthetic, draft, the_axes)
        first_head = next(iter(the_axes.head_type), "none")
        model, draft = synthetic_models.paths(spec, the_axes.target_type[0], first_head)
        natural_end = False
    assert model is not None
    if model == "demo":
        draft = draft or "demo"
        loaded = tuple(_demo_workload(name) for name in split(workloads))
    else:
        loaded = tuple(workload.load(name) for name in split(workloads))
    if len({w.name for w in loaded}) != len(loaded):
        raise UsageError("two workloads have the same name", fix="rename one of the files")
    synth_rates = _rates(rates, max(the_axes.n_max)) if rates else None
    if spec is None:
        model = str(resolve_model(model, "target").absolute())
        draft = str(resolve_model(draft, "head").absolute()) if draft else None
    return SweepPlan(
        model=model,
        draft=draft,
        axes=the_axes,
        workloads=tuple(w.head(prompts) for w in loaded),
        settings=Settings(
            repeats=repeats,
            precision=precision,
            prompts=prompts,
            n_predict=tokens,
            seed=seed,
            temperature=temperature,
            ignore_eos=not natural_end,
            synthetic=synth_rates is not None,
        ),
        synth_rates=synth_rates,
        synthetic=spec,
        allow_busy=allow_busy,
        try_anyway=try_anyway,
        fast=fast,
        budget_s=budget_s,
        llama_dir=llama_dir,
        docker=docker,
    )


def _synthetic(text: str, draft: str | None, the_axes: Axes) -> tuple[Synthetic, Axes]:
    """What to make, and the axes with the types that a named shape has by default."""
    if text.lower() not in SHAPES:
        if not (text == "demo" or text.startswith("hf:") or Path(text).expanduser().is_file()):
            shape_named(text)
        model = str(resolve_model(text, "target").absolute())
        draft = "demo" if text == "demo" and draft is None else draft
        head = str(resolve_model(draft, "head").absolute()) if draft else None
        return Synthetic(model=model, draft=head), the_axes
    if draft is not None:
        raise UsageError(
            "--draft does not go together with a named shape",
            why="the shape brings the head that belongs to it",
            fix="leave --draft out; --head-types chooses its types",
        )
    spec = Synthetic(shape=text.lower())
    heads = the_axes.head_type or (("as-is",) if spec.has_drafter or spec.embedded else ())
    default = EMBEDDED if spec.embedded else "Q8_0"
    named = {
        "target_type": _types(the_axes.target_type, "Q4_K"),
        "head_type": _types(heads, default),
    }
    return spec, msgspec.structs.replace(the_axes, **named)


def _types(names: Sequence[str], default: str) -> tuple[str, ...]:
    """Types that can be written at random, ``as-is`` replaced by a default."""
    found = [default if name.lower() == AS_IS else name for name in names]
    for name in found:
        if name.lower() not in (NO_HEAD, EMBEDDED):
            main_type(name)
    return tuple(n.lower() if n.lower() in (NO_HEAD, EMBEDDED) else n.upper() for n in found)


def demo_plan(*, allow_busy: bool, llama_dir: str | None, docker: str | None) -> SweepPlan:
    """What ``browndwarf demo`` measures: two target types, four heads, n_max 1 to 4."""
    return plan(
        "demo",
        None,
        Axes(
            target_type=("Q4_0", "Q8_0"),
            head_type=DEMO_HEADS,
            n_max=(1, 2, 3, 4),
            ctx=(2048,),
        ),
        workloads=",".join(DEMO_WORKLOADS),
        prompts=4,
        repeats=3,
        precision=0.0,
        tokens=96,
        seed=1,
        temperature=0.0,
        natural_end=True,
        rates=None,
        allow_busy=allow_busy,
        llama_dir=llama_dir,
        docker=docker,
    )


def _demo_workload(name: str) -> workload.Workload:
    """The pair's own held-out prompts where it has such a workload; else as for any model."""
    from browndwarf.models import demo

    rows = demo.prompts(name)
    return workload.from_rows(name, rows) if rows else workload.load(name)


def _n_max(text: str) -> int:
    if not text.isdigit() or int(text) > 64:
        raise UsageError(f"n_max {text} is not a number from 0 to 64", fix="write e.g. 1,2,3")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{text} is not a positive number", fix="write e.g. 1,2,4")
    return int(text)


def _layers(text: str) -> int | None:
    if text.lower() in ("all", "-1"):
        return None
    if not text.isdigit():
        raise UsageError(f"layers {text} is neither `all` nor a number", fix="write e.g. all,40")
    return int(text)


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise UsageError(f"{text} is no probability", fix="write numbers from 0 to 1")
    return value


def _switch(text: str) -> bool:
    return parse_switch("--backend-sampling", text)


def _rates(text: str, n_max: int) -> tuple[float, ...]:
    if (profile := find_run(text)) is not None:
        return _measured_rates(profile, n_max)
    made = tuple(_probability(part) for part in split(text))
    if len(made) < n_max:
        raise UsageError(
            f"{len(made)} acceptance rates are given, and n_max goes to {n_max}",
            fix="give one rate for each position",
        )
    if any(b > a for a, b in itertools.pairwise(made)):
        raise UsageError(
            "acceptance rates rise with the position",
            why="they are unconditional: a position counts only after all before it",
            fix="write them in falling order, e.g. .80,.54,.43",
        )
    return made


def _measured_rates(directory: Path, n_max: int) -> tuple[float, ...]:
    """Acceptance per position that a run measured, over all its heads and texts.

    Raises:
        UsageError: it measured none, or none so deep.
    """
    made = pooled_rates(read_run(directory).cells)
    if len(made) < n_max:
        raise UsageError(
            f"{directory} tells the acceptance of {len(made)} positions, and n_max goes to {n_max}",
            fix=f"use --n-max up to {len(made)}, or give --rates as numbers"
            if made
            else "name a run that measured MTP cells, or give --rates as numbers",
        )
    return made[:n_max]
