"""Something hidden in a passage, asked for at the end: short and long contexts.

Boundary: passages of about 60 to 720 tokens, several times the sliding window, so the answer
has to come through the full-attention layers. Output contract: the answer occurs once.
"""

# ruff: noqa: E501  (a sentence template stays on one line)
from __future__ import annotations

import random

from training.corpus import words as w
from training.corpus.prose import filler
from training.corpus.sample import Exchange, expand

_HIDDEN = (
    ("The secret word is {x}.", "[What is the secret word?|What was the secret word?|Tell me the secret word.]", "The secret word is {x}."),
    ("The password is {x}.", "[What is the password?|Tell me the password.]", "The password is {x}."),
    ("Remember this code: {n}.", "[What is the code?|Which code did I ask you to remember?]", "The code is {n}."),
    ("{p} hid the {x} in the {y}.", "[Where did {p} hide the {x}?|Where is the {x} of {p}?]", "{p} hid the {x} in the {y}."),
    ("The number of {p} is {n}.", "[What is the number of {p}?|Which number does {p} have?]", "The number of {p} is {n}."),
    ("The favorite color of {p} is {c}.", "[What is the favorite color of {p}?]", "The favorite color of {p} is {c}."),
)  # fmt: skip


def retrieval(rng: random.Random) -> Exchange:
    """A passage with one hidden sentence, and the question for it."""
    sentences = filler(rng, rng.choice((0, 1, 3, 5, 8, 12, 18, 24, 32, 40)))
    slots = {
        "x": w.thing(rng), "y": rng.choice(w.PLACES), "n": rng.randint(1000, 9999),
        "p": w.name(rng), "c": rng.choice(w.COLORS),
    }  # fmt: skip
    if rng.random() < 0.4:
        slots["x"] = f"{rng.choice(w.ADJECTIVES)} {slots['x']}"
    elif rng.random() < 0.4:
        slots["x"] = w.coined(rng)
    hidden, ask, reply = rng.choice(_HIDDEN)
    sentence = hidden.format_map(slots)
    sentences.insert(rng.randint(0, len(sentences)), sentence)
    passage = " ".join(sentences)
    question = expand(rng, ask, **slots)
    if rng.random() < 0.2:
        text = f"{question}\n\n{passage}"
    else:
        lead = expand(
            rng,
            "[|Read this text.\n\n|Here is a text:\n\n|Read the text and answer the question.\n\n]",
        )
        text = f"{lead}{passage}\n\n{question}"
    answer = reply.format_map(slots)
    value = {"{n}": str(slots["n"]), "{c}": str(slots["c"])}.get(reply.split()[-1].strip("."))
    value = value or str(slots["y"] if "{y}" in reply else slots["x"])
    return Exchange(
        text, answer, f"The text says: {sentence}", key=f"{sentence}{len(sentences)}", answer=value
    )
