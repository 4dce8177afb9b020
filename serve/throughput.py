"""How fast prompts are computed: rows a second of the engine's own steps. No torch, no asyncio."""

from __future__ import annotations

# What the past counts for after one more step: steps of the last twenty or so decide.
_DECAY = 0.95


class Throughput:
    """Exponentially weighted: rows over seconds of the steps that computed prompt rows.

    Steps of decode rows alone are bound by memory and say nothing about prompts. Rows and
    seconds are averaged apart, so that a large step counts for more than a small one.
    """

    __slots__ = ("_rows", "_seconds", "last_step_s")

    def __init__(self) -> None:
        self._rows = self._seconds = 0.0
        self.last_step_s = 0.0

    def observe(self, num_rows: int, num_decodes: int, step_s: float) -> None:
        """A step of num_rows, of which num_decodes are sequences with a single one."""
        self.last_step_s = step_s
        if num_rows > num_decodes:
            self._rows = _DECAY * self._rows + num_rows
            self._seconds = _DECAY * self._seconds + step_s

    @property
    def rows_per_s(self) -> float | None:
        """None: nothing is known yet."""
        return self._rows / self._seconds if self._seconds else None

    def seconds(self, num_rows: int) -> float:
        """What that many rows take; 0 while nothing is known."""
        return num_rows * self._seconds / self._rows if self._rows else 0.0
