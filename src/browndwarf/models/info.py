"""What a GGUF is: its shape, tensors, head kind and tokenizer, from the header alone.

``read_model`` reads one file, or all parts of a split one, and returns a frozen ``ModelInfo``.
Tensor data is never read, so a 12B file takes a fraction of a second. ``fingerprint`` names the
content and does read data.

Not covered: what llama.cpp makes of the model at run time (``plan``), and whether a build can
load it (``engine``).

Example:
    info = read_model(Path("gemma.gguf"))
    info.layers.sliding, info.head.kind, round(info.bits_per_weight, 2)
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from browndwarf.errors import BadModelFile
from browndwarf.models.ggml_types import FILE_TYPES
from browndwarf.models.gguf_faults import broken
from browndwarf.models.gguf_read import ArrayValue, Header, Tensor, read_header
from browndwarf.models.shape import Block, Keys, Shape, read_shape

HeadKind = Literal["none", "assistant", "nextn"]
_PART = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")
MAX_PARTS = 1000


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Layers by what they keep; nextn layers inside a target's file are not among them."""

    total: int
    full: int
    sliding: int
    recurrent: int
    kv_shared: int


@dataclass(frozen=True, slots=True)
class Head:
    """The MTP head that this file is (``assistant``) or carries (``nextn``)."""

    kind: HeadKind
    layers: int


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer by hashes. ``fingerprint`` covers the model name, tokens, types and merges;
    ``tokens`` only the mapping from ids to strings. Empty strings where a file has none."""

    model: str
    tokens: str
    fingerprint: str
    has_chat_template: bool


@dataclass(frozen=True)
class ModelInfo:
    """One model, whole: the parts of a split file are merged. Sizes in bytes."""

    path: Path
    files: tuple[Path, ...]
    file_bytes: int
    architecture: str
    name: str
    file_type: str
    shape: Shape
    layers: LayerCounts
    head: Head
    vocab: int
    tokenizer: Tokenizer
    tensors: tuple[Tensor, ...]

    @property
    def hidden_width(self) -> int:
        """Numbers per token between layers."""
        return self.shape.hidden_width

    @property
    def context_length(self) -> int:
        """Tokens that the model was trained for; 0 when the file does not say."""
        return self.shape.context_length

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All layers, those of a nextn head last."""
        return self.shape.blocks

    @cached_property
    def by_name(self) -> dict[str, Tensor]:
        """Tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def tied(self) -> bool:
        """Whether the output matrix is the input embedding."""
        return "output.weight" not in self.by_name

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all tensors, padding left out."""
        return sum(tensor.bytes for tensor in self.tensors)

    @cached_property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Mean stored bits per parameter."""
        return 8 * self.weight_bytes / self.parameters if self.parameters else 0.0

    @property
    def is_head(self) -> bool:
        """Whether the file is a drafter and no model to draft for."""
        return self.head.kind == "assistant" or (
            self.head.kind == "nextn" and "blk.0.attn_norm.weight" not in self.by_name
        )

    @cached_property
    def type_bytes(self) -> dict[str, int]:
        """Bytes by tensor type, largest first."""
        sums: dict[str, int] = {}
        for tensor in self.tensors:
            sums[tensor.type] = sums.get(tensor.type, 0) + tensor.bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def read_model(path: Path | str) -> ModelInfo:
    """Read a model's header, or those of all parts when any part of a split file is named.

    Raises:
        ModelNotFound: no such file.
        BadModelFile: not a GGUF, truncated, inconsistent, or a part is missing.
    """
    path = Path(path)
    headers = [read_header(part) for part in model_parts(path)]
    first = headers[0]
    tensors = _merge(headers)
    keys = Keys(first.path, first.metadata)
    shape = read_shape(first)
    head = _head(keys.architecture, shape, tensors)
    return ModelInfo(
        path=first.path,
        files=tuple(header.path for header in headers),
        file_bytes=sum(header.file_bytes for header in headers),
        architecture=keys.architecture,
        name=keys.text("general.name") or first.path.stem,
        file_type=_file_type(first, tensors),
        shape=shape,
        layers=_counts(shape, head),
        head=head,
        vocab=_vocab(keys, tensors),
        tokenizer=_tokenizer(keys),
        tensors=tensors,
    )


def model_parts(path: Path) -> list[Path]:
    """All files of the model, in order; the named one alone when its name is not a part's."""
    match = _PART.match(path.name)
    if match is None or not path.is_file():
        return [path]
    count = int(match["count"])
    if not 1 <= count <= MAX_PARTS or not 1 <= int(match["no"]) <= count:
        return [path]
    names = [f"{match['stem']}-{no:05d}-of-{count:05d}.gguf" for no in range(1, count + 1)]
    parts = [path.with_name(name) for name in names]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        listed = ", ".join(missing[:5]) + (" and more" if len(missing) > 5 else "")
        raise BadModelFile(
            f"{path.name} is one of {count} parts, and {len(missing)} of them are missing",
            why=f"not in {path.parent}: {listed}",
            fix="put all parts of the split model into one folder",
        )
    return parts


