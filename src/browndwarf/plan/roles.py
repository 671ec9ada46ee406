"""What a tensor does and how deep it sits, and how much its error therefore counts.

The loss of a plan is a sum of alpha x error over tensors, where the error is relative
(``loss``). Alpha says how far a relative error of a tensor's output moves the model's predictions.
It is set per group, a role in a band of depth, because one tensor's own alpha cannot be told from
noise and costs a measurement each.

Example:
    group_of("blk.3.ffn_down.weight", layers=48, tied=True)      # "ffn_down/early"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from browndwarf.models.gguf import ModelInfo

Band = Literal["early", "middle", "late"]
_LAYER = re.compile(r"^blk\.(?P<layer>\d+)\.(?P<role>.+?)\.(weight|bias)$")
_EXPERTS = re.compile(r"_(exps|shexp|chexps)$")


def layer_of(name: str) -> int | None:
    """The layer in a tensor's name."""
    match = _LAYER.match(name)
    return int(match["layer"]) if match else None


def role_of(name: str, *, tied: bool) -> str:
    """What a tensor does: ``ffn_down``, ``attn_v``, ``output``, ``embedding``...

    Experts have the role of the plain matrix; a tied embedding is the output.
    """
    if name == "token_embd.weight":
        return "output" if tied else "embedding"
    if name == "output.weight":
        return "output"
    if name.startswith(("per_layer_token_embd", "position_embd", "token_types")):
        return "embedding"
    if "nextn." in name:
        return "nextn"
    match = _LAYER.match(name)
    return _EXPERTS.sub("", match["role"]) if match else name.split(".")[0]


def band_of(layer: int, layers: int) -> Band:
    """Which part of the depth: the first quarter, the last quarter, or what is between."""
    return "early" if 4 * layer < layers else "late" if 4 * layer >= 3 * layers else "middle"


def group_of(name: str, *, layers: int, tied: bool) -> str:
    """A tensor's group, ``role/band``; the role alone outside of the layers."""
    role, layer = role_of(name, tied=tied), layer_of(name)
    return role if layer is None else f"{role}/{band_of(layer, layers)}"


def groups(model: ModelInfo, names: Iterable[str]) -> dict[str, str]:
    """Tensor name -> group."""
    layers = len(model.blocks)
    return {name: group_of(name, layers=layers, tied=model.tied) for name in names}


PRIORS: Mapping[str, float] = {}


def prior_alphas(model: ModelInfo, names: Iterable[str]) -> dict[str, float]:
    """The shipped weight of every tensor: its group's, its role's, or 1."""
    return {
        name: PRIORS.get(group, PRIORS.get(group.split("/")[0], 1.0))
        for name, group in groups(model, names).items()
    }
