"""fp8 products with a scale for each 128 inputs, as FP8 checkpoints in blocks have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.backend import NO_FUSION, Fusion
from ops.cuda.linear import interleaved, norm_on, packed_bias, placed_rows, require_fp8
from ops.cuda.upload import on_device
from ops.triton_kernels.block_fp8 import E4M3, GROUP, BlockWeight, block_product, quantize_groups
from ops.triton_kernels.rows import norm_rows


class BlockFp8Linear:
    """A LinearOp. Rows are fp32 or bf16; the result is bf16, fp32 with a residual. A call neither
    waits for the device nor reads its data, and a row does not depend on the others."""

    def __init__(
        self,
        parts: Sequence[Tensor],
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        scales: Tensor,
        device: torch.device,
    ) -> None:
        """parts: [out_i, in] e4m3; scales: [out, in / 128, rounded up]. ValueError on a device
        whose tensor cores do not know the type."""
        require_fp8(device)
        num_rows, self.num_in = sum(len(part) for part in parts), parts[0].shape[1]
        groups = -(-self.num_in // GROUP)
        assert scales.shape == (num_rows, groups), f"{scales.shape} for {num_rows}, {self.num_in}"
        self.fusion, self.num_rows, self.device = fusion, num_rows, device
        self.num_out = num_rows // 2 if fusion.is_gated else num_rows
        codes = torch.zeros(num_rows, groups * GROUP, dtype=E4M3, device=device)
        for some, to in placed_rows(parts, fusion.is_gated):
            codes[to, : self.num_in] = on_device(some, device)
        order = interleaved(torch.arange(num_rows, device=device), fusion)
        placed = scales.to(device, torch.float32)[order].t().contiguous()
        self.weight = BlockWeight(codes, placed, packed_bias(bias, num_rows, fusion, device))
        self._norm = None if fusion.norm is None else norm_on(fusion.norm, self.num_in, device)

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.weight if t is not None)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert x.shape[1] == self.num_in, f"{x.shape} times [{self.num_out}, {self.num_in}]"
        out = residual
        if out is None:
            out = torch.empty(len(x), self.num_out, dtype=torch.bfloat16, device=x.device)
        if not len(x):
            return out
        rows = x if self._norm is None else norm_rows(x, self._norm, torch.float32)
        return block_product(
            quantize_groups(rows),
            self.weight,
            self.num_rows,
            out,
            residual,
            self.fusion.activation,
            is_gated=self.fusion.is_gated,
            most_rows=len(x),
            rows_per_expert=len(x),
        )
