"""Linear layers with bf16 and fp32 weights on the native kernels (ops/csrc/gemm_plain.inl).

A row has the same bits in any batch, because every output is summed in one order whatever the
number of rows. Results are rounded at the same points as in Transformers: a bf16 product, its
activation, and the sum with the residual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.backend import NO_FUSION, Fusion
from ops.cpu.native_fusion import ACTIVATIONS, checked_bias, set_norm, sizes
from ops.cpu.native_library import TYPES, address, library


class PlainLinear:
    """A LinearOp that fuses norm, product, bias, activation and residual."""

    def __init__(self, weight: Tensor, bias: Tensor | None, fusion: Fusion = NO_FUSION) -> None:
        """Copies weight: [out, in] bf16 or fp32, which is also the type of rows and results."""
        self.num_out, self.num_in = sizes(weight.shape[0], weight.shape[1], fusion)
        self.dtype = self.in_dtype = self.out_dtype = weight.dtype
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        bias = checked_bias(bias, self.num_out, fusion)
        self.packed = library().PlainLinear(
            self.num_in,
            self.num_out,
            weight.data_ptr(),
            weight.stride(0),
            TYPES[self.dtype],
            address(bias),
            ACTIVATIONS[fusion.activation],
            fusion.is_gated,
        )
        self.norm = set_norm(self.packed, fusion.norm, self.num_in)

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
