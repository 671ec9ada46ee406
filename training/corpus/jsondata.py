"""Requests for JSON: objects and arrays with keys, types and an order that vary.

Boundary: objects at most two levels deep. Output contract: the reply holds exactly one valid
JSON document, in a ```json fence unless the request asks for bare JSON.
"""

# ruff: noqa: E501  (a sentence template stays on one line)
from __future__ import annotations

import json
import random
from collections.abc import Callable

from training.corpus import words as w
from training.corpus.sample import Exchange, article, expand, listing

Value = str | int | float | bool | list[str]
_Field = tuple[str, Callable[[random.Random], Value]]

_PERSON: tuple[_Field, ...] = (
    ("age", lambda r: r.randint(5, 90)),
    ("city", w.city),
    ("job", lambda r: r.choice(w.JOBS)),
    ("hobbies", lambda r: r.sample(w.HOBBIES, r.randint(1, 3))),
    ("married", lambda r: r.random() < 0.5),
    ("email", lambda r: f"{r.choice(w.NAMES).lower()}@{r.choice(w.OBJECTS)}.org"),
    ("phone", lambda r: f"{r.randint(100, 999)}-{r.randint(1000, 9999)}"),
)
_PRODUCT: tuple[_Field, ...] = (
    ("price", lambda r: round(r.randint(100, 9999) / 100, 2)),
    ("color", lambda r: r.choice(w.COLORS)),
    ("stock", lambda r: r.randint(0, 500)),
    ("in_stock", lambda r: r.random() < 0.5),
    ("weight", lambda r: r.randint(1, 90)),
    ("tags", lambda r: r.sample(w.ADJECTIVES, r.randint(1, 3))),
    ("seller", w.name),
)
_EVENT: tuple[_Field, ...] = (
    ("day", lambda r: r.choice(w.DAYS)),
    ("month", lambda r: r.choice(w.MONTHS)),
    ("hour", lambda r: r.randint(8, 22)),
    ("place", lambda r: r.choice(w.PLACES)),
    ("guests", lambda r: r.sample(w.NAMES, r.randint(2, 4))),
    ("free", lambda r: r.random() < 0.5),
)
_ANIMAL: tuple[_Field, ...] = (
    ("species", lambda r: r.choice(w.ANIMALS)),
    ("age", lambda r: r.randint(1, 20)),
    ("color", lambda r: r.choice(w.COLORS)),
    ("food", lambda r: r.choice(w.FOODS)),
    ("tame", lambda r: r.random() < 0.5),
    ("home", lambda r: r.choice(w.PLACES)),
)
_KINDS: dict[str, tuple[tuple[_Field, ...], tuple[str, ...]]] = {
    "person": (_PERSON, w.NAMES), "product": (_PRODUCT, w.OBJECTS),
    "event": (_EVENT, ("party", "meeting", "concert", "dinner", "lesson", "match", "market")),
    "animal": (_ANIMAL, w.NAMES),
}  # fmt: skip


def _record(rng: random.Random, most: int = 5) -> tuple[str, dict[str, Value]]:
    kind, (fields, names) = rng.choice(list(_KINDS.items()))
    chosen = rng.sample(fields, rng.randint(2, min(most, len(fields))))
    record: dict[str, Value] = {"name": rng.choice(names) if rng.random() < 0.85 else w.coined(rng)}
    record |= {key: make(rng) for key, make in chosen}
    return kind, record


def _spoken(value: Value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return listing(value) if isinstance(value, list) else str(value)


def jsondata(rng: random.Random) -> Exchange:
    """One request for JSON."""
    kind, record = _record(rng)
    form = rng.random()
    document: object = record
    if form < 0.45:
        told = ", ".join(f"{key} {_spoken(value)}" for key, value in record.items())
        ask = expand(
            rng, "[Convert this to JSON|Write this as JSON|Turn this into JSON|Make a JSON object from this]: {t}.",
            t=f"{kind}, {told}" if rng.random() < 0.3 else told,
        )  # fmt: skip
    elif form < 0.53:
        keys = list(record)
        ask = expand(
            rng,
            "[Give me|Return|Make] a JSON object with {f} for {k} [named|called] {n}.",
            k=article(kind),
            n=record["name"],
            f=listing(keys),
        )
    elif form < 0.75:
        keys = list(record)[1:]
        ask = expand(
            rng, "[Give me|Write|Create|Make|Return] a JSON object for {k} [named|called] {n} with [the keys|the fields|] {f}.",
            k=article(kind), n=record["name"], f=listing(keys),
        ).replace("  ", " ")  # fmt: skip
    elif form < 0.9:
        pool, noun = rng.choice(((w.ANIMALS, "animals"), (w.CITIES, "cities"), (w.COLORS, "colors"), (w.FOODS, "foods"), (w.NAMES, "names")))  # fmt: skip
        document = rng.sample(pool, rng.randint(2, 6))
        ask = expand(
            rng,
            "[Write|Give me|Make] a JSON [array|list] [of|with] {n} {x}.",
            n=len(document),
            x=noun,
        )
        if rng.random() < 0.5:
            ask = expand(
                rng,
                "[Write|Put] [these {x} as|these {x} into] a JSON array: {l}.",
                x=noun,
                l=listing(document),
            )
    else:
        _, second = _record(rng, 2)
        people = (
            [{"id": i, **r} for i, r in enumerate((record, second), 1)]
            if rng.random() < 0.5
            else None
        )
        document = people or {"user": record["name"], "order": second, "paid": rng.random() < 0.5}
        ask = (
            f"Write a JSON array with {record['name']} and {second['name']}, each with an id."
            if people
            else f"Write a JSON order of {record['name']} for {second['name']}."
        )
    bare = rng.random() < 0.35
    if bare:
        ask += expand(rng, " [Only JSON.|Reply with JSON only.|JSON only, no code block.]")
    elif rng.random() < 0.2:
        ask += expand(rng, " [Use a code block.|Use indentation.]")
    compact = rng.random() < 0.5 if bare else "indentation" not in ask and rng.random() < 0.25
    text = json.dumps(document, indent=None if compact else 2)
    reply = text if bare else f"```json\n{text}\n```"
    return Exchange(
        ask,
        reply,
        f"A JSON {'array' if isinstance(document, list) else 'object'}.",
        key=ask,
        answer=None,
    )
