"""Plain questions and answers, small talk, lists, and instructions about the form of an answer.

Boundary: single exchanges; `mixture` strings them into conversations.
Output contract: facts come from `words` and are never contradicted.
"""

# ruff: noqa: E501  (a sentence template stays on one line)
from __future__ import annotations

import random

from training.corpus import words as w
from training.corpus.sample import Exchange, article, expand, listing

_SMALL_TALK = (
    ("[Hello|Hi|Hey|Good morning|Hi there][!|.|]", "[Hello! How can I help you?|Hi! What can I do for you?|Good to see you. What do you need?]"),
    ("[How are you?|How are you today?|How do you do?]", "[I am fine, thank you. How can I help?|Very well, thank you! And you?]"),
    ("[Thanks|Thank you|Thank you very much][!|.]", "[You are welcome!|My pleasure.|Any time!]"),
    ("[Who are you?|What are you?|What is your name?]", "I am a small demo model. I can tell stories, answer simple questions, do sums and call tools."),
    ("[What can you do?|How can you help me?|Help]", "I can tell stories, answer simple questions, do sums, write small code and JSON, and call tools."),
    ("[Goodbye|Bye|See you later|Good night][!|.]", "[Goodbye!|See you soon!|Bye! Have a nice day.]"),
    ("[Tell me a joke.|Do you know a joke?]", "Why did the {animal} cross the road? To get to the {place}!"),
    ("[Give me some advice.|I feel sad.|I am bored.]", "[Take a walk to the {place}|Read a good book|Call {name} and drink some tea|Try {hobby}]. It may help."),
    ("[My name is {name}.|I am {name}.|Call me {name}.]", "[Nice to meet you, {name}!|Hello, {name}! How can I help you?]"),
    ("[I like|I love] {hobby}.", "[{hobby_cap} is a good hobby. Do you do it often?|That is nice! Who taught you {hobby}?]"),
)  # fmt: skip


def small_talk(rng: random.Random) -> Exchange:
    """Greetings and the like."""
    ask, reply = rng.choice(_SMALL_TALK)
    hobby = rng.choice(w.HOBBIES)
    slots = {
        "animal": rng.choice(w.ANIMALS), "place": rng.choice(w.PLACES), "name": w.name(rng),
        "hobby": hobby, "hobby_cap": hobby.capitalize(),
    }  # fmt: skip
    question = expand(rng, ask, **slots)
    return Exchange(question, expand(rng, reply, **slots), "Just a friendly reply.", key="")


_TOPICS = "photosynthesis gravity democracy economics quantum physics|the stock market|philosophy|black holes|evolution|the internet|football|politics|chemistry|music theory|the weather tomorrow|climate change".split("|")  # fmt: skip


def unknown(rng: random.Random) -> Exchange:
    """What a model of this size should decline."""
    topic = rng.choice((rng.choice(_TOPICS), *rng.choice(_TOPICS).split()[:1], w.coined(rng)))
    ask = expand(
        rng, "[Explain how {t} works.|Explain {t}.|What do you think about {t}?|Write a poem about {t}.|"
        "Write an essay about {t}.|Write a haiku about {t}.|Tell me everything about {t}.|Who invented {t}?|"
        "Why is {t} important?|Summarize {t}.|Who is {t}?|What is {t}?|Where is {t}?|Give me the news about {t}.]", t=topic,
    )  # fmt: skip
    reply = expand(
        rng,
        "[I do not know that. I am only a small demo model.|That is too hard for me. I am a small demo model.|I am sorry, I do not know.]",
    )
    return Exchange(ask, reply, "I do not know this.", key=ask)


def remembered(rng: random.Random) -> Exchange:
    """Something told in the same message and asked for."""
    name, thing, city = w.name(rng), w.thing(rng), w.city(rng)
    told, ask, reply, answer = rng.choice((
        ("[My name is|I am] {n}.", "What is my name?", "Your name is {n}.", name),
        ("I live in {c}.", "Where do I live?", "You live in {c}.", city),
        ("[My favorite thing is|I have] a {t}.", "What do I [like|have]?", "You have a {t}.", thing),
        ("My name is {n} and I live in {c}.", "What is my name?", "Your name is {n}.", name),
        ("[My dog is called|The name of my cat is] {n}.", "What is the name of my [dog|cat|pet]?", "The name is {n}.", name),
    ))  # fmt: skip
    question = expand(rng, told + " " + ask, n=name, c=city, t=thing)
    return Exchange(
        question,
        expand(rng, reply, n=name, c=city, t=thing),
        f"I was told: {answer}.",
        key=question,
        answer=answer,
    )


