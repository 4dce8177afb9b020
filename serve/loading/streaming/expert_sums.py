"""Weighted sums of experts that are computed in groups, each when its weights are there.

Each pair of a row and an expert is computed by itself and kept until all are there; then a row's
pairs are added in the order of the row's choice. So the bits are those of one call for all experts,
however they were grouped.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ops.backend import ExpertsOp, Routing


def bytes_of_pairs(routing: Routing, num_out: int) -> int:
    """Returns the bytes of memory that a PairSums takes."""
    return 4 * routing.experts.numel() * num_out


class PairSums:
    """The pairs of one call of an ExpertsOp."""

    def __init__(
        self, op: ExpertsOp, x: Tensor, routing: Routing, num_out: int, *, scales_input: bool
    ) -> None:
        """op: over slots, in which routing's experts are when they are computed."""
        self._op, self._x, self._scales_input = op, x, scales_input
        self._rows, self._top_k = routing.experts.shape
        self._experts = routing.experts.numpy().reshape(-1)
        self._weights = routing.weights.reshape(-1, 1)
        self._parts = torch.empty(len(self._experts), num_out)

    def compute(self, experts: np.ndarray, slots: np.ndarray) -> None:
        """Computes all pairs of these experts (sorted), which are in these slots."""
        places = np.minimum(np.searchsorted(experts, self._experts), len(experts) - 1)
        pairs = np.flatnonzero(experts[places] == self._experts)
        chosen = torch.from_numpy(pairs)
        weights = self._weights[chosen] if self._scales_input else torch.ones(len(pairs), 1)
        picked = Routing(torch.from_numpy(slots[places[pairs]])[:, None], weights)
        # -0 + y is y for every y, so that the sum has the bits of the product
        nothing = torch.full((len(pairs), self._parts.shape[1]), -0.0)
        self._parts[chosen] = self._op(self._x[chosen // self._top_k], picked, nothing)

    def total(self, residual: Tensor | None) -> Tensor:
        """Returns the sums of all rows, whose pairs have all been computed."""
        if not self._scales_input:
            self._parts *= self._weights
        parts = self._parts.view(self._rows, self._top_k, -1)
        total = parts[:, 0]
        for place in range(1, self._top_k):
            total = total + parts[:, place]
        if residual is None:
            return total.to(self._x.dtype)
        return residual + total.to(residual.dtype)
