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
_BANDS = ("early", "middle", "late")
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
    """Tensor name -> group; all of an MTP head's layers inside the model are ``nextn``."""
    layers = len(model.blocks)
    trunk = layers - model.shape.nextn_layers
    return {
        name: "nextn"
        if trunk < layers and (layer_of(name) or 0) >= trunk
        else group_of(name, layers=trunk, tied=model.tied)
        for name in names
    }


PRIORS: Mapping[str, tuple[float, float, float]] = {
    "attn_q": (0.35, 0.20, 0.10),
    "attn_k": (0.50, 0.30, 0.10),
    "attn_v": (0.60, 0.30, 0.10),
    "attn_output": (0.60, 0.25, 0.10),
    "ffn_gate": (0.40, 0.40, 0.30),
    "ffn_up": (0.20, 0.25, 0.20),
    "ffn_down": (0.65, 0.65, 0.40),
    "nextn": (0.05, 0.05, 0.05),
}
"""Weights of a layer's matrices (early, middle, late), to be divided by the number of layers.

The output matrix has 1: its error is an error of the logits. A layer adds one part in many to what
the last norm sees, so what its matrices count falls with the number of layers. The figures come
from calibrating the embedded pair, drawn half way (in logarithms) to the role's mean, because one
small model is thin evidence: that the output counts most by far, ffn_down and the values more than
the queries, and late attention least, is what to trust in them. An MTP head's layers move no
prediction, only how many drafts are accepted.
"""
OTHER_PRIOR = 0.35
EMBEDDING_PRIOR = 0.3


def prior_alphas(model: ModelInfo, names: Iterable[str]) -> dict[str, float]:
    """The shipped weight of every tensor."""
    layers = max(len(model.blocks), 1)
    return {name: _prior(group, layers) for name, group in groups(model, names).items()}


def _prior(group: str, layers: int) -> float:
    role, _, band = group.partition("/")
    if not band and role != "nextn":
        return EMBEDDING_PRIOR if role == "embedding" else 1.0
    bands = PRIORS.get(role, (OTHER_PRIOR,) * 3)
    return bands[_BANDS.index(band) if band else 0] / layers
