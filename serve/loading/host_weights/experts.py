"""Experts that stay in host memory and are computed there, for rows that come from a device.

The rows of a layer and their routing are copied to page-locked memory, computed by the operator of
the CPU back end, and the results are copied back (as in HeteGen, Zhao et al., MLSys 2024, and
KTransformers, Chen et al., SOSP 2025). The host waits for the rows, so that a step cannot be a CUDA
graph; what the device computes beside the experts, such as a shared MLP, runs meanwhile.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ops.backend import ExpertsOp, Routing
from serve.loading.host_weights.link import Link, Wait


class HostRows:
    """Page-locked memory for the rows of one layer at a time, which all layers share.

    It is written again only after the host has waited for the next layer's rows, which are behind
    the copies of these results in the device's order.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._memory: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a tensor over the memory of this name, which grows when that is needed."""
        num_bytes = prod(shape) * dtype.itemsize
        memory = self._memory.get(name)
        if memory is None or memory.nbytes < num_bytes:
            memory = self._memory[name] = self.link.staging(num_bytes)
        return memory[:num_bytes].view(dtype).view(shape)


class _Begun(NamedTuple):
    """Rows on their way to the host, and what waits for them."""

    x: Tensor
    routing: Routing
    wait: Wait


class HostExperts:
    """An ExpertsOp for rows of a device over one of the CPU's."""

    def __init__(self, op: ExpertsOp, num_experts: int, rows: HostRows) -> None:
        self._op, self._num_experts, self._rows = op, num_experts, rows
        self._begun: _Begun | None = None
        self.num_rows = 0

    def begin(self, x: Tensor, routing: Routing) -> None:
        """Starts to copy the rows of the next call, so that what the device is given between does
        not delay it."""
        rows, experts, weights = self._rows, routing.experts, routing.weights
        here = rows.get("x", tuple(x.shape), x.dtype)
        chosen = rows.get("experts", tuple(experts.shape), experts.dtype)
        factors = rows.get("weights", tuple(weights.shape), weights.dtype)
        for target, source in ((here, x), (chosen, experts), (factors, weights)):
            target.copy_(source, non_blocking=True)
        self._begun = _Begun(here, Routing(chosen, factors), rows.link.mark())

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        if not len(x):
            return x if residual is None else residual
        if self._begun is None:
            self.begin(x, routing)
        begun, self._begun = self._begun, None
        assert begun is not None and begun.x.shape == x.shape, "the rows that were begun"
        begun.wait()
        self.num_rows += len(x)
        # rows of no sequence, as a warm-up has, may be NaN and have any number of an expert
        begun.routing.experts.clamp_(0, self._num_experts - 1)
        found = self._op(begun.x, begun.routing)
        staged = self._rows.get("out", tuple(found.shape), found.dtype).copy_(found)
        out = staged.to(x.device, non_blocking=True, copy=True)
        return out if residual is None else residual.add_(out)
