"""How many replicas a model should have, from the wait that they predict and the calls that run."""

from __future__ import annotations

from dataclasses import dataclass

from serve.errors import ConfigError

_CALM = 0.1  # of the longest wait: below it a replica may be too many


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """least, most: replicas. queue_s: the predicted wait above which there are too few. grow_s,
    shrink_s: how long there must have been too few or too many."""

    least: int = 1
    most: int = 1
    queue_s: float = 1.0
    grow_s: float = 5.0
    shrink_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise ConfigError(f"min_replicas {self.least} must be from 0 to max_replicas")


class Scaling:
    """Call `wanted` again and again."""

    def __init__(self, limits: ScalingLimits) -> None:
        self._limits = limits
        self._short_s: float | None = None  # since when there have been too few
        self._calm_s: float | None = None

    def wanted(
        self, now_s: float, num_replicas: int, num_ready: int, queue_s: float, num_calls: int
    ) -> int:
        """Returns the number of replicas that there should be. queue_s: the mean wait that the
        ready ones predict. num_calls: the calls that run or wait."""
        limits = self._limits
        if num_replicas < limits.least:
            return limits.least
        if num_replicas == 0:
            return min(limits.most, 1) if num_calls else 0
        is_settled = num_ready == num_replicas
        is_short = is_settled and queue_s > limits.queue_s and num_replicas < limits.most
        is_calm = is_settled and num_replicas > limits.least and queue_s < _CALM * limits.queue_s
        if num_replicas == 1:
            is_calm = is_calm and not num_calls  # the last one goes when nothing runs
        self._short_s = _since(self._short_s, now_s, is_on=is_short)
        self._calm_s = _since(self._calm_s, now_s, is_on=is_calm)
        if self._short_s is not None and now_s >= self._short_s + limits.grow_s:
            self._short_s = None
            return num_replicas + 1
        if self._calm_s is not None and now_s >= self._calm_s + limits.shrink_s:
            self._calm_s = None
            return num_replicas - 1
        return num_replicas


def _since(began_s: float | None, now_s: float, *, is_on: bool) -> float | None:
    if not is_on:
        return None
    return now_s if began_s is None else began_s
