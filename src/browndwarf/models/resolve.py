"""From what a user writes to a model file: a path, ``demo``, or ``hf:owner/name[:file]``.

``hf:`` looks into the local Hugging Face cache (``HF_HUB_CACHE``, else ``HF_HOME``/hub, else
``~/.cache/huggingface/hub``) and never touches the network. Without a file name the snapshot must
leave one choice: for a target the only model that is no drafter, projector or imatrix, for a head
the only drafter; ``:Q4_K_M`` chooses by part of the name.

Example:
    resolve_model("demo"), resolve_model("hf:ggml-org/gemma-4-12b-it-GGUF:Q4_K_M")
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from browndwarf.errors import ModelNotFound, UsageError

Role = Literal["target", "head"]

_HF = re.compile(r"^hf:(?P<owner>[\w.-]+)/(?P<name>[\w.-]+?)(?::(?P<file>.+))?$")
_HEAD_NAME = re.compile(r"(^|[^a-z])(mtp|assistant|draft(er)?)([^a-z]|$)", re.IGNORECASE)
_OTHER_NAME = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def resolve_model(text: str, role: Role = "target") -> Path:
    """The file that ``text`` names; whether it is a sound model is not looked at.

    Raises:
        UsageError: the text is empty.
        ModelNotFound: nothing there, or more than one choice.
    """
    if not text.strip():
        raise UsageError(
            f"the name of the {'model' if role == 'target' else 'head'} is empty",
            why="an unset variable of a script leaves an empty word",
            fix="give a path to a .gguf file, the word demo, or hf:owner/name[:file]",
        )
    if text == "demo":
        return _demo(role)
    if text.startswith("hf:"):
        return _from_cache(text, role)
    try:
        path = Path(text).expanduser()
        why = "" if path.exists() else "the file does not exist"
    except (OSError, RuntimeError) as exc:  # a name too long, a folder not to be entered, ~nobody
        why = getattr(exc, "strerror", None) or str(exc)
    if why:
        raise ModelNotFound(
            f"no model at {text}",
            why=why,
            fix="give a path to a .gguf file, the word demo, or hf:owner/name[:file]",
        )
    return path


def _demo(role: Role) -> Path:
    try:
        from browndwarf.models import demo
    except ImportError as exc:
        raise ModelNotFound(
            "the demo models are not part of this installation",
            why=str(exc),
            fix="install browndwarf from its wheel, or give your own model",
        ) from exc
    path = getattr(demo, "HEAD" if role == "head" else "TARGET", None)
    if not isinstance(path, Path) or not path.is_file():
        raise ModelNotFound(
            "the demo models are missing",
            why=f"no file at {path}" if path else "this installation has none",
            fix="install browndwarf from its wheel, or give your own model",
        )
    return path


def cache_folder() -> Path:
    """Where Hugging Face's tools keep downloaded repositories."""
    if hub := os.environ.get("HF_HUB_CACHE"):
        return Path(hub).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def _from_cache(text: str, role: Role) -> Path:
    match = _HF.match(text)
    if match is None:
        raise ModelNotFound(
            f"{text!r} is no name of a cached model",
            why="it is written hf:owner/name or hf:owner/name:file",
            fix="check the spelling",
        )
    repository = f"{match['owner']}/{match['name']}"
    folder = cache_folder() / f"models--{match['owner']}--{match['name']}"
    snapshot = _snapshot(folder)
    if snapshot is None:
        raise ModelNotFound(
            f"{repository} is not in the local Hugging Face cache",
            why=f"no snapshot under {folder}",
            fix=f"download it first, for example with `hf download {repository}`",
        )
    wanted = match["file"]
    if wanted and (snapshot / wanted).is_file():
        return snapshot / wanted
    found = sorted(p for p in snapshot.rglob("*.gguf") if not _LATER_PART.search(p.name))
    fitting = [p for p in found if _plays(p, role) and (not wanted or wanted in p.name)]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(str(p.relative_to(snapshot)) for p in fitting or found) or "no .gguf file"
    raise ModelNotFound(
        f"{text} leaves no single choice of a {role}",
        why=f"the snapshot holds {names}",
        fix=f"name the file: hf:{repository}:FILE",
    )


def _snapshot(folder: Path) -> Path | None:
    """The snapshot of ``main``, else the newest one."""
    snapshots = folder / "snapshots"
    try:
        named = snapshots / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        named = None
    if named is not None and named.is_dir():
        return named
    try:
        return max((p for p in snapshots.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime)
    except (OSError, ValueError):
        return None


def _plays(path: Path, role: Role) -> bool:
    if _OTHER_NAME.search(path.name):
        return False
    return bool(_HEAD_NAME.search(path.name)) == (role == "head")
