"""Tells a story of exactly n sentences from a plot and a cast, with questions about its facts.

A sentence has exactly one full stop, at its end.
"""

import random
import re
from dataclasses import dataclass, field

from examples.default_model.corpus import words
from examples.default_model.corpus.plots import PLOTS, Plot

MAX_SENTENCES = 12
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(slots=True)
class Cast:
    """The characters and things of one story; `known` has the fields that it has introduced."""

    hero_kind: str  # such as "fox" or "king"; "" if the hero is a child
    hero: str
    trait: str
    is_girl: bool
    friend_kind: str
    friend: str
    colour: str
    thing: str
    place: str
    food: str
    skill: str
    plant: str
    known: set[str] = field(default_factory=set)

    def intro(self) -> str:
        kind = self.hero_kind or ("girl" if self.is_girl else "boy")
        return f"{words.article(f'{self.trait} {kind}')} named {self.hero}"

    def intro_friend(self) -> str:
        return f"{words.article(self.friend_kind)} named {self.friend}"

    def at(self) -> str:
        return f"{words.PLACES[self.place]} the {self.place}"

    def a_thing(self) -> str:
        return words.article(f"{self.colour} {self.thing}")


@dataclass(slots=True)
class Story:
    text: str
    sentences: int
    cast: Cast
    questions: list[tuple[str, str]]  # pairs of a question about it and the answer


def make_cast(rng: random.Random, topic: dict[str, str] | None = None) -> Cast:
    """Returns a random cast.

    `topic` fixes some of hero_kind, hero, trait, friend_kind, thing, colour and place."""
    topic = topic or {}
    hero = topic.get("hero") or rng.choice(words.GIRLS + words.BOYS)
    friend = rng.choice([n for n in words.GIRLS + words.BOYS if n != hero])
    kind = topic.get("hero_kind")
    if kind is None:
        kind = "" if "hero" in topic else _hero_kind(rng)
    if kind in ("boy", "prince", "king", "wizard", "knight"):
        hero = topic.get("hero") or rng.choice([n for n in words.BOYS if n != friend])
    if kind in ("girl", "princess", "queen", "witch", "fairy"):
        hero = topic.get("hero") or rng.choice([n for n in words.GIRLS if n != friend])
    others = [a for a in words.CAST_ANIMALS if a != kind]
    return Cast(
        hero_kind=kind,
        hero=hero,
        trait=topic.get("trait") or rng.choice(words.TRAITS if kind else words.CHILD_TRAITS),
        is_girl=hero in words.GIRLS,
        friend_kind=topic.get("friend_kind") or rng.choice(others),
        friend=friend,
        colour=topic.get("colour") or rng.choice(words.COLOURS),
        thing=topic.get("thing") or rng.choice(words.THINGS),
        place=topic.get("place") or rng.choice(list(words.PLACES)),
        food=rng.choice(words.FOODS),
        skill=rng.choice(words.SKILLS),
        plant=rng.choice(words.PLANTS),
    )


def _hero_kind(rng: random.Random) -> str:
    pick = rng.random()
    if pick < 0.2:
        return ""
    return rng.choice(words.CAST_ANIMALS if pick < 0.8 else words.CAST_OTHERS)


def _value(name: str, cast: Cast, rng: random.Random) -> str:
    first = name not in cast.known
    cast.known.add(name)
    match name:
        case "h":
            if first:
                return cast.intro()
            plain = cast.hero_kind and rng.random() < 0.3
            return f"the {cast.hero_kind}" if plain else cast.hero
        case "f":
            return cast.intro_friend() if first else cast.friend
        case "o":
            return cast.a_thing() if first else f"the {cast.thing}"
        case "oa":
            return cast.a_thing()
        case "ox":
            return cast.thing
        case "p":
            return cast.at()
        case "to":
            return f"to the {cast.place}"
        case "food":
            return cast.food if cast.food not in ("cake", "pie", "pizza") else f"a {cast.food}"
        case "planta":
            return words.article(f"big {cast.plant}")
        case "skill":
            return cast.skill
        case "he":
            return "she" if cast.is_girl else "he"
        case "his":
            return "her" if cast.is_girl else "his"
        case "him":
            return "her" if cast.is_girl else "him"
    raise AssertionError(name)


def _fill(template: str, cast: Cast, rng: random.Random) -> str:
    text = _FIELD.sub(lambda m: _value(m[1], cast, rng), template)
    return text[0].upper() + text[1:]


_TOPIC_FIELDS = {"thing": ("{o}",), "place": ("{p}", "{to}"), "friend_kind": ("{f}",)}


def _always_mentions(plot: Plot, sentences: int, fields: tuple[str, ...]) -> bool:
    kept = _template_sets(plot, sentences)
    return any(all(any(f in text for f in fields) for text in texts) for texts in kept)


def _template_sets(plot: Plot, sentences: int) -> list[tuple[str, ...]]:
    if sentences == 1:
        return [plot.one]
    if sentences == 2:
        return [plot.slots[0][1], plot.two]
    return [texts for rank, texts in plot.slots if rank <= sentences]


def plots_for(topic: dict[str, str], sentences: int) -> list[Plot]:
    """Returns the plots that always mention the requested topic at this length."""
    wanted = [fields for key, fields in _TOPIC_FIELDS.items() if key in topic]
    return [p for p in PLOTS if all(_always_mentions(p, sentences, w) for w in wanted)]


def tell(rng: random.Random, sentences: int, topic: dict[str, str] | None = None) -> Story:
    assert 1 <= sentences <= MAX_SENTENCES, f"{sentences=}"
    topic = topic or {}
    plot = rng.choice(plots_for(topic, sentences))
    cast = make_cast(rng, topic)
    templates = [rng.choice(texts) for texts in _template_sets(plot, sentences)]
    text = ". ".join(_fill(t, cast, rng) for t in templates) + "."
    return Story(text, sentences, cast, _questions(plot, sentences, cast, rng))


def _questions(plot: Plot, sentences: int, cast: Cast, rng: random.Random) -> list[tuple[str, str]]:
    told = set(cast.known)
    pairs: list[tuple[str, str]] = []
    name_them = rng.random() < 0.6  # otherwise questions say "the fox"
    hero = cast.hero if name_them or not cast.hero_kind else f"the {cast.hero_kind}"
    if sentences > 2:
        for rank, questions, answer in plot.asks:
            fields = {"o" if f in ("oa", "ox") else f for f in _FIELD.findall(answer)}
            if rank <= sentences and fields <= told:
                ask = rng.choice(questions).replace("{h}", hero)
                say = answer.replace("{h}", cast.hero)
                pairs.append((_fill(ask, cast, rng), _fill(say, cast, rng)))
    if "o" in told:
        pairs.append((f"What colour is the {cast.thing}?", f"The {cast.thing} is {cast.colour}."))
    if "p" in told:
        pairs.append(("Where does the story happen?", f"It happens {cast.at()}."))
    if "f" in told:
        pairs.append(("Who else is in the story?", f"There is {cast.intro_friend()}."))
        pairs.append(
            (f"What is {cast.friend}?", f"{cast.friend} is {words.article(cast.friend_kind)}.")
        )
    kind = cast.hero_kind or ("girl" if cast.is_girl else "boy")
    pairs.append((f"What is the name of the {kind}?", f"The {kind} is named {cast.hero}."))
    pairs.append(("Who is the story about?", f"It is about {cast.intro()}."))
    return pairs
