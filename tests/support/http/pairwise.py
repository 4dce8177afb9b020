"""Makes few combinations of values that contain every pair of values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(values: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Returns rows that contain every pair of values of different names.

    Each row is built greedily: each name gets the value that covers the most missing pairs.
    """
    rng = random.Random(seed)
    names = list(values)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(values[a]))
        for j in range(len(values[b]))
    }
    rows = []
    while missing:
        (first, second) = min(missing) if len(rows) % 2 else rng.choice(sorted(missing))
        chosen = dict((first, second))
        for name in rng.sample(names, len(names)):
            if name not in chosen:
                options = range(len(values[name]))
                chosen[name] = max(
                    options,
                    key=lambda i: (_new_pairs(name, i, chosen, missing, names), rng.random()),
                )
        missing -= set(itertools.combinations([(name, chosen[name]) for name in names], 2))
        rows.append({name: values[name][chosen[name]] for name in names})
    return rows


def _new_pairs(
    name: str, option: int, chosen: Mapping[str, int], missing: set[Any], names: list[str]
) -> int:
    index = names.index(name)
    return sum(
        (
            ((other, i), (name, option)) in missing
            if names.index(other) < index
            else ((name, option), (other, i)) in missing
        )
        for other, i in chosen.items()
    )
