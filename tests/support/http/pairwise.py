"""Makes few combinations of values in which every pair of values occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(values: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Greedily adds, name by name, the value that covers most missing pairs."""
    rng = random.Random(seed)
    names = list(values)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(values[a]))
        for j in range(len(values[b]))
    }
    found = []
    while missing:
        (first, second) = min(missing) if len(found) % 2 else rng.choice(sorted(missing))
        chosen = dict((first, second))
        for name in rng.sample(names, len(names)):
            if name not in chosen:
                options = range(len(values[name]))
                chosen[name] = max(
                    options,
                    key=lambda i: (_new_pairs(name, i, chosen, missing, names), rng.random()),
                )
        missing -= set(itertools.combinations([(name, chosen[name]) for name in names], 2))
        found.append({name: values[name][chosen[name]] for name in names})
    return found


def _new_pairs(
    name: str, option: int, chosen: Mapping[str, int], missing: set[Any], names: list[str]
) -> int:
    place = names.index(name)
    return sum(
        (
            ((other, i), (name, option)) in missing
            if names.index(other) < place
            else ((name, option), (other, i)) in missing
        )
        for other, i in chosen.items()
    )
