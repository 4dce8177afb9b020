"""Runs of consecutive numbers: what one system call can map, unmap or release."""

from __future__ import annotations

from collections.abc import Sequence


def runs_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """(first, length) of the runs of consecutive numbers in a list."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found
