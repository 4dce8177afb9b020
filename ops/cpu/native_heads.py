"""Products of their own for each head on the native kernels, in one call (ops/csrc/heads.inl).

The products are layers that were packed one by one; their weights stay where they are. The result
has the bits of `HeadsOneByOne` over the same layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ops.backend import LinearOp
from ops.cpu.native_experts import kind_of, of_one_kind
from ops.cpu.native_library import TYPES, library


def can_join(ops: Sequence[LinearOp]) -> bool:
    """Returns whether NativeHeads takes these layers."""
    layers: Sequence[Any] = ops
    return of_one_kind(ops) and all(layer.norm is None for layer in layers)


class NativeHeads:
    """A HeadsOp over layers of the native library. Rows are fp32 or bf16.

    A row's bits do not depend on other rows, nor on the number of threads.
    """

    def __init__(self, ops: Sequence[LinearOp]) -> None:
        """The layers satisfy can_join. ValueError if they differ in shape."""
        self._layers: list[Any] = list(ops)
        first = self._layers[0]
        self.num_in, self.num_out = first.num_in, first.num_out
        self._in_dtype, self._out_dtype = first.in_dtype, first.out_dtype
        products = [layer.packed.product for layer in self._layers]
        self._heads = library().HeadLayer(products, kind_of(first))

    def __call__(self, x: Tensor) -> Tensor:
        rows, heads, num_in = x.shape
        assert (heads, num_in) == (len(self._layers), self.num_in), f"{x.shape}"
        assert self._in_dtype in (None, x.dtype), f"{x.dtype} times {self._in_dtype}"
        if x.stride(2) != 1:
            x = x.contiguous()
        out = torch.empty(rows, heads, self.num_out, dtype=self._out_dtype)
        if rows:
            self._heads.run(
                x.data_ptr(), x.stride(0), x.stride(1), TYPES[x.dtype], rows, out.data_ptr()
            )
        return out
