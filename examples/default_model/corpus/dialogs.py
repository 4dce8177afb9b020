"""Mixes turns into dialogs of one to four turns, requests of a load generator and held-out text.

The seed alone determines the text. Training uses seeds of `train_seed` and evaluation seeds of
`heldout_seed`, which never coincide.
"""

import json
import random
from collections.abc import Callable, Iterator

from examples.default_model.corpus import unknowns, words
from examples.default_model.corpus.reading import reading_turns
from examples.default_model.corpus.smalltalk import OFFER, SMALL, grouped, name_game, said_no
from examples.default_model.corpus.stories import Story, tell
from examples.default_model.corpus.tasks import TASKS
from examples.default_model.corpus.turn import Turn, typed

Message = dict[str, str]
Dialog = list[Message]

_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are the built-in model of mergestep.",
    "Answer the user.",
    "Be brief and kind.",
    "You are a helpful, honest assistant.",
)
_NAMED_LENGTHS = {
    "a very short story": 2,
    "a tiny story": 2,
    "a short story": 4,
    "a short bedtime story": 4,
    "a short tale": 4,
    "a little story": 4,
    "a story": 6,
    "a nice story": 6,
    "a bedtime story": 6,
    "a funny story": 6,
    "a fairy tale": 6,
    "a tale": 6,
    "story": 6,
    "some story": 6,
    "a long story": 8,
    "a longer story": 8,
    "a very long story": 8,
}
_STORY_ASKS = (
    "Tell me {s}.",
    "Tell me {s}",
    "Can you tell me {s}?",
    "Write {s}.",
    "Write me {s}",
    "I want to hear {s}.",
    "I would like {s}, please.",
    "Give me {s}.",
    "Make up {s}.",
)
_AGAIN = (
    "Tell me another one",
    "Another story please",
    "Another one",
    "One more!",
    "One more story",
    "Tell me more",
    "Tell me another story.",
    "More",
    "Again",
)
_THEMES = words.split_words(
    "friendship love winter summer Christmas magic nature animals space adventure courage life "
    "friends family cats dogs kindness dreams peace hope music rain snow holidays"
)


def train_seed(number: int) -> str:
    return f"train-{number}"


def heldout_seed(number: int) -> str:
    return f"heldout-{number}"


def _random_hero(rng: random.Random) -> str:
    """Returns a hero, mostly an animal. Other words teach the model to copy unknown words."""
    pick = rng.random()
    if pick < 0.08:
        return unknowns.made_up_word(rng)
    if pick < 0.25:
        return rng.choice(words.CAST_THINGS)
    return rng.choice(words.CAST_ANIMALS if pick < 0.75 else words.CAST_OTHERS)


def _topic(rng: random.Random) -> tuple[dict[str, str], str, tuple[str, ...]]:
    """Returns settings of the cast, the words that ask for this topic, and words to mention."""
    pick = rng.random()
    animal = _random_hero(rng)
    about = f" about {words.article(animal)}"
    if pick < 0.22:
        return {}, "", ()
    if pick < 0.50:
        return {"hero_kind": animal}, about, (animal,)
    if pick < 0.56:
        trait = rng.choice(words.TRAITS)
        asked = f" about {words.article(f'{trait} {animal}')}"
        return {"hero_kind": animal, "trait": trait}, asked, (animal, trait)
    if pick < 0.62:
        name = unknowns.any_name(rng)
        named = rng.choice([f"{about} named {name}", f"{about} called {name}"])
        return {"hero_kind": animal, "hero": name}, named, (animal, name.lower())
    if pick < 0.73:
        other = rng.choice([a for a in words.CAST_ANIMALS if a != animal])
        asked = f"{about} and {words.article(other)}"
        return {"hero_kind": animal, "friend_kind": other}, asked, (animal, other)
    if pick < 0.80:
        name = unknowns.any_name(rng)
        return {"hero": name}, f" about {name}", (name.lower(),)
    if pick < 0.83:
        return {}, f" about {rng.choice(_THEMES)}", ()
    return _thing_or_place(rng, animal, about)


def _thing_or_place(
    rng: random.Random, animal: str, about: str
) -> tuple[dict[str, str], str, tuple[str, ...]]:
    pick = rng.random()
    colour, thing = rng.choice(words.COLOURS), rng.choice(words.THINGS)
    item = words.article(f"{colour} {thing}")
    if pick < 0.3:
        return {"thing": thing, "colour": colour}, f" about {item}", (thing, colour)
    if pick < 0.5:
        return {"thing": thing}, f" about {words.article(thing)}", (thing,)
    if pick < 0.7:
        joint = rng.choice(["and", "who found", "with"])
        asked = f"{about} {joint} {item}"
        topic = {"hero_kind": animal, "thing": thing, "colour": colour}
        return topic, asked, (animal, thing, colour)
    place = rng.choice(list(words.PLACES))
    asked = f"{about} {words.PLACES[place]} the {place}"
    if pick < 0.8:
        return {"place": place}, f" about the {place}", (place,)
    return {"hero_kind": animal, "place": place}, asked, (animal, place)


def _length(rng: random.Random) -> tuple[int, str]:
    """Returns a number of sentences and a phrase that asks for it; the topic replaces its "{a}"."""
    if rng.random() < 0.42:
        phrase = rng.choice(list(_NAMED_LENGTHS))
        return _NAMED_LENGTHS[phrase], phrase + "{a}"
    number = rng.choice([1, 2, 3, 3, 4, 5, 5, 6, 7, 8])
    said = words.NUMBER_WORDS[number] if rng.random() < 0.4 else str(number)
    unit = "sentence" if number == 1 else "sentences"
    forms = ["a story{a} in {n} {u}", "a story{a} with {n} {u}", "a story of {n} {u}{a}"]
    forms += ["{n} {u}{a}", "{n} sentence story{a}", "a funny story{a} in {n} {u}"]
    forms += ["a {n} sentence story{a}", "a {n}-sentence story{a}", "a short story{a} in {n} {u}"]
    form = rng.choice(forms).replace("{n}", said).replace("{u}", unit)
    return number, form.replace("a 8", "an 8").replace("a e", "an e")


