"""Ask llama.cpp how large its compute buffers would be, without allocating them.

With ``no_alloc`` set in the model parameters, llama.cpp reads the header, builds the graphs and
plans the buffers, but allocates neither weights nor caches; its log then states the exact sizes.
``DrySession`` does so for many context settings of one target and drafter, in a worker process
(``python -m browndwarf.engine.dryalloc``), because a fault in the library must not end the
caller. The worker reads JSON lines, first a ``DryModels`` and then arrays of ``DryCase``, and
answers each array with one ``DryReply``. Loading takes most of a second with a vocabulary of
262k, each further setting some 10 ms.

The settings mirror llama-server: ``n_outputs_max`` is slots x (1 + n_max) for the target and the
number of slots for the drafter, whose sampler runs on the device; the drafter's context is as
long as the target's. The figures are those of the devices that the loaded library has: a CPU
library gives CPU figures. Weights and attention caches print as 0 in this mode and come from
formulas elsewhere (``plan``).

Recurrent states are the exception: llama.cpp allocates them even so, for the moment that a
setting is measured.

Example:
    with DrySession(DryModels(target="m.gguf", head="h.gguf")) as session:
        session.ask([DryCase(n_ctx=4096)]).cases[0].compute
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import msgspec

from browndwarf.engine.logparse import parse_log
from browndwarf.engine.native import Library, Model, load_library
from browndwarf.errors import BrowndwarfError, EngineError, EngineUnsupported

_MTP = 1
_DRAFT_TOP_K = 10


class DryCase(msgspec.Struct, frozen=True):
    """One context setting. ``draft`` adds the drafter's context; types are llama.cpp's names."""

    n_ctx: int
    parallel: int = 1
    unified: bool = False
    batch: int = 2048
    ubatch: int = 512
    type_k: str = "f16"
    type_v: str = "f16"
    draft: bool = True
    draft_type_k: str = "f16"
    draft_type_v: str = "f16"
    n_max: int = 3
    swa_full: bool = False
    flash_attention: bool = True


class DryModels(msgspec.Struct, frozen=True):
    """Which files. Without ``head``, ``draft`` cases use the target's own nextn layers.
    ``gpu_layers`` -1 offloads everything; ``device`` picks one by llama.cpp's index."""

    target: str
    head: str | None = None
    gpu_layers: int = -1
    device: int | None = None


class DryResult(msgspec.Struct, frozen=True):
    """One case's buffers in MiB by device name; ``error`` is set when llama.cpp refused."""

    compute: dict[str, float] = {}
    recurrent: dict[str, float] = {}
    output: dict[str, float] = {}
    draft_compute: dict[str, float] = {}
    draft_output: dict[str, float] = {}
    error: str = ""


class DryReply(msgspec.Struct, frozen=True):
    """One result per case, and the bindings' version; or ``error`` when nothing could load."""

    cases: tuple[DryResult, ...] = ()
    version: str = ""
    path: str = ""
    error: str = ""


