"""Stories, descriptions, letters, recipes: sentences composed from parts in free order.

Boundary: prose only; questions about a passage are in `retrieval`, which reuses `filler`.
Output contract: a story keeps its names, animal and object from the first line to the last.
"""

# ruff: noqa: E501  (a sentence template stays on one line)
from __future__ import annotations

import random
from dataclasses import dataclass

from training.corpus import words as w
from training.corpus.sample import Exchange, article, expand

_OPENINGS = (
    "[Once upon a time|Long ago|Many years ago|Not so long ago], {a_adj} {animal} named {hero} lived "
    "[near|behind|not far from|at the edge of] the {place}.",
    "In {a_adj} {place} there lived {a_animal} [called|named] {hero}.",
    "{hero} was {a_adj} {animal} who [loved|liked|missed|dreamed of] the {place}.",
    "Everyone in the {place} knew {hero}, the {adj} {animal}.",
    "There was once {a_adj} {animal}. [Its name was|Everybody called it|Its friends called it] {hero}.",
)
_FINDS = (
    "One {time}, {hero} found {a_object} [beside the path|under a tree|in the grass|behind a wall|"
    "next to the water] [on the way to|not far from|close to] the {other_place}.",
    "[Early|Late] one {time} {hero} [saw|noticed|discovered] {a_object} [near|inside|in front of] the "
    "{other_place}.",
    "While walking [to|past|around] the {other_place}, {hero} stepped on {a_object}.",
    "{hero} [opened an old box|looked under a bench|dug a small hole] and there was {a_object}.",
)
_WANTS = (
    "{hero} had always wanted [to see the sea|to learn to {hobby}|a real friend|to find {a_object}|"
    "to travel to {city}].",
    "[For three days|All summer|Since spring], {hero} had been looking for {a_object}.",
    "More than anything, {hero} wanted to [be brave|help somebody|visit the {other_place}|sing a song].",
)
_LOOKS = (
    '"Whose {object} is this?" [asked|wondered|whispered] {hero}.',
    "{hero} picked up the {object} and [looked at it for a long time|put it in a bag|cleaned it "
    "carefully|smiled].",
    "The {object} was [covered in dust|very old|cold as ice|light as a feather], but {hero} could see "
    "that it was [special|precious|not broken|made by hand].",
    "It was a {adj2} {object}, [the finest in the land|just like in the old songs|with a name on it].",
)
_TROUBLES = (
    "Then the {weather} came, and the {animal} had to hide [under a tree|in a barn|behind a rock].",
    "The {weather} was strong, so {hero} walked slowly and [carefully|quietly|alone].",
    "[Suddenly|All at once|Just then] the {weather} began, and the {other_place} was hard to see.",
    "But the road to the {other_place} was [closed|long|steep|full of mud|dark].",
    "{hero} was [hungry|thirsty|lost|afraid], and there was no {food} left.",
    'A {adj2} {rival} stood in the way and said, "[Go home|Give me the {object}|You are too late|'
    'Nobody may pass]!"',
)
_MEETS = (
    "At the {other_place}, {hero} met {a_friend} called {friend}.",
    "On the way, {hero} heard the voice of {friend}, a {job}.",
    "{friend} the {friend_animal} was [waiting|sleeping|singing|cooking {food}] [there|by the door|"
    "near the {place}].",
    "A {job} named {friend} [came by|opened the door|called from a window] and [waved|laughed|asked for help].",
)
_TALKS = (
    '{friend} said, "[I lost my {object} {number} days ago|That is the {object} my [grandmother|'
    'brother|teacher] gave to me|I have never seen such {a_object}]. Thank you!"',
    '"[Come with me|Wait for me|Do not worry|Let us share the {food}]," said {friend}. '
    '"[The {other_place} is near|The night is long|I know the way|We can fix it]."',
    '"Do you know who owns this {object}?" asked {hero}. "[Yes|Of course|Maybe]," said {friend}, '
    '"[it is mine|it belongs to the {job}|it was in the {place} last {day}]."',
    "{friend} told a story about {a_adj2} {rival} and the {weather}.",
)
_DEEDS = (
    "They shared some {food} and told each other stories until the {time} was over.",
    "Together they carried the {object} [home|to the {place}|over the hill] and put it on the shelf.",
    "{hero} gave the {object} to {friend}, and {friend} gave {hero} some {food}.",
    "They [cleaned|painted|repaired] the {object} and [hung it on the wall|showed it to everyone|"
    "sold it for {number} coins].",
    "{number_cap} {rival}s helped them, and the work was soon done.",
)
_FEELINGS = (
    "{hero} felt very {feeling}.",
    "{hero} was {feeling}, and {friend} was {feeling2} too.",
    "That {time}, {hero} went to sleep [early|late|under the stars] and felt {feeling}.",
)
_ENDINGS = (
    "From that day on, {hero} and {friend} were the best of friends.",
    "[And so|In the end] the {object} stayed in the {place} [for ever|for many years].",
    "Every {day} they [meet|met|walk] [at|to] the {other_place}, even in the {weather}.",
    "And {hero} never forgot the {adj2} {object}.",
)
_REQUESTS = (
    "Tell me a story about {a_animal} and {a_object}.",
    "Tell me a story about {a_adj} {animal} named {hero}.",
    "[Write|Please write|Could you write] a [short|nice|little] story about {hero} the {animal}.",
    "Can you tell me a story about the {place}?",
    "[Please write|I want|I would like] a story with {a_animal}, {a_object} and the {other_place}.",
    "Write a story in which {hero} meets {friend}.",
    "Make up a story about {a_object} in the {place}.",
    "Tell {friend} a bedtime story about {a_animal}.",
)


