"""States of sequences on a late device: a record has the last position that was applied to it and a
value that follows from all tokens up to there, so that a row that is applied twice, never, or to
the state of another sequence shows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from memory.pages.kv_range import RangePart
from serve.scheduler.sequence import PENDING_TOKEN

Content = dict[int, dict[int, tuple[int, int]]]
"""By page and offset: the position and what is stored."""


def next_state(value: int, token: int) -> int:
    return (value * 1_000_003 + token + 29) % 2_147_483_647


def advance(
    part: RangePart,
    pages: Sequence[int],
    content: Content,
    first: int,
    tokens: Sequence[int],
    history: Sequence[int],
) -> list[str]:
    """Applies a sequence's tokens from position `first` on; returns what is wrong with the state
    before them. history: the tokens before, PENDING_TOKEN for what was not known at the launch."""
    interval = part.group.tile_tokens

    def record(position: int) -> int:
        return pages[part.group.slots_for(position // interval * interval)]

    value, faults = 0, []
    if first:
        page = record(first - 1)
        position, value = content.get(page, {}).get(0, (-1, 0)) if page >= 0 else (-1, 0)
        expected = reduce(next_state, history, 0)
        if position != first - 1 or (value != expected and PENDING_TOKEN not in history):
            faults.append(f"the state before {first} is that of {position}")
    for position, token in enumerate(tokens, first):
        value = next_state(value, token)
        if record(position) < 0:
            return [*faults, f"the record of position {position} has no page"]
        content.setdefault(record(position), {})[0] = (position, value)
    return faults
