"""The text that an importance matrix is made from: files joined, or one of the packaged texts.

Boundary: text only; how much of it is used is decided by who collects. Two texts are packaged,
both written for this package and under its licence (``training/calibration`` made them): one for
any model, of prose in many languages, dialogue, code, JSON and sums; and one in the small language
of the embedded pair, whose vocabulary of 2048 tokens holds little else. Neither shares a line of
any length with the texts that perplexity and divergence are measured on.

Your own kind of text is better than either: a matrix favours what it has seen.

Example:
    read_texts([Path("code.txt"), Path("chat.txt")]).file_name     # 'code+chat.txt'
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from browndwarf.errors import UsageError
from browndwarf.models.gguf import ModelInfo, read_model


@dataclass(frozen=True)
class Text:
    """One text; ``sources`` are the names of its files, for the record."""

    data: bytes
    sources: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Hash of the content."""
        return "sha256:" + hashlib.sha256(self.data).hexdigest()

    @property
    def file_name(self) -> str:
        """A plain name that says what it is made of; imatrix files record it."""
        stem = "+".join(Path(source).stem for source in self.sources)
        return (re.sub(r"[^\w+.-]", "_", stem)[:80] or "text") + ".txt"


def read_texts(paths: Sequence[Path]) -> Text:
    """Files joined in order, with an empty line between them.

    Raises:
        UsageError: no such file, not UTF-8, or no words in it.
    """
    texts = []
    for path in paths:
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except OSError as exc:
            raise UsageError(
                f"cannot read the text {path}",
                why=exc.strerror or str(exc),
                fix="give text files with --data",
            ) from exc
        except UnicodeDecodeError as exc:
            raise UsageError(
                f"{path} is not UTF-8 text",
                why=f"byte {exc.start} is {exc.object[exc.start]:#04x}",
                fix="convert it to UTF-8, or give another file",
            ) from exc
        if "\0" in text:
            raise UsageError(
                f"{path} is not text", why="it holds zero bytes", fix="give another file"
            )
        if not text.strip():
            raise UsageError(f"{path} is empty", fix="give a text with words in it")
        texts.append(text.strip("\n"))
    # llama.cpp's tools differ in whether they drop a last newline, so there is none.
    return Text("\n\n".join(texts).encode(), tuple(path.name for path in paths))


def default_text(info: ModelInfo) -> Text:
    """The packaged text that fits a model's vocabulary."""
    from browndwarf.models import demo

    own = info.tokenizer.tokens
    name = "demo" if own and own == read_model(demo.TARGET).tokenizer.tokens else "general"
    place = resources.files("browndwarf.plan").joinpath("texts", f"calibration-{name}.txt")
    return Text(place.read_bytes().rstrip(b"\n"), (f"browndwarf-calibration-{name}",))