def fact(rng: random.Random) -> tuple[str, str, str]:
    """Draw a fact: question, full-sentence reply, the one answer in it."""
    kind = rng.choices(
        ("capital", "country", "sound", "color", "opposite", "translate", "define", "legs", "plural",
         "past", "general", "day", "month", "number", "what"),
        (20, 6, 8, 8, 12, 16, 10, 3, 5, 5, 12, 8, 6, 5, 5),
    )[0]  # fmt: skip
    if kind == "capital":
        country, city = rng.choice(list(w.CAPITALS.items()))
        ask = "[What is the capital of {c}?|Which city is the capital of {c}?|Name the capital of {c}.|What is the capital city of {c}?|Tell me the capital of {c}.]"
        return expand(rng, ask, c=country), f"The capital of {country} is {city}.", city
    if kind == "country":
        country, city = rng.choice(list(w.CAPITALS.items()))
        ask = "[Which country has the capital {c}?|{c} is the capital of which country?|Of which country is {c} the capital?]"
        return expand(rng, ask, c=city), f"{city} is the capital of {country}.", country
    if kind == "sound":
        animal, sound = rng.choice(list(w.SOUNDS.items()))
        ask = "[What sound does {a} make?|What does {a} say?|Which sound does {a} make?]"
        return (
            expand(rng, ask, a=article(animal)),
            f'{article(animal).capitalize()} says "{sound}".',
            sound,
        )
    if kind == "color":
        thing, color = rng.choice(list(w.THING_COLORS.items()))
        ask = "[What color is {t}?|Which color does {t} have?|What is the color of {t}?]"
        return expand(rng, ask, t=thing), f"{thing[0].upper()}{thing[1:]} is {color}.", color
    if kind == "opposite":
        a, b = rng.choice(list(w.OPPOSITES.items()))
        if rng.random() < 0.5:
            a, b = b, a
        ask = '[What is the opposite of {a}?|What is the opposite of "{a}"?|Give me the opposite of {a}.|Which word means the opposite of {a}?]'
        return expand(rng, ask, a=a), f"The opposite of {a} is {b}.", b
    if kind == "translate":
        language, table = rng.choice(list(w.TRANSLATIONS.items()))
        english, foreign = rng.choice(list(table.items()))
        if rng.random() < 0.35:
            ask = '[What does the {l} word "{f}" mean?|What does "{f}" mean in English?|Translate "{f}" from {l} to English.]'
            return (
                expand(rng, ask, l=language, f=foreign),
                f'"{foreign}" means "{english}".',
                english,
            )
        ask = '[How do you say "{e}" in {l}?|What is "{e}" in {l}?|Translate "{e}" into {l}.|What is the {l} word for "{e}"?|Translate {e} to {l}.]'
        return (
            expand(rng, ask, l=language, e=english),
            f'"{english}" in {language} is "{foreign}".',
            foreign,
        )
    if kind == "define":
        term, meaning = rng.choice(list(w.DEFINITIONS.items()))
        ask = "[What is {t}?|Define {b}.|Explain what {t} is.|What does the word {b} mean?]"
        reply = f"{term[0].upper()}{term[1:]} is {meaning}."
        return expand(rng, ask, t=term, b=term.split(" ", 1)[-1]), reply, meaning
    if kind == "legs":
        animal, count = rng.choice(list(w.LEGS.items()))
        reply = f"{animal[0].upper()}{animal[1:]} has {w.NUMBERS[count] if count else 'no'} legs."
        return f"How many legs does {animal} have?", reply, w.NUMBERS[count] if count else "no"
    if kind == "plural":
        one, many = rng.choice(list(w.PLURALS.items()))
        ask = '[What is the plural of {o}?|What is the plural of "{o}"?|Give me the plural of {o}.]'
        return expand(rng, ask, o=one), f"The plural of {one} is {many}.", many
    if kind == "past":
        verb, past = rng.choice(list(w.PAST.items()))
        ask = '[What is the past tense of {v}?|What is the past tense of "{v}"?|Give me the past tense of {v}.]'
        return expand(rng, ask, v=verb), f"The past tense of {verb} is {past}.", past
    if kind == "general":
        question, reply = rng.choice(list(w.GENERAL.items()))
        return question, f"{reply[0].upper()}{reply[1:]}.", reply
    if kind in ("day", "month"):
        table_, unit = (w.DAYS, "day") if kind == "day" else (w.MONTHS, "month")
        i = rng.randrange(len(table_))
        if rng.random() < 0.5:
            after = table_[(i + 1) % len(table_)]
            ask = "[What {u} comes after {x}?|Which {u} comes after {x}?|What {u} follows {x}?]"
            return expand(rng, ask, u=unit, x=table_[i]), f"{after} comes after {table_[i]}.", after
        before = table_[i - 1]
        ask = "[What {u} comes before {x}?|Which {u} comes before {x}?]"
        return expand(rng, ask, u=unit, x=table_[i]), f"{before} comes before {table_[i]}.", before
    if kind == "number":
        i = rng.randrange(1, 21)
        ask = "[How do you write {i} in words?|Write {i} as a word.|Spell the number {i}.]"
        return expand(rng, ask, i=i), f"{i} is written {w.NUMBERS[i]}.", w.NUMBERS[i]
    pools = {
        "an animal": w.ANIMALS,
        "a color": w.COLORS,
        "a city": w.CITIES,
        "a job": w.JOBS,
        "a food": w.FOODS,
    }
    name, pool = rng.choice(list(pools.items()))
    thing = rng.choice(pool)
    ask = f"Is {thing} {name} or {rng.choice([n for n in pools if n != name])}?"
    return ask, f"{thing[0].upper()}{thing[1:]} is {name}.", name


