"""The pair's tokenizer: BPE over whole lines, as llama.cpp does for `gemma4` vocabularies.

Boundary: training and encoding with the `tokenizers` package; `export` writes the vocabulary
into GGUF. Merges are learned inside words only (no merge crosses a word or touches a digit),
then applied to whole lines, so that both sides cut a text alike.
Output contract: `vocab.json` with `tokens`, `types` (llama.cpp's token types) and `merges`.

Not covered: runs of more than eight newlines and a literal U+2581 in the text.

Example:
    $ python -m training.tokenizer work/vocab.json
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from training.corpus import mixture

SIZE = 2048
SEED = 11
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

_BASE = ("<pad>", "<eos>", "<bos>", "<unk>")
_CONTROL = ("<|turn>", "<turn|>", "<|think|>", "<|tool>", "<tool|>", "<|tool_response>")
_USER = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<tool_response|>", '<|"|>')
_SPACE = "\u2581"
_NEWLINES = tuple("\n" * n for n in range(1, 9))
_BYTES = tuple(f"<0x{value:02X}>" for value in range(256))


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in id order, their llama.cpp types, and the merges in rank order."""

    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]]

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token -> id."""
        return {token: i for i, token in enumerate(self.tokens)}

    @cached_property
    def tokenizer(self) -> Any:
        """The encoder; special tokens in a text become their ids."""
        model = models.BPE(
            vocab=self.ids, merges=self.merges, unk_token="<unk>", byte_fallback=True
        )
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
        special = [AddedToken(t, special=True, normalized=False) for t in _BASE + _CONTROL + _USER]
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens([AddedToken(n, special=False, normalized=False) for n in _NEWLINES])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        return tokenizer

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Encode texts without adding anything."""
        return [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        """Decode ids, special tokens included."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def save(self, path: Path) -> None:
        """Write vocab.json."""
        merges = [list(pair) for pair in self.merges]
        text = json.dumps({"tokens": self.tokens, "types": self.types, "merges": merges})
        path.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read vocab.json."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(data["tokens"], data["types"], [(a, b) for a, b in data["merges"]])


def train(documents: int = 30_000, size: int = SIZE, seed: int = SEED) -> Vocabulary:
    """Learn the merges from training documents."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    pattern = rf"{_SPACE}?[A-Za-z]+|[0-9]|\n+|{_SPACE}|{_SPACE}?[^A-Za-z0-9{_SPACE}\n]+"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    fixed = _BASE + _CONTROL + _USER + _BYTES + _NEWLINES
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(fixed), initial_alphabet=[*map(chr, range(33, 127)), _SPACE],
        special_tokens=[], show_progress=False, min_frequency=2,
    )  # fmt: skip
    tokenizer.train_from_iterator(_pieces(documents, seed), trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    pieces = [
        t for t, _ in sorted(learned["vocab"].items(), key=lambda item: item[1]) if "\n" not in t
    ]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in learned["merges"]]
    tokens = [*fixed, *pieces]
    spare = [f"<unused{i}>" for i in range(size - len(tokens))]
    types = [CONTROL] * 3 + [UNKNOWN] + [CONTROL] * len(_CONTROL) + [USER_DEFINED] * len(_USER)
    types += [BYTE] * 256 + [NORMAL] * (len(_NEWLINES) + len(pieces)) + [CONTROL] * len(spare)
    return Vocabulary([*tokens, *spare], types, merges)


def _pieces(documents: int, seed: int) -> Iterator[str]:
    special = sorted((*_CONTROL, *_USER, "<bos>"), key=len, reverse=True)
    cut = re.compile("|".join(map(re.escape, special)) + r"|\n+")
    for sample in islice(mixture.documents(seed), documents):
        yield from (piece for piece in cut.split(mixture.render(sample)) if piece)


def main() -> None:
    """Train and report."""
    vocabulary = train()
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    vocabulary.save(path)
    texts = [mixture.render(s) for s in islice(mixture.documents(random.randrange(2**30)), 3000)]
    lengths = sorted(map(len, vocabulary.encode(texts)))
    mean = sum(lengths) / len(lengths)
    print(f"{len(vocabulary.merges)} merges; {mean:.0f} tokens a document, longest {lengths[-1]}")


if __name__ == "__main__":
    main()
