"""Conversations as packed rows of tokens.

Boundary: from corpus to arrays; many processes, no GPU. Output contract: `Rows.tokens`,
`.documents` and `.weights` are (rows, LENGTH); a document never crosses a row; padding has
document number -1 and weight 0.

Weights: 1 where the model writes, `CONTEXT_WEIGHT` on what it reads, 0 on past turns of
thinking conversations, which the template shows without the thought that preceded them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training.corpus import mixture
from training.tokenizer import Vocabulary

LENGTH = 768
CONTEXT_WEIGHT = 0.1
_OPEN_ROWS = 24
_CHUNK = 2000


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed documents; weights apply to predicting the token they stand at."""

    tokens: NDArray[np.int16]
    documents: NDArray[np.int16]
    weights: NDArray[np.float16]

    @property
    def token_count(self) -> int:
        """Tokens without padding."""
        return int((self.documents >= 0).sum())


def weigh(ids: list[int], vocabulary: Vocabulary) -> list[float]:
    """Return the loss weight of every token of a conversation."""
    code = vocabulary.ids
    turn, end, model = code["<|turn>"], code["<turn|>"], code["model"]
    reply, reply_end = code["<|tool_response>"], code["<tool_response|>"]
    thinking = code["<|think|>"] in ids
    starts = [i for i, t in enumerate(ids[:-1]) if t == turn and ids[i + 1] == model]
    last = starts[-1]
    weights = [CONTEXT_WEIGHT] * len(ids)
    for start in starts:
        written = 0.0 if thinking and start < last else 1.0
        inside = True
        for i in range(start + 3, len(ids)):
            weights[i] = written if inside else CONTEXT_WEIGHT
            if ids[i] == end:
                break
            if ids[i] == reply:
                inside = False
            elif ids[i] == reply_end:
                inside = True
    return weights


def pack(documents: Iterable[tuple[list[int], list[float]]], length: int = LENGTH) -> Rows:
    """Pack documents into rows, each into the fullest open row that holds it."""
    rows: list[list[tuple[list[int], list[float]]]] = []
    open_rows: list[tuple[int, int]] = []  # (free places, row)
    for ids, weights in documents:
        if len(ids) > length:
            continue
        fits = [(free, row) for free, row in open_rows if free >= len(ids)]
        if fits:
            free, row = min(fits)
            open_rows.remove((free, row))
        else:
            if len(open_rows) >= _OPEN_ROWS:
                open_rows.remove(min(open_rows))
            rows.append([])
            free, row = length, len(rows) - 1
        rows[row].append((ids, weights))
        open_rows.append((free - len(ids), row))
    out = Rows(
        np.zeros((len(rows), length), np.int16), np.full((len(rows), length), -1, np.int16),
        np.zeros((len(rows), length), np.float16),
    )  # fmt: skip
    for r, members in enumerate(rows):
        at = 0
        for number, (ids, weights) in enumerate(members):
            place = slice(at, at + len(ids))
            out.tokens[r, place], out.documents[r, place] = ids, number
            out.weights[r, place] = weights
            out.weights[r, at] = 0.0  # nothing predicts a document's first token
            at += len(ids)
    return out


def _make(task: tuple[Path, int, int, int]) -> Rows:
    vocab_path, seed, count, length = task
    vocabulary = Vocabulary.load(vocab_path)
    source = mixture.documents(seed)

    def encoded() -> Iterable[tuple[list[int], list[float]]]:
        for start in range(0, count, _CHUNK):
            texts = [mixture.render(s) for s in islice(source, min(_CHUNK, count - start))]
            for ids in vocabulary.encode(texts):
                yield ids, weigh(ids, vocabulary)

    return pack(encoded(), length)


def build(vocab_path: Path, documents: int, seed: int, workers: int, length: int = LENGTH) -> Rows:
    """Generate, encode and pack ``documents`` conversations over ``workers`` processes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parts = workers * 4
    tasks = [(vocab_path, seed + i, documents // parts, length) for i in range(parts)]
    with ProcessPoolExecutor(workers) as pool:
        made = list(pool.map(_make, tasks))
    return Rows(
        np.concatenate([m.tokens for m in made]), np.concatenate([m.documents for m in made]),
        np.concatenate([m.weights for m in made]),
    )  # fmt: skip
