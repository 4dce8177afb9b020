"""Products of which each rank of a group computes some columns.

Nothing is summed across ranks: a rank computes its columns from whole rows, all ranks write theirs
into one buffer, and each goes on with all of them. An output's bits do not depend on its
neighbours, so the results have the bits of one rank, in every type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ops.backend import ExpertsOp, LinearOp, Routing

NUM_LIVE_BUFFERS = 7
"""The later calls of `Exchange.begin` that a buffer stays valid for."""


class Exchange(Protocol):
    """Buffers that the ranks of one stage fill together."""

    rank: int
    size: int

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Returns a buffer, [rows, columns], into which each rank writes its columns. It is valid
        for NUM_LIVE_BUFFERS further calls, which all ranks make in the same order."""

    def complete(self, buffer: Tensor, bounds: Sequence[int]) -> None:
        """Waits until every rank r has written the columns bounds[r] to bounds[r + 1]."""


class AloneExchange:
    """Stands for an exchange while a rank computes without the others. Their columns are zeros."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._device = device

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(rows, columns, dtype=dtype, device=self._device)

    def complete(self, buffer: Tensor, bounds: Sequence[int]) -> None:
        """There is no rank to wait for."""


class LateExchange:
    """An exchange that is opened when the products which use it are packed."""

    def __init__(self, rank: int, size: int, inner: Exchange | None = None) -> None:
        self.rank, self.size = rank, size
        self.inner = inner

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        assert self.inner is not None, "opened before the first step"
        return self.inner.begin(rows, columns, dtype)

    def complete(self, buffer: Tensor, bounds: Sequence[int]) -> None:
        assert self.inner is not None, "opened before the first step"
        self.inner.complete(buffer, bounds)

    @contextmanager
    def alone(self, device: torch.device) -> Iterator[None]:
        """Meanwhile, this rank computes without the others."""
        before, self.inner = self.inner, AloneExchange(self.rank, self.size, device)
        try:
            yield
        finally:
            self.inner = before


@runtime_checkable
class PhasedExperts(ExpertsOp, Protocol):
    """Experts whose ups and downs can run apart. A pair is a row with one of its experts."""

    between_dtype: torch.dtype | None
    """The type of what lies between the phases; None: that of the rows."""

    def up(self, x: Tensor, routing: Routing, out: Tensor) -> None:
        """Computes gate, up and the activation of all pairs into out: [pairs, columns]. The order
        of the pairs depends on the routing alone."""

    def down(self, between: Tensor, routing: Routing, out: Tensor, *, add: bool) -> None:
        """Computes the weighted sums for between: [pairs, in] as `up` orders them, and
        writes them into out: [T, columns], or adds them to it."""


class Columns:
    """One rank's columns of a result with bounds[-1] columns."""

    def __init__(self, exchange: Exchange, bounds: Sequence[int]) -> None:
        self._exchange = exchange
        self._bounds = list(bounds)
        self.own = slice(bounds[exchange.rank], bounds[exchange.rank + 1])

    def begin(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns a buffer for all columns, and the part of it that this rank writes."""
        buffer = self._exchange.begin(rows, self._bounds[-1], dtype)
        return buffer, buffer[:, self.own]

    def seeded(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the same, with the residual's columns in this rank's part."""
        buffer, own = self.begin(len(residual), residual.dtype)
        own.copy_(residual[:, self.own])
        return buffer, own

    def complete(self, buffer: Tensor) -> Tensor:
        """Waits for the other columns; returns the buffer."""
        self._exchange.complete(buffer, self._bounds)
        return buffer

    def gather(self, own: Tensor) -> Tensor:
        """Returns all columns: [T, total], for this rank's: [T, own]."""
        buffer, target = self.begin(len(own), own.dtype)
        target.copy_(own)
        return self.complete(buffer)


class ShardedLinear:
    """A LinearOp of which this rank packs some outputs.

    inputs: its rows are parts too, such as the attention of this rank's heads, and are gathered
    first. The result is a buffer of the exchange.
    """

    def __init__(self, op: LinearOp, outputs: Columns, inputs: Columns | None = None) -> None:
        self._op = op
        self._outputs = outputs
        self._inputs = inputs

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._inputs is not None:
            x = self._inputs.gather(x)
        if residual is None:
            return self._outputs.gather(self._op(x))
        buffer, own = self._outputs.seeded(residual)
        result = self._op(x, own)
        if result.data_ptr() != own.data_ptr():
            own.copy_(result)
        return self._outputs.complete(buffer)


class ShardedExperts:
    """An ExpertsOp of which this rank packs some columns of every expert's ups and downs."""

    def __init__(self, op: PhasedExperts, between: Columns, outputs: Columns) -> None:
        self._op = op
        self._between = between
        self._outputs = outputs

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        pairs = routing.experts.numel()
        between, own = self._between.begin(pairs, self._op.between_dtype or x.dtype)
        self._op.up(x, routing, own)
        self._between.complete(between)
        if residual is None:
            buffer, part = self._outputs.begin(len(x), x.dtype)
        else:
            buffer, part = self._outputs.seeded(residual)
        self._op.down(between, routing, part, add=residual is not None)
        return self._outputs.complete(buffer)
