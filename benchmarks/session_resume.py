"""How long does a long conversation take to resume from disk, against reading it again, and why?

The models are loaded; a conversation of ``--tokens`` is read once (its prefill time), saved, and
resumed ``--repeats`` times with the file in the operating system's cache, then once after that
cache was dropped. A resume is split into wall time: ``data`` (reading, checking and placing the
states, by several threads), ``small`` (manifest, tokens, digest, layout), ``set_target`` and
``set_head`` (llama.cpp's own uploads) and ``other``. ``floor`` is ``set_target`` alone again and
again from the same memory, and from memory that the device's driver has pinned, where there is
such. A turn of 200 tokens is appended, and what it writes is compared with the state.

    python benchmarks/session_resume.py                                     # CPU, the embedded pair
    python benchmarks/session_resume.py --shape gemma4-12b --out FOLDER     # a GPU

Goals: a resume takes under 5% of the prefill, a turn writes under 5% of the state. The last line
of output is one JSON document, which ``--out`` also keeps.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from browndwarf.decode.llm import LLM
from browndwarf.decode.session import SessionStore
from browndwarf.decode.session_file import Contents, Disk
from browndwarf.decode.state_layout import Bytes, parse
from browndwarf.engine.listing import list_devices
from browndwarf.engine.locate import choose_build, find_builds
from inprocess_vs_server import models, open_here

GOAL = 0.05


class TimedDisk(Disk):
    """Sums what the reading threads wait for."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    def read(self, path: Path, offset: int, out: Bytes) -> int:
        begun = time.perf_counter()
        got = super().read(path, offset, out)
        with self._lock:
            self.seconds += time.perf_counter() - begun
        return got


@contextlib.contextmanager
def timed(owner: Any, name: str, sums: dict[str, float], part: str) -> Iterator[None]:
    """Add the wall time of a method's calls to ``sums[part]`` meanwhile."""
    real: Callable[..., Any] = getattr(owner, name)
    own = name in vars(owner)

    def call(*args: Any, **settings: Any) -> Any:
        begun = time.perf_counter()
        try:
            return real(*args, **settings)
        finally:
            sums[part] = sums.get(part, 0.0) + time.perf_counter() - begun

    setattr(owner, name, call)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, real)
        else:
            delattr(owner, name)


def resume(llm: LLM, store: SessionStore, disk: TimedDisk) -> tuple[dict[str, float], Any]:
    """One resume and its parts, in seconds."""
    slot = llm._slots[0]
    llm.keeper.clear(slot)
    llm.pair.target.wait()
    parts: dict[str, float] = {}
    disk.seconds = 0.0
    with contextlib.ExitStack() as stack:
        stack.enter_context(timed(Contents, "spread", parts, "spread"))
        stack.enter_context(timed(llm.pair.target, "restore", parts, "set_target"))
        if llm.keeper.own_head is not None:
            stack.enter_context(timed(llm.keeper.own_head, "restore", parts, "set_head"))
        begun = time.perf_counter()
        snapshot = store.load("long", llm.fingerprint)
        loaded = time.perf_counter()
        llm.keeper.restore(slot, snapshot)
        llm.pair.target.wait()
        ended = time.perf_counter()
    parts["data"] = parts.pop("spread")
    parts["small"] = loaded - begun - parts["data"]
    restored = parts["set_target"] + parts.get("set_head", 0.0)
    parts["other"] = ended - loaded - restored
    parts["total"] = ended - begun
    parts["reading_threads"] = disk.seconds
    return parts, snapshot


def forget(folder: Path) -> bool:
    """Drop a session's files from the operating system's cache, where it can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in folder.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def floor(llm: LLM, state: Bytes, repeats: int) -> dict[str, float]:
    """llama.cpp's upload alone: seconds and GiB/s of the fastest."""
    target, seq = llm.pair.target, llm._slots[0].seq

    def fastest() -> float:
        times = []
        for _ in range(repeats + 1):
            target.remove(seq, -1)
            target.wait()
            begun = time.perf_counter()
            assert target.restore(seq, state)
            target.wait()
            times.append(time.perf_counter() - begun)
        return min(times)

    best = fastest()
    found = {"set_s": best, "set_gib_s": state.nbytes / best / 2**30}
    with pinned(state) as pin_s:
        if pin_s is not None:
            best = fastest()
            found |= {"pin_s": pin_s, "set_pinned_s": best}
            found["set_pinned_gib_s"] = state.nbytes / best / 2**30
    return {key: round(value, 4) for key, value in found.items()}


@contextlib.contextmanager
def pinned(data: Bytes) -> Iterator[float | None]:
    """Let CUDA's driver pin memory meanwhile; yields the seconds that took, None without one."""
    try:
        driver: Any = ctypes.CDLL("libcuda.so.1")
    except OSError:
        yield None
        return
    begun = time.perf_counter()
    address = ctypes.c_void_p(data.ctypes.data)
    status = driver.cuMemHostRegister_v2(address, ctypes.c_size_t(data.nbytes), 0)
    took = time.perf_counter() - begun
    if status:
        tell({"cuMemHostRegister": status})
        yield None
        return
    try:
        yield took
    finally:
        driver.cuMemHostUnregister(address)


