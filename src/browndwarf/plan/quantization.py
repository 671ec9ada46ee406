"""A quantization plan: which type each tensor gets, why, and what that is expected to cost.

The record that ``plan --quantize`` saves and ``quantize`` carries out. Everything needed to judge
the plan later is in it: the file that it is for, the importance matrix, the budget, the weights
of the loss, and what the stock types would have given. The record decides nothing; ``allocate``
does.

``tensors`` lists every tensor of the source in the file's order. ``chosen`` is False for those
that llama-quantize copies as they are (norms, routers); their ``type`` is the source's and nothing
must be said about them on its command line.

Example:
    plan = QuantizationPlan.load(Path("plan.json"))
    plan.types["blk.3.ffn_down.weight"], plan.bits_per_weight
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

import msgspec

from browndwarf.errors import UsageError
from browndwarf.files import atomic_write, storage_errors
from browndwarf.records import Record

KIND = "browndwarf/quantization-plan"
VERSION = 1

Objective = Literal["quality", "speed", "balanced"]


class TensorChoice(Record, frozen=True, kw_only=True):
    """One tensor's type. ``bytes`` are those of its data in the new file.

    Attributes:
        type: ggml's name of the type, upper case.
        device: whether the bytes count against the device.
        loss: its part of ``predicted_loss``, alpha included.
        chosen: False where llama-quantize copies the tensor as it is.
    """

    name: str
    type: str
    elements: int
    bytes: int
    device: bool
    loss: float
    chosen: bool = True


class StockChoice(Record, frozen=True, kw_only=True):
    """What one of llama-quantize's own mixes comes to, by the same measure of loss.

    ``ours`` is the predicted loss of our choice in the same device bytes; None where it cannot be
    had in them.
    """

    type: str
    device_bytes: int
    predicted_loss: float
    bits_per_weight: float = 0.0
    ours: float | None = None


class WeightsBudget(Record, frozen=True, kw_only=True):
    """Where the weights' bytes come from: the limit less all else on the device, in MiB.

    ``weights_mib`` is what was left for the target's weights, or what was asked for exactly; then
    ``limit_mib`` and the others are None.
    """

    weights_mib: float
    limit_mib: float | None = None
    kv_mib: float | None = None
    recurrent_mib: float | None = None
    draft_mib: float | None = None
    compute_mib: float | None = None
    context_mib: float | None = None
    margin_mib: float | None = None


class QuantizationPlan(Record, frozen=True, kw_only=True):
    """A type for every tensor of one file, within a budget of device bytes.

    Attributes:
        base_type: what llama-quantize gets as the file's type, such as ``Q4_K``; never F16, for
            which it ignores the types of single tensors.
        file_bytes: of all tensors' data, header and padding left out.
        alphas: weight of the loss by role and depth band, as they were used.
        proxied: tensors whose error was weighed without the imatrix -> what stood in for it.
    """

    source: str
    source_fingerprint: str
    base_type: str
    tensors: tuple[TensorChoice, ...]
    device_bytes: int
    file_bytes: int
    bits_per_weight: float
    predicted_loss: float
    budget: WeightsBudget
    imatrix: str | None = None
    imatrix_sha256: str | None = None
    objective: Objective = "quality"
    alphas: dict[str, float] = msgspec.field(default_factory=dict)
    alphas_source: str = ""
    stock: tuple[StockChoice, ...] = ()
    proxied: dict[str, str] = msgspec.field(default_factory=dict)
    engine_sha: str = ""
    created: str = ""
    schema: str = f"{KIND}/{VERSION}"

    @property
    def types(self) -> dict[str, str]:
        """Tensor name -> type, of the tensors that llama-quantize is told about."""
        return {tensor.name: tensor.type for tensor in self.tensors if tensor.chosen}

    def save(self, path: Path) -> None:
        """Write the plan, whole or not at all.

        Raises:
            DiskFull, StorageError: the file system refused.
        """
        atomic_write(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """A saved plan.

        Raises:
            UsageError: not such a file, damaged, or of another version.
            StorageError: it cannot be read.
        """
        with storage_errors(path, f"read {path.name}"):
            data = path.read_bytes()
        again = "make it anew with `browndwarf plan MODEL --quantize --output plan.json`"
        try:
            schema = msgspec.json.decode(data, type=_Versioned).schema
        except msgspec.DecodeError as exc:
            raise UsageError(f"{path} is no quantization plan", why=str(exc), fix=again) from exc
        kind, _, version = schema.rpartition("/")
        if kind != KIND:
            raise UsageError(
                f"{path} is no quantization plan",
                why=f"it says that it is {schema[:80]!r}",
                fix=again,
            )
        if version != str(VERSION):
            raise UsageError(
                f"{path} is a quantization plan of another version",
                why=f"it has version {version[:20]}, this browndwarf reads {VERSION}",
                fix=again,
            )
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as exc:
            raise UsageError(f"{path} is damaged", why=str(exc), fix=again) from exc


class _Versioned(Record, frozen=True, kw_only=True):
    schema: str


__all__ = [
    "Objective",
    "QuantizationPlan",
    "StockChoice",
    "TensorChoice",
    "WeightsBudget",
]
