"""A question with its right answer, and the variations in which people type a question.

A Turn also defines how a reply is judged. It must equal `answer` or one of `accepted`; a free text
must have the requested number of sentences and mention every word of `must_say`.
"""

import random
import re
from dataclasses import dataclass

from examples.default_model.corpus.words import split_words

_IMPERATIVES = frozenset(
    split_words(
        "Tell Write Give Make Count Add Subtract Spell Say Repeat Name List Calculate "
        "Compute Explain Show Translate Define Recommend Introduce"
    )
)
_STOPS = re.compile(r"[.!?](?=\s|$)")


@dataclass(frozen=True, slots=True)
class Turn:
    kind: str
    question: str
    answer: str
    accepted: frozenset[str] = frozenset()  # further right answers besides `answer`
    sentences: int = 0  # the number of sentences of a free text, or 0
    must_say: tuple[str, ...] = ()

    def is_right(self, reply: str) -> bool:
        if self.sentences:
            said = reply.lower()
            counted = count_sentences(reply) == self.sentences
            return counted and all(word in said for word in self.must_say)
        return reply == self.answer or reply in self.accepted


def count_sentences(text: str) -> int:
    return len(_STOPS.findall(text))


def typed(rng: random.Random, text: str, *, slips: bool = False) -> str:
    """Returns the text as a person in a hurry might type it."""
    pick = rng.random()
    if pick < 0.45 or len(text) < 3:
        return text
    if pick < 0.53:
        is_imperative = text.split()[0] in _IMPERATIVES
        text = "Please " + text[0].lower() + text[1:] if is_imperative else text
    elif pick < 0.56:
        text = text.rstrip(".!?") + rng.choice([", please", " please", "??", "!"])
    if pick < 0.50 or pick > 0.80:
        text = text.rstrip(".!?")
    if pick > 0.68:
        text = text.lower()
    if pick > 0.985:
        text = text.upper()
    if slips and rng.random() < 0.06 and len(text) > 8:
        text = _slip(rng, text)
    return text


def _slip(rng: random.Random, text: str) -> str:
    """Swaps two neighbouring letters, but not digits, which would change the question."""
    at = rng.randrange(1, len(text) - 2)
    if not text[at : at + 2].isalpha():
        return text
    return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
