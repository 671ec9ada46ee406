"""Server options as typed values; and one value of ``--axis NAME=...`` as such an option.

Boundary: no flag of llama-server is spelled here; ``options`` does that for a given build.

Example:
    >>> ServerOptions(model="t.gguf", draft="h.gguf").effective_spec_type
    'draft-mtp'
"""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

import msgspec

from browndwarf.errors import UsageError
from browndwarf.units import parse_count


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One llama-server configuration. None leaves llama.cpp's own default in place.

    Args:
        model: path of the target GGUF.
        draft: path of a separate head or drafter; None for an embedded head.
        spec_type: kind of speculation; with ``draft`` and None it is ``draft-mtp``.
        n_max: draft tokens per cycle; 3 where speculation is on and nothing is said.
        ctx: tokens of context over all slots together; 0 asks for the model's own length.
        parallel: slots.
        n_gpu_layers: None puts all layers on the device.
        synth_rates: acceptance per position, made up: right speed, invalid text.
        load_mode: ``mmap``, ``none``, ``mlock`` or what else the build knows.
        verbosity: 4 makes current builds log their buffers; ignored by builds with other levels.
        extra: any other flag with its value (None for a switch).
    """

    model: str
    draft: str | None = None
    spec_type: str | None = None
    n_max: int | None = None
    n_min: int | None = None
    p_min: float | None = None
    ctx: int = 4096
    parallel: int = 1
    batch: int | None = None
    ubatch: int | None = None
    kv_k: str = "f16"
    kv_v: str = "f16"
    draft_kv_k: str | None = None
    draft_kv_v: str | None = None
    n_gpu_layers: int | None = None
    draft_n_gpu_layers: int | None = None
    device: str | None = None
    draft_device: str | None = None
    flash_attn: Literal["on", "off", "auto"] = "auto"
    threads: int | None = None
    threads_batch: int | None = None
    backend_sampling: bool = False
    draft_backend_sampling: bool | None = None
    kv_unified: bool | None = None
    swa_full: bool = False
    context_shift: bool = False
    jinja: bool = True
    chat_template_file: str | None = None
    metrics: bool = True
    seed: int | None = None
    synth_rates: tuple[float, ...] | None = None
    synth_len: float | None = None
    slots_path: str | None = None
    load_mode: str | None = None
    cache_ram_mib: int | None = None
    webui: bool = False
    verbosity: int | None = 4
    extra: tuple[tuple[str, str | None], ...] = ()

    @property
    def speculative(self) -> bool:
        """Whether this configuration drafts at all."""
        return self.effective_spec_type is not None

    @property
    def effective_spec_type(self) -> str | None:
        """The speculation type that is passed; None and ``none`` mean no speculation."""
        if self.spec_type == "none":
            return None
        return self.spec_type or ("draft-mtp" if self.draft is not None else None)


_TRUE = frozenset({"1", "on", "true", "yes"})
_FALSE = frozenset({"0", "off", "false", "no"})


def parse_switch(name: str, text: str) -> bool:
    """True or False from on/off, yes/no, true/false, 1/0.

    Raises:
        UsageError: it is none of these.
    """
    lowered = text.strip().lower()
    if lowered not in _TRUE | _FALSE:
        raise UsageError(f"{name}={text} is neither on nor off", fix=f"write {name}=on")
    return lowered in _TRUE


_ALIASES = {
    "c": "ctx",
    "ctx_size": "ctx",
    "np": "parallel",
    "b": "batch",
    "batch_size": "batch",
    "ub": "ubatch",
    "ubatch_size": "ubatch",
    "ctk": "kv_k",
    "cache_type_k": "kv_k",
    "ctv": "kv_v",
    "cache_type_v": "kv_v",
    "ctkd": "draft_kv_k",
    "ctvd": "draft_kv_v",
    "ngl": "n_gpu_layers",
    "ngld": "draft_n_gpu_layers",
    "dev": "device",
    "fa": "flash_attn",
    "t": "threads",
    "tb": "threads_batch",
    "bs": "backend_sampling",
    "kvu": "kv_unified",
    "spec_draft_n_max": "n_max",
    "spec_draft_n_min": "n_min",
    "spec_draft_p_min": "p_min",
    "cram": "cache_ram_mib",
    "cache_ram": "cache_ram_mib",
}


def axis_to_option(name: str, value: str) -> dict[str, Any]:
    """One value of ``--axis NAME=...`` as fields of ServerOptions.

    Field names and llama.cpp's own flag names set fields; ``kv`` sets both KV types; any other
    name becomes an entry of ``extra``, checked against the build when the command is made.

    Raises:
        UsageError: the text does not fit the field's type.

    Example:
        >>> axis_to_option("ctx", "16k"), axis_to_option("poll", "0")
        ({'ctx': 16384}, {'extra': (('--poll', '0'),)})
    """
    key = name.strip().lstrip("-").replace("-", "_")
    key = _ALIASES.get(key, key)
    text = value.strip()
    if key == "kv":
        return {"kv_k": text, "kv_v": text}
    field = ServerOptions.__annotations__.get(key)
    if field is None or key == "extra":
        flag = name if name.startswith("-") else "--" + name.replace("_", "-")
        return {"extra": ((flag, text or None),)}
    hints = typing.get_type_hints(ServerOptions)
    return {key: _typed(key, hints[key], text)}


def _typed(name: str, kind: Any, text: str) -> Any:
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    optional = type(None) in options
    if optional and text.lower() in ("default", "all", "auto") and str not in options:
        return None
    main = next(option for option in options if option is not type(None))
    try:
        if main is bool:
            return parse_switch(name, text)
        if main is int:
            return int(text) if text.startswith("-") else parse_count(text)
        if main is float:
            return float(text)
        if typing.get_origin(main) is tuple:
            return tuple(float(part) for part in text.replace(";", " ").replace(":", " ").split())
    except ValueError as exc:
        raise UsageError(f"{name}={text} is not a number", fix="check the axis") from exc
    if typing.get_origin(main) is Literal and text not in typing.get_args(main):
        raise UsageError(
            f"{name}={text} is not known", fix=f"use one of {', '.join(typing.get_args(main))}"
        )
    return text