class DrySession:
    """A worker with the models loaded. Not for several threads at once."""

    def __init__(self, models: DryModels, *, lib_path: str | None = None) -> None:
        """Start the worker and let it load; ``lib_path`` makes it use another build's library.

        Raises:
            EngineError: the worker cannot be started.
        """
        env = dict(os.environ)
        if lib_path is not None:
            env["LLAMA_CPP_LIB_PATH"] = lib_path
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "browndwarf.engine.dryalloc"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=env,
            )
        except OSError as exc:
            self._errors.close()
            raise _no_answer(f"the worker does not start: {exc}") from exc
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self._send(models)

    def ask(self, cases: Sequence[DryCase], timeout: float = 120.0) -> DryReply:
        """Measure these settings. After an error the session is closed.

        Raises:
            EngineError: the library is missing, refused the models, crashed or took too long.
        """
        try:
            self._send(list(cases))
            try:
                line = self._answers.get(timeout=timeout)
            except queue.Empty as exc:
                raise _no_answer(f"no answer within {timeout:g} s") from exc
            if not line:
                raise _no_answer(self._last_words())
            try:
                reply = msgspec.json.decode(line, type=DryReply)
            except msgspec.DecodeError as exc:
                raise _no_answer("its answer is no JSON") from exc
            if reply.error:
                raise _no_answer(reply.error)
        except EngineError:
            self.close()
            raise
        return reply

    def close(self) -> None:
        """End the worker; a second call does nothing."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):
                    stream.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        # A worker that is gone closes its end; the reason comes with the answer that is missing.
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._answers.put(line)
        self._answers.put(b"")

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-20000:].decode("utf-8", "replace").strip().splitlines()
        telling = [line for line in said if "ASSERT" in line or "rror" in line] or said[-1:]
        return f"it ended with {status}: {' '.join(telling[:1])[:200]}"


def open_models(library: Library, wanted: DryModels) -> list[Model]:
    """Load the target, and the head if there is one, without their weights.

    Raises:
        EngineError: llama.cpp refuses one.
    """
    fields: dict[str, Any] = {
        "no_alloc": True,
        "load_mode": 0,
        "load_mtp": True,
        "n_gpu_layers": wanted.gpu_layers,
    }
    if wanted.device is not None:
        fields |= {"split_mode": 0, "main_gpu": wanted.device}
    paths = [wanted.target, *([wanted.head] if wanted.head else [])]
    # The vocabularies take most of the time; the library loads models on several threads.
    with ThreadPoolExecutor(len(paths)) as pool:
        return list(pool.map(lambda path: library.model(path, **fields), paths))


def measure(library: Library, models: list[Model], cases: Sequence[DryCase]) -> DryReply:
    """Measure in this process. A case that llama.cpp refuses has its reason in the reply."""
    results = tuple(_case(library, models, case) for case in cases)
    return DryReply(results, library.version, library.path)


def _case(library: Library, models: list[Model], case: DryCase) -> DryResult:
    try:
        return _reserve(library, models, case)
    except BrowndwarfError as exc:
        return DryResult(error=exc.why or exc.what)


def _reserve(library: Library, models: list[Model], case: DryCase) -> DryResult:
    drafted = case.n_max if case.draft else 0
    outputs = min(case.batch, case.parallel * (1 + drafted))
    common: dict[str, Any] = {
        "n_batch": case.batch,
        "n_ubatch": case.ubatch,
        "n_seq_max": case.parallel,
        "kv_unified": case.unified,
        "swa_full": case.swa_full,
        "flash_attn_type": -1 if case.flash_attention else 0,
    }
    lines: list[str] = []

    def hear(_: int, line: str) -> None:
        # A context logs a thousand lines, of which a handful matter.
        if " buffer size" in line or "reserving" in line:
            lines.append(line)

    with library.listen(hear), contextlib.ExitStack() as stack:
        target = stack.enter_context(
            models[0].context(
                n_ctx=case.n_ctx,
                n_rs_seq=drafted,
                n_outputs_max=outputs,
                n_outputs_max_per_seq=min(case.batch, 1 + drafted),
                type_k=library.ggml_type(case.type_k),
                type_v=library.ggml_type(case.type_v),
                **common,
            )
        )
        own = _buffers(lines)
        draft: dict[str, dict[str, float]] = {}
        if case.draft:
            lines.clear()
            stack.enter_context(
                models[-1].context(
                    n_ctx=target.n_ctx,
                    n_rs_seq=0,
                    n_outputs_max=case.parallel,
                    n_outputs_max_per_seq=1,
                    type_k=library.ggml_type(case.draft_type_k),
                    type_v=library.ggml_type(case.draft_type_v),
                    ctx_type=_MTP,
                    other=target,
                    top_k=_DRAFT_TOP_K,
                    **common,
                )
            )
            draft = _buffers(lines)
    if "compute" not in own:
        raise EngineUnsupported("llama.cpp did not state its compute buffers")
    return DryResult(
        compute=own["compute"],
        recurrent=own.get("RS", {}),
        output=own.get("output", {}),
        draft_compute=draft.get("compute", {}),
        draft_output=draft.get("output", {}),
    )


def _buffers(lines: list[str]) -> dict[str, dict[str, float]]:
    """MiB by purpose and device."""
    found: dict[str, dict[str, float]] = {}
    for buffer in parse_log("\n".join(lines)).buffers:
        sizes = found.setdefault(buffer.kind, {})
        sizes[buffer.device] = sizes.get(buffer.device, 0.0) + buffer.mib
    return found


def _no_answer(why: str) -> EngineError:
    return EngineError(
        "llama.cpp's library could not size its buffers",
        why=why,
        fix="install the engine extra, or go on with the fitted estimate",
    )


def main() -> None:
    """The worker: JSON lines in, JSON lines out, until the input ends."""
    out = sys.stdout.buffer
    models: list[Model] = []
    library: Library | None = None
    error = ""
    for line in sys.stdin.buffer:
        if library is None and not error:
            try:
                library = load_library()
                models = open_models(library, msgspec.json.decode(line, type=DryModels))
            except BrowndwarfError as exc:
                error = f"{exc.what}: {exc.why}" if exc.why else exc.what
            continue
        reply = DryReply(error=error)
        if library is not None and not error:
            reply = measure(library, models, msgspec.json.decode(line, type=list[DryCase]))
        out.write(msgspec.json.encode(reply) + b"\n")
        out.flush()
    # Destructors of a GPU backend that holds no memory can hang; nothing is left to save.
    os._exit(0)


if __name__ == "__main__":
    main()
