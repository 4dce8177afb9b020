"""What a step takes."""

from __future__ import annotations

from typing import Protocol

from serve.step_time import StepWork


class StepCost(Protocol):
    """A machine with a model on it."""

    def seconds(self, work: StepWork) -> float:
        """Of a step that computes that."""
