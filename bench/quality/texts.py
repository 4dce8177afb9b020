"""Random texts with long-range structure: facts, mappings by example, and running text.

A text is a list of tokens (bench.quality.vocabulary), made of statements:

- `a b .` says that b belongs to the name a; facts may form chains (`a b .`, `b c .`).
- `x y .` is an example of this text's mapping: all items of x's class have the label y.
- running text: each word has a few likely successors, which are this text's own. The words are
  divided among topics, and the text stays in a topic for some time before it goes to another.

and of questions with their answers: `? a : b`, `? x : y`, `?? a : b : c : d : e`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.quality import vocabulary as v

HOPS = 4  # of a chain
SUCCESSORS = (0.7, 0.1, 0.1, 0.1)  # the shares of a word's successors
TOPIC_LENGTH = 96  # the mean number of words before the topic changes
TOPIC_WORDS = 32

# What the model learns from a token.
NOTHING, STRUCTURE, ANSWER, TEXT = range(4)
Random = np.random.Generator
Tokens = npt.NDArray[np.int64]


class RunningText:
    """Yields the words of one text's topics; it goes on where it stopped."""

    def __init__(self, random: Random, num_words: int) -> None:
        self._random = random
        words = random.permutation(v.NUM_WORDS)[:num_words]
        count = max(1, num_words // TOPIC_WORDS)
        self._topics = np.array_split(words, count)
        self._next: dict[int, list[int]] = {}
        for topic in self._topics:
            for word in topic:
                self._next[int(word)] = random.choice(topic, len(SUCCESSORS)).tolist()
        self._topic = 0
        self._steps = np.cumsum(SUCCESSORS)

    def take(self, count: int) -> list[int]:
        """Returns the next `count` tokens; the first one does not follow from anything."""
        random = self._random
        words: list[int] = []
        current = -1
        picks = np.minimum(np.searchsorted(self._steps, random.random(count)), 3).tolist()
        changes = (random.random(count) < 1 / TOPIC_LENGTH).tolist()
        for pick, change in zip(picks, changes, strict=True):
            if change:
                self._topic = int(random.integers(len(self._topics)))
                current = -1
            if current < 0:
                current = int(random.choice(self._topics[self._topic]))
            else:
                current = self._next[current][pick]
            words.append(v.WORDS + current)
        return words


@dataclass
class Facts:
    """The facts and the mapping of a text, and which of them it has stated."""

    chains: list[list[int]]
    labels: list[int]  # of each class
    classes: list[int]  # those in use
    open_facts: list[tuple[int, int]]  # (chain, hop), to be stated, the last one first
    stated: list[tuple[int, int]] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)  # facts of a chain not yet stated
    whole: list[int] = field(default_factory=list)  # chains of HOPS hops that are stated
    shown: list[int] = field(default_factory=list)  # classes with an example

    @classmethod
    def random(cls, random: Random, num_chains: int, num_pairs: int, num_classes: int) -> Facts:
        """Returns facts about random names: chains of HOPS hops and single ones."""
        names = (v.NAMES + random.permutation(v.NUM_NAMES)).tolist()
        lengths = [HOPS + 1] * num_chains + [2] * num_pairs
        chains, start = [], 0
        for length in lengths:
            chains.append(names[start : start + length])
            start += length
        facts = [(i, hop) for i, chain in enumerate(chains) for hop in range(len(chain) - 1)]
        order = random.permutation(len(facts))
        return cls(
            chains,
            (v.LABELS + random.integers(0, v.NUM_LABELS, v.NUM_CLASSES)).tolist(),
            random.permutation(v.NUM_CLASSES)[:num_classes].tolist(),
            [facts[i] for i in order],
            left={i: len(chain) - 1 for i, chain in enumerate(chains)},
        )

    def state(self) -> list[int]:
        """Returns the statement of the next fact."""
        chain, hop = self.open_facts.pop()
        self.stated.append((chain, hop))
        self.left[chain] -= 1
        if self.left[chain] == 0 and len(self.chains[chain]) == HOPS + 1:
            self.whole.append(chain)
        return [*self.chains[chain][hop : hop + 2], v.STOP]

    def example(self, random: Random, class_index: int) -> list[int]:
        """Returns an example of a class, by one of its items but the last."""
        if class_index not in self.shown:
            self.shown.append(class_index)
        word = v.item(class_index, int(random.integers(v.ITEMS_PER_CLASS - 1)))
        return [word, self.labels[class_index], v.STOP]

    def question(self, random: Random) -> list[int]:
        """Returns a random question that the text so far answers, with its answer; or nothing."""
        kinds = [k for k, known in enumerate((self.stated, self.whole, self.shown)) if known]
        if not kinds:
            return []
        kind = kinds[int(random.integers(len(kinds)))]
        if kind == 0:
            chain, hop = self.stated[int(random.integers(len(self.stated)))]
            key, value = self.chains[chain][hop : hop + 2]
            return [v.ASK, key, v.COLON, value]
        if kind == 1:
            names = self.chains[self.whole[int(random.integers(len(self.whole)))]]
            return [v.ASK_CHAIN, *(t for name in names for t in (name, v.COLON))][:-1]
        one = self.shown[int(random.integers(len(self.shown)))]
        word = v.item(one, int(random.integers(v.ITEMS_PER_CLASS)))
        return [v.ASK, word, v.COLON, self.labels[one]]


