"""From a configuration to the server options that realise it.

The boundary: this maps names of axes to typed options; llama.cpp's flags are spelled by the
engine floor alone.

Example:
    >>> server_options(Configuration(target_type="Q4_0", ctx=2048), "t.gguf", None).ctx
    2048
"""

from __future__ import annotations

from typing import Any

import msgspec

from browndwarf.engine.locate import Build
from browndwarf.engine.options import ServerOptions, axis_to_option, server_argv
from browndwarf.sweep.planned import SweepPlan
from browndwarf.sweep.space import EMBEDDED, Axes, Configuration

#: Axis names of ours that a user may also write as ``--axis NAME=...``, and other spellings.
_OWN_AXES = {
    "n_gpu_layers": "layers",
    "kv_k": None,
    "kv_v": None,
    "model": None,
    "draft": None,
    "spec_type": None,
    "synth_rates": None,
    "synth_len": None,
}


def server_options(
    configuration: Configuration,
    target: str,
    head: str | None,
    *,
    synth_rates: tuple[float, ...] | None = None,
) -> ServerOptions:
    """The options of one cell's server. ``head`` is None for an embedded head.

    ``synth_rates`` are cut to the configuration's n_max, since the server wants exactly that
    many.

    Raises:
        UsageError: an extra option's value does not fit.
    """
    kv_k, kv_v = configuration.kv_pair
    fields: dict[str, Any] = {
        "model": target,
        "ctx": configuration.ctx,
        "parallel": configuration.parallel,
        "ubatch": configuration.ubatch,
        "kv_k": kv_k,
        "kv_v": kv_v,
        "n_gpu_layers": configuration.layers,
        "threads": configuration.threads,
        "backend_sampling": configuration.backend_sampling,
    }
    if configuration.speculative:
        draft_kv = configuration.draft_kv
        fields |= {
            "draft": None if configuration.head_type == EMBEDDED else head,
            "spec_type": "draft-mtp",
            "n_max": configuration.n_max,
            "p_min": configuration.p_min,
            "draft_kv_k": draft_kv,
            "draft_kv_v": draft_kv,
        }
        if synth_rates:
            fields["synth_rates"] = synth_rates[: configuration.n_max]
    extra: list[tuple[str, str | None]] = []
    for name, value in configuration.extra:
        made = axis_to_option(name, value)
        extra += made.pop("extra", ())
        fields |= made
    return ServerOptions(**fields, extra=tuple(extra))


def check_plan(plan: SweepPlan, build: Build) -> None:
    """Spell every configuration's command once, so that a bad option costs no time later.

    Raises:
        UsageError, EngineUnsupported: an option does not exist, or not in this build.
    """
    for job in plan.jobs():
        options = server_options(
            job.configuration, "target.gguf", "head.gguf", synth_rates=plan.synth_rates
        )
        server_argv(build, options, port=1)


def own_axis(name: str) -> str | None:
    """The field of ``Axes`` that a user's axis name means; None for any other server option."""
    key = name.strip().lstrip("-").replace("-", "_")
    made = axis_to_option(key, "0") if key in {"c", "np", "ub", "ngl", "t", "bs"} else {}
    key = next(iter(made), key)
    key = _OWN_AXES.get(key) or key
    return key if key in Axes.__struct_fields__ and key != "extra" else None


def recipe_options(options: ServerOptions) -> ServerOptions:
    """A measured cell's options as a user would run them: without measuring aids."""
    return msgspec.structs.replace(
        options, metrics=False, verbosity=None, seed=None, synth_rates=None, webui=True
    )
