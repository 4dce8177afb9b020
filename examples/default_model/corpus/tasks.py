"""Short tasks with one right answer: sums, counting, opposites, words, days, facts.

Every function returns one random Turn. The answer depends only on the question, so that equality
judges it.
"""

import random
from collections.abc import Callable

from examples.default_model.corpus import unknowns, words
from examples.default_model.corpus.turn import Turn, typed

MAX_NUMBER = 20
MAX_COMPARED = 20
MAX_COUNT = 20
MAX_REPEATED = 5  # the most repetitions of a word, and the most words of a list
TOO_BIG = f"That is too big for me. I can add and subtract numbers up to {MAX_NUMBER}."
TOO_FAR = f"I can count up to {MAX_COUNT} only."
TOO_MANY = f"That is too many for me. I can do it up to {MAX_REPEATED} times."
TOO_LONG_LIST = f"That is too many for me. I can name up to {MAX_REPEATED}."


def _operands(rng: random.Random) -> tuple[int, int]:
    return rng.randint(0, MAX_NUMBER), rng.randint(0, MAX_NUMBER)


def _spoken(rng: random.Random, *numbers: int) -> list[str]:
    spell = max(numbers) <= 20 and rng.random() < 0.12
    return [words.NUMBER_WORDS[n] if spell else str(n) for n in numbers]


_FRAMES = (
    "What is {e}?",
    "{e}",
    "{e} =",
    "{e}?",
    "How much is {e}?",
    "Calculate {e}.",
    "What's {e}?",
    "Can you tell me {e}?",
    "Compute {e}",
    "{e}=?",
)
_PLUS = ("{a} + {b}", "{a}+{b}", "{a} plus {b}", "{a} and {b}")
_MINUS = ("{a} - {b}", "{a}-{b}", "{a} minus {b}", "{a} take away {b}")
_TIMES = ("{a} * {b}", "{a} x {b}", "{a} times {b}", "{a}*{b}")


def _sum(
    rng: random.Random, signs: tuple[str, ...], frames: tuple[str, ...], a: int, b: int
) -> str:
    sign = rng.choice(signs[:2]) if rng.random() < 0.6 else rng.choice(signs)
    left, right = _spoken(rng, a, b)
    frame = rng.choice(frames[:3]) if rng.random() < 0.5 else rng.choice(frames)
    if sign == "{a} and {b}":
        frame = "How much is {e}?"
    return typed(rng, frame.format(e=sign.format(a=left, b=right)))


def add(rng: random.Random) -> Turn:
    a, b = _operands(rng)
    if rng.random() < 0.12:
        left, right = _spoken(rng, a, b)
        ask = rng.choice(["Add {a} and {b}.", "Sum of {a} and {b}", "Add {b} to {a}."])
        return Turn("add", typed(rng, ask.format(a=left, b=right)), f"{a} + {b} = {a + b}.")
    return Turn("add", _sum(rng, _PLUS, _FRAMES, a, b), f"{a} + {b} = {a + b}.")


def subtract(rng: random.Random) -> Turn:
    a, b = _operands(rng)
    if b > a and rng.random() < 0.85:
        a, b = b, a
    if rng.random() < 0.12:
        left, right = _spoken(rng, a, b)
        ask = typed(rng, f"Subtract {right} from {left}.")
        return Turn("subtract", ask, f"{a} - {b} = {a - b}.")
    return Turn("subtract", _sum(rng, _MINUS, _FRAMES, a, b), f"{a} - {b} = {a - b}.")


def times(rng: random.Random) -> Turn:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    return Turn("times", _sum(rng, _TIMES, _FRAMES, a, b), f"{a} x {b} = {a * b}.")


def word_problem(rng: random.Random) -> Turn:
    name, fruit = rng.choice(words.GIRLS + words.BOYS), words.plural(rng.choice(words.FRUITS))
    pronoun = "she" if name in words.GIRLS else "he"
    a, b = rng.randint(2, 12), rng.randint(1, 9)
    if rng.random() < 0.5:
        more = rng.choice(["gets", "buys", "finds"])
        ask = f"{name} has {a} {fruit} and {more} {b} more. How many {fruit} does {pronoun} have?"
        return Turn("word_problem", typed(rng, ask), f"{a} + {b} = {a + b}.")
    a = max(a, b)
    less = rng.choice(["eats", "loses", "gives away"])
    ask = f"{name} has {a} {fruit} and {less} {b}. How many {fruit} are left?"
    return Turn("word_problem", typed(rng, ask), f"{a} - {b} = {a - b}.")


