"""Small texts with questions about them; an answer is in the text, or says that it is not.

A text here consists of a few shuffled facts and is independent of stories.py.
"""

import random
import re
from collections.abc import Callable
from typing import NamedTuple

from examples.default_model.corpus import unknowns, words
from examples.default_model.corpus.turn import Turn
from examples.default_model.corpus.words import split_words

NOT_SAID = "The story does not say that."


class Fact(NamedTuple):
    sentence: str
    asks: tuple[tuple[str, str], ...]


def _pick_place(rng: random.Random) -> str:
    place = rng.choice(list(words.PLACES))
    return f"{words.PLACES[place]} the {place}"


def _lives(rng: random.Random, who: str, other: str) -> Fact:
    at = _pick_place(rng)
    said = rng.choice(["lives", "has a house"])
    return Fact(f"{who} {said} {at}.", ((f"Where does {who} live?", f"{who} lives {at}."),))


_VERBS = (
    ("found", "find"),
    ("saw", "see"),
    ("lost", "lose"),
    ("bought", "buy"),
    ("hid", "hide"),
    ("left", "leave"),
)


def _found(rng: random.Random, who: str, other: str) -> Fact:
    colour, thing = rng.choice(words.COLOURS), rng.choice(words.THINGS)
    verb, base = _VERBS[0] if rng.random() < 0.4 else rng.choice(_VERBS)
    item, at = words.article(f"{colour} {thing}"), _pick_place(rng)
    asks = [
        (f"What did {who} {base}?", f"{who} {verb} {item}."),
        (f"What colour is the {thing}?", f"The {thing} is {colour}."),
        (f"What color was the {thing}?", f"The {thing} is {colour}."),
        (f"Who {verb} the {thing}?", f"{who} {verb} the {thing}."),
    ]
    if rng.random() < 0.4:
        return Fact(f"{who} {verb} {item}.", tuple(asks))
    asks.append((f"Where did {who} {base} the {thing}?", f"{who} {verb} the {thing} {at}."))
    asks.append((f"Where was the {thing}?", f"The {thing} was {at}."))
    return Fact(f"{who} {verb} {item} {at}.", tuple(asks))


def _put(rng: random.Random, who: str, other: str) -> Fact:
    thing, inside = rng.sample(words.THINGS, 2)
    verb = rng.choice(["put", "kept"])
    place = f"{rng.choice(['in', 'under', 'on', 'behind'])} the {inside}"
    return Fact(
        f"{who} {verb} the {thing} {place}.",
        (
            (f"Where is the {thing}?", f"The {thing} is {place}."),
            (f"Who {verb} the {thing} {place}?", f"{who} {verb} the {thing} {place}."),
        ),
    )


def _met(rng: random.Random, who: str, other: str) -> Fact:
    at = _pick_place(rng)
    verb, base = rng.choice([("met", "meet"), ("helped", "help"), ("visited", "visit")])
    return Fact(
        f"{who} {verb} {other} {at}.",
        (
            (f"Who did {who} {base}?", f"{who} {verb} {other}."),
            (f"Where did {who} {base} {other}?", f"{who} {verb} {other} {at}."),
            (f"Who {verb} {other}?", f"{who} {verb} {other}."),
        ),
    )


def _made(rng: random.Random, who: str, other: str) -> Fact:
    food = rng.choice(words.FOODS)
    verb, base = rng.choice([("made", "make"), ("cooked", "cook"), ("shared", "share")])
    return Fact(
        f"{who} {verb} some {food} for {other}.".replace(" for ", " with ")
        if verb == "shared"
        else f"{who} {verb} some {food} for {other}.",
        (
            (f"What did {who} {base}?", f"{who} {verb} some {food}."),
            (f"Who {verb} the {food}?", f"{who} {verb} the {food}."),
        ),
    )


def _gave(rng: random.Random, who: str, other: str) -> Fact:
    colour, thing = rng.choice(words.COLOURS), rng.choice(words.THINGS)
    item = words.article(f"{colour} {thing}")
    return Fact(
        f"{who} gave {other} {item}.",
        (
            (f"What did {who} give {other}?", f"{who} gave {other} {item}."),
            (f"Who got the {thing}?", f"{other} got the {thing}."),
            (f"Who gave away the {thing}?", f"{who} gave {other} the {thing}."),
            (f"What colour is the {thing}?", f"The {thing} is {colour}."),
        ),
    )


