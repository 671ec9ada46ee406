"""Sweeps without a download: models of random weights in a real shape, with given acceptance.

The speed of a cell depends on shapes, types and options, so a random model of the right shape
times like the real one; acceptance depends on trained weights, so it is given. Everything that
comes out of such a run says so.

The boundary: this decides which files are needed and where they lie; ``models.filled`` writes
them. Files are kept in the cache under names that tell shape and type, and made again when they
are gone.

Example:
    >>> spec = Synthetic(shape="gemma4-12b")
    >>> spec.label, spec.has_drafter
    ('gemma4-12b', True)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from browndwarf.files import cache_folder
from browndwarf.models import filled
from browndwarf.models.gguf import fingerprint
from browndwarf.sweep import sources
from browndwarf.sweep.sources import Source

#: Changes when the written bytes do, so that older files are not taken for new ones.
LAYOUT = "1"


class Synthetic(msgspec.Struct, frozen=True, kw_only=True):
    """What the random files are shaped like: a named shape, or the headers of two files."""

    shape: str | None = None
    model: str | None = None
    draft: str | None = None

    @property
    def label(self) -> str:
        """The shape's name, for tables and recipes."""
        return self.shape or Path(self.model or "").stem

    @property
    def has_drafter(self) -> bool:
        """Whether a separate head file belongs to it."""
        if self.shape is None:
            return self.draft is not None
        return filled.has_drafter(filled.shape_named(self.shape))

    @property
    def embedded(self) -> bool:
        """Whether a named shape carries its head inside."""
        return self.shape is not None and bool(filled.shape_named(self.shape).nextn)


def of_shape(shape: str, role: filled.Role, type_name: str) -> Source:
    """The source of a named shape's files; all its types are written and none is quantized."""
    folder = cache_folder("synthetic")
    return Source(
        path=str(folder / f"{shape}-{role}-{type_name}.gguf"),
        type=type_name,
        fingerprint=f"synthetic:{LAYOUT}:{shape}:{role}",
        shape=shape,
        role=role,
    )


def of_header(path: str) -> Path:
    """Where the random file with this file's header is kept."""
    digest = fingerprint(path).removeprefix("sha256:")[:16]
    return cache_folder("synthetic") / f"{Path(path).stem}-{digest}-random.gguf"


def paths(spec: Synthetic, target_type: str, head_type: str) -> tuple[str, str | None]:
    """The files of target and head, made or not."""
    if spec.shape is None:
        draft = str(of_header(spec.draft)) if spec.draft else None
        return str(of_header(str(spec.model))), draft
    target = of_shape(spec.shape, "target", target_type).path
    return target, of_shape(spec.shape, "head", head_type).path if spec.has_drafter else None


def source_of(spec: Synthetic, path: str, role: filled.Role) -> Source | None:
    """The source behind a named shape's file; None for a header's copy, which is as any file."""
    if spec.shape is None:
        return None
    type_name = Path(path).stem.removeprefix(f"{spec.shape}-{role}-")
    return of_shape(spec.shape, role, type_name)


def ensure(spec: Synthetic, model: str, draft: str | None, on_make: Callable[[str], None]) -> None:
    """Make the files that are missing. ``on_make`` is told each name first.

    Raises:
        UsageError: the shape or a type cannot be made.
        DiskFull, StorageError: a file could not be written; nothing half-written stays.
    """
    roles: list[tuple[str, filled.Role, str | None]] = [(model, "target", spec.model)]
    if draft is not None:
        roles.append((draft, "head", spec.draft))
    for text, role, header in roles:
        path = Path(text)
        if path.exists():
            sources.touch(path)
            continue
        on_make(f"synthetic {path.stem}")
        source = source_of(spec, text, role)
        if source is not None:
            write(source, path, source.type)
        else:
            filled.write_copy(Path(str(header)), path)


def write(source: Source, path: Path, type_name: str) -> None:
    """Write one type of a named shape."""
    filled.write_shape(path, str(source.shape), type_name, role=source.role)
