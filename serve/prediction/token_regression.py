"""A regression on which tokens a prompt ends with. Integers and floats only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np

from serve.prediction.regression import MAX_TARGET

NUM_PLACES = 4096
_LAST_TOKENS = 8
_MOST_SEEN = 256.0  # a place's weight moves as if it had been seen so often, at most
_MAX_ERROR = 4.0  # of one answer
_MASK64 = (1 << 64) - 1
_HASH = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio (Knuth's multiplicative hashing)
_PAIR = 0xD1B54A32D192ED03  # another odd number, so that pairs have other places than tokens


def places_of(prompt: Sequence[int], client: str) -> tuple[int, ...]:
    """Returns the places of a request: 0, and by hashing (Weinberger et al., ICML 2009) those of
    its client, of its length in octaves, of its last tokens and of pairs of them. A chat's last
    words say what is asked."""
    last = prompt[-_LAST_TOKENS:]
    mixed = [(token + 1) * _HASH for token in last]
    mixed += [(a * 0x10001 + b + 1) * _PAIR for a, b in pairwise(last)]
    places = [1 + ((value & _MASK64) >> 32) % (NUM_PLACES - 1) for value in mixed]
    octave = NUM_PLACES - len(prompt).bit_length()
    of_client = 1 + crc32(client.encode("utf-8", "replace")) % (NUM_PLACES - 1)
    return (0, octave, of_client, *places)


class TokenRegression:
    """Adds up a weight for each place, and learns as a Kalman filter whose covariance is kept
    diagonal: an answer's error is shared out over its places, more to those seen seldom.

    Weights stay within +-MAX_TARGET whatever is learned. A prediction takes 2 us, and to learn
    takes 8 us.
    """

    def __init__(self) -> None:
        self.num_learned = 0
        self._weights = [0.0] * NUM_PLACES
        self._seen = [1.0] * NUM_PLACES

    def predict(self, places: tuple[int, ...]) -> float:
        """Returns the prediction, between -MAX_TARGET and MAX_TARGET."""
        weights = self._weights
        return min(max(sum([weights[place] for place in places]), -MAX_TARGET), MAX_TARGET)

    def learn(self, rows: list[tuple[int, ...]], targets: list[float]) -> None:
        """Learns from the places of prompts and their targets."""
        weights, seen = self._weights, self._seen
        for places, target in zip(rows, targets, strict=True):
            error = target - self.predict(places)
            error = min(max(-_MAX_ERROR, error), _MAX_ERROR)  # also where it is not a number
            for place in places:
                seen[place] = min(seen[place] + 1.0, _MOST_SEEN)
            unit = error / (1.0 + sum([1.0 / seen[place] for place in places]))
            for place in places:
                moved = weights[place] + unit / seen[place]
                weights[place] = min(max(moved, -MAX_TARGET), MAX_TARGET)
        self.num_learned += 1

    def state(self) -> dict[str, Any]:
        """Returns what `restore` takes, as arrays. Any thread may call it."""
        sums = np.array([self._weights.copy(), self._seen.copy()])
        return {"sums": sums, "num_learned": np.array([self.num_learned], np.int64)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a state whose types and shapes have been checked.

        Raises ValueError if no regression can have this state."""
        (weights, seen), num_learned = state["sums"], int(state["num_learned"][0])
        is_possible = (np.abs(weights) <= MAX_TARGET).all() and (seen >= 1.0).all()
        if not (is_possible and (seen <= _MOST_SEEN).all() and 0 <= num_learned < 1 << 60):
            raise ValueError("its weights are out of bounds")
        self._weights, self._seen = weights.tolist(), seen.tolist()
        self.num_learned = num_learned