def too_big(rng: random.Random) -> Turn:
    top = rng.choice([99, 99, 999, 10 ** rng.randint(4, 6)])
    a, b = rng.randint(MAX_NUMBER + 1, top), rng.randint(0, rng.choice([20, 99, top]))
    if rng.random() < 0.5:
        a, b = b, a
    return Turn("too_big", _sum(rng, _PLUS[:3] + _MINUS[:3], _FRAMES, a, b), TOO_BIG)


def compare(rng: random.Random) -> Turn:
    a, b = rng.sample(range(MAX_COMPARED + 1), 2)
    if rng.random() < 0.5:
        ask, best = rng.choice(["bigger", "larger", "greater", "more"]), max(a, b)
    else:
        ask, best = rng.choice(["smaller", "less"]), min(a, b)
    shown = {"larger": "bigger", "greater": "bigger"}.get(ask, ask)
    question = rng.choice([f"Which is {ask}, {a} or {b}?", f"What is {ask}: {a} or {b}?"])
    return Turn("compare", typed(rng, question), f"{best} is {shown}.")


def count(rng: random.Random) -> Turn:
    pick = rng.random()
    low, high = sorted(rng.sample(range(1, MAX_COUNT + 1), 2))
    if pick < 0.35:
        low, high = 1, rng.choice([5, 10, rng.randint(2, MAX_COUNT), rng.randint(2, MAX_COUNT)])
        ask = rng.choice(["Count to {b}.", "Count up to {b}", "Can you count to {b}?"])
        numbers = range(low, high + 1)
    elif pick < 0.6:
        ask = rng.choice(["Count from {a} to {b}.", "Count {a} to {b}", "Count up from {a} to {b}"])
        numbers = range(low, high + 1)
    elif pick < 0.8:
        high = rng.choice([3, 5, 10, rng.randint(2, MAX_COUNT)])
        low = 1
        ask = rng.choice(["Count down from {b}.", "Count backwards from {b}", "Countdown from {b}"])
        numbers = range(high, 0, -1)
    elif pick < 0.95:
        ask = rng.choice(["Count down from {b} to {a}.", "Count from {b} down to {a}."])
        numbers = range(high, low - 1, -1)
    else:
        high = rng.choice([25, 30, 40, 50, 100, 1000, rng.randint(MAX_COUNT + 1, 999)])
        return Turn("count", typed(rng, f"Count to {high}."), TOO_FAR)
    answer = ", ".join(str(n) for n in numbers) + "."
    return Turn("count", typed(rng, ask.format(a=low, b=high)), answer)


def count_in_steps(rng: random.Random) -> Turn:
    step, name = rng.choice([(2, "twos"), (5, "fives"), (10, "tens")])
    top = step * rng.randint(2, 10)
    ask = rng.choice([f"Count by {name} to {top}.", f"Count to {top} in steps of {step}."])
    answer = ", ".join(str(n) for n in range(step, top + 1, step)) + "."
    return Turn("count", typed(rng, ask), answer)


def opposite(rng: random.Random) -> Turn:
    if rng.random() < 0.08:
        word = rng.choice(words.FRUITS + words.CAST_ANIMALS + words.THINGS + words.VEHICLES)
        ask = f"What is the opposite of {word}?"
        return Turn("opposite", typed(rng, ask), f"I do not know an opposite of {word}.")
    word = rng.choice(list(words.OPPOSITES))
    ask = rng.choice(
        [
            "What is the opposite of {w}?",
            "Opposite of {w}?",
            "What's the opposite of {w}?",
            "Tell me the opposite of {w}.",
            "Give me the opposite of the word {w}.",
            "{w} is the opposite of what?",
            'What is the opposite of "{w}"?',
            "Which word is the opposite of {w}?",
        ]
    ).format(w=word)
    answer = f"The opposite of {word} is {words.OPPOSITES[word]}."
    return Turn("opposite", typed(rng, ask[0].upper() + ask[1:]), answer)