def _has_pet(rng: random.Random, who: str, other: str) -> Fact:
    pet, name = rng.choice(words.CAST_ANIMALS), rng.choice(words.GIRLS + words.BOYS)
    while name in (who, other):
        name = rng.choice(words.GIRLS + words.BOYS)
    return Fact(
        f"{who} has {words.article(pet)} named {name}.",
        (
            (f"What is the name of the {pet}?", f"The {pet} is named {name}."),
            (f"Who is {name}?", f"{name} is the {pet} of {who}."),
            (f"What animal does {who} have?", f"{who} has {words.article(pet)}."),
        ),
    )


def _ate(rng: random.Random, who: str, other: str) -> Fact:
    number, fruit = rng.randint(2, 9), rng.choice(words.FRUITS)
    count = rng.choice([str(number), words.NUMBER_WORDS[number]])
    many = words.plural(fruit)
    verb, base = rng.choice([("ate", "eat"), ("bought", "buy"), ("picked", "pick")])
    return Fact(
        f"{who} {verb} {count} {many}.",
        (
            (f"What did {who} {base}?", f"{who} {verb} {count} {many}."),
            (f"How many {many} did {who} {base}?", f"{who} {verb} {count} {many}."),
            (f"Who {verb} the {many}?", f"{who} {verb} the {many}."),
        ),
    )


def _wears(rng: random.Random, who: str, other: str) -> Fact:
    colour, item = rng.choice(words.COLOURS), rng.choice(words.CLOTHES)
    worn = words.article(f"{colour} {item}")
    return Fact(
        f"{who} wears {worn}.",
        (
            (f"What does {who} wear?", f"{who} wears {worn}."),
            (f"What colour is the {item} of {who}?", f"The {item} is {colour}."),
        ),
    )


def _likes(rng: random.Random, who: str, other: str) -> Fact:
    skill = rng.choice(words.SKILLS)
    return Fact(
        f"{who} likes to {skill}.",
        (
            (f"What does {who} like to do?", f"{who} likes to {skill}."),
            (f"Who likes to {skill}?", f"{who} likes to {skill}."),
        ),
    )


def _friend(rng: random.Random, who: str, other: str) -> Fact:
    return Fact(
        f"The best friend of {who} is {other}.",
        (
            (f"Who is the best friend of {who}?", f"The best friend of {who} is {other}."),
            (f"Who is {who}'s best friend?", f"The best friend of {who} is {other}."),
        ),
    )


def _felt(rng: random.Random, who: str, other: str) -> Fact:
    mood = rng.choice(split_words("happy sad tired hungry angry afraid proud bored cold thirsty"))
    return Fact(
        f"{who} was very {mood}.",
        (
            (f"How did {who} feel?", f"{who} was {mood}."),
            (f"Who was {mood}?", f"{who} was {mood}."),
        ),
    )


def _went(rng: random.Random, who: str, other: str) -> Fact:
    place, day = rng.choice(list(words.PLACES)), rng.choice(words.DAYS)
    return Fact(
        f"On {day} {who} went to the {place}.",
        (
            (f"Where did {who} go?", f"{who} went to the {place}."),
            (f"When did {who} go to the {place}?", f"{who} went there on {day}."),
            (f"Who went to the {place}?", f"{who} went to the {place}."),
        ),
    )


_MAKERS: tuple[Callable[[random.Random, str, str], Fact], ...] = (
    _lives,
    _found,
    _gave,
    _has_pet,
    _ate,
    _wears,
    _likes,
    _friend,
    _felt,
    _went,
    _put,
    _met,
    _made,
    _found,
)
_WRAPS = (
    "{text} {ask}",
    "{text}\n{ask}",
    "{text}\n\n{ask}",
    "Here is a story: {text} {ask}",
    "Read this: {text} {ask}",
    "Story: {text}\nQuestion: {ask}",
    "{ask} {text}",
)


