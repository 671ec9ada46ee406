"""Tool-call dialogues: many tools under many names, calls, results, answers, and no-call cases.

Boundary: one call a turn, sometimes a second after its result. Names of tools and parameters
vary so that the target learns to read declarations instead of remembering them.
Output contract: calls name a declared tool and give every required parameter; results are
JSON text, as an OpenAI client sends them.
"""

# ruff: noqa: E501  (a sentence template stays on one line)
from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from training.corpus import chat
from training.corpus import words as w
from training.corpus.sample import Message, Sample, Tool, assistant, expand, system, user

Parameter = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Use:
    """A tool, one request for it, its call, its result and the answer."""

    name: str
    purpose: str
    parameters: tuple[Parameter, ...]
    request: str
    arguments: dict[str, Any]
    result: dict[str, Any] | str
    reply: str
    optional: tuple[str, ...] = ()

    @property
    def declaration(self) -> Tool:
        """The tool in OpenAI form."""
        properties = {n: {"type": kind, "description": text} for n, kind, text in self.parameters}
        required = [n for n in properties if n not in self.optional]
        schema = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.purpose, "parameters": schema}
        return {"type": "function", "function": function}


def _weather(r: random.Random) -> Use:
    city, where = w.city(r), r.choice(("city", "location", "place", "town"))
    sky, degrees = r.choice(w.CONDITIONS), r.randint(-9, 38)
    name = r.choice(("get_weather", "weather", "current_weather", "fetch_weather", "get_forecast"))
    return Use(
        name, expand(r, "[Get the current weather|Get the weather for a city|Returns the weather|Look up the weather]."),
        ((where, "string", expand(r, "[The name of the city|City name|Name of the {w}|The {w}]", w=where)),),
        expand(r, "[What is the weather in {c}?|What's the weather like in {c}?|How is the weather in {c} [today|now|right now]?|What is the weather in {c} today?|Weather in {c}, please.|Is it cold in {c}?|What is the weather like in {c}?|Tell me the weather in {c}.]", c=city),
        {where: city}, {r.choice(("temperature", "temp", "degrees")): degrees, r.choice(("condition", "sky", "weather")): sky},
        expand(r, "[It is {s} in {c} with {t} degrees.|The weather in {c} is {s}, {t} degrees.|In {c} it is {t} degrees and {s}.]", s=sky, c=city, t=degrees),
    )  # fmt: skip


