"""How a given llama.cpp build spells a server configuration.

Boundary: the only place in browndwarf where llama-server flags are spelled. A flag is chosen
from its known spellings by what the build's ``--help`` accepts; removed ones are never used.
Nothing runs here.

Example:
    >>> options = ServerOptions(model="t.gguf", draft="h.gguf", spec_type="draft-mtp", n_max=3)
    >>> server_argv(build, options, port=9000)  # doctest: +SKIP
    ['/opt/llama/llama-server', '-m', 't.gguf', '-md', 'h.gguf', '--spec-type', 'draft-mtp', ...]
"""

from __future__ import annotations

import difflib
import itertools
from pathlib import Path, PurePath
from typing import Literal

import msgspec

from browndwarf.engine import docker, shelltext
from browndwarf.engine.locate import Build
from browndwarf.engine.settings import ServerOptions, axis_to_option, parse_switch
from browndwarf.errors import EngineUnsupported, UsageError

__all__ = ["ServerOptions", "axis_to_option", "command_text", "server_argv", "server_files"]

DEFAULT_N_MAX = 3
ALL_LAYERS = 999
"""Understood by every build as "all layers"; the words ``all`` and ``auto`` are not."""


# Spellings of an option that takes a value, preferred first.
_VALUE_FLAGS: dict[str, tuple[str, ...]] = {
    "draft": ("-md", "--spec-draft-model", "--model-draft"),
    "n_max": ("--spec-draft-n-max", "--draft-max", "--draft"),
    "n_min": ("--spec-draft-n-min", "--draft-min"),
    "p_min": ("--spec-draft-p-min", "--draft-p-min"),
    "ctx": ("-c", "--ctx-size"),
    "parallel": ("-np", "--parallel"),
    "batch": ("-b", "--batch-size"),
    "ubatch": ("-ub", "--ubatch-size"),
    "kv_k": ("-ctk", "--cache-type-k"),
    "kv_v": ("-ctv", "--cache-type-v"),
    "draft_kv_k": ("-ctkd", "--spec-draft-type-k", "--cache-type-k-draft"),
    "draft_kv_v": ("-ctvd", "--spec-draft-type-v", "--cache-type-v-draft"),
    "n_gpu_layers": ("-ngl", "--gpu-layers", "--n-gpu-layers"),
    "draft_n_gpu_layers": ("-ngld", "--spec-draft-ngl", "--gpu-layers-draft"),
    "device": ("-dev", "--device"),
    "draft_device": ("-devd", "--spec-draft-device", "--device-draft"),
    "threads": ("-t", "--threads"),
    "threads_batch": ("-tb", "--threads-batch"),
    "chat_template_file": ("--chat-template-file",),
    "seed": ("-s", "--seed"),
    "synth_rates": ("--spec-synth-rates",),
    "synth_len": ("--spec-synth-len",),
    "slots_path": ("--slot-save-path",),
    "cache_ram_mib": ("-cram", "--cache-ram"),
}

# Spellings that switch an option on, and off.
_SWITCH_FLAGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "backend_sampling": (("--backend-sampling", "-bs"), ()),
    "draft_backend_sampling": (
        ("--spec-draft-backend-sampling",),
        ("--no-spec-draft-backend-sampling",),
    ),
    "kv_unified": (("--kv-unified", "-kvu"), ("--no-kv-unified", "-no-kvu")),
    "swa_full": (("--swa-full",), ()),
    "context_shift": (("--context-shift",), ("--no-context-shift",)),
    "jinja": (("--jinja",), ("--no-jinja",)),
    "metrics": (("--metrics",), ()),
    "webui": (("--ui", "--webui"), ("--no-ui", "--no-webui")),
}
# Off is llama.cpp's default for these, so a build without the "off" spelling loses nothing.
_OFF_BY_DEFAULT = frozenset(
    {"backend_sampling", "swa_full", "metrics", "context_shift", "kv_unified", "jinja", "webui"}
)
_OWNED = frozenset({"-m", "--model", "--host", "--port", "-fit", "--fit"})


