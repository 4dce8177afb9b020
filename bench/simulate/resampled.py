"""Draws the cost of a step from the steps that a real engine ran."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.plan.cost import StepCost
from serve.scheduler.step_time import StepWork

NEAREST = 24


class ResampledCost:
    """Multiplies the base cost of a step by the ratio of measured to base cost of a similar step.

    The similar step is drawn at random from the NEAREST measured ones: a bootstrap of residuals,
    conditional on the size. This corrects errors of the base cost at measured sizes, and steps of a
    kind stall as often as they did when measured. Sizes are compared by the logarithms of decode
    rows, prompt rows and prompts. A step with prompts is compared only with such steps.
    """

    def __init__(
        self, base: StepCost, times: Sequence[tuple[StepWork, float]], seed: int = 0
    ) -> None:
        self._base = base
        self._random = random.Random(f"resampled-{seed}")
        self._sizes: dict[bool, NDArray[np.float64]] = {}
        self._ratios: dict[bool, NDArray[np.float64]] = {}
        for has_prompts in (False, True):
            kept = [(w, s) for w, s in times if bool(w.num_chunks) is has_prompts]
            self._sizes[has_prompts] = np.array([_size(work) for work, _ in kept])
            self._ratios[has_prompts] = np.array([s / base.seconds(work) for work, s in kept])
        self._near: dict[tuple[float, ...], NDArray[np.float64]] = {}

    def seconds(self, work: StepWork) -> float:
        size = _size(work)
        near = self._near.get(size)
        if near is None:
            near = self._near[size] = self._nearest(size, bool(work.num_chunks))
        ratio = near[self._random.randrange(len(near))] if len(near) else 1.0
        return float(self._base.seconds(work) * ratio)

    def _nearest(self, size: tuple[float, ...], has_prompts: bool) -> NDArray[np.float64]:
        ratios = self._ratios[has_prompts]
        if len(ratios) <= NEAREST:
            return ratios
        distances = np.square(self._sizes[has_prompts] - size).sum(axis=1)
        nearest: NDArray[np.float64] = ratios[np.argpartition(distances, NEAREST)[:NEAREST]]
        return nearest


def _size(work: StepWork) -> tuple[float, ...]:
    prompt_rows = work.num_rows - work.num_decodes
    return tuple(np.log1p([work.num_decodes, prompt_rows, work.num_chunks]).tolist())