@dataclass(frozen=True, slots=True)
class Cast:
    """Who and what a story is about, as slots for its sentences."""

    slots: dict[str, str]

    @classmethod
    def draw(cls, rng: random.Random) -> Cast:
        """Draw a fresh cast."""
        hero, friend = rng.sample(w.NAMES, 2)
        animal, friend_animal, rival = rng.sample(w.ANIMALS, 3)
        place, other = rng.sample(w.PLACES, 2)
        adj, adj2 = rng.sample(w.ADJECTIVES, 2)
        feeling, feeling2 = rng.sample(w.FEELINGS, 2)
        thing = rng.choice(w.OBJECTS)
        number = rng.choice(w.NUMBERS[2:13])
        return cls({
            "hero": hero, "friend": friend, "animal": animal, "friend_animal": friend_animal,
            "rival": rival, "place": place, "other_place": other, "adj": adj, "adj2": adj2,
            "feeling": feeling, "feeling2": feeling2, "object": thing, "number": number,
            "number_cap": number.capitalize(), "a_adj": article(adj), "a_adj2": article(adj2),
            "a_object": article(thing), "a_animal": article(animal),
            "a_friend": article(friend_animal), "weather": rng.choice(w.WEATHER),
            "time": rng.choice(w.TIMES), "food": rng.choice(w.FOODS), "job": rng.choice(w.JOBS),
            "city": rng.choice(w.CITIES), "day": rng.choice(w.DAYS),
            "hobby": rng.choice(("sing", "swim", "dance", "read", "paint")),
        })  # fmt: skip

    def say(self, rng: random.Random, templates: tuple[str, ...]) -> str:
        """Write one of the sentences about this cast."""
        return expand(rng, rng.choice(templates), **self.slots)


def story(rng: random.Random) -> Exchange:
    """A story on request: opening, events in an order of its own, feeling, ending."""
    cast = Cast.draw(rng)
    length = rng.choice(("short", "normal", "normal", "long"))
    events = [_LOOKS, _TROUBLES, _MEETS, _TALKS, _DEEDS]
    keep = {"short": 2, "normal": 4, "long": 5}[length]
    chosen = [part for part in events if part in rng.sample(events, keep)]
    sentences = [cast.say(rng, _OPENINGS), cast.say(rng, _FINDS if rng.random() < 0.75 else _WANTS)]
    for part in chosen:
        sentences.append(cast.say(rng, part))
        if length == "long" and rng.random() < 0.5:
            sentences.append(cast.say(rng, rng.choice((_TROUBLES, _TALKS, _FEELINGS))))
    sentences.append(cast.say(rng, _FEELINGS if rng.random() < 0.5 else _ENDINGS))
    if rng.random() < 0.4:
        sentences.append("The end.")
    text = _paragraphs(rng, sentences)
    question = cast.say(rng, _REQUESTS)
    if length == "short" and rng.random() < 0.5:
        question += " Keep it short."
    if length == "long" and rng.random() < 0.5:
        question += " Make it long."
    thought = expand(
        rng, "[A|The user wants a|I will write a] story. [Hero|Main character]: {hero}, {a_animal}. "
        "[Object|Thing]: {object}. Place: {place}.", **cast.slots,
    )  # fmt: skip
    return Exchange(question, text, thought, key=question)


def description(rng: random.Random) -> Exchange:
    """A few sentences that describe a place or a thing."""
    cast = Cast.draw(rng)
    subject = rng.choice((cast.slots["place"], cast.slots["object"]))
    color, second = rng.sample(w.COLORS, 2)
    lines = [
        expand(rng, "The {s} is [small|large|old|new|quiet|beautiful] and {c}.", s=subject, c=color),
        expand(rng, "It has [a {c} door|{n} windows|a strange smell|a long history].", c=second, n=cast.slots["number"]),
        cast.say(rng, ("In the {time} it is [quiet|busy|cold|bright], and in the {weather} it looks [sad|wild|magical].",)),
        cast.say(rng, ("{hero} the {job} [comes here|thinks of it|talks about it] every {day}.",)),
        cast.say(rng, ("People say that {a_animal} [sleeps|lives|sings] there.", "Nobody knows who made it.")),
    ]  # fmt: skip
    head, tail = lines[0], lines[1:]
    rng.shuffle(tail)
    text = " ".join([head, *tail[: rng.randint(2, 4)]])
    question = expand(
        rng, "[Describe the {s}|Write a description of the {s}|What is the {s} like|"
        "Describe the {s} in a few sentences]", s=subject,
    )  # fmt: skip
    question += "?" if question.startswith("What") else "."
    return Exchange(question, text, f"I will describe the {subject}.", key=question)