def _people(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(words.GIRLS + words.BOYS, 2)
    if rng.random() < 0.1:
        first = unknowns.made_up_word(rng).capitalize()
    if rng.random() < 0.25:
        first = f"the {rng.choice(words.CAST_ANIMALS)}"
    if rng.random() < 0.1:
        second = f"the {rng.choice(words.CAST_OTHERS)}"
    return first, second


def _cap(text: str) -> str:
    return text[0].upper() + text[1:]


def small_text(rng: random.Random) -> tuple[str, list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns a text, (question, answer) pairs about it, and pairs that it leaves open."""
    first, second = _people(rng)
    count = rng.choice([1, 2, 2, 3, 3, 4, 5])
    makers = rng.sample(_MAKERS, count + 1)
    facts: list[Fact] = []
    subjects: list[str] = []
    for maker in makers:
        who, other = (first, second) if rng.random() < 0.65 else (second, first)
        fact = maker(rng, who, other)
        while _clash(fact, facts, {first, second}):
            fact = maker(rng, who, other)
        facts.append(fact)
        subjects.append(who)
    open_fact = facts.pop()
    sentences = [f.sentence for f in facts]
    if rng.random() < 0.5:
        sentences = _flowing(rng, sentences, subjects)
    asks = [(_cap(q), _cap(a)) for f in facts for q, a in f.asks]
    missing = [(_cap(open_fact.asks[0][0]), NOT_SAID)]
    return " ".join(_cap(s) for s in sentences), asks, missing


_OPENINGS = ("one day ", "yesterday ", "then ", "in the morning ", "today ", "later ")


def _flowing(rng: random.Random, sentences: list[str], subjects: list[str]) -> list[str]:
    """Returns the sentences with pronouns for a repeated subject and with introductory words."""
    out, before = [], ""
    if rng.random() < 0.3:
        out.append(_opening(rng, subjects[0]))
        before = subjects[0]
    for sentence, who in zip(sentences, subjects, strict=False):
        if who == before and sentence.startswith(who) and rng.random() < 0.6:
            sentence = _pronoun(who) + sentence[len(who) :]
        is_event = not re.search(r"\b(likes|lives|has|wears|best|On)\b", sentence)
        if is_event and rng.random() < 0.3:
            sentence = rng.choice(_OPENINGS) + sentence
        out.append(sentence)
        before = who
    return out


def _pronoun(who: str) -> str:
    if who in words.GIRLS:
        return "she"
    return "he" if who in words.BOYS else "it"


def _opening(rng: random.Random, who: str) -> str:
    trait = rng.choice(words.CHILD_TRAITS)
    if who.startswith("the "):
        return rng.choice(["once there was ", "there was "]) + f"{words.article(trait)} {who[4:]}."
    kind = "girl" if who in words.GIRLS else "boy"
    if rng.random() < 0.5:
        return f"{who} is {words.article(f'{trait} {kind}')}."
    return f"once there was {words.article(f'{trait} {kind}')} named {who}."


_KEYS = frozenset(words.THINGS + words.FRUITS + words.CAST_ANIMALS + words.CLOTHES + words.SKILLS)


def _key_words(sentence: str, people: set[str]) -> set[str]:
    named = {person.removeprefix("the ") for person in people}
    return ({w.strip(".") for w in sentence.split()} & _KEYS) - named


def _clash(fact: Fact, facts: list[Fact], people: set[str]) -> bool:
    """Returns whether a question would have two answers, as a noun or a question occurs twice."""
    keys = _key_words(fact.sentence, people)
    asks = {question for question, _ in fact.asks}
    return any(
        keys & _key_words(f.sentence, people) or asks & {q for q, _ in f.asks} for f in facts
    )


def reading_turns(rng: random.Random) -> list[Turn]:
    """Returns a text with a question, and sometimes one or two more questions about it."""
    text, asks, missing = small_text(rng)
    rng.shuffle(asks)
    chosen = asks[: rng.choice([1, 1, 1, 2, 3])]
    if rng.random() < 0.08:
        chosen[0] = missing[0]
    wrap = rng.choice(_WRAPS) if rng.random() < 0.5 else _WRAPS[0]
    ask, answer = chosen[0]
    if rng.random() < 0.15:
        ask = ask.lower()
    turns = [Turn("reading", wrap.format(text=text, ask=ask), answer)]
    turns += [Turn("reading", q, a) for q, a in chosen[1:]]
    return turns
