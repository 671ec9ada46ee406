"""llama.cpp's library inside this process: the only module that touches ``llama_cpp``.

``llama-cpp-python``'s low-level bindings are loaded on first use; ``LLAMA_CPP_LIB_PATH`` makes
them load the ``libllama`` of another build of the same commit. Models and contexts are context
managers that free their C objects once, in the right order, also when the interpreter ends.
llama.cpp's log goes to the logger ``browndwarf.engine.llama`` and to listeners.

Each object that owns a C pointer is a ``Handle`` and is counted while it lives, so that a test
can prove that nothing leaks. ``native_context``, ``native_batch``, ``native_vocab`` and
``native_sampler`` are the typed calls that decoding needs; they take the bindings from here.

A fault inside the library ends the process: what may crash belongs into a worker, as
``dryalloc`` does it. Not covered: multimodal projectors and adapters.

Example:
    library = load_library()
    with library.model(path, no_alloc=True) as model, model.context(n_ctx=4096) as context:
        ...
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

from browndwarf.errors import EngineNotFound, EngineUnsupported, ModelUnsupported

log = logging.getLogger("browndwarf.engine.llama")
log.addHandler(logging.NullHandler())

_WARNING, _ERROR, _CONTINUED = 3, 4, 5
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
"""ggml's levels (debug, info, warning, error); its info is our debug."""
_MODEL_FIELDS = ("no_alloc", "load_mtp", "load_mode", "n_gpu_layers", "split_mode", "main_gpu")
_CONTEXT_FIELDS = (
    "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "ctx_type",
    "ctx_other", "flash_attn_type", "type_k", "type_v", "swa_full", "kv_unified", "samplers",
)  # fmt: skip
_TESTED = "0.3.36"

Listener = Callable[[int, str], None]
"""Takes ggml's level (1 debug, 2 info, 3 warning, 4 error) and a complete line."""


@dataclass(frozen=True)
class Library:
    """The loaded bindings. ``api`` is ``llama_cpp.llama_cpp``; ``ext`` its unstable part, with
    ``llama_set_embeddings_nextn`` and its kin, or None where the library lacks their symbols."""

    api: Any
    ext: Any
    version: str
    path: str
    _log: _Log = field(repr=False)

    @contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Hand every complete log line to ``listener`` meanwhile, from any thread."""
        self._log.listeners.append(listener)
        try:
            yield
        finally:
            self._log.listeners.remove(listener)

    def ggml_type(self, name: str) -> int:
        """ggml's number of a type such as ``q8_0``."""
        number = getattr(self.api, f"GGML_TYPE_{name.upper()}", None)
        if number is None:
            raise EngineUnsupported(
                f"llama.cpp's library knows no type {name!r}",
                why=f"llama-cpp-python {self.version} does not list it",
                fix="use f16 or q8_0",
            )
        return int(number)

    @property
    def offloads(self) -> bool:
        """Whether this library has a device to put layers on."""
        return bool(self.api.llama_supports_gpu_offload())

    def grammar_of_schema(self, schema: str) -> str:
        """A GBNF grammar for a JSON schema, given as JSON text; ``ValueError`` if it is none."""
        return str(importlib.import_module("llama_cpp.llama_grammar").json_schema_to_gbnf(schema))

    def model(self, path: Path | str, **fields: Any) -> Model:
        """Load a model; ``fields`` are those of ``llama_model_params``.

        Raises:
            ModelUnsupported: llama.cpp refuses the file; its own words are in ``why``.
        """
        params = self.api.llama_model_default_params()
        for name, value in fields.items():
            setattr(params, name, value)
        with self._failure() as said:
            pointer = self.api.llama_model_load_from_file(os.fsencode(path), params)
        if not pointer:
            raise ModelUnsupported(
                f"llama.cpp cannot load {path}",
                why=said() or "it gives no reason",
                fix="run `browndwarf inspect` on the file; a newer build may know it",
            )
        return Model(self, pointer)

    @contextmanager
    def _failure(self) -> Iterator[Callable[[], str]]:
        """Collect complaints; the function that is yielded returns the last ones."""
        lines: list[str] = []

        def hear(level: int, line: str) -> None:
            if level in (_WARNING, _ERROR) and line.strip():
                lines.append(line.strip())

        with self.listen(hear):
            yield lambda: "; ".join(lines[-3:])


_live: Counter[str] = Counter()


def live_pointers() -> dict[str, int]:
    """How many C objects are owned now, by kind; kinds without any are left out."""
    return {kind: count for kind, count in _live.items() if count}


def _release(kind: str, free: Callable[[Any], None], pointer: Any) -> None:
    free(pointer)
    _live[kind] -= 1


