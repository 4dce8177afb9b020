"""The products of heads on a CUDA device: those of experts, each with its own head's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.backend import LinearOp
from ops.cuda.experts import one_side
from ops.triton_kernels.experts import SortedPairs


class CudaHeads:
    """A HeadsOp over layers of one kind (ops.cuda.experts.is_one_kind), which stay where they are.

    A call neither waits for the device nor reads its data. The results of a row do not depend on
    other rows, except in fp8.
    """

    def __init__(self, ops: Sequence[LinearOp]) -> None:
        """ValueError if the layers differ in shape."""
        self._side, self._num_heads = one_side(ops), len(ops)

    @property
    def size_bytes(self) -> int:
        return self._side.size_bytes

    def __call__(self, x: Tensor) -> Tensor:
        num_rows, num_heads, num_in = x.shape
        assert (num_heads, num_in) == (self._num_heads, self._side.num_in), f"{x.shape}"
        if not num_rows:
            return x.new_empty(0, num_heads, self._side.num_out)
        order = torch.arange(num_rows * num_heads, dtype=torch.int32, device=x.device)
        by_head = order.view(num_rows, num_heads).t().contiguous().view(-1)
        starts = torch.arange(num_heads + 1, dtype=torch.int32, device=x.device) * num_rows
        pairs = SortedPairs(by_head, starts, 1)
        out = self._side.run(x.reshape(-1, num_in), pairs, num_rows)
        return out.view(num_rows, num_heads, -1)
