"""A product's weight as rows of stored tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

Rows = slice | Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a product's weight that one stored tensor gives.

    module: its name without an ending. num_rows: rows of the stored tensor, [num_rows, in]. rows:
    those that are taken, in this order; None: all. expert: the number of the expert whose product
    it is. is_fused: the tensor holds all num_experts experts, [num_experts, num_rows, in]; its name
    is the module's, and that of the biases `bias`. is_transposed: stored [.., in, num_rows].
    """

    module: str
    num_rows: int
    rows: Rows | None = None
    expert: int | None = None
    is_fused: bool = False
    num_experts: int = 0
    bias: str = ""
    is_transposed: bool = False

    @property
    def weight(self) -> str:
        return self.module if self.is_fused else f"{self.module}.weight"

    @property
    def bias_name(self) -> str:
        return self.bias or f"{self.module}.bias"

    def shape(self, num_in: int, is_transposed: bool) -> tuple[int, ...]:
        """Returns the stored tensor's shape. is_transposed: all products of the model are."""
        shape = (self.num_rows, num_in)
        if self.is_transposed or is_transposed:
            shape = (num_in, self.num_rows)
        return (self.num_experts, *shape) if self.is_fused else shape

    @property
    def num_taken(self) -> int:
        """How many rows are taken."""
        if isinstance(self.rows, slice):
            return len(range(*self.rows.indices(self.num_rows)))
        return self.num_rows if self.rows is None else len(self.rows)

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return (self.num_experts, self.num_rows) if self.is_fused else (self.num_rows,)

    @property
    def index(self) -> int | None:
        """The index into the stored tensor, None for all of it."""
        return self.expert if self.is_fused else None


@functools.lru_cache(maxsize=16)
def head_rows(num_heads: int, start: int, num_rotated: int, size: int) -> Tensor:
    """Returns the rows of heads of `size` in which the pairs of the num_rotated values from `start`
    on are side by side: (2i, 2i + 1) becomes (i, i + num_rotated / 2). It must not be changed."""
    pairs = torch.arange(start, start + num_rotated).view(-1, 2)
    rest = torch.arange(start), torch.arange(start + num_rotated, size)
    one = torch.cat((rest[0], pairs[:, 0], pairs[:, 1], rest[1]))
    return (torch.arange(num_heads)[:, None] * size + one).flatten()