class _Writer:
    """Collects argv for one build; each method checks what the build accepts."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.parts: list[list[str]] = []

    def spelling(self, option: str, spellings: tuple[str, ...]) -> str:
        for flag in spellings:
            if flag in self.build.flags:
                return flag
        removed = [flag for flag in spellings if flag in self.build.removed]
        raise EngineUnsupported(
            f"this llama.cpp build cannot be told {option!r}",
            why=f"{self.build.label} accepts none of {', '.join(spellings)}"
            + (f" ({', '.join(removed)} was removed)" if removed else ""),
            fix=f"leave {option!r} at its default, or use another build (--llama-dir)",
        )

    def value(self, option: str, value: object) -> None:
        text = ",".join(f"{v:g}" for v in value) if isinstance(value, tuple) else _plain(value)
        flag = self.spelling(option, _VALUE_FLAGS[option])
        allowed = self.build.choices.get(flag, ())
        if allowed and text not in allowed:
            raise EngineUnsupported(
                f"this llama.cpp build does not know {option}={text}",
                why=f"{self.build.label} allows {', '.join(allowed)}",
                fix="choose one of these, or use another build (--llama-dir)",
            )
        self.parts.append([flag, text])

    def switch(self, option: str, on: bool) -> None:
        yes, no = _SWITCH_FLAGS[option]
        if on:
            self.parts.append([self.spelling(option, yes)])
            return
        present = [flag for flag in no if flag in self.build.flags]
        if present:
            self.parts.append([present[0]])
        elif option not in _OFF_BY_DEFAULT:
            self.spelling(option, no)

    def extra(self, name: str, value: str | None) -> None:
        flag = name if name.startswith("-") else "--" + name.replace("_", "-")
        if flag in _OWNED:
            raise UsageError(
                f"{flag} cannot be set by hand",
                why="browndwarf chooses it itself",
                fix="use the command's own argument or option for it",
            )
        if flag in self.build.removed:
            raise EngineUnsupported(
                f"{flag} was removed from llama.cpp",
                why=f"{self.build.label} lists it as removed",
                fix="see `llama-server --help` for what took its place",
            )
        if flag not in self.build.flags:
            near = difflib.get_close_matches(flag, sorted(self.build.flags), n=3, cutoff=0.6)
            raise UsageError(
                f"llama-server has no flag {flag}",
                why=f"it is not in the --help of {self.build.label}",
                fix=f"did you mean {' or '.join(near)}?" if near else "check the spelling",
            )
        if self.build.hints.get(flag, "N"):
            if value is None:
                raise UsageError(
                    f"{flag} needs a value", why=f"it takes {self.build.hints.get(flag)}"
                )
            self.parts.append([flag, value])
        elif value is None or parse_switch(flag, value):
            self.parts.append([flag])
        else:
            opposite = "--no-" + flag.lstrip("-")
            if opposite in self.build.flags:
                self.parts.append([opposite])


def server_argv(
    build: Build, options: ServerOptions, *, host: str = "127.0.0.1", port: int
) -> list[str]:
    """The full command, program first.

    Raises:
        EngineUnsupported: the build cannot express an option.
        UsageError: options contradict each other, or ``extra`` names an unknown flag.
    """
    return [part for group in _groups(build, options, host, port) for part in group]


def command_text(
    build: Build,
    options: ServerOptions,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    shell: Literal["posix", "powershell"] = "posix",
    portable: bool = False,
) -> str:
    """The command for people: over several lines, a flag and its value on each.

    Args:
        shell: whose quoting and line continuation to use.
        portable: name programs and files without their folders and leave the environment out,
            for a machine where they lie elsewhere.

    Raises:
        EngineUnsupported, UsageError: as ``server_argv``.
    """
    if portable and build.docker_image is None:
        draft = PurePath(options.draft).name if options.draft is not None else None
        options = msgspec.structs.replace(options, model=PurePath(options.model).name, draft=draft)
    groups = _groups(build, options, host, port)
    if build.docker_image is not None:
        groups = _groups(build, options, "0.0.0.0", port)
        argv = [part for group in groups for part in group]
        prefix = docker.run_command(
            build.docker_image,
            argv[:1],
            name="browndwarf",
            port=port,
            read_only=server_files(options),
        )
        groups = [prefix, *groups[1:]]
    elif portable:
        groups[0] = ["llama-server"]
    env = {} if portable else build.env
    return shelltext.format_command(groups, env, shell=shell)


def server_files(options: ServerOptions) -> list[Path]:
    """Absolute paths of the files that the server reads."""
    named = (options.model, options.draft, options.chat_template_file)
    return [Path(path).expanduser().absolute() for path in named if path is not None]


def _groups(build: Build, o: ServerOptions, host: str, port: int) -> list[list[str]]:
    """argv in groups of a flag with its value, the program being the first group."""
    out = _Writer(build)
    out.parts.append([str(build.server)])
    out.parts.append(["-m", o.model])
    _speculation(out, o)
    for name in ("ctx", "parallel", "batch", "ubatch", "kv_k", "kv_v"):
        _optional(out, o, name)
    out.value("n_gpu_layers", ALL_LAYERS if o.n_gpu_layers is None else o.n_gpu_layers)
    for name in ("device", "threads", "threads_batch"):
        _optional(out, o, name)
    _flash_attention(out, o.flash_attn)
    for name in ("backend_sampling", "kv_unified", "swa_full", "context_shift", "jinja"):
        state = getattr(o, name)
        if state is not None:
            out.switch(name, state)
    for name in ("chat_template_file", "seed", "slots_path", "cache_ram_mib"):
        _optional(out, o, name)
    _load_mode(out, o.load_mode)
    if o.metrics:
        out.switch("metrics", True)
    out.switch("webui", o.webui)
    if "fit" in build.features:
        out.parts.append(["-fit" if "-fit" in build.flags else "--fit", "off"])
    if o.verbosity is not None and "log-levels" in build.features:
        out.parts.append(["-lv", str(o.verbosity)])
    for name, value in o.extra:
        out.extra(name, value)
    out.parts += [["--host", host], ["--port", str(port)]]
    return out.parts


def _optional(out: _Writer, options: ServerOptions, name: str) -> None:
    value = getattr(options, name)
    if value is not None:
        out.value(name, value)


def _speculation(out: _Writer, o: ServerOptions) -> None:
    kind = o.effective_spec_type
    if kind is None:
        if o.synth_rates is not None or o.synth_len is not None:
            raise UsageError(
                "synthetic acceptance without speculation",
                why="synth_rates and synth_len replace the acceptance of drafted tokens",
                fix="set spec_type to draft-mtp, or leave them out",
            )
        return
    if o.draft is not None:
        out.value("draft", o.draft)
    known = out.build.spec_types
    spelled = [
        "mtp" if part == "draft-mtp" and part not in known and "mtp" in known else part
        for part in kind.split(",")
    ]
    for part in spelled:
        if part not in known:
            raise EngineUnsupported(
                f"this llama.cpp build does not know the speculation type {part}",
                why=f"{out.build.label} knows {', '.join(sorted(known)) or 'none at all'}",
                fix="use a build from b9549 on, or run `browndwarf engine install`",
            )
    out.parts.append([out.spelling("spec_type", ("--spec-type",)), ",".join(spelled)])
    # Both are always passed: their defaults changed between builds.
    out.value("n_max", DEFAULT_N_MAX if o.n_max is None else o.n_max)
    out.value("p_min", 0.0 if o.p_min is None else o.p_min)
    for name in ("n_min", "draft_kv_k", "draft_kv_v", "draft_device", "synth_len"):
        _optional(out, o, name)
    if o.draft is not None:
        layers = ALL_LAYERS if o.draft_n_gpu_layers is None else o.draft_n_gpu_layers
        out.value("draft_n_gpu_layers", layers)
    if o.draft_backend_sampling is not None:
        out.switch("draft_backend_sampling", o.draft_backend_sampling)
    if o.synth_rates is not None:
        _check_rates(o.synth_rates, DEFAULT_N_MAX if o.n_max is None else o.n_max)
        out.value("synth_rates", o.synth_rates)


def _check_rates(rates: tuple[float, ...], n_max: int) -> None:
    falling = all(a >= b for a, b in itertools.pairwise(rates))
    if len(rates) != n_max or not falling or not all(0 <= r <= 1 for r in rates):
        raise UsageError(
            f"synth_rates {rates} do not fit n_max {n_max}",
            why="llama-server wants exactly n_max shares between 0 and 1 that never rise",
            fix="give one unconditional acceptance rate per drafted position",
        )


def _flash_attention(out: _Writer, state: str) -> None:
    flag = next((f for f in ("-fa", "--flash-attn") if f in out.build.flags), None)
    if flag is None:
        return
    if out.build.hints.get(flag):
        out.parts.append([flag, state])
    elif state == "on":  # older builds: a bare switch, off unless given
        out.parts.append([flag])


def _load_mode(out: _Writer, mode: str | None) -> None:
    if mode is None:
        return
    flags = out.build.flags
    if "load-mode" in out.build.features:
        out.parts.append(["--load-mode", mode])
    elif mode == "none" and "--no-mmap" in flags:
        out.parts.append(["--no-mmap"])
    elif mode == "mlock" and "--mlock" in flags:
        out.parts.append(["--mlock"])
    elif mode != "mmap":
        out.spelling("load_mode", ("--load-mode",))


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
