"""A header is read within limits, and a bad one gives one clear error."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from browndwarf.errors import BadModelFile, ModelNotFound
from browndwarf.models.ggml_types import GGML_TYPES, KV_TYPES, row_bytes
from browndwarf.models.gguf import read_model
from browndwarf.models.gguf_read import read_header
from gguf_files import gguf, hollow_pair, tensor, text, tiny, tiny_file

SOUND = gguf(tiny(), [tensor("token_embd.weight", (64, 100))], 25600)


def test_a_header_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Keys, short arrays, long arrays as hashes, tensors with their bytes."""
    header = read_header(tiny_file(tmp_path / "m.gguf", **{"x.list": [1, 2, 3]}))
    assert header.metadata["general.architecture"] == "llama"
    listed, tokens = header.metadata["x.list"], header.metadata["tokenizer.ggml.tokens"]
    assert not isinstance(listed, str | int | float)
    assert not isinstance(tokens, str | int | float)
    assert listed.values == (1, 2, 3)
    assert (tokens.count, tokens.values) == (100, None)
    assert header.tensors[0].shape == (64, 100)
    assert header.tensors[0].bytes == 64 * 100 * 4


def test_type_sizes_are_those_of_the_gguf_package() -> None:
    """The table is ggml's."""
    import gguf as package

    for kind, sizes in package.GGML_QUANT_SIZES.items():
        if kind.name in GGML_TYPES:
            ours = GGML_TYPES[kind.name]
            assert (ours.number, ours.block, ours.bytes) == (kind.value, *sizes)
    assert all(row_bytes(kind, 256) > 0 for kind in KV_TYPES)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"GG", "not a GGUF"),
        (b"GGUF", "truncated"),
        (b"abcd" * 20, "not a GGUF"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (struct.pack("<Q", 40) + b'{"__metadata__":{}}' + b" " * 60, "safetensors"),
        (b"PK\x03\x04" + b"\0" * 60, "PyTorch"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"<!DOCTYPE html><html>", "web page"),
        (SOUND[:100], "truncated"),
        (SOUND[:-1], "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63), "claims"),
        (gguf({"a": "b"}, []), "general.architecture"),
        (gguf(tiny(**{"llama.block_count": None}), []), "block_count is missing"),
        (gguf(tiny(**{"llama.block_count": 100_000}), []), "block_count"),
        (gguf(tiny(**{"llama.block_count": "two"}), []), "block_count"),
        (gguf(tiny(**{"llama.attention.head_count_kv": [2]}), []), "1 entries for 2 layers"),
        (gguf(tiny(**{"general.alignment": 33}), []), "alignment"),
        (gguf(tiny(), [tensor("a", (32,), 99)]), "type 99"),
        (gguf(tiny(), [tensor("a", (33,), 8)]), "blocks"),
        (gguf(tiny(), [tensor("a", (2**40, 2**40))]), "impossible shape"),
        (gguf(tiny(), [tensor("a", (32,))] * 2, 999), "appears twice"),
        (gguf(tiny(), [tensor("a", (1,) * 5)]), "5 dimensions"),
    ],
)
def test_a_bad_file_gives_one_clear_error(tmp_path: Path, content: bytes, said: str) -> None:
    """What is wrong is named, and the exit code is the environment's."""
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(BadModelFile) as caught:
        read_model(path)
    assert said in str(caught.value)
    assert caught.value.exit_code == 3
    assert caught.value.fix


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes in folders")
def test_a_pipe_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    """Opening one waits until somebody writes."""
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "pipe.gguf", Path(os.devnull)):
        with pytest.raises(BadModelFile, match="no regular file"):
            read_header(path)


def test_a_directory_and_a_missing_file_are_told_apart(tmp_path: Path) -> None:
    """Neither ends in an operating system's error."""
    with pytest.raises(BadModelFile, match="directory"):
        read_model(tmp_path)
    with pytest.raises(ModelNotFound, match="no model"):
        read_model(tmp_path / "none.gguf")


def test_a_duplicate_key_is_refused(tmp_path: Path) -> None:
    """llama.cpp would take one of the two silently."""
    pair = text("k") + struct.pack("<II", 4, 1)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pair * 2)
    with pytest.raises(BadModelFile, match="twice"):
        read_header(path)


def mutate(base: bytes, seed: int) -> bytes:
    """A damaged copy: bytes flipped, numbers replaced, parts cut, doubled or removed."""
    rng = random.Random(seed)
    data = bytearray(base)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(5):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                number = rng.choice([0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1])
                data[at : at + 8] = struct.pack("<Q", number)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + rng.randrange(1, 40)]
            case 4:
                data[at:at] = data[at : at + rng.randrange(1, 200)]
    return bytes(data)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_a_damaged_header_is_read_or_refused_never_worse(tmp_path: Path, seed: int) -> None:
    """No exception but our own leaves the reader, whatever the bytes are."""
    path = tmp_path / "m.gguf"
    path.write_bytes(mutate(SOUND, seed))
    with contextlib.suppress(BadModelFile):
        read_model(path)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_a_damaged_gemma_header_is_read_or_refused(
    tmp_path: Path, gemma_header: bytes, seed: int
) -> None:
    """The same over per-layer arrays, windows and a head's keys."""
    path = tmp_path / "m.gguf"
    path.write_bytes(mutate(gemma_header, seed))
    with contextlib.suppress(BadModelFile):
        read_model(path)


@pytest.fixture(scope="module")
def gemma_header(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small gemma4 file's first bytes: its header and some data."""
    folder = tmp_path_factory.mktemp("gemma")
    target, _ = hollow_pair(folder, "gemma4-e4b", layers=12, vocab=1100)
    return target.read_bytes()[: read_header(target).data_offset + 512]


HUNGRY = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
sys.path[:0] = [sys.argv[2]]
from browndwarf.errors import BadModelFile
from browndwarf.models.gguf import read_model
from models.test_gguf_read import SOUND, mutate
import struct
path = Path(sys.argv[1])
def strings(count):
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack(
        "<IIQ", 9, 8, count)
cases = [mutate(SOUND, seed) for seed in range(400)]
cases += [strings(2**62), strings(1_500_000) + b"\\0" * 12_000_000]
cases += [b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**40)]
refused = 0
for case in cases:
    path.write_bytes(case)
    try:
        read_model(path)
    except BadModelFile:
        refused += 1
print(refused)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory")
def test_a_damaged_header_never_takes_a_gibibyte(tmp_path: Path) -> None:
    """With 1 GiB of address space for the whole process, no case ends in MemoryError."""
    tests = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", HUNGRY, str(tmp_path / "m.gguf"), str(tests)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
