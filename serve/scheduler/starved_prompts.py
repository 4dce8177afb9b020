"""Finds running prompts that more urgent ones keep from computing. No torch, no asyncio."""

from __future__ import annotations

from collections.abc import Iterable

from serve.scheduler.sequence import Sequence

# After this many consecutive steps without rows, a running prompt goes first.
_MAX_STARVED_STEPS = 16


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
