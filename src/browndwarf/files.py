"""Writing files so that a crash, a full disk or a second process loses nothing.

Example:
    >>> atomic_write(Path("out/cells.csv"), b"id,status")     # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from browndwarf.errors import DiskFull, StorageError

#: Read once: asking for it means setting it for a moment, for all threads.
_UMASK = os.umask(0)
os.umask(_UMASK)

#: A full file system may still make an empty file.
BLOCK = 4096


def cache_folder(name: str) -> Path:
    """The folder of one kind of cached thing, safe to delete at any time; it may not exist yet.

    It lies below ``BROWNDWARF_CACHE``, or the user's cache folder of this system.
    """
    root = os.environ.get("BROWNDWARF_CACHE") or platformdirs.user_cache_dir("browndwarf")
    return Path(root) / name


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hex; read in blocks. Raises OSError."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def place(partial: Path, dest: Path, *, overwrite: bool) -> None:
    """Give a finished file its name; without ``overwrite`` never in another file's place, even
    if that one came a moment ago.

    Raises:
        FileExistsError: ``dest`` is there and may not be replaced.
        OSError: as the operating system says.
    """
    if not overwrite:
        try:
            os.link(partial, dest)
        except FileExistsError:
            raise
        except OSError as exc:  # a file system without links
            if dest.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(dest)) from exc
        else:
            partial.unlink(missing_ok=True)
            return
    partial.replace(dest)


@contextlib.contextmanager
def storage_errors(path: Path, doing: str) -> Iterator[None]:
    """Translate the operating system's refusals about ``path`` into StorageError or DiskFull.

    ``doing`` completes the sentence "could not ...", e.g. ``"write the report"``.
    """
    try:
        yield
    except OSError as exc:
        raise storage_error(exc, path, doing) from exc


def storage_error(exc: OSError, path: Path, doing: str) -> StorageError:
    """The StorageError that an ``OSError`` about ``path`` means."""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"could not {doing}: no space left",
            why=f"{path}: {exc.strerror}",
            fix="free some space and run the same command again; what was finished is kept",
        )
    return StorageError(
        f"could not {doing}",
        why=f"{path}: {exc.strerror or exc}",
        fix="check that the folder exists and may be written",
    )


def check_writable(folder: Path, doing: str) -> None:
    """Make sure that files can be made in ``folder``, before work is spent on what goes there.

    Raises:
        DiskFull, StorageError: they cannot; ``doing`` as in ``storage_errors``.
    """
    with storage_errors(folder, doing):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(BLOCK))
            probe.flush()


def atomic_write(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` whole or not at all: temporary file, fsync, rename.

    Parent folders are made. Readers see the old content or the new, never a part.

    Raises:
        DiskFull, StorageError: the file system refused; the old content is untouched.
    """
    with storage_errors(path, f"write {path.name}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
                stream.flush()
                if hasattr(os, "fchmod"):  # mkstemp's files are for their owner alone
                    os.fchmod(stream.fileno(), 0o666 & ~_UMASK)
                os.fsync(stream.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
