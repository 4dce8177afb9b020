"""Exercises that compression of K/V breaks: a prompt, what follows it, and which of it counts.

What follows is given token by token, as if the model had decoded it; the model is right where the
given token is the one that it would have decoded.

- needle: one fact in running text, asked for at the prompt's end.
- needles: the same with 96 facts.
- again: the same, but the prompt ends where the answer begins, so that its last row looks at the
  fact, and the same question comes again in the answer.
- hops: 20 chains of facts; the answer follows one of them over 4 hops, and all must be right.
- examples: a mapping of 32 classes by 4 examples each; a new item is asked for.
- later: 96 facts in the prompt, and 8 questions that come only after it.
- text: running text goes on; its perplexity counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.quality import vocabulary as v
from bench.quality.texts import HOPS, Facts, Random, RunningText

NUM_FACTS = 96
NUM_CHAINS = 20
NUM_EXAMPLES = 4  # of each class
NUM_LATER = 8
TEXT_TOKENS = 256  # of the text that goes on
MAX_FOLLOWING = max(TEXT_TOKENS, 4 * NUM_LATER, 2 * HOPS)
ACCURACIES = ("needle", "needles", "again", "hops", "examples", "later")
TEXT = "text"


@dataclass(frozen=True)
class Exercise:
    """answers: for each question the places in `following` that must all be right; none in a
    text, of which every token counts."""

    task: str
    prompt: list[int]
    following: list[int]
    answers: list[list[int]]


def make_exercises(length: int, count: int, seed: int) -> list[Exercise]:
    """Makes `count` exercises of each task but half as many of the last two. length: the tokens of
    a prompt, at least 1024."""
    makers: dict[str, Callable[[Random, int], Exercise]] = {
        "needle": _needle,
        "needles": _needles,
        "again": _again,
        "hops": _hops,
        "examples": _examples,
        "later": _later,
        TEXT: _text,
    }
    made = []
    for index, (task, make) in enumerate(makers.items()):
        random = np.random.default_rng((seed, index))
        number = count if task not in ("later", TEXT) else max(1, count // 2)
        made += [make(random, length) for _ in range(number)]
    return made


def _needle(random: Random, length: int) -> Exercise:
    facts = Facts.random(random, 0, 1, 0)
    return _asked("needle", random, length, [facts.state()], facts.chains[0][:2], v.ASK)


def _needles(random: Random, length: int) -> Exercise:
    facts = Facts.random(random, 0, NUM_FACTS, 0)
    statements = [facts.state() for _ in range(NUM_FACTS)]
    chain = facts.chains[int(random.integers(NUM_FACTS))]
    return _asked("needles", random, length, statements, chain, v.ASK)


def _again(random: Random, length: int) -> Exercise:
    asked = _needles(random, length - 1)
    _, key = asked.prompt[-2:]
    value = asked.following[-1]
    following = [value, v.ASK, key, v.COLON, value]
    return Exercise("again", [*asked.prompt, v.COLON], following, [[len(following) - 1]])


def _hops(random: Random, length: int) -> Exercise:
    facts = Facts.random(random, NUM_CHAINS, 0, 0)
    statements = [facts.state() for _ in range(NUM_CHAINS * HOPS)]
    chain = facts.chains[int(random.integers(NUM_CHAINS))]
    return _asked("hops", random, length, statements, chain, v.ASK_CHAIN)


def _examples(random: Random, length: int) -> Exercise:
    facts = Facts.random(random, 0, 0, v.NUM_CLASSES)
    classes = random.permutation(np.repeat(np.arange(v.NUM_CLASSES), NUM_EXAMPLES))
    statements = [facts.example(random, int(one)) for one in classes]
    asked = int(random.integers(v.NUM_CLASSES))
    new = v.item(asked, v.ITEMS_PER_CLASS - 1)
    return _asked("examples", random, length, statements, [new, facts.labels[asked]], v.ASK)


def _later(random: Random, length: int) -> Exercise:
    facts = Facts.random(random, 0, NUM_FACTS, 0)
    statements = [facts.state() for _ in range(NUM_FACTS)]
    following: list[int] = []
    answers = []
    for index in random.choice(NUM_FACTS, NUM_LATER, replace=False):
        key, value = facts.chains[index]
        following += [v.ASK, key, v.COLON, value]
        answers.append([len(following) - 1])
    return Exercise("later", _among_text(random, length, statements), following, answers)


def _text(random: Random, length: int) -> Exercise:
    words = RunningText(random, v.NUM_WORDS).take(length - 1 + TEXT_TOKENS)
    return Exercise(TEXT, [v.BOS, *words[: length - 1]], words[length - 1 :], [])


def _asked(
    task: str,
    random: Random,
    length: int,
    statements: list[list[int]],
    chain: list[int],
    mark: int,
) -> Exercise:
    """Returns an exercise whose prompt ends with a question."""
    prompt = [*_among_text(random, length - 2, statements), mark, chain[0]]
    following = [token for name in chain[1:] for token in (v.COLON, name)]
    return Exercise(task, prompt, following, [list(range(1, len(following), 2))])


def _among_text(random: Random, length: int, statements: list[list[int]]) -> list[int]:
    """Returns a text of `length` tokens with the statements at random places."""
    num_words = length - 1 - sum(len(one) for one in statements)
    words = RunningText(random, v.NUM_WORDS).take(num_words)
    places = np.sort(random.choice(num_words, len(statements), replace=False)).tolist()
    tokens, begin = [v.BOS], 0
    for place, statement in zip(places, statements, strict=True):
        tokens += words[begin:place] + statement
        begin = place
    return tokens + words[begin:]
