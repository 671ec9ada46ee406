"""Small GGUF files for tests, written byte by byte so that any part can be made wrong."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from browndwarf.models.hollow import SHAPES, HollowShape, scaled, write_hollow, write_hollow_head

KINDS = {"u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q")}


def text(value: str) -> bytes:
    """A GGUF string."""
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """A typed value: str, int (u32), float, bool, or a list of one of these."""
    if isinstance(item, list):
        kind, body = 8, b"".join(text(x) for x in item) if isinstance(item[0], str) else b""
        if not isinstance(item[0], str):
            code = {bool: "bool", int: "i32", float: "f32"}[type(item[0])]
            kind, pattern = KINDS[code]
            body = b"".join(struct.pack(pattern, x) for x in item)
        return struct.pack("<IIQ", 9, kind, len(item)) + body
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    kind, pattern = KINDS[{bool: "bool", int: "u32", float: "f32"}[type(item)]]
    return struct.pack("<I", kind) + struct.pack(pattern, item)


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """One entry of the tensor table; kind 0 is F32."""
    dims = b"".join(struct.pack("<Q", n) for n in shape)
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def gguf(
    metadata: dict[str, Any], tensors: list[bytes], data: int = 0, *, version: int = 3
) -> bytes:
    """A whole file; ``data`` bytes of zeros follow the aligned header."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(key) + value(item) for key, item in metadata.items())
    head += b"".join(tensors)
    return head + b"\0" * (-len(head) % 32 + data)


def tiny(**changes: Any) -> dict[str, Any]:
    """Metadata of a small llama without a head."""
    keys: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": 2,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.context_length": 2048,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(100)],
        "tokenizer.ggml.token_type": [1] * 100,
    }
    keys.update(changes)
    return {key: item for key, item in keys.items() if item is not None}


def tiny_file(path: Path, **changes: Any) -> Path:
    """A sound small model with one tensor."""
    path.write_bytes(gguf(tiny(**changes), [tensor("token_embd.weight", (64, 100))], 25600))
    return path


def hollow_pair(folder: Path, name: str, *, layers: int, vocab: int = 2048) -> tuple[Path, Path]:
    """A hollow target of a known shape and its head (which exists for gemma4 only)."""
    shape: HollowShape = scaled(SHAPES[name], layers=layers, vocab=vocab)
    target, head = folder / f"{name}.gguf", folder / f"{name}-head.gguf"
    write_hollow(target, shape)
    if shape.arch == "gemma4":
        write_hollow_head(head, shape)
    return target, head