def _merge(headers: list[Header]) -> tuple[Tensor, ...]:
    first = headers[0]
    stated = first.metadata.get("split.count", len(headers))
    if isinstance(stated, int) and stated > 1 and stated != len(headers):
        raise BadModelFile(
            f"{first.path.name} says that it is one of {stated} parts",
            why="its name does not lead to the others",
            fix="give the parts the names NAME-00001-of-0000N.gguf that they came with",
        )
    merged: dict[str, Tensor] = {}
    for part, header in enumerate(headers):
        if part and header.metadata.get("split.no", part) != part:
            raise broken(header.path, f"it says that it is part {header.metadata['split.no']}")
        for tensor in header.tensors:
            if tensor.name in merged:
                raise broken(header.path, f"{tensor.name[:80]!r} is in two parts")
            merged[tensor.name] = replace(tensor, part=part) if part else tensor
    wanted = first.metadata.get("split.tensors.count", len(merged))
    if len(headers) > 1 and wanted != len(merged):
        raise broken(first.path, f"its parts hold {len(merged)} tensors of {wanted}")
    return tuple(merged.values())


def _head(architecture: str, shape: Shape, tensors: tuple[Tensor, ...]) -> Head:
    if architecture.endswith("-assistant"):
        return Head("assistant", len(shape.blocks))
    # The key alone is no proof: many conversions keep it and drop the layer.
    if shape.nextn_layers and any(".nextn." in tensor.name for tensor in tensors):
        return Head("nextn", shape.nextn_layers)
    return Head("none", 0)


def _counts(shape: Shape, head: Head) -> LayerCounts:
    own = [b for b in shape.blocks if b.part == "trunk" or head.kind == "assistant"]
    return LayerCounts(
        total=len(own),
        full=sum(b.kind == "full" for b in own),
        sliding=sum(b.kind == "sliding" for b in own),
        recurrent=sum(b.kind == "recurrent" for b in own),
        kv_shared=sum(b.kind != "recurrent" and not b.own_kv for b in own),
    )


def _vocab(keys: Keys, tensors: tuple[Tensor, ...]) -> int:
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, ArrayValue):
        return tokens.count
    for tensor in tensors:
        if tensor.name == "token_embd.weight" and len(tensor.shape) == 2:
            return tensor.shape[1]
    return keys.whole("vocab_size", 0)


def _tokenizer(keys: Keys) -> Tokenizer:
    def digest(key: str) -> str:
        value = keys.metadata.get(f"tokenizer.ggml.{key}")
        return f"{value.count}:{value.sha256}" if isinstance(value, ArrayValue) else ""

    model = keys.text("tokenizer.ggml.model")
    parts = [model, *(digest(key) for key in ("tokens", "token_type", "merges"))]
    known = bool(parts[1])
    return Tokenizer(
        model=model,
        tokens=parts[1],
        fingerprint=hashlib.sha256("\n".join(parts).encode()).hexdigest() if known else "",
        has_chat_template=bool(keys.text("tokenizer.chat_template")),
    )


def _file_type(header: Header, tensors: tuple[Tensor, ...]) -> str:
    """The mix by name; where the file does not say, the type that holds most bytes."""
    number = header.metadata.get("general.file_type")
    if isinstance(number, int) and number & 0x3FF in FILE_TYPES:
        return FILE_TYPES[number & 0x3FF]
    sums: dict[str, int] = {}
    for tensor in tensors:
        sums[tensor.type] = sums.get(tensor.type, 0) + tensor.bytes
    return max(sums, key=lambda kind: sums[kind]) if sums else "unknown"
