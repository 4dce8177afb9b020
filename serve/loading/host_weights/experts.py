"""Experts that stay in host memory and are computed there, for rows that come from a device.

The rows of a layer and their routing are copied to page-locked memory, computed by the operator of
the CPU back end, and the results are copied back (as in HeteGen, Zhao et al., MLSys 2024, and
KTransformers, Chen et al., SOSP 2025). The host waits for the rows, so that a step cannot be a CUDA
graph; what the device computes beside the experts, such as a shared MLP, runs meanwhile.

With room on the device (device_experts.py) it computes the pairs of a row and one of the hottest
experts meanwhile, and all pairs of a step of many rows, of which then nothing is copied here.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ops.backend import ExpertsOp, Routing
from serve.loading.host_weights.link import Link, Wait

if TYPE_CHECKING:  # only a CUDA back end has them
    from serve.loading.host_weights.expert_memory import ExpertMemory


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


class OnDevice(Protocol):
    """What the device computes of a layer: `LayerOnDevice` of device_experts.py."""

    def takes(self, num_rows: int) -> bool: ...
    def compute_all(self, x: Tensor, routing: Routing, residual: Tensor | None) -> Tensor: ...
    def begin(self, x: Tensor, routing: Routing) -> Tensor: ...
    def is_cold(self, experts: np.ndarray) -> np.ndarray: ...
    def total(
        self, x: Tensor, routing: Routing, parts: Tensor, residual: Tensor | None
    ) -> Tensor: ...


class HostExperts:
    """An ExpertsOp for rows of a device over one of the CPU's. memory: of its experts, if the
    device can compute them, too; on_device: what does so. num_rows, num_used: rows of which the CPU
    computed some, and the experts that they used in each step."""

    def __init__(
        self, op: ExpertsOp, num_experts: int, rows: HostRows, *, scales_input: bool = False
    ) -> None:
        self._op, self.num_experts, self._rows = op, num_experts, rows
        self.scales_input = scales_input
        self._begun: _Begun | None = None
        self.memory: ExpertMemory | None = None
        self.on_device: OnDevice | None = None
        self.num_rows = self.num_used = 0

    @property
    def op(self) -> ExpertsOp:
        """The CPU's."""
        return self._op

    def begin(self, x: Tensor, routing: Routing) -> None:
        """Starts to copy the rows of the next call, so that what the device is given between does
        not delay it."""
        self._begun = None
        if self.on_device is not None and self.on_device.takes(len(x)):
            return
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
        on_device = self.on_device
        if on_device is not None and on_device.takes(len(x)):
            return on_device.compute_all(x, routing, residual)
        if self._begun is None:
            self.begin(x, routing)
        begun, self._begun = self._begun, None
        assert begun is not None and begun.x.shape == x.shape, "the rows that were begun"
        parts = None if on_device is None else on_device.begin(x, routing)
        begun.wait()
        self.num_rows += len(x)
        # rows of no sequence, as a warm-up has, may be NaN and have any number of an expert
        chosen = begun.routing.experts.clamp_(0, self.num_experts - 1).numpy()
        self.num_used += len(np.unique(chosen))
        if on_device is not None and parts is not None:
            self._compute_pairs(begun, np.flatnonzero(on_device.is_cold(chosen)), parts)
            return on_device.total(x, routing, parts, residual)
        found = self._op(begun.x, begun.routing)
        staged = self._rows.get("out", tuple(found.shape), found.dtype).copy_(found)
        out = staged.to(x.device, non_blocking=True, copy=True)
        return out if residual is None else residual.add_(out)

    def _compute_pairs(self, begun: _Begun, pairs: np.ndarray, parts: Tensor) -> None:
        """Computes pairs, by their numbers among all of the rows, each by itself, and copies the
        results to their places in parts: [T, K, out] on the device."""
        if not len(pairs):
            return
        count, (experts, weights) = len(pairs), begun.routing
        chosen = self._rows.get("pairs", (count,), torch.int64).copy_(torch.from_numpy(pairs))
        factors = weights.view(-1, 1)[chosen] if self.scales_input else torch.ones(count, 1)
        # -0 + y is y for every y, so that the sum has the bits of the product
        found = torch.full((count, parts.shape[2]), -0.0)
        rows = begun.x[chosen // experts.shape[1]]
        self._op(rows, Routing(experts.view(-1, 1)[chosen], factors), found)
        staged = self._rows.get("out", tuple(found.shape), parts.dtype).copy_(found)
        places, results = (
            each.to(parts.device, non_blocking=True, copy=True) for each in (chosen, staged)
        )
        parts.view(-1, parts.shape[2]).index_copy_(0, places, results)
