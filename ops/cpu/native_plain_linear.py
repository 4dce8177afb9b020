"""Linear layers with bf16 and fp32 weights on the native kernels (ops/csrc/gemm_plain.inl).

A row has the same bits in any batch, because every output is summed in one order whatever the
number of rows. Results are rounded at the same points as in Transformers: a bf16 product, its
activation, and the sum with the residual.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops.backend import NO_FUSION, Fusion
from ops.cpu.native_fusion import ACTIVATIONS, checked_bias, set_norm, sizes
from ops.cpu.native_library import TYPES, address, library


class PlainLinear:
    """A LinearOp that fuses norm, product, bias, activation and residual."""

    def __init__(self, weight: Tensor, bias: Tensor | None, fusion: Fusion = NO_FUSION) -> None:
        """Copies weight: [out, in] bf16 or fp32, which is also the type of rows and results."""
        num_out, num_in = sizes(weight.shape[0], weight.shape[1], fusion)
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        bias = checked_bias(bias, num_out, fusion)
        packed = library().PlainLinear(
            num_in,
            num_out,
            weight.data_ptr(),
            weight.stride(0),
            TYPES[weight.dtype],
            address(bias),
            ACTIVATIONS[fusion.activation],
            fusion.is_gated,
        )
        self._begin(packed, weight.dtype, num_in, num_out, fusion)

    @classmethod
    def over(
        cls, packed: Any, dtype: torch.dtype, num_in: int, num_out: int, fusion: Fusion
    ) -> PlainLinear:
        """Returns a layer of the library's packed product. num_out: outputs after gating."""
        op = cls.__new__(cls)
        op._begin(packed, dtype, num_in, num_out, fusion)
        return op

    def _begin(
        self, packed: Any, dtype: torch.dtype, num_in: int, num_out: int, fusion: Fusion
    ) -> None:
        self.packed, self.num_in, self.num_out = packed, num_in, num_out
        self.dtype = self.in_dtype = self.out_dtype = dtype
        self.norm = set_norm(packed, fusion.norm, num_in)
        self.memory: tuple[Tensor, ...] = ()  # of the weights, if the library has not allocated it

    @property
    def size_bytes(self) -> int:
        return int(self.packed.bytes)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        assert x.shape[1] == self.num_in, f"{x.shape} times [{self.num_out}, {self.num_in}]"
        assert x.dtype == self.dtype, f"{x.dtype} times {self.dtype}"
        out = residual
        if out is None:
            out = torch.empty(rows, self.num_out, dtype=self.dtype)
        assert out.shape == (rows, self.num_out) and out.dtype == self.dtype and out.stride(1) == 1
        if x.stride(1) != 1:
            x = x.contiguous()
        if rows:
            has_residual = residual is not None
            self.packed.run(
                x.data_ptr(), x.stride(0), rows, out.data_ptr(), out.stride(0), has_residual
            )
        return out
