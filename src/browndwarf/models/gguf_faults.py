"""What is wrong with a file that is no sound GGUF, as one error each.

Example:
    raise broken(path, "the key 'general.name' appears twice")
"""

from __future__ import annotations

from pathlib import Path

from browndwarf.errors import BadModelFile

_FOREIGN = (
    (b"PK\x03\x04", "a zip archive, such as a PyTorch checkpoint"),
    (b"version https://git-lfs", "a Git LFS pointer: the model itself was not downloaded"),
    (b"<!DOCTYPE", "a web page: the download failed"),
    (b"<html", "a web page: the download failed"),
    (b"ggml", "the pre-2023 GGML format"),
    (b"tjgg", "the pre-2023 GGML format"),
    (b"lmgg", "the pre-2023 GGML format"),
    (b"FUGG", "a GGUF with its bytes swapped"),
)


def foreign(path: Path, head: bytes, size: int) -> BadModelFile:
    """The error for a file of another format; ``head`` is its first 32 bytes or fewer."""
    if size == 0:
        return BadModelFile(
            f"{path} is empty",
            why="the file has no bytes",
            fix="download or copy it again",
        )
    why = f"it begins with {head[:4]!r}, not with b'GGUF'"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < size:
        why = "it looks like a safetensors file"
    for magic, what in _FOREIGN:
        if head.startswith(magic):
            why = f"it looks like {what}"
    return BadModelFile(
        f"{path} is not a GGUF file",
        why=why,
        fix="give a .gguf file; convert_hf_to_gguf.py of llama.cpp makes one from safetensors",
    )


def bad_version(path: Path, version: int) -> BadModelFile:
    """The error for a version that is not read, or whose bytes are swapped."""
    if version and version & 0xFFFF == 0:
        return BadModelFile(
            f"{path} is a big-endian GGUF",
            why="llama.cpp builds for this kind of machine read little-endian files only",
            fix="convert it with gguf_convert_endian.py of llama.cpp, or fetch the usual file",
        )
    return BadModelFile(
        f"{path} is a GGUF of version {version}",
        why="versions 2 and 3 are read",
        fix="convert the model again with a current llama.cpp",
    )


def truncated(path: Path, detail: str) -> BadModelFile:
    """The error for a file that ends early."""
    return BadModelFile(
        f"{path} is truncated or damaged",
        why=detail,
        fix="download or copy it again and compare its size with the source",
    )


def broken(path: Path, detail: str) -> BadModelFile:
    """The error for a file that contradicts itself."""
    return BadModelFile(
        f"{path} is not a sound GGUF",
        why=detail,
        fix="download or convert it again",
    )
