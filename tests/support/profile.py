"""Sets what `make test` leaves to `make test-full`: most examples of a property-based test, and
most cases of a test with many slow ones."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import settings

THOROUGH = os.environ.get("TEST_PROFILE", "quick") == "thorough"
QUICK_EXAMPLES = 25
QUICK_STEPS = 20


def examples(most: int, *, steps: int | None = None, **others: Any) -> settings:
    """Returns settings: `most` examples of `steps` steps in the thorough profile. The quick profile
    draws the same few examples every time, so that `make test` gives one answer for one tree."""
    if not THOROUGH:
        most = min(most, QUICK_EXAMPLES)
        steps = None if steps is None else min(steps, QUICK_STEPS)
        others = {**others, "derandomize": True, "database": None}
    if steps is not None:
        others["stateful_step_count"] = steps
    return settings(max_examples=most, deadline=None, **others)


def every_day(chosen: Collection[int], cases: Sequence[Any]) -> list[Any]:
    """Returns the cases as parameters. Those that have no chosen place are for `make test-full`."""
    assert chosen and 0 <= min(chosen) <= max(chosen) < len(cases), "a place that has no case"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if place in chosen else [pytest.mark.exhaustive],
        )
        for place, case in enumerate(cases)
    ]


def mark_the_rest(items: Iterable[pytest.Item]) -> None:
    """Of each test with the mark `covering(strength)`, leaves a covering array of its cases to
    every day: as many as it takes that every value of every parameter occurs (strength 1), or every
    pair of values of two parameters (2). The other combinations are for `make test-full`.

    Greedy, as in AETG (Cohen et al., 1997): always the case with most that is missing.
    """
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") and not item.get_closest_marker("exhaustive"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        chosen = covering_places([_values(case) for case in cases])
        for place, case in enumerate(cases):
            if place not in chosen:
                case.add_marker(pytest.mark.exhaustive)


def _values(case: pytest.Item) -> set[Any]:
    """Returns the combinations of values that count, of one or two parameters."""
    mark = case.get_closest_marker("covering")
    assert mark is not None and mark.args in ((1,), (2,)), "covering(1) or covering(2)"
    parameters = case.callspec.params  # type: ignore[attr-defined]
    pairs = sorted((name, repr(value)) for name, value in parameters.items())
    assert len(pairs) >= mark.args[0], "it has too few parameters"
    return set(combinations(pairs, mark.args[0]))


def covering_places(cases: Sequence[set[Any]]) -> set[int]:
    """Returns the places of cases that have together what all have."""
    missing, chosen = set().union(*cases), set()
    while missing:
        place = max(range(len(cases)), key=lambda i: len(cases[i] & missing))
        chosen.add(place)
        missing -= cases[place]
    return chosen
