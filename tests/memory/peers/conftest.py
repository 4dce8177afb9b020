"""What the tests of peers share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def close_all() -> Iterator[list[Any]]:
    """A list whose entries are closed at the end of the test."""
    opened: list[Any] = []
    yield opened
    for each in opened:
        each.close(5.0)
