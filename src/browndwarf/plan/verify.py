"""Is a quantized file what was asked for? Its header against the layout, tensor by tensor.

Boundary: types, shapes, sizes and the places of the data; no tensor data is read, which
llama-quantize checks while it writes. Tensors lie one behind the other, each padded to the file's
alignment, so a missing or cut tensor cannot hide.

Example:
    verify(Path("model.gguf.partial"), layout)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

from browndwarf.errors import BadModelFile, CheckFailed
from browndwarf.models.ggml_types import row_bytes
from browndwarf.models.gguf_read import Header, read_header

SHOWN = 5


@dataclass(frozen=True)
class Layout:
    """What a file should hold: each tensor's type and shape; of a plan, its device bytes."""

    types: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    device: frozenset[str] = frozenset()
    device_bytes: int | None = None

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor's data."""
        return {
            name: prod(shape[1:]) * row_bytes(self.types[name], shape[0])
            for name, shape in self.shapes.items()
            if name in self.types
        }

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors, padding left out."""
        return sum(self.sizes.values())


def verify(path: Path, layout: Layout) -> None:
    """Compare a file with a layout.

    Raises:
        CheckFailed: it is another one, with what differs.
    """
    try:
        header = read_header(path)
    except BadModelFile as exc:
        raise _failed([exc.why]) from exc
    found = {tensor.name: tensor for tensor in header.tensors}
    wrong = [f"{name} is missing" for name in layout.types if name not in found]
    wrong += [f"{name} was not asked for" for name in found if name not in layout.types]
    for name, kind in layout.types.items():
        tensor = found.get(name)
        if tensor is None:
            continue
        if tensor.type != kind:
            wrong.append(f"{name} is {tensor.type}, not {kind}")
        elif tensor.shape != layout.shapes[name]:
            wrong.append(f"{name} has shape {list(tensor.shape)}, not {list(layout.shapes[name])}")
        elif tensor.bytes != layout.sizes[name]:
            wrong.append(f"{name} takes {tensor.bytes} bytes, not {layout.sizes[name]}")
    wrong += _misplaced(header)
    device = sum(tensor.bytes for tensor in header.tensors if tensor.name in layout.device)
    if layout.device_bytes is not None and device != layout.device_bytes:
        wrong.append(f"{device} bytes are for the device, not {layout.device_bytes}")
    if wrong:
        raise _failed(wrong)


def listed(names: Iterable[str], joint: str = ", ") -> str:
    """The first few, and how many more."""
    every = list(names)
    rest = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return joint.join(every[:SHOWN]) + rest


def _misplaced(header: Header) -> list[str]:
    alignment = header.metadata.get("general.alignment", 32)
    step = alignment if isinstance(alignment, int) else 32
    end = 0
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
        if tensor.offset != end:
            return [f"the data of {tensor.name} begins at {tensor.offset}, not {end}"]
        end += -(-tensor.bytes // step) * step
    if header.data_offset + end != header.file_bytes:
        return [f"the file has {header.file_bytes} bytes, not {header.data_offset + end}"]
    return []


def _failed(wrong: list[str]) -> CheckFailed:
    return CheckFailed(
        "the quantized file is not what was asked for, and was removed",
        why=f"{len(wrong)} differences: {listed(wrong, '; ')}",
        fix="check the disk and try again; if it stays so, use another build of llama.cpp",
    )