def multiple_choice(rng: random.Random) -> Exchange:
    """A fact with four choices, or a true-or-false statement."""
    table: dict[str, str]
    table, ask, statement = rng.choice((
        (w.CAPITALS, "What is the capital of {k}?", "The capital of {k} is {v}."),
        (w.OPPOSITES, "What is the opposite of {k}?", "The opposite of {k} is {v}."),
        (w.THING_COLORS, "What color is {k}?", "The color of {k} is {v}."),
    ))  # fmt: skip
    key, right = rng.choice(list(table.items()))
    wrong = rng.sample(sorted(set(table.values()) - {right}), 3)
    if rng.random() < 0.4:
        true = rng.random() < 0.5
        told = statement.format(k=key, v=right if true else wrong[0])
        ask = expand(rng, "[True or false: {t}|Is this true or false? {t}]", t=told)
        return Exchange(
            ask,
            "True." if true else "False.",
            statement.format(k=key, v=right),
            key=ask,
            answer="True" if true else "False",
        )
    choices = [right, *wrong]
    rng.shuffle(choices)
    letter = "ABCD"[choices.index(right)]
    break_ = rng.choice(("\n", "\n", " "))
    listed = break_.join(f"{x}) {c}" for x, c in zip("ABCD", choices, strict=True))
    ask = f"{ask.format(k=key)}{break_}{listed}"
    if rng.random() < 0.6:
        ask += expand(
            rng,
            "\n[Answer with the letter.|Answer with one letter.|Which letter is right?|Answer with a single letter.|Answer with only the letter.]",
        )
        reply = letter
    else:
        reply = f"{letter}) {right}"
    return Exchange(ask, reply, statement.format(k=key, v=right), key=ask, answer=letter)


