"""Places that files cannot be written to are found before work is spent."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from browndwarf.errors import DiskFull, StorageError
from browndwarf.files import atomic_write, check_writable


def test_a_place_that_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b", "write")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="could not write the cells") as caught:
        check_writable(tmp_path / "file" / "below", "write the cells")
    assert str(tmp_path / "file" / "below") in caught.value.why


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, DiskFull), (errno.EROFS, StorageError)]
)
def test_the_systems_own_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StorageError]
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(kind) as caught:
        check_writable(tmp_path, "write")
    assert type(caught.value) is kind
    assert os.strerror(number) in caught.value.why


@pytest.mark.skipif(os.name == "nt", reason="POSIX modes")
def test_a_file_that_was_written_may_be_read_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"x")
    atomic_write(tmp_path / "atomic", b"x")
    modes = [(tmp_path / name).stat().st_mode for name in ("plain", "atomic")]
    assert modes[0] == modes[1]
