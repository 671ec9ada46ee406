"""Word lists and facts that every workload draws from.

Boundary: data only. Facts are common knowledge written down by hand; a fact that is not
here is not in the demo target either.
"""

# ruff: noqa: E501  (a sentence template stays on one line)
from __future__ import annotations

import random

NAMES = (
    "Mia Tom Lena Omar Ana Ben Ivy Max Zoe Sam Nora Leo Ruth Finn Ada Hugo Clara Jonas Priya Ken "
    "Maya Luis Emma Felix Grace Ravi Sofia Peter Julia Karl Amara David Elena Frank Hana Igor Jade "
    "Kofi Laura Marco Nadia Oscar Paula Quinn Rosa Simon Tara Umar Vera Walter Yara Alice Bruno "
    "Carmen Diego Esther Fatima George Helen Ines"
).split()
CITIES = (
    "Oslo Paris Rome Cairo Lima Madrid Tokyo Athens Berlin Vienna Dublin Lisbon Prague Nairobi "
    "Havana Ottawa London Warsaw Santiago Accra Boston Denver Sydney Mumbai Seoul Toronto Geneva "
    "Hamburg Milan Porto"
).split()
ANIMALS = (
    "fox cat dog owl rabbit horse bear duck mouse goat whale crow turtle deer frog hedgehog squirrel "
    "otter sparrow badger wolf donkey lizard swan goose beaver pony seal raven lamb"
).split()
PLACES = (
    "forest harbor village garden mountain library market castle river island school desert bridge "
    "meadow lighthouse station museum farm beach valley tower bakery park cave mill orchard temple "
    "square theater swamp"
).split()
OBJECTS = (
    "lantern map key bell book boat kite stone compass ring basket clock coin drum feather hat ladder "
    "mirror needle pearl rope shell sword telescope umbrella violin whistle candle letter button "
    "flute hammer jar pencil scarf"
).split()
ADJECTIVES = (
    "small old bright quiet brave curious gentle clever hungry lonely golden silver tall strange shy "
    "proud lazy kind wild wise tiny dusty blue green red broken heavy secret warm simple"
).split()
WEATHER = "rain snow wind fog sunshine thunder hail frost".split()
CONDITIONS = "sunny rainy cloudy windy snowy foggy stormy clear".split()
TIMES = "morning evening afternoon night".split()
FEELINGS = "happy proud tired surprised calm grateful excited relieved hopeful cheerful".split()
FOODS = "bread soup cheese apples cake rice honey beans tea cookies pears noodles pie nuts".split()
COLORS = "red blue green yellow white black orange purple brown gray pink".split()
JOBS = (
    "teacher doctor baker farmer pilot nurse painter writer sailor engineer singer gardener judge "
    "tailor miner lawyer chef dancer"
).split()
HOBBIES = "chess tennis painting singing hiking reading cooking swimming dancing fishing".split()
SUBJECTS = "math history music art science sports geography biology".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()

CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Egypt": "Cairo", "Spain": "Madrid",
    "Kenya": "Nairobi", "Peru": "Lima", "Norway": "Oslo", "Greece": "Athens", "Canada": "Ottawa",
    "Chile": "Santiago", "Cuba": "Havana", "Poland": "Warsaw", "Ghana": "Accra",
    "Nepal": "Kathmandu", "Iran": "Tehran", "Germany": "Berlin", "Austria": "Vienna",
    "Ireland": "Dublin", "Portugal": "Lisbon", "Russia": "Moscow", "China": "Beijing",
    "India": "New Delhi", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Hungary": "Budapest", "Turkey": "Ankara", "Belgium": "Brussels", "Mexico": "Mexico City",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "Iceland": "Reykjavik", "England": "London",
    "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Iraq": "Baghdad", "Australia": "Canberra",
}  # fmt: skip
SOUNDS = {
    "cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "owl": "hoot",
    "lion": "roar", "frog": "croak", "pig": "oink", "horse": "neigh", "bee": "buzz",
    "snake": "hiss", "mouse": "squeak", "rooster": "cock-a-doodle-doo", "crow": "caw",
}  # fmt: skip
THING_COLORS = {
    "grass": "green", "the sky": "blue", "a banana": "yellow", "snow": "white", "coal": "black",
    "an orange": "orange", "blood": "red", "milk": "white", "a lemon": "yellow", "a tomato": "red",
    "chocolate": "brown", "a strawberry": "red", "the sun": "yellow", "a carrot": "orange",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "up": "down", "day": "night", "wet": "dry",
    "happy": "sad", "open": "closed", "light": "dark", "old": "new", "rich": "poor",
    "early": "late", "hard": "soft", "full": "empty", "left": "right", "high": "low",
    "strong": "weak", "good": "bad", "near": "far", "loud": "quiet", "long": "short",
    "true": "false", "win": "lose", "begin": "end", "sweet": "sour", "thick": "thin",
}  # fmt: skip
TRANSLATIONS = {
    "Spanish": {
        "cat": "gato", "dog": "perro", "house": "casa", "water": "agua", "bread": "pan",
        "book": "libro", "sun": "sol", "moon": "luna", "red": "rojo", "hello": "hola",
        "friend": "amigo", "school": "escuela", "milk": "leche", "night": "noche", "thank you": "gracias",
    },
    "French": {
        "cat": "chat", "dog": "chien", "house": "maison", "water": "eau", "bread": "pain",
        "book": "livre", "sun": "soleil", "moon": "lune", "red": "rouge", "hello": "bonjour",
        "friend": "ami", "school": "ecole", "milk": "lait", "night": "nuit", "thank you": "merci",
    },
    "German": {
        "cat": "Katze", "dog": "Hund", "house": "Haus", "water": "Wasser", "bread": "Brot",
        "book": "Buch", "sun": "Sonne", "moon": "Mond", "red": "rot", "hello": "hallo",
        "friend": "Freund", "school": "Schule", "milk": "Milch", "night": "Nacht", "thank you": "danke",
    },
}  # fmt: skip
DEFINITIONS = {
    "a baker": "a person who makes bread and cakes",
    "a pilot": "a person who flies an airplane",
    "a river": "a long stream of water that flows to the sea",
    "an island": "a piece of land with water all around it",
    "a library": "a place where people can read and borrow books",
    "a clock": "a device that shows the time",
    "a compass": "a tool that shows which way is north",
    "a telescope": "a tool that makes far things look near",
    "a triangle": "a shape with three sides",
    "a square": "a shape with four equal sides",
    "a week": "a period of seven days",
    "a desert": "a dry place with very little rain",
    "ice": "frozen water",
    "a hammer": "a tool for hitting nails",
    "a doctor": "a person who helps sick people",
    "a farmer": "a person who grows food and keeps animals",
    "a bridge": "a structure that crosses water or a road",
    "a volcano": "a mountain that can throw out hot rock",
    "a telephone": "a device for talking to people far away",
    "a kitchen": "a room where food is cooked",
    "an orchard": "a place where fruit trees grow",
    "a museum": "a place where old or beautiful things are shown",
    "a poem": "a short text with carefully chosen words",
    "a planet": "a large round body that moves around a star",
}
LEGS = {"a dog": 4, "a spider": 8, "a bird": 2, "an ant": 6, "a horse": 4, "a snake": 0, "a cat": 4}
PLURALS = {
    "mouse": "mice", "child": "children", "foot": "feet", "tooth": "teeth", "goose": "geese",
    "man": "men", "woman": "women", "leaf": "leaves", "box": "boxes", "city": "cities",
    "wolf": "wolves", "sheep": "sheep",
}  # fmt: skip
PAST = {
    "go": "went", "see": "saw", "eat": "ate", "run": "ran", "find": "found", "give": "gave",
    "take": "took", "write": "wrote", "sing": "sang", "buy": "bought", "think": "thought",
    "fly": "flew", "make": "made", "come": "came",
}  # fmt: skip
GENERAL = {
    "How many days are in a week?": "seven",
    "How many months are in a year?": "twelve",
    "How many hours are in a day?": "24",
    "How many minutes are in an hour?": "60",
    "How many sides does a triangle have?": "three",
    "How many letters are in the alphabet?": "26",
    "Which planet do we live on?": "Earth",
    "Which planet is closest to the sun?": "Mercury",
    "What is the largest planet?": "Jupiter",
    "What is the largest ocean?": "the Pacific Ocean",
    "What is the tallest mountain?": "Mount Everest",
    "What is the fastest land animal?": "the cheetah",
    "What is the largest animal?": "the blue whale",
    "What do bees make?": "honey",
    "What do plants need to grow?": "light and water",
    "At how many degrees Celsius does water boil?": "100",
    "At how many degrees Celsius does water freeze?": "0",
    "Which season comes after winter?": "spring",
    "Which season comes after summer?": "autumn",
    "Who wrote Romeo and Juliet?": "William Shakespeare",
}


def coined(rng: random.Random) -> str:
    """Make up a word, a name or a code, so that copying is learned letter by letter."""
    kind = rng.random()
    if kind < 0.15:
        return str(rng.randint(10, 99999))
    onset, vowel, coda = "bcdfghjklmnprstvwz", "aeiou", "lmnrstkxz"
    word = "".join(rng.choice(onset) + rng.choice(vowel) for _ in range(rng.randint(1, 3)))
    word += rng.choice(coda) if rng.random() < 0.6 else ""
    if kind < 0.35:
        return f"{word}-{rng.randint(1, 999)}" if kind < 0.27 else f"{word}_{rng.choice(OBJECTS)}"
    return word.capitalize() if kind < 0.65 else word


def name(rng: random.Random) -> str:
    """A person's name, now and then one that nobody has heard."""
    return coined(rng) if rng.random() < 0.12 else rng.choice(NAMES)


def thing(rng: random.Random) -> str:
    """A thing, now and then one that nobody has heard of."""
    return coined(rng) if rng.random() < 0.15 else rng.choice(OBJECTS)


def city(rng: random.Random) -> str:
    """A city: common, a capital, or made up."""
    kind = rng.random()
    if kind < 0.15:
        return coined(rng)
    return rng.choice(tuple(CAPITALS.values())) if kind < 0.4 else rng.choice(CITIES)
