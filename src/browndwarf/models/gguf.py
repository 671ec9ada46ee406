"""The door to GGUF files: what a model is, what its content is called, which drafter fits it.

Everything outside ``models`` imports these names from here. Headers only, except for
``fingerprint``, which reads (part of) the data.

Example:
    target, head = read_model("gemma.gguf"), read_model("mtp-gemma.gguf")
    check_head(target, head).ok
"""

from browndwarf.models.fingerprints import fingerprint
from browndwarf.models.gguf_read import Tensor
from browndwarf.models.heads import HeadMatch, check_head, mismatch
from browndwarf.models.info import Head, LayerCounts, ModelInfo, Tokenizer, read_model
from browndwarf.models.shape import Block, Shape

__all__ = [
    "Block",
    "Head",
    "HeadMatch",
    "LayerCounts",
    "ModelInfo",
    "Shape",
    "Tensor",
    "Tokenizer",
    "check_head",
    "fingerprint",
    "mismatch",
    "read_model",
]
