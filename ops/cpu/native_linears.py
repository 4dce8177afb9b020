"""Quantized linear layers of the native CPU kernels, for `Backend.quantized`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ops.backend import NO_FUSION, Fusion, LinearOp
from ops.cpu.native import Int4Linear, Int8Linear


class NativeLinears:
    """QuantizedLinears of ops.cpu.native. A product raises RuntimeError if they are not built."""

    int8 = Int8Linear
    int4 = Int4Linear

    @staticmethod
    def fp8(parts: Sequence[Tensor], bias: Tensor | None, fusion: Fusion = NO_FUSION) -> LinearOp:
        raise ValueError("this processor has no fp8 products")


NATIVE = NativeLinears()
