"""Sets how many examples a property-based test draws: few in `make test`, all in `make
test-full`."""

from __future__ import annotations

import os
from typing import Any

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
