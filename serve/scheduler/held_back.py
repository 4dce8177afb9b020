"""Remembers what keeps sequences from running: a lack of memory, or prompts that are more urgent.

Integers only: no torch, no asyncio.
"""

from __future__ import annotations

from collections.abc import Iterable

from serve.scheduler.admission import RECHECK_STEPS
from serve.scheduler.sequence import Sequence

# For so many steps after a sequence did not fit, memory is what the waiting ones are short of.
_RECENT_STEPS = 64
# After this many consecutive steps without rows, a running prompt goes first.
_MAX_STARVED_STEPS = 16


class Refusals:
    """The last sequence that memory did not admit."""

    def __init__(self) -> None:
        self._sequence: Sequence | None = None
        self._num_available = 0  # pages at that time
        self._step = -_RECENT_STEPS

    def add(self, sequence: Sequence, num_available: int, step: int) -> None:
        """Notes that the sequence does not fit at this step, with num_available pages."""
        self._sequence, self._num_available, self._step = sequence, num_available, step

    def holds(self, sequence: Sequence, num_available: int, step: int) -> bool:
        """Returns whether the sequence need not be tried again: no memory has been freed since."""
        has_changed = num_available > self._num_available or not step % RECHECK_STEPS
        return self._sequence is sequence and not has_changed

    def is_recent(self, step: int) -> bool:
        """Returns whether waiting sequences wait for memory rather than for rows of a step."""
        return step < self._step + _RECENT_STEPS


class StarvedPrompts:
    """Counts the consecutive steps in which a running prompt got no rows."""

    def __init__(self) -> None:
        self._num_steps: dict[Sequence, int] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        return self._num_steps.get(sequence, 0) >= _MAX_STARVED_STEPS

    def end_step(self, prompts: Iterable[Sequence], chunks: list[tuple[Sequence, int]]) -> None:
        """Counts a step in which, of the running prompts, only those in `chunks` have rows."""
        given, before = {sequence for sequence, _ in chunks}, self._num_steps
        self._num_steps = {s: before.get(s, 0) + 1 for s in prompts if s not in given}
