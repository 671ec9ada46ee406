"""A small model, a plan and an imatrix for it, and a build whose fake tools do their work."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import fake_tools
from browndwarf.engine.locate import Build
from browndwarf.models.gguf import fingerprint, read_model
from browndwarf.plan.legal import tensor_bytes
from browndwarf.plan.quantization import QuantizationPlan, TensorChoice, WeightsBudget
from fakes import make_build
from gguf_files import gguf, tensor, tiny

F32, F16 = 0, 1
TENSORS = {
    "token_embd.weight": ((256, 96), F16),
    "output_norm.weight": ((256,), F32),
    "blk.0.attn_norm.weight": ((256,), F32),
    "blk.0.attn_q.weight": ((256, 128), F16),
    "blk.0.ffn_down.weight": ((256, 256), F16),
    "blk.0.ffn_Up.weight": ((256, 256), F16),
    "blk.0.odd.weight": ((96, 64), F16),
}
TYPES = {
    "token_embd.weight": "Q6_K",
    "blk.0.attn_q.weight": "Q8_0",
    "blk.0.ffn_down.weight": "Q3_K",
    "blk.0.ffn_Up.weight": "Q4_K",
    "blk.0.odd.weight": "Q5_0",
}


IMATRIX_KEYS: dict[str, Any] = {
    "general.type": "imatrix",
    "imatrix.datasets": ["a.txt", "b.txt", "a.txt"],
    "imatrix.chunk_count": 7,
    "imatrix.chunk_size": 512,
}

Entries = dict[str, tuple[list[list[float]], list[float]]]


def imatrix_bytes(entries: Entries, **changes: Any) -> bytes:
    """A file with (sums by expert, counts by expert) of each tensor."""
    table, data = [], b""
    for name, (sums, counts) in entries.items():
        flat = [value for row in sums for value in row]
        for suffix, shape, body in (
            ("in_sum2", (len(flat) // len(counts), len(counts)), flat),
            ("counts", (1, len(counts)), counts),
        ):
            table.append(tensor(f"{name}.{suffix}", shape, 0, len(data)))
            raw = struct.pack(f"<{len(body)}f", *body)
            data += raw + b"\0" * (-len(raw) % 32)
    keys = {key: value for key, value in {**IMATRIX_KEYS, **changes}.items() if value is not None}
    return gguf(keys, table) + data


def small_model(path: Path, **changes: Any) -> Path:
    """A GGUF whose data is zeros."""
    offset, table = 0, []
    for name, (shape, kind) in TENSORS.items():
        table.append(tensor(name, shape, kind, offset))
        size = (4 if kind == F32 else 2) * shape[0] * (shape[1] if len(shape) > 1 else 1)
        offset += -(-size // 32) * 32
    path.write_bytes(gguf(tiny(**changes), table, offset))
    return path


def plan_for(source: Path, types: dict[str, str] = TYPES, **changes: Any) -> QuantizationPlan:
    """A sound plan: what is not in ``types`` is copied."""
    info = read_model(source)
    choices = tuple(
        TensorChoice(
            name=t.name,
            type=(kind := types.get(t.name, t.type)),
            elements=t.elements,
            bytes=tensor_bytes(t, kind),
            device=t.name != "token_embd.weight",
            loss=0.0,
            chosen=t.name in types,
        )
        for t in info.tensors
    )
    total = sum(choice.bytes for choice in choices)
    plan = QuantizationPlan(
        source=str(source),
        source_fingerprint=fingerprint(source),
        base_type="Q4_K",
        tensors=choices,
        device_bytes=sum(choice.bytes for choice in choices if choice.device),
        file_bytes=total,
        bits_per_weight=8 * total / info.parameters,
        predicted_loss=1.0,
        budget=WeightsBudget(weights_mib=1.0),
    )
    return msgspec.structs.replace(plan, **changes)


def working_build(folder: Path) -> Build:
    """A build whose tools quantize, collect and tokenize."""
    build = make_build(folder)
    fake_tools.install(build.server.parent)
    return build


Act = Callable[..., None]