def neighbours(rng: random.Random) -> Turn:
    ring, unit = rng.choice([(words.DAYS, "day"), (words.MONTHS, "month")])
    if rng.random() < 0.15:
        ring, unit = words.SEASONS, "season"
    at = rng.randrange(len(ring))
    back = rng.random() < 0.35
    word, other = ring[at], ring[at - 1 if back else (at + 1) % len(ring)]
    where = "before" if back else "after"
    asks = [f"What comes {where} {word}?", f"Which {unit} comes {where} {word}?"]
    asks += [f"What {unit} is {where} {word}?"]
    if unit == "day":
        yesterday = "yesterday" if back else "tomorrow"
        asks.append(f"If today is {word}, what day {'was' if back else 'is'} {yesterday}?")
    subject = other[0].upper() + other[1:]
    return Turn("days", typed(rng, rng.choice(asks)), f"{subject} comes {where} {word}.")


def number_neighbour(rng: random.Random) -> Turn:
    number = rng.randint(1, MAX_COMPARED)
    back = rng.random() < 0.4
    where = "before" if back else "after"
    ask = rng.choice([f"What comes {where} {number}?", f"What number comes {where} {number}?"])
    return Turn(
        "days", typed(rng, ask), f"{number - 1 if back else number + 1} comes {where} {number}."
    )


def colour_of(rng: random.Random) -> Turn:
    thing, colour = rng.choice(list(words.THING_COLOURS.items()))
    spelled = rng.choice(["colour", "color"])
    asks = [f"What {spelled} is {thing}?", f"Which {spelled} has {thing}?"]
    asks.append(f"What is the {spelled} of {thing}?")
    return Turn("colour", typed(rng, rng.choice(asks)), f"{thing.capitalize()} is {colour}.")


def sound(rng: random.Random) -> Turn:
    animal, said = rng.choice(list(words.SOUNDS.items()))
    named = words.article(animal)
    asks = [f"What sound does {named} make?", f"What does {named} say?"]
    asks += [f"What does the {animal} say?", f"Which animal says {said}?"]
    at = rng.randrange(len(asks))
    return Turn("sound", typed(rng, asks[at]), f"{named.capitalize()} says {said}.")


def category(rng: random.Random) -> Turn:
    group = rng.choice(list(words.CATEGORIES))
    word = rng.choice(words.CATEGORIES[group])
    named = word if group == "colour" else words.article(word)
    is_what = f"{named[0].upper() + named[1:]} is {words.article(group)}."
    if rng.random() < 0.5:
        return Turn("category", typed(rng, f"What is {named}?"), is_what)
    if rng.random() < 0.5:
        other = rng.choice([g for g in words.CATEGORIES if g != group])
        if word in words.CATEGORIES[other]:
            return Turn("category", typed(rng, f"What is {named}?"), is_what)
        first, second = rng.sample([words.article(group), words.article(other)], 2)
        return Turn("category", typed(rng, f"Is {named} {first} or {second}?"), is_what)
    other = rng.choice(list(words.CATEGORIES))
    ask = typed(rng, f"Is {named} {words.article(other)}?")
    if word in words.CATEGORIES[other]:
        yes = f"Yes, {named} is {words.article(other)}."
        return Turn("category", ask, yes)
    return Turn("category", ask, f"No, {named} is {words.article(group)}.")


def list_some(rng: random.Random) -> Turn:
    """Asks for some words of a group. Any would be right; the answer has the first ones."""
    plural = rng.choice(list(words.LISTABLE))
    number = rng.choice([1, 2, 2, 3, 3, 3, 4, 5, 5])  # up to MAX_REPEATED
    asked = words.NUMBER_WORDS[number] if rng.random() < 0.5 else str(number)
    noun = {"clothes": "clothes"}.get(plural, plural if number > 1 else plural[:-1])
    if plural == "clothes":
        number, asked = max(number, 2), asked if number > 1 else "two"
    verb = rng.choice(["Name", "Tell me", "List", "Give me", "Name me"])
    if rng.random() < 0.06:
        asked = str(rng.choice([6, 7, 8, 9, 10, 20, 50, 100]))
        return Turn("list", typed(rng, f"{verb} {asked} {plural}."), TOO_LONG_LIST)
    answer = ", ".join(words.LISTABLE[plural][:number])
    return Turn("list", typed(rng, f"{verb} {asked} {noun}."), answer[0].upper() + answer[1:] + ".")