def letter(rng: random.Random) -> Exchange:
    """A short letter or message between two people."""
    cast = Cast.draw(rng)
    purpose, body = rng.choice((
        ("thank {friend} for the {object}", "Thank you [so much|very much] for the {object}. It is [lovely|very useful|just what I needed]."),
        ("invite {friend} to dinner on {day}", "Would you like to come to dinner on {day}? There will be {food} and {weather_talk}."),
        ("apologize to {friend} for losing the {object}", "I am sorry that I lost your {object}. I will [buy you a new one|look for it again on {day}]."),
        ("tell {friend} about a trip to {city}", "Greetings from {city}! The {place} is [beautiful|full of people|very old], and there is a lot of {weather}."),
        ("ask {friend} for help with the {object}", "Could you help me with my {object}? It is [broken|too heavy|lost]. {day} would be best."),
    ))  # fmt: skip
    slots = {**cast.slots, "weather_talk": rng.choice(("music", "games", "old stories", "tea"))}
    closing = expand(
        rng,
        "[I hope you are well.|See you soon!|Please write back.|Say hello to the {animal}.]",
        **slots,
    )
    greeting = expand(rng, "[Dear|Hello|Hi] {friend},", **slots)
    sign = expand(rng, "[Best wishes|Yours|Love|Kind regards],", **slots)
    text = f"{greeting}\n\n{expand(rng, body, **slots)} {closing}\n\n{sign}\n{slots['hero']}"
    question = (
        expand(
            rng,
            "[Write a letter from {hero} to|Write a short message from {hero} to] " + purpose,
            **slots,
        )
        + "."
    )
    thought = expand(rng, "A letter from {hero} to {friend}.", **slots)
    return Exchange(question, text, thought, key=question)


def recipe(rng: random.Random) -> Exchange:
    """A numbered recipe."""
    dish = rng.choice(("soup", "cake", "pie", "salad", "bread", "tea", "rice", "noodles"))
    parts = rng.sample(("salt", "water", "flour", "milk", "eggs", "butter", "sugar", "onions", "carrots", "cheese", "apples", "lemon"), 4)  # fmt: skip
    minutes = rng.choice((5, 10, 15, 20, 30, 45))
    steps = [
        expand(rng, "[Wash|Cut|Measure|Prepare] the {a} and the {b}.", a=parts[0], b=parts[1]),
        expand(rng, "[Mix them with|Add] the {c} [in a large bowl|in a pot|slowly].", c=parts[2]),
        expand(rng, "[Cook|Bake|Heat|Stir] everything for {n} minutes.", n=minutes),
        expand(rng, "[Add|Finish with] the {d} and [serve it hot|let it cool|enjoy the {dish}].", d=parts[3], dish=dish),
    ]  # fmt: skip
    text = f"[Ingredients]: {', '.join(parts)}.\n\n".replace("[", "").replace("]", "")
    text += "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))
    question = expand(
        rng, "[How do I make {d}|Give me a recipe for {d}|I want to make {d}] [with|using] {a} and {b}",
        d=dish, a=parts[0], b=parts[1],
    )  # fmt: skip
    question += "?" if question.startswith("How") else "."
    return Exchange(question, text, f"A recipe for {dish}.", key=question)


def filler(rng: random.Random, sentences: int) -> list[str]:
    """Unconnected prose sentences, for passages in which something is hidden."""
    out: list[str] = []
    while len(out) < sentences:
        cast = Cast.draw(rng)
        pools = (_OPENINGS, _FINDS, _LOOKS, _TROUBLES, _MEETS, _TALKS, _DEEDS, _FEELINGS, _ENDINGS)
        out += [cast.say(rng, pool) for pool in rng.sample(pools, 3)]
    return out[:sentences]


def prose(rng: random.Random) -> Exchange:
    """Any kind of prose."""
    kind = rng.choices((story, description, letter, recipe), (0.62, 0.14, 0.14, 0.10))[0]
    return kind(rng)


def _paragraphs(rng: random.Random, sentences: list[str]) -> str:
    if len(sentences) > 4 and rng.random() < 0.5:
        cut = rng.randint(2, len(sentences) - 2)
        return " ".join(sentences[:cut]) + "\n\n" + " ".join(sentences[cut:])
    return " ".join(sentences)
