"""Products of their own for each head, one after the other: for back ends without a joined product,
and what joined ones must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.backend import LinearOp


class HeadsOneByOne:
    """A HeadsOp that calls the product of each head."""

    def __init__(self, ops: Sequence[LinearOp]) -> None:
        assert ops
        self._ops = list(ops)

    def __call__(self, x: Tensor) -> Tensor:
        assert x.shape[1] == len(self._ops), f"{x.shape} for {len(self._ops)} heads"
        return torch.stack([op(x[:, head]) for head, op in enumerate(self._ops)], dim=1)