class Handle:
    """Owns one C object and frees it once: on ``close``, or when nothing refers to it."""

    def __init__(self, free: Callable[[Any], None], pointer: Any) -> None:
        self.pointer = pointer
        kind = type(self).__name__
        _live[kind] += 1
        self._finalizer = weakref.finalize(self, _release, kind, free, pointer)

    @property
    def closed(self) -> bool:
        """Whether the object was freed."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Free the object; a second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Model(Handle):
    """A loaded model. Contexts keep it alive; close it after them."""

    def __init__(self, library: Library, pointer: Any) -> None:
        super().__init__(library.api.llama_model_free, pointer)
        self.library = library

    @property
    def window(self) -> int:
        """Tokens that sliding-window layers look back; 0 without such layers."""
        return int(self.library.api.llama_model_n_swa(self.pointer))

    @property
    def recurrent(self) -> bool:
        """Whether some layers, or all, keep a running state instead of a cache."""
        api = self.library.api
        return bool(
            api.llama_model_is_recurrent(self.pointer) or api.llama_model_is_hybrid(self.pointer)
        )

    def metadata(self, key: str) -> str:
        """A value of the file's header as text; empty when there is none."""
        size = 256
        for _ in range(2):
            buffer = ctypes.create_string_buffer(size)
            length = self.library.api.llama_model_meta_val_str(
                self.pointer, key.encode(), buffer, size
            )
            if length < size:
                return buffer.value.decode("utf-8", "replace") if length > 0 else ""
            size = length + 1
        return ""

    def context(self, **fields: Any) -> Context:
        """Make a context; ``fields`` are those of ``llama_context_params``, and ``top_k``.

        ``top_k`` attaches a top-k sampler to every sequence, as llama-server does to its
        drafter's, so that the graph that samples on the device is reserved too. ``other`` is the
        target's context for a drafter's.

        Raises:
            EngineUnsupported: llama.cpp refuses; its own words are in ``why``.
        """
        api = self.library.api
        params = api.llama_context_default_params()
        other: Context | None = fields.pop("other", None)
        top_k: int = fields.pop("top_k", 0)
        for name, value in fields.items():
            setattr(params, name, value)
        if other is not None:
            params.ctx_other = other.pointer
        chains = _Samplers(api, params.n_seq_max, top_k) if top_k else None
        if chains is not None:
            params.samplers = chains.array
            params.n_samplers = len(chains.array)
        with self.library._failure() as said:
            pointer = api.llama_init_from_model(self.pointer, params)
        if not pointer:
            raise EngineUnsupported(
                "llama.cpp refuses to make a context",
                why=said() or "it gives no reason",
                fix="check the context's options against the model",
            )
        return Context(self, pointer, keep=(other, chains))


class Context(Handle):
    """A context of a model; it keeps the model, and what ``keep`` holds, alive."""

    def __init__(self, model: Model, pointer: Any, keep: tuple[object, ...] = ()) -> None:
        super().__init__(model.library.api.llama_free, pointer)
        self.model = model
        self._keep = keep

    @property
    def n_ctx(self) -> int:
        """Tokens that all sequences hold together, after llama.cpp's own rounding."""
        return int(self.model.library.api.llama_n_ctx(self.pointer))


class _Samplers:
    """One top-k chain per sequence, as a C array."""

    def __init__(self, api: Any, count: int, top_k: int) -> None:
        self.array = (api.llama_sampler_seq_config * count)()
        for seq in range(count):
            chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_top_k(top_k))
            self.array[seq].seq_id = seq
            self.array[seq].sampler = ctypes.cast(chain, ctypes.c_void_p)
            weakref.finalize(self, api.llama_sampler_free, chain)


class _Log:
    """llama.cpp's log callback: joins pieces into lines and passes them on."""

    def __init__(self, api: Any) -> None:
        self.listeners: list[Listener] = []
        self._pieces = threading.local()
        # The C side keeps only the pointer: this object must live as long as the library.
        self._callback = api.llama_log_callback(self._receive)
        api.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _receive(self, level: int, text: bytes, _data: object) -> None:
        if level == _CONTINUED:
            level = getattr(self._pieces, "level", 1)
        self._pieces.level = level
        pending: str = getattr(self._pieces, "text", "") + text.decode("utf-8", "replace")
        *lines, self._pieces.text = pending.split("\n")
        for line in lines:
            log.log(_LEVELS.get(level, logging.DEBUG), "%s", line)
            for listener in tuple(self.listeners):
                listener(level, line)


_loaded: list[Library] = []
_lock = threading.Lock()


def load_library() -> Library:
    """Load the bindings once per process and start the backends.

    Raises:
        EngineNotFound: llama-cpp-python is not installed, or its library does not load.
        EngineUnsupported: its version lacks a structure field that is used here.
    """
    with _lock:
        if not _loaded:
            _loaded.append(_load())
        return _loaded[0]


def _load() -> Library:
    try:
        package = importlib.import_module("llama_cpp")
        api: Any = importlib.import_module("llama_cpp.llama_cpp")
    except ModuleNotFoundError as exc:
        raise EngineNotFound(
            "llama.cpp's library is not available to Python",
            why=f"the module {exc.name} is not installed",
            fix="pip install 'browndwarf[engine]'",
        ) from exc
    except (ImportError, OSError, RuntimeError, AttributeError) as exc:
        where = os.environ.get("LLAMA_CPP_LIB_PATH", "the package's own folder")
        raise EngineNotFound(
            "llama.cpp's library does not load",
            why=f"from {where}: {exc}",
            fix="point LLAMA_CPP_LIB_PATH at the lib folder of a build of the same commit, "
            "or unset it",
        ) from exc
    version = str(getattr(package, "__version__", "unknown"))
    missing = _missing(api)
    if missing:
        raise EngineUnsupported(
            f"llama-cpp-python {version} does not fit",
            why="its structures lack " + ", ".join(missing),
            fix=f"install llama-cpp-python {_TESTED}",
        )
    ext: ModuleType | None
    try:
        ext = importlib.import_module("llama_cpp.llama_cpp_ext")
    except (ImportError, AttributeError):
        ext = None
    handler = _Log(api)
    api.llama_backend_init()
    return Library(api, ext, version, str(getattr(api, "_base_path", "")), handler)


def _missing(api: Any) -> list[str]:
    found = []
    for structure, names in (
        ("llama_model_params", _MODEL_FIELDS),
        ("llama_context_params", _CONTEXT_FIELDS),
    ):
        have = {entry[0] for entry in getattr(getattr(api, structure, None), "_fields_", ())}
        found += [f"{structure}.{name}" for name in names if name not in have]
    return found
