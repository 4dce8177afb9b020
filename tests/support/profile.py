"""Sets what `make test` leaves to `make test-full`: most examples of a property-based test, and
most cases of a test with many slow ones."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
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