def story_turn(rng: random.Random) -> tuple[Turn, Story]:
    while True:
        topic, about, must_say = _topic(rng)
        number, form = _length(rng)
        if not ("place" in topic and number < 3) and not ("friend_kind" in topic and number == 3):
            break
    ask = rng.choice(_STORY_ASKS).format(s=form.format(a=about))
    if rng.random() < 0.1:
        bare = form.format(a=about)
        ask = bare[0].upper() + bare[1:]
    told = tell(rng, number, topic)
    turn = Turn("story", typed(rng, ask), told.text, sentences=number, must_say=must_say)
    return turn, told


def _story_turns(rng: random.Random) -> list[Turn]:
    turn, told = story_turn(rng)
    turns = [turn]
    if rng.random() < 0.45:
        chosen = rng.sample(told.questions, min(len(told.questions), rng.choice([1, 1, 2, 3])))
        turns += [Turn("story_question", typed(rng, q), a) for q, a in chosen]
    elif rng.random() < 0.1:
        again = rng.choice(_AGAIN)
        turns.append(Turn("story", again, tell(rng, 6).text, sentences=6))
    return turns


def _reply_to_offer(rng: random.Random) -> Turn:
    if rng.random() < 0.25:
        return said_no(rng)
    asks = ["Yes", "Yes please", "Sure", "Ok", "Yes, please!", "Of course", "Please do", "Go on"]
    asks += ["Yes, tell me a story", "Why not", "Yeah", "y", "Okay"]
    return Turn("yes_story", typed(rng, rng.choice(asks)), tell(rng, 6).text, sentences=6)


def _user_story_turns(rng: random.Random) -> list[Turn]:
    """Returns turns in which the user tells a longer story and asks about it."""
    told = tell(rng, rng.choice([2, 3, 3, 4, 5, 6]))
    chosen = rng.sample(told.questions, min(len(told.questions), rng.choice([1, 1, 2])))
    ask, answer = chosen[0]
    turns = [Turn("reading", f"{told.text} {ask}", answer)]
    return turns + [Turn("reading", q, a) for q, a in chosen[1:]]


def _one_of(
    rng: random.Random, table: tuple[tuple[float, Callable[[random.Random], Turn]], ...]
) -> Turn:
    return rng.choices([make for _, make in table], [weight for weight, _ in table])[0](rng)


def _some_turns(rng: random.Random) -> list[Turn]:
    pick = rng.random()
    if pick < 0.17:
        return _story_turns(rng)
    if pick < 0.32:
        return reading_turns(rng)
    if pick < 0.345:
        return _user_story_turns(rng)
    if pick < 0.38:
        return name_game(rng)
    if pick < 0.48:
        return [_one_of(rng, SMALL)]
    return [_one_of(rng, TASKS)]


def turns(rng: random.Random) -> list[Turn]:
    """Returns the turns of one dialog; long dialogs are rare."""
    wanted = rng.choices([1, 2, 3, 4], [55, 22, 13, 10])[0]
    out: list[Turn] = []
    if rng.random() < 0.1:
        out.append(grouped(rng, "greeting"))
    while len(out) < wanted:
        if out and out[-1].answer.endswith(OFFER) and rng.random() < 0.6:
            out.append(_reply_to_offer(rng))
        else:
            out += _some_turns(rng)
    return out[:4]


def messages(rng: random.Random, dialog_turns: list[Turn]) -> Dialog:
    out: Dialog = []
    if rng.random() < 0.1:
        out.append({"role": "system", "content": rng.choice(_SYSTEMS)})
    for turn in dialog_turns:
        out.append({"role": "user", "content": turn.question})
        out.append({"role": "assistant", "content": turn.answer})
    return out


def dialogs(seed: int | str) -> Iterator[Dialog]:
    """Yields dialogs without end; an int is the number of a training seed."""
    rng = random.Random(train_seed(seed) if isinstance(seed, int) else seed)
    while True:
        yield messages(rng, turns(rng))


def mixed_requests(seed: int, n: int) -> list[Dialog]:
    """Returns n requests, which are dialogs that end with a question."""
    stream = dialogs(f"requests-{seed}")
    return [next(stream)[:-1] for _ in range(n)]


def frozen_requests(n: int = 2000) -> str:
    """Returns the first n requests of seed 0 as JSON lines, which are bench/data/mixed.jsonl."""
    lines = [
        json.dumps({"messages": dialog}, ensure_ascii=False, separators=(",", ":"))
        for dialog in mixed_requests(0, n)
    ]
    return "\n".join(lines) + "\n"


def heldout_turns(number: int, count: int) -> list[list[Turn]]:
    """Returns the turns of `count` dialogs for an evaluation."""
    rng = random.Random(heldout_seed(number))
    return [turns(rng) for _ in range(count)]


def heldout_text(seed: int = 0, size: int = 80_000) -> str:
    """Returns about `size` characters of rendered dialogs that training never uses."""
    stream, parts, length = dialogs(heldout_seed(seed)), [], 0
    while length < size:
        text = render(next(stream))
        parts.append(text)
        length += len(text)
    return "".join(parts)


def render(dialog: Dialog) -> str:
    """Returns the dialog in the chat template of the model."""
    body = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in dialog)
    return f"<|bos|>{body}\n"
