"""Every native linear layer passes this check of its rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ops.cpu import native_library


def check_rows_alone(layer: Callable[[Tensor], Tensor], num_inputs: int) -> None:
    """A row has the same bits beside others, and on one thread as on several."""
    x = torch.randn(300, num_inputs)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(300)])
    for m in (*range(2, 14), 24, 31, 64, 129, 300):
        assert torch.equal(layer(x[:m]), alone[:m]), f"{m} rows"
    threads = native_library.num_threads()
    native_library.set_num_threads(1)
    try:
        assert torch.equal(layer(x), alone)
    finally:
        native_library.set_num_threads(threads)