def measure(llm: LLM, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Prefill, save, resume, append."""
    disk = TimedDisk()
    store = SessionStore(folder, disk=disk, compress=args.compress)
    rng = np.random.default_rng(3)
    vocab = min(4000, llm.pair.vocab.size)
    prompt = rng.integers(300, vocab, args.tokens).tolist()
    slot = llm._slots[0]
    identity = llm.fingerprint
    with llm.stream_text([5] * 64, max_tokens=4) as stream:
        stream.run()
    prefills = []
    for _ in range(args.repeats):
        llm.keeper.clear(slot)
        with llm.stream_text(prompt, max_tokens=8) as stream:
            prefills.append(stream.run().stats.prefill_s)
        tell({"prefill_s": prefills[-1]})

    def save(previous: Any) -> tuple[Any, Any, dict[str, float]]:
        begun = time.perf_counter()
        snapshot = llm.keeper.capture(slot)
        captured = time.perf_counter()
        if previous is None:
            snapshot.unchanged = 0
        else:
            snapshot.layouts = previous.layouts
        saved = store.save("long", snapshot, identity)
        if not saved.replay:
            slot.unchanged = slot.kept
        ended = time.perf_counter()
        return snapshot, saved, {"capture_s": captured - begun, "write_s": ended - captured}

    first, whole, whole_s = save(None)
    tell({"save": whole_s, "bytes": whole.bytes})
    resumes = []
    for _ in range(args.repeats):
        parts, loaded = resume(llm, store, disk)
        resumes.append(parts)
        tell(parts)
    state = loaded.states["target"]
    same = all(np.array_equal(first.states[k], loaded.states[k]) for k in first.states)
    layout = parse(state)
    form = {
        "rows": [len(block.positions) for block in layout.blocks],
        "arrays": [len(block.arrays) for block in layout.blocks],
        "raw_bytes": sum(end - start for start, end in layout.raw),
    }
    alone = floor(llm, state, args.repeats)
    tell(alone)
    cold: dict[str, float] = {}
    if forget(folder / "long"):
        cold, _ = resume(llm, store, disk)
        tell({"cold": cold})
    del state, loaded
    # A turn of 200 tokens: half of it read, half of it made.
    resume(llm, store, disk)
    turn = slot.tokens + rng.integers(300, vocab, 100).tolist()
    with llm.stream_text(turn, max_tokens=100) as stream:
        stream.run()
    _, added, added_s = save(first)
    after, again = resume(llm, store, disk)
    begun = time.perf_counter()
    with llm.stream_text([*again.tokens, 301, 302], max_tokens=1) as stream:
        replayed = stream.run().stats
    first_token_s = time.perf_counter() - begun
    totals = [parts["total"] for parts in resumes]
    prefill_s, resume_s = statistics.median(prefills), statistics.median(totals)
    return {
        "resume_over_prefill": round(resume_s / prefill_s, 5),
        "turn_over_state": round(added.bytes / whole.state_bytes, 6),
        "tokens": args.tokens,
        "prefill_s": rounded(prefills),
        "resume_s": rounded(totals),
        "resume_parts_s": {
            key: round(statistics.median(parts[key] for parts in resumes), 4) for key in resumes[0]
        },
        "resume_cold_s": {key: round(value, 4) for key, value in cold.items()},
        "resume_after_turn_s": round(after["total"], 4),
        "first_token_after_resume_s": round(first_token_s, 4),
        "replayed_tokens": replayed.prompt_tokens - replayed.reused_tokens,
        "floor": alone,
        "state_mib": round(whole.state_bytes / 2**20, 2),
        "file_mib": round(whole.bytes / 2**20, 2),
        "form": form,
        "save_s": {key: round(value, 4) for key, value in whole_s.items()},
        "turn_bytes": added.bytes,
        "turn_save_s": {key: round(value, 4) for key, value in added_s.items()},
        "same_state": same,
        "met": same and resume_s < GOAL * prefill_s and added.bytes < GOAL * whole.state_bytes,
    }


def rounded(values: list[float]) -> dict[str, float]:
    """Median and spread."""
    return {
        "median": round(statistics.median(values), 4),
        "spread": round(max(values) - min(values), 4),
    }


def tell(values: dict[str, Any]) -> None:
    """Progress, on stderr."""
    print(json.dumps(values), file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make the models, load them and measure."""
    started = time.monotonic()
    build = choose_build(find_builds())
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        folder = Path(name)
        pair = models(args, folder, build)
        tell({"models_s": time.monotonic() - started})
        with open_here(pair, args, n_max=args.n_max, n_ctx=args.tokens + 1024) as llm:
            tell({"loaded_s": time.monotonic() - started})
            found = measure(llm, folder / "sessions", args)
    return {
        "name": "session_resume",
        **found,
        "goal": "resume under 5% of the prefill's time, a turn's bytes under 5% of the state",
        "shape": args.shape or "demo",
        "machine": {
            "os": platform.system(),
            "cores": os.cpu_count(),
            "devices": list_devices(build).strip(),
        },
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", help="random weights of this shape; else the embedded pair")
    parser.add_argument("--layers", type=int, help="fewer layers, to rehearse a shape")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--n-max", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compress", action="store_true", help="with zstandard")
    parser.add_argument("--out", type=Path, help="folder for session_resume.json")
    args = parser.parse_args()
    text = json.dumps(run(args))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "session_resume.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