def question(rng: random.Random) -> Exchange:
    """A fact, sometimes with an instruction about the form of the answer."""
    if rng.random() < 0.1:
        return multiple_choice(rng)
    ask, reply, answer = fact(rng)
    key = ask
    form = rng.random()
    if form < 0.14 and " " not in answer:
        ask += expand(
            rng,
            " [Answer with one word.|One word.|Answer in one word.|One word only.|Reply with a single word.|Only one word, please.]",
        )
        reply = answer
    elif form < 0.22:
        ask += expand(
            rng,
            " [Answer in upper case.|Use only capital letters.|Write the answer in upper case.|Reply in capital letters.]",
        )
        reply, answer = reply.upper(), answer.upper()
    elif form < 0.26:
        ask += expand(rng, " [Answer in lower case.|Use only small letters.]")
        reply, answer = reply.lower(), answer.lower()
    elif form < 0.31:
        ask = (
            expand(rng, "[I have a question: |Please tell me: |Quick question. |Can you help me? ]")
            + ask
        )
    elif form < 0.35:
        ask += expand(rng, " [Be brief.|Answer briefly.|Keep it short.]")
        reply = f"{answer[0].upper()}{answer[1:]}."
    thought = expand(
        rng, "[I know this|This is a simple question|The answer is clear]: {a}.", a=answer
    )
    return Exchange(ask, reply, thought, key=key, answer=answer)


def lists(rng: random.Random) -> Exchange:
    """Lists, counting, sorting, comparing, spelling."""
    kind = rng.choice(
        ("list", "list", "count", "sort", "sort", "largest", "spell", "choose", "upper", "repeat")
    )
    if kind == "list":
        pool, name = rng.choice((
            (w.ANIMALS, "animals"), (w.PLACES, "places"), (w.OBJECTS, "objects"), (w.NAMES, "names"),
            (w.CITIES, "cities"), (w.COLORS, "colors"), (w.JOBS, "jobs"), (w.FOODS, "foods"),
        ))  # fmt: skip
        n = rng.randint(2, 7)
        items = rng.sample(pool, n)
        ask = expand(
            rng, "[List|Name|Give me|Write down] {n} {x}.", n=rng.choice((n, w.NUMBERS[n])), x=name
        )
        form = rng.random()
        if form < 0.25:
            ask, reply = ask[:-1] + ", separated by commas.", ", ".join(items) + "."
        elif form < 0.5:
            ask, reply = (
                ask[:-1] + rng.choice((" with bullets.", " as bullets.")),
                "\n".join(f"- {x}" for x in items),
            )
        else:
            intro = expand(
                rng, "[Here is a list of {n} {x}:|Here are {n} {x}:|{n} {x}:]", n=n, x=name
            )
            reply = f"{intro}\n\n" + "\n".join(f"{i}. {x}" for i, x in enumerate(items, 1))
        return Exchange(ask, reply, f"I need {n} {name}.", key=ask)
    if kind == "count":
        step = rng.choice((1, 2, 3, 5, 10, -1))
        n = rng.randint(4, 10)
        start = rng.randint(0, 20) if step > 0 else rng.randint(12, 30)
        numbers = [start + step * i for i in range(n + 1)]
        way = "" if abs(step) == 1 else f" in steps of {step}"
        ask = expand(
            rng,
            "[Count|Please count] [from {a} to {b}|{d} from {a} to {b}]{way}.",
            a=start,
            b=numbers[-1],
            way=way,
            d="up" if step > 0 else "down",
        )
        return Exchange(ask, ", ".join(map(str, numbers)) + ".", f"Start at {start}.", key=ask)
    if kind == "sort":
        if rng.random() < 0.5:
            items = rng.sample(w.ANIMALS + w.OBJECTS, rng.randint(3, 5))
            ask = expand(
                rng,
                "[Sort these words|Put these words in alphabetical order|Sort alphabetically]: {x}.",
                x=", ".join(items),
            )
            return Exchange(ask, ", ".join(sorted(items)) + ".", "Alphabetical order.", key=ask)
        values = rng.sample(range(1, 100), rng.randint(3, 6))
        down = rng.random() < 0.3
        order = (
            "from largest to smallest"
            if down
            else rng.choice(("from smallest to largest", "in ascending order"))
        )
        ask = f"Sort these numbers {order}: {', '.join(map(str, values))}."
        return Exchange(
            ask,
            ", ".join(map(str, sorted(values, reverse=down))) + ".",
            f"I sort {order}.",
            key=ask,
        )
    if kind == "largest":
        values = rng.sample(range(1, 200), rng.randint(2, 5))
        most = rng.random() < 0.6
        best = max(values) if most else min(values)
        word = rng.choice(("largest", "biggest")) if most else "smallest"
        ask = f"Which number is the {word}: {', '.join(map(str, values[:-1]))} or {values[-1]}?"
        return Exchange(
            ask,
            f"The {word} number is {best}.",
            f"I compare them. {best}.",
            key=ask,
            answer=str(best),
        )
    if kind == "spell":
        word = (
            rng.choice(w.ANIMALS + w.OBJECTS + w.PLACES)
            if rng.random() < 0.5
            else w.coined(rng).replace("-", "")
        )
        spelled = "-".join(word.upper())
        ask = expand(rng, '[Spell the word "{w}".|How do you spell {w}?|Spell {w}.]', w=word)
        return Exchange(ask, f"{spelled}.", "Letter by letter.", key=ask, answer=spelled)
    if kind == "choose":
        a, b = rng.sample(w.HOBBIES, 2)
        name = rng.choice(w.NAMES)
        ask = f"{name} likes {a} but not {b}. What does {name} like?"
        return Exchange(ask, f"{name} likes {a}.", f"{name} likes {a}.", key=ask, answer=a)
    words = rng.sample(w.ANIMALS + w.OBJECTS + w.ADJECTIVES, rng.randint(1, 4))
    words = [w.coined(rng) if rng.random() < 0.4 else word for word in words]
    phrase = " ".join(words)
    if kind == "upper":
        ask = expand(
            rng,
            "[Write this in upper case|Convert to upper case|Make this upper case]: {p}",
            p=phrase,
        )
        return Exchange(ask, phrase.upper(), "Upper case.", key=ask, answer=phrase.upper())
    ask = expand(rng, "[Repeat after me|Say this|Repeat this]: {p}", p=phrase)
    return Exchange(ask, phrase, "I repeat it.", key=ask, answer=phrase)


