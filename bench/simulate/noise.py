"""Steps that do not take exactly what is predicted, as no real ones do.

An engine keeps a margin for them: while sequences decode, a step gets fewer prompt rows, the more
steps have taken longer than was predicted (serve/scheduler/step_time.py). So servers whose steps
are exact compute prompts faster beside streams, and say so of themselves, than real ones.
"""

from __future__ import annotations

import math
import random

from bench.plan.cost import StepCost
from serve.scheduler.step_time import StepWork

USUAL = 0.05, 0.15
"""The median and the 90th percentile of relative errors, about as real engines have them."""
_P90_Z = 1.2815515655446004  # of the normal distribution
_LEAST, _MOST = 0.5, 2.0


class NoisyCost:
    """The steps of a cost, longer or shorter by errors that are drawn. The same seed draws the same
    errors."""

    def __init__(self, cost: StepCost, median: float, p90: float, seed: int = 1) -> None:
        """median, p90: of the absolute relative error; they may be 0."""
        assert 0.0 <= median <= p90, f"{median} and {p90}"
        self._cost = cost
        self._median = median
        self._spread = math.log(p90 / median) / _P90_Z if median else 0.0
        self._random = random.Random(seed)

    def seconds(self, work: StepWork) -> float:
        error = self._median * math.exp(self._spread * self._random.gauss(0.0, 1.0))
        error = -error if self._random.random() < 0.5 else error
        return self._cost.seconds(work) * min(_MOST, max(_LEAST, 1.0 + error))