def training_text(random: Random, length: int) -> tuple[Tokens, Tokens]:
    """Returns (tokens, what to learn from each token), both of `length`."""
    num_words = int(np.clip(length // 16, 8, v.NUM_WORDS))
    text = RunningText(random, num_words)
    tokens, kinds = [v.BOS], [NOTHING]
    style = random.random()
    if style < 0.15:
        _add_text(tokens, kinds, text.take(length))
    else:
        pieces = _Pieces(random, text, length, is_sparse=style < 0.4)
        while len(tokens) < length:
            part, kind = pieces.next(len(tokens))
            if kind == TEXT:
                _add_text(tokens, kinds, part)
            else:
                tokens += part
                kinds += _kinds(part)
    return np.array(tokens[:length]), np.array(kinds[:length])


class _Pieces:
    """The pieces of a text without end, of random shares. is_sparse: few facts among much running
    text, and the questions at its end."""

    def __init__(self, random: Random, text: RunningText, length: int, *, is_sparse: bool) -> None:
        self._random, self._text = random, text
        room = max(2, int(length * random.uniform(0.05, 0.3)) // 3)  # facts
        self._mean_words = int(random.integers(2, 24))
        if is_sparse:
            room = min(room, int(random.integers(1, 9)))
            self._mean_words = int(random.integers(24, 200))
        num_chains = min(room // (2 * HOPS), 24)
        num_pairs = min(room - HOPS * num_chains, (v.NUM_NAMES - num_chains * (HOPS + 1)) // 2)
        self._num_classes = int(np.clip(length // 32, 2, v.NUM_CLASSES))
        self._facts = Facts.random(random, num_chains, num_pairs, self._num_classes)
        self._asks_from = 0.85 * length if is_sparse else 0.0
        self._share_asked = random.uniform(0.2, 0.5)
        self._share_examples = random.uniform(0.05, 0.2)
        self._rate = len(self._facts.open_facts) / (random.uniform(0.2, 0.8) * length)
        self._due = 0

    def next(self, place: int) -> tuple[list[int], int]:
        """Returns the next piece, which begins at a place, and what it is."""
        random, facts = self._random, self._facts
        if self._due == 0:
            self._due = 1 + int(random.poisson(self._rate * self._turn_length()))
        self._due -= 1
        if self._due and facts.open_facts:
            return facts.state(), STRUCTURE
        kind = random.random()
        if kind < self._share_asked and place >= self._asks_from:
            return facts.question(random), ANSWER
        if kind < self._share_asked + self._share_examples:
            one = facts.classes[int(random.integers(self._num_classes))]
            return facts.example(random, one), STRUCTURE
        mean = 4 if 0 < self._asks_from <= place else self._mean_words
        return self._text.take(1 + int(random.integers(2 * mean))), TEXT

    def _turn_length(self) -> float:
        share_of_words = 1 - self._share_asked - self._share_examples
        return (
            3 * self._share_examples + 4.5 * self._share_asked + self._mean_words * share_of_words
        )


def _add_text(tokens: list[int], kinds: list[int], words: list[int]) -> None:
    tokens += words
    kinds += [NOTHING] + [TEXT] * (len(words) - 1)


def _kinds(part: list[int]) -> list[int]:
    """Returns what to learn from the tokens of a statement or of a question."""
    if part[:1] and part[0] in (v.ASK, v.ASK_CHAIN):
        return [NOTHING, NOTHING] + [
            STRUCTURE if token == v.COLON else ANSWER for token in part[2:]
        ]
    return [NOTHING, NOTHING, STRUCTURE][: len(part)]


def batch(random: Random, size: int, length: int) -> dict[str, Any]:
    """Returns a batch of training texts: tokens and kinds [size, length]."""
    made = [training_text(random, length) for _ in range(size)]
    return {"tokens": np.stack([t for t, _ in made]), "kinds": np.stack([k for _, k in made])}
