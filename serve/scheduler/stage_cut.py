"""Cuts a model's layers into the stages of a pipeline. Floats only: no torch, no asyncio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate


def cut_stages(seconds_by_layer: Sequence[float], num_stages: int) -> list[tuple[int, int]]:
    """Returns each stage's (first layer, number of layers): contiguous, at least one layer each,
    such that the slowest stage is as fast as it can be, because a pipeline runs at its pace. Among
    such cuts the others are as even as they can be (least squares).

    Raises ValueError if there are more stages than layers.
    """
    num_layers = len(seconds_by_layer)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"num_stages: {num_stages} stages of {num_layers} layers")
    before = [0.0, *accumulate(seconds_by_layer)]

    def seconds(first: int, end: int) -> float:
        return before[end] - before[first]

    slowest_s, _ = _best_cut(num_layers, num_stages, seconds, max)
    # rounding must not exclude the cut that was just found
    limit_s = slowest_s * (1 + 1e-9)

    def squares(first: int, end: int) -> float:
        stage_s = seconds(first, end)
        return stage_s**2 if stage_s <= limit_s else float("inf")

    _, ends = _best_cut(num_layers, num_stages, squares, lambda one, other: one + other)
    firsts = [0, *ends[:-1]]
    return [(first, end - first) for first, end in zip(firsts, ends, strict=True)]


def _best_cut(
    num_layers: int,
    num_stages: int,
    cost: Callable[[int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Returns the least joined cost of stages first .. end, and their ends, by dynamic programming
    over the number of stages and the end of the last one."""
    best = {end: (cost(0, end), [end]) for end in range(1, num_layers + 1)}
    for stage in range(1, num_stages):
        best = {
            end: min(
                (join(best[first][0], cost(first, end)), [*best[first][1], end])
                for first in range(stage, end)
            )
            for end in range(stage + 1, num_layers + 1)
        }
    return best[num_layers]
