"""Ridge regression that learns one sequence at a time and forgets old ones slowly."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MAX_FEATURE = 4.0
MAX_TARGET = 8.0
_RIDGE = 2.0
_MEMORY = 4096  # sequences; older ones count for less than 1 / e
_MOST_BETWEEN = 32  # sequences that are learned before the weights are solved for again


class OnlineRegression:
    """Keeps the normal equations of a weighted ridge regression with exponential forgetting.

    Features are cut to +-MAX_FEATURE and targets to +-MAX_TARGET, and what is not a number counts
    as the lower bound. A sequence weighs 1 in all, so at most _MEMORY of them count at once, and
    with the ridge r the weights w keep |w| <= MAX_TARGET * sqrt(_MEMORY / r) / 2, whatever was
    learned. A recursion on the inverse has no such bound: it diverges when features stay constant.

    Sequences are collected and learned together, up to _MOST_BETWEEN at once: with 68 features this
    takes about 200 us, so 6 us for each.
    """

    def __init__(self, num_features: int) -> None:
        self.weights: Floats = np.zeros(num_features)
        self.num_learned = 0
        # the products of features with one another, and in the last row with targets
        self._sums: Floats = np.zeros((num_features + 1, num_features))
        self._ridge: Floats = _RIDGE * np.eye(num_features)
        self._rows: list[Floats] = []
        self._pairs: list[tuple[float, float]] = []  # the target and the weight of each row
        self._num_collected = 0

    def predict(self, features: Floats) -> float:
        """Returns the prediction for [num_features], between -MAX_TARGET and MAX_TARGET."""
        found = float(features @ self.weights)
        return min(max(found, -MAX_TARGET), MAX_TARGET)

    def learn(self, rows: list[Floats], targets: list[float]) -> None:
        """Learns the rows of a sequence, [num_features] each, with their targets."""
        weight = 1.0 / len(rows)
        self._rows += rows
        self._pairs += [(target, weight) for target in targets]
        self._num_collected += 1
        if self._num_collected >= min(_MOST_BETWEEN, 8 + self.num_learned // 8):
            self._learn_collected()

    def _learn_collected(self) -> None:
        rows = bounded(np.array(self._rows), MAX_FEATURE)
        pairs = np.array(self._pairs)
        targets = bounded(pairs[:, 0], MAX_TARGET)
        kept = (1.0 - 1.0 / _MEMORY) ** self._num_collected
        weighted = np.column_stack([rows, targets]).T * pairs[:, 1]
        self._sums = kept * self._sums + weighted @ rows  # another thread may save the old ones
        self.num_learned += self._num_collected
        self._rows, self._pairs, self._num_collected = [], [], 0
        self._solve()

    def _solve(self) -> None:
        self.weights = np.linalg.solve(self._sums[:-1] + self._ridge, self._sums[-1])

    def state(self) -> dict[str, Any]:
        """Returns what `restore` takes, as arrays. Any thread may call it."""
        sums, num_learned = self._sums, self.num_learned
        return {"sums": sums, "num_learned": np.array([num_learned], np.int64)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a state whose types and shapes have been checked.

        Raises ValueError if no regression can have this state."""
        sums, num_learned = state["sums"], int(state["num_learned"][0])
        most = MAX_FEATURE * max(MAX_FEATURE, MAX_TARGET) * _MEMORY
        if not (np.abs(sums) <= most).all() or not 0 <= num_learned < 1 << 60:
            raise ValueError("its numbers are too large for sums of a regression")
        products = sums[:-1]
        if not np.allclose(products, products.T) or np.linalg.eigvalsh(products)[0] < -_RIDGE / 2:
            raise ValueError("its sums are not those of a regression")
        self._sums = sums.copy()
        self.num_learned = num_learned
        self._solve()


def bounded(values: Floats, most: float) -> Floats:
    """Returns the values cut to +-most; what is not a number becomes -most."""
    return np.fmin(np.fmax(values, -most), most)