def list_is_right(reply: str, question: str) -> bool:
    group = next((g for g in words.LISTABLE if g[:-1] in question.lower()), "animals")
    asked = [w.strip(".!?,") for w in question.lower().split()]
    numbers = [
        int(w) if w.isdigit() else words.NUMBER_WORDS.index(w)
        for w in asked
        if w.isdigit() or w in words.NUMBER_WORDS
    ]
    said = reply.rstrip(".").lower().split(", ")
    known = {w.lower() for w in words.LISTABLE[group]}
    return len(said) == len(set(said)) == numbers[0] and set(said) <= known


def spell(rng: random.Random) -> Turn:
    word = rng.choice(words.SPELL)
    ask = rng.choice(
        ["Spell {w}.", "How do you spell {w}?", "Spell the word {w}.", "Spell {w} please"]
    )
    return Turn("spell", typed(rng, ask.format(w=word)), "-".join(word) + ".")


def letter(rng: random.Random) -> Turn:
    word = rng.choice(words.SPELL)
    pick = rng.random()
    if pick < 0.5:
        ask, at = "first", 0
    elif pick < 0.8:
        ask, at = "last", -1
    else:
        counted = rng.choice([f"How many letters are in {word}?", f"How long is the word {word}?"])
        return Turn("letter", typed(rng, counted), f"The word {word} has {len(word)} letters.")
    question = rng.choice(
        [f"What is the {ask} letter of {word}?", f"{ask.capitalize()} letter of {word}?"]
    )
    return Turn("letter", typed(rng, question), f"The {ask} letter of {word} is {word[at]}.")


def repeat(rng: random.Random) -> Turn:
    pick = rng.random()
    word = rng.choice(words.SPELL) if pick < 0.7 else rng.choice(words.GIRLS + words.BOYS)
    if pick > 0.9:
        word = unknowns.made_up_word(rng)
    if rng.random() < 0.1:
        return Turn("repeat", typed(rng, f"Say {word}."), word[0].upper() + word[1:] + ".")
    number = rng.randint(2, MAX_REPEATED)
    asked = words.NUMBER_WORDS[number] if rng.random() < 0.4 else str(number)
    ask = rng.choice(
        [
            "Say {w} {n} times.",
            "Repeat {w} {n} times.",
            "Repeat the word {w} {n} times.",
            "Write {w} {n} times.",
            "Say the word {w} {n} times",
        ]
    )
    if rng.random() < 0.06:
        many = rng.choice([6, 7, 8, 9, 10, 12, 20, 50, 100])
        return Turn("repeat", typed(rng, ask.format(w=word, n=many)), TOO_MANY)
    return Turn("repeat", typed(rng, ask.format(w=word, n=asked)), " ".join([word] * number) + ".")


def capital(rng: random.Random) -> Turn:
    country, city = rng.choice(list(words.CAPITALS.items()))
    asks = [f"What is the capital of {country}?", f"Capital of {country}?"]
    asks += [f"What's the capital of {country}?", f"Which city is the capital of {country}?"]
    return Turn("capital", typed(rng, rng.choice(asks)), f"The capital of {country} is {city}.")


def fact(rng: random.Random) -> Turn:
    ask, answer = rng.choice(list(words.FACTS.items()))
    is_question = ask.split()[0] in ("How", "What", "Where", "Is", "Can")
    return Turn("fact", typed(rng, ask + ("?" if is_question else ".")), answer)


TASKS: tuple[tuple[float, Callable[[random.Random], Turn]], ...] = (
    (9.0, add),
    (7.0, subtract),
    (3.0, times),
    (1.5, word_problem),
    (2.0, too_big),
    (2.0, compare),
    (9.0, count),
    (1.0, count_in_steps),
    (4.0, opposite),
    (2.0, neighbours),
    (0.6, number_neighbour),
    (1.3, colour_of),
    (1.3, sound),
    (2.5, category),
    (6.0, list_some),
    (3.0, spell),
    (4.0, letter),
    (5.0, repeat),
    (1.4, capital),
    (1.7, fact),
)
