"""A model's header without its vocabulary: the same shape, read by llama.cpp in no time.

Most of the time that llama.cpp needs to open a header goes into the vocabulary, which decides no
buffer but through its size. ``write_lean`` copies a header byte by byte, leaves the tokenizer out,
states the number of tokens instead, and sets the file's length without writing data (a sparse
file). Such a file serves dry allocation and nothing else.

Not covered: split models, and file systems without sparse files.

Example:
    write_lean(Path("gemma.gguf"), Path("lean.gguf"), vocab=262144)
"""

from __future__ import annotations

import struct
from pathlib import Path

from browndwarf.models.gguf_read import HeaderBytes, header_bytes

_UINT32, _STRING = 4, 8


def write_lean(source: Path, target: Path, *, vocab: int) -> None:
    """Write the lean copy of ``source``'s header to ``target``.

    Raises:
        ModelNotFound, BadModelFile: as when reading the header.
        OSError: the file system refuses.
    """
    raw = header_bytes(source)
    kept = [
        data
        for key, data in raw.keys.items()
        if not key.startswith("tokenizer.") and key != f"{raw.architecture}.vocab_size"
    ]
    kept.append(_entry("tokenizer.ggml.model", _STRING, _text("no_vocab")))
    size_key = f"{raw.architecture}.vocab_size"
    kept.append(_entry(size_key, _UINT32, struct.pack("<I", vocab)))
    head = b"GGUF" + struct.pack("<IQQ", raw.version, raw.n_tensors, len(kept))
    body = head + b"".join(kept) + raw.tensor_table
    with target.open("wb") as out:
        out.write(body)
        out.truncate(_length(raw, len(body)))


def _length(raw: HeaderBytes, header: int) -> int:
    start = -(-header // raw.alignment) * raw.alignment
    return start + -(-raw.data_bytes // raw.alignment) * raw.alignment


def _entry(key: str, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data
