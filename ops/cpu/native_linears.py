"""Products of weights in few bits on our own CPU kernels, as `Backend.quantized` offers them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ops.backend import NO_FUSION, Fusion, LinearOp
from ops.cpu.native import Int4Linear, Int8Linear


class NativeLinears:
    """QuantizedLinears of ops.cpu.native. RuntimeError at the first product if it was not built."""

    def int8(
        self,
        parts: Sequence[Tensor],
        bias: Tensor | None,
        edges: Fusion = NO_FUSION,
        *,
        scales: Tensor | None = None,
        is_head: bool = False,
    ) -> LinearOp:
        return Int8Linear(parts, bias, edges, scales=scales)

    def int4(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        edges: Fusion = NO_FUSION,
        *,
        group: int,
        is_nf4: bool = False,
    ) -> LinearOp:
        return Int4Linear(codes, scales, zeros, bias, edges, group=group, is_nf4=is_nf4)

    def fp8(
        self, parts: Sequence[Tensor], bias: Tensor | None, edges: Fusion = NO_FUSION
    ) -> LinearOp:
        raise ValueError("this processor has no fp8 products")


NATIVE = NativeLinears()