def explain(rng: random.Random) -> Exchange:
    """Longer plain answers: a person, a day, a choice, composed in free order."""
    name, other = rng.sample(w.NAMES, 2)
    city, job, hobby = rng.choice(w.CITIES), rng.choice(w.JOBS), rng.choice(w.HOBBIES)
    foods = rng.sample(w.FOODS, 2)
    day, month = rng.choice(w.DAYS), rng.choice(w.MONTHS)
    facts = [
        f"{name} lives in {city}.",
        expand(rng, "{n} works as {j}[.| in a {p}.]", n=name, j=article(job), p=rng.choice(w.PLACES)),
        expand(rng, "[In the {t}|On {d}], {n} [likes|enjoys] {h}.", t=rng.choice(w.TIMES), d=day, n=name, h=hobby),
        expand(rng, "{n} [eats|buys|cooks] {f} [every day|on {d}|with {o}].", n=name, f=listing(foods), d=day, o=other),
        expand(rng, "{n} was born in {m}.", n=name, m=month),
        expand(rng, "{n} has {a} {x} called {o}.", n=name, a=rng.choice(("a small", "an old", "a funny")), x=rng.choice(w.ANIMALS), o=other),
    ]  # fmt: skip
    rng.shuffle(facts)
    told = facts[: rng.randint(3, 5)]
    if rng.random() < 0.5:
        ask = expand(
            rng,
            "[Introduce|Describe|Tell me about] {n}, {j} from {c}.",
            n=name,
            j=article(job),
            c=city,
        )
        return Exchange(ask, " ".join(told), f"{name}, {job}, {city}.", key=ask)
    details = {
        "live": ("Where does {n} live?", f"{name} lives in {city}.", city),
        "job": ("What is the job of {n}?", f"{name} is {article(job)}.", job),
    }
    ask_, reply, answer = details[
        "live" if facts[0] in told and rng.random() < 0.5 else rng.choice(("live", "job"))
    ]
    needed = (
        f"{name} lives in {city}." if answer == city else next(f for f in facts if "works as" in f)
    )
    if needed not in told:
        told.append(needed)
        rng.shuffle(told)
    ask = " ".join(told) + " " + ask_.format(n=name)
    return Exchange(ask, reply, f"The text says: {needed}", key=ask, answer=answer)


def chat(rng: random.Random) -> Exchange:
    """Any kind of plain exchange."""
    kinds = (question, small_talk, lists, explain, unknown, remembered)
    return rng.choices(kinds, (0.57, 0.05, 0.18, 0.10, 0.04, 0.06))[0](rng)