def _calculate(r: random.Random) -> Use:
    a, b, op = r.randint(2, 999), r.randint(2, 99), r.choice(("add", "subtract", "multiply"))
    first, second = r.choice((("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
    value = {"add": a + b, "subtract": a - b, "multiply": a * b}[op]
    words = {
        "add": f"add {a} and {b}",
        "subtract": f"subtract {b} from {a}",
        "multiply": f"multiply {a} by {b}",
    }[op]
    return Use(
        r.choice((op, f"{op}_numbers", f"calc_{op}")), f"{op.capitalize()} two numbers.",
        ((first, "number", "The first number"), (second, "number", "The second number")),
        expand(r, "[Use the tool to {w}.|Please {w}.|Can you {w}?|{W} with the tool.|{W}|What is {a} {o} {b}? Use the tool.|What is {a} {o} {b}?]", w=words, W=words.capitalize(), a=a, b=b, o={"add": "plus", "subtract": "minus", "multiply": "times"}[op]),
        {first: a, second: b}, {"result": value}, expand(r, "[The result is {v}.|The answer is {v}.|It is {v}.]", v=value),
    )  # fmt: skip


def _reminder(r: random.Random) -> Use:
    what, hour, who = (
        r.choice(("tea", "lunch", "a meeting", "a call", "dinner", "a walk", "a lesson")),
        r.randint(1, 12),
        w.name(r),
    )
    text, time = r.choice(("text", "message", "title")), r.choice(("hour", "time", "at"))
    return Use(
        r.choice(("set_reminder", "remind", "add_reminder", "create_reminder")), expand(r, "[Set a reminder|Create a reminder|Remind the user]."),
        ((time, "integer", expand(r, "[The hour of the day|Hour]")), (text, "string", expand(r, "[The reminder text|What to remember|Text of the reminder]"))),
        expand(r, "[Remind me about {x} with {p} at {h} o'clock.|Set a reminder for {x} with {p} at {h}.|At {h} o'clock I have {x} with {p}. Remind me.]", x=what, p=who, h=hour),
        {time: hour, text: f"{what} with {who}"}, {"status": "ok", "id": r.randint(10, 999)},
        expand(r, "[I set a reminder for {x} with {p} at {h} o'clock.|Done. I will remind you about {x} with {p} at {h}.]", x=what, p=who, h=hour),
    )  # fmt: skip


def _message(r: random.Random) -> Use:
    who, text = (
        w.name(r),
        expand(
            r,
            "[I am late|see you on {d}|the {o} is here|call me|dinner is ready|happy birthday|I found the {o}]",
            d=r.choice(w.DAYS),
            o=r.choice(w.OBJECTS),
        ),
    )
    to, body = (
        r.choice(("to", "recipient", "name", "contact")),
        r.choice(("text", "body", "message")),
    )
    return Use(
        r.choice(("send_message", "send_text", "message", "send_email")), expand(r, "[Send a message|Send a message to a person|Sends a text]."),
        ((to, "string", expand(r, "[Who gets the message|The name of the person|Receiver]")), (body, "string", expand(r, "[The text of the message|What to say|Message text]"))),
        expand(r, "[Send {p} a message: {t}.|Tell {p}: {t}.|Write to {p} that says: {t}.|Message {p}: {t}.]", p=who, t=text),
        {to: who, body: text}, r.choice(({"sent": True}, {"status": "sent"}, "sent")),
        expand(r, "[I sent the message to {p}.|Your message to {p} was sent.|Done, {p} has your message.]", p=who),
    )  # fmt: skip


def _search(r: random.Random) -> Use:
    topic, n = r.choice((w.thing(r), r.choice(w.ANIMALS), r.choice(w.PLACES))), r.randint(2, 9)
    query, limit = (
        r.choice(("query", "q", "topic", "keyword")),
        r.choice(("limit", "count", "max_results")),
    )
    title = f"The {r.choice(w.ADJECTIVES).capitalize()} {topic.capitalize()}"
    what = r.choice(("books", "articles", "songs", "films"))
    return Use(
        r.choice((f"search_{what}", f"find_{what}", "search")), expand(r, "[Search for|Find] {x}.", x=what),
        ((limit, "integer", expand(r, "[How many results|Number of results]")), (query, "string", expand(r, "[What to look for|Search words|The topic]"))),
        expand(r, "[Find {n} {x} about {t}.|Search for {n} {x} about {t}.|Show me {n} {x} on {t}.|I need {n} {x} about {t}.]", n=n, x=what, t=topic),
        {limit: n, query: topic}, {"total": n, "first": title},
        expand(r, "[I found {n} {x}. The first is \"{f}\".|There are {n} {x}, for example \"{f}\".]", n=n, x=what, f=title),
    )  # fmt: skip


def _currency(r: random.Random) -> Use:
    coins = ("USD", "EUR", "GBP", "JPY", "CHF", "NOK")
    (a, b), amount, value = r.sample(coins, 2), r.randint(1, 900), r.randint(1, 5000)
    source, target = r.choice(
        (("from", "to"), ("source", "target"), ("from_currency", "to_currency"))
    )
    return Use(
        r.choice(("convert_currency", "exchange", "convert_money", "convert")), expand(r, "[Convert money|Convert an amount from one currency to another]."),
        (("amount", "number", "The amount of money"), (source, "string", expand(r, "[The currency to convert from|Source currency]")), (target, "string", expand(r, "[The currency to convert to|Target currency]"))),
        expand(r, "[Convert {n} {a} to {b}.|How much is {n} {a} in {b}?|Change {n} {a} into {b}.]", n=amount, a=a, b=b),
        {"amount": amount, source: a, target: b}, {"value": value}, expand(r, "[{n} {a} is {v} {b}.|{n} {a} are {v} {b}.]", n=amount, a=a, b=b, v=value),
    )  # fmt: skip


def _light(r: random.Random) -> Use:
    room, on, level = (
        r.choice(("kitchen", "bedroom", "garden", "office", "hall", "bathroom")),
        r.random() < 0.5,
        r.randint(1, 10) * 10,
    )
    where, state = r.choice(("room", "place", "area")), r.choice(("on", "state", "enabled"))
    dim = on and r.random() < 0.5
    request = (
        f"Set the {room} light to {level} percent."
        if dim
        else expand(
            r,
            "[Turn|Switch|Please turn] {s} the light in the {x}.",
            s="on" if on else "off",
            x=room,
        )
    )
    arguments: dict[str, Any] = (
        {"brightness": level, state: True, where: room} if dim else {state: on, where: room}
    )
    reply = (
        f"The {room} light is at {level} percent."
        if dim
        else expand(
            r,
            "[The light in the {x} is {s}.|Done, the {x} light is {s}.]",
            x=room,
            s="on" if on else "off",
        )
    )
    return Use(
        r.choice(("set_light", "light", "control_light", "switch_light")), expand(r, "[Turn a light on or off|Control a light]."),
        (("brightness", "integer", "Brightness in percent"), (state, "boolean", "If the light is on"), (where, "string", "Which room")),
        request, arguments, {"ok": True}, reply, optional=("brightness",),
    )  # fmt: skip


def _route(r: random.Random) -> Use:
    a, b, mode = w.city(r), w.city(r), r.choice(("train", "car", "bus", "bike"))
    start, end = r.choice((("start", "end"), ("origin", "destination"), ("from_city", "to_city")))
    hours, how = r.randint(1, 20), r.choice(("mode", "by", "vehicle"))
    return Use(
        r.choice(("find_route", "get_route", "plan_trip", "travel_time")), expand(r, "[Find a route between two cities|Plan a trip]."),
        ((end, "string", "Where the trip ends"), (how, "string", "How to travel"), (start, "string", "Where the trip starts")),
        expand(r, "[How long is the trip from {a} to {b} by {m}?|Plan a trip from {a} to {b} by {m}.|How do I get from {a} to {b} by {m}?|I go from {a} to {b} by {m}. How long does it take?]", a=a, b=b, m=mode),
        {end: b, how: mode, start: a}, {"hours": hours}, expand(r, "[The trip from {a} to {b} by {m} takes {h} hours.|It takes {h} hours by {m} from {a} to {b}.]", a=a, b=b, m=mode, h=hours),
    )  # fmt: skip


def _todo(r: random.Random) -> Use:
    items = [r.choice((w.thing(r), r.choice(w.FOODS))) for _ in range(r.randint(1, 4))]
    key = r.choice(("items", "things", "entries"))
    listed = chat.listing(items)
    return Use(
        r.choice(("add_items", "add_to_list", "shopping_list", "add_todo")), expand(r, "[Add items to the shopping list|Put things on a list]."),
        ((key, "array", expand(r, "[The items to add|What to add]")),),
        expand(r, "[Add {x} to my list.|Put {x} on the shopping list.|I need to buy {x}. Add it to my list.]", x=listed),
        {key: items}, {"added": len(items)}, expand(r, "[I added {x} to your list.|Added to your list: {x}.|Done. I added {x}.]", x=listed),
    )  # fmt: skip


def _clock(r: random.Random) -> Use:
    city, where = w.city(r), r.choice(("city", "location", "timezone"))
    time = f"{r.randint(0, 23)}:{r.randint(10, 59)}"
    return Use(
        r.choice(("get_time", "current_time", "clock", "local_time")), expand(r, "[Get the current time|Get the time in a city|Tells the time]."),
        ((where, "string", expand(r, "[The name of the city|City name|Where]")),),
        expand(r, "[What time is it in {c}?|Tell me the time in {c}.|How late is it in {c}?|Time in {c}?]", c=city),
        {where: city}, r.choice(({"time": time}, time)), expand(r, "[It is {t} in {c}.|The time in {c} is {t}.]", t=time, c=city),
    )  # fmt: skip


def _lookup(r: random.Random) -> Use:
    """A tool with a made-up name, so that any declared name can be copied."""
    verb, noun, field = (
        r.choice(("get", "find", "check", "load", "read", "show", "open")),
        r.choice(w.OBJECTS + w.ANIMALS + w.SUBJECTS),
        r.choice(("name", "id", "code", "owner", "key")),
    )
    value: str | int = r.randint(1, 9999) if field in ("id", "code") else w.name(r)
    answer = r.choice((r.choice(w.COLORS), r.randint(1, 99), r.choice(w.ADJECTIVES)))
    attribute = r.choice(("color", "price", "state", "size", "age", "grade"))
    return Use(
        f"{verb}_{noun}", f"{verb.capitalize()} the {noun} by {field}.",
        ((field, "integer" if isinstance(value, int) else "string", f"The {field} of the {noun}"),),
        expand(r, "[{V} the {n} with {f} {v}.|What is the {a} of the {n} with {f} {v}?|Please {b} the {n} with the {f} {v}.]", V=verb.capitalize(), b=verb, n=noun, f=field, v=value, a=attribute),
        {field: value}, {attribute: answer}, expand(r, "[The {a} of the {n} is {x}.|The {n} has the {a} {x}.]", a=attribute, n=noun, x=answer),
    )  # fmt: skip


def _event(r: random.Random) -> Use:
    title, day, n = (
        r.choice(
            (r.choice(("Lunch", "Dinner", "Meeting", "Party", "Concert", "Lesson")), w.coined(r))
        ),
        r.choice(w.DAYS),
        r.randint(1, 12),
    )
    name, when = r.choice(("title", "name", "summary")), r.choice(("date", "day", "when"))
    guests = [w.name(r) for _ in range(r.randint(1, 3))]
    invited = r.random() < 0.4
    extra = f" with {chat.listing(guests)}" if invited else ""
    arguments: dict[str, Any] = {name: title, when: day}
    if invited:
        arguments["attendees"] = guests
    return Use(
        r.choice(("create_event", "add_event", "schedule", "new_event")), expand(r, "[Create a calendar event|Add an event to the calendar|Schedule something]."),
        (("attendees", "array", expand(r, "[Who comes|The guests|Names of people]")), (when, "string", expand(r, "[The day|Date of the event|When it is]")), (name, "string", expand(r, "[The title|Event title|Name of the event]"))),
        expand(r, "[Create an event called {t} on {d}{e}.|Schedule {t} on {d}{e}.|Add {t}{e} to my calendar on {d}.|Put {t} in the calendar for {d}{e}.]", t=title, d=day, e=extra),
        arguments, r.choice(({"created": True}, {"id": n}, {"status": "ok"})), expand(r, "[I created {t} on {d}.|{t} is in your calendar on {d}.|Done: {t} on {d}.]", t=title, d=day), optional=("attendees",),
    )  # fmt: skip


def _text(r: random.Random) -> Use:
    """A tool that does something to a text of any words."""
    words = [
        r.choice((w.thing(r), w.coined(r), r.choice(w.ANIMALS), r.choice(w.ADJECTIVES)))
        for _ in range(r.randint(1, 4))
    ]
    text, key = " ".join(words), r.choice(("text", "input", "content", "string"))
    name, does, result = r.choice((
        ("uppercase", "turn {t} into upper case", text.upper()), ("count_words", "count the words in {t}", str(len(words))),
        ("translate", "translate {t}", w.coined(r)), ("save_note", "save the note {t}", "saved"), ("reverse", "reverse {t}", text[::-1]),
    ))  # fmt: skip
    quoted = r.choice((f'"{text}"', text, f"the text {text}"))
    request = does.format(t=quoted)
    return Use(
        name, f"{does.format(t='a text').capitalize()}.", ((key, "string", expand(r, "[The text|Text to use|Input text]")),),
        expand(r, "[{R}.|Please {q}.|Can you {q}?|Use the tool to {q}.]", R=request[0].upper() + request[1:], q=request),
        {key: text}, r.choice(({"result": result}, result)), expand(r, "[The result is {x}.|Here it is: {x}.|{x}]", x=result),
    )  # fmt: skip


def _any(r: random.Random) -> Use:
    """A tool of any name with one to three parameters of any name, asked for by its name."""
    name = f"{r.choice(('run', 'start', 'make', 'list', 'stop', 'order', 'book', 'rate', 'update', 'delete', w.coined(r).lower()))}_{r.choice((r.choice(w.OBJECTS), r.choice(w.PLACES), r.choice(w.SUBJECTS), 'order', 'table', 'file', 'task'))}".replace(
        "-", "_"
    )
    keys = r.sample(
        (
            "name",
            "id",
            "count",
            "size",
            "color",
            "owner",
            "path",
            "level",
            "user",
            "email",
            "date",
            "status",
            "price",
            "active",
        ),
        r.randint(1, 3),
    )
    arguments: dict[str, Any] = {}
    for key in keys:
        number = key in ("id", "count", "size", "level", "price")
        arguments[key] = (
            r.randint(0, 999)
            if number
            else r.random() < 0.5
            if key == "active"
            else r.choice((w.coined(r), r.choice(w.COLORS), w.name(r)))
        )
    kinds = {
        k: "integer" if type(v) is int else "boolean" if isinstance(v, bool) else "string"
        for k, v in arguments.items()
    }
    spoken = chat.listing(
        [f"{k} {str(v).lower() if isinstance(v, bool) else v}" for k, v in arguments.items()]
    )
    verb, _, noun = name.partition("_")
    return Use(
        name, expand(r, "[{V} a {n}.|{V} the {n}.|This tool can {v} the {n}.]", V=verb.capitalize(), v=verb, n=noun),
        tuple((k, kinds[k], expand(r, "[The {k}|The {k} of the {n}|{K}]", k=k, K=k.capitalize(), n=noun)) for k in sorted(arguments)),
        expand(r, "[{V} the {n} with {s}.|Call {x} with {s}.|Use {x} with {s}.|Please {v} a {n} with {s}.]", V=verb.capitalize(), v=verb, n=noun, x=name, s=spoken),
        arguments, r.choice(({"ok": True}, {"status": "done"}, "done")), expand(r, "[Done.|The {n} is done.|I called {x}.]", n=noun, x=name),
    )  # fmt: skip


MAKERS = (
    _weather,
    _calculate,
    _reminder,
    _message,
    _search,
    _currency,
    _light,
    _route,
    _todo,
    _clock,
    _lookup,
    _event,
    _text,
    _any,
    _any,
)
_SYSTEMS = ("", "", "You are a helpful assistant.", "Use tools when they help.", "You can call tools.", "You are an assistant with tools.")  # fmt: skip


def _call(use: Use, number: int, thought: str | None) -> Message:
    function = {"name": use.name, "arguments": dict(sorted(use.arguments.items()))}
    message: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }
    if thought:
        message["reasoning_content"] = thought
    return message


def _exchange(r: random.Random, use: Use, number: int, thinking: bool) -> list[Message]:
    thought = (
        expand(r, "[I need|I use|I call|The right tool is] {n}.", n=use.name) if thinking else None
    )
    result = use.result if isinstance(use.result, str) else json.dumps(use.result)
    return [
        user(use.request), _call(use, number, thought),
        {"role": "tool", "tool_call_id": f"call_{number}", "content": result}, assistant(use.reply),
    ]  # fmt: skip


def tools(rng: random.Random, thinking: bool) -> Sample:
    """A dialogue with one to four declared tools."""
    makers = rng.sample(MAKERS, rng.choices((1, 2, 3, 4), (0.35, 0.3, 0.2, 0.15))[0])
    uses = {use.name: use for use in (maker(rng) for maker in makers)}
    use = rng.choice(list(uses.values()))
    messages: list[Message] = [system(text)] if (text := rng.choice(_SYSTEMS)) else []
    keys = [use.request]
    declared = [u.declaration for u in uses.values()]
    rng.shuffle(declared)
    form = rng.random()
    if form < 0.16:
        item = chat.chat(rng)
        messages += [user(item.question), assistant(item.reply, item.thought if thinking else None)]
        return Sample("tools", item.key, tuple(messages), thinking, tuple(declared))
    if form < 0.30:
        item = chat.chat(rng)
        keys.insert(0, item.key)
        messages += [user(item.question), assistant(item.reply)]
    messages += _exchange(rng, use, 1, thinking)
    if form > 0.82 and len(uses) > 1:
        second = rng.choice([u for u in uses.values() if u.name != use.name])
        messages += _exchange(rng, second, 2, thinking)
        use = second
        keys.append(second.request)
    expected = {"name": use.name, "arguments": use.arguments}
    return Sample("tools", "|".join(keys), tuple(messages), thinking, tuple(declared), expected)
