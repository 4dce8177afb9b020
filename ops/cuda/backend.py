"""The CUDA back end: Triton kernels, cuBLAS for plain products.

Its device is the current CUDA device, or the CPU with Triton's interpreter (TRITON_INTERPRET=1),
which tests the same kernels without a GPU. The engine's K/V is in tiles (ops.cuda.attention); the
contract's functions on strided K/V are the slow ones of the reference.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from ops import MIN_CAPABILITY
from ops.backend import (
    NO_FUSION,
    ExpertsOp,
    Fusion,
    HeadsOp,
    LinearOp,
    Norm,
    Partial,
    QuantizedLinears,
    Router,
    Routing,
)
from ops.cuda.block_linear import BlockFp8Linear
from ops.cuda.experts import CudaExperts, can_group, is_one_kind
from ops.cuda.heads import CudaHeads
from ops.cuda.linear import Fp8Linear, Int4Linear, Int8Linear, PlainLinear, rounded4_linear
from ops.reference import ReferenceBackend
from ops.states import StateOps
from ops.superblocks import Superblocks
from ops.triton_kernels import partials
from ops.triton_kernels.kv import Rotation, rotate
from ops.triton_kernels.router import route
from ops.triton_kernels.rows import activation_rows, gated_rows, norm_rows

logger = logging.getLogger(__name__)


class CudaBackend(ReferenceBackend):
    """The Backend contract on one CUDA device."""

    name = "cuda"

    def __init__(self) -> None:
        self.device = cuda_device()
        self.quantized: QuantizedLinears | None = CudaLinears(self.device)

    @cached_property
    def states(self) -> StateOps:
        from ops.cuda.states import CudaStates  # for models with states only

        return CudaStates()

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = NO_FUSION
    ) -> LinearOp:
        return PlainLinear(weight, bias, fusion, device=self.device)

    def pack_experts(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], *, scales_input: bool = False
    ) -> ExpertsOp:
        if can_group(ups, downs):
            return CudaExperts(ups, downs, scales_input)
        return super().pack_experts(ups, downs, scales_input=scales_input)

    def pack_heads(self, ops: Sequence[LinearOp]) -> HeadsOp:
        return CudaHeads(ops) if is_one_kind(ops) else super().pack_heads(ops)

    def route(self, x: Tensor, router: Router) -> Routing:
        return route(x, router)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm_rows(x, Norm("rms", weight, None, eps))

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return norm_rows(x, Norm("layer", weight, bias, eps))

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(x, Rotation(cos, sin), x)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        return activation_rows(x, kind)

    def gated_activation(self, gate_up: Tensor, kind: str) -> Tensor:
        return gated_rows(gate_up, kind)

    def merge_into(self, total: Partial, part: Partial, rows: Tensor | None = None) -> None:
        partials.merge_into(total, part, rows)


class CudaLinears:
    """QuantizedLinears on the device."""

    has_superblocks = False

    def __init__(self, device: torch.device) -> None:
        self.int8 = partial(Int8Linear, device=device)
        self.int4 = partial(Int4Linear, device=device)
        self.rounded4 = partial(rounded4_linear, device=device)
        self._device = device

    def superblocks(
        self,
        weight: Superblocks,
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        factor: float = 1.0,
    ) -> LinearOp:
        raise ValueError("GPUs have no products of weights in superblocks")

    def fp8(
        self,
        parts: Sequence[Tensor],
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        scales: Tensor | None = None,
    ) -> LinearOp:
        if scales is not None and scales.dim() == 2:
            return BlockFp8Linear(parts, bias, fusion, scales=scales, device=self._device)
        return Fp8Linear(parts, bias, fusion, scales=scales, device=self._device)


def is_interpreted() -> bool:
    """Returns whether Triton's kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def cuda_device() -> torch.device:
    """Returns the device of this back end. ValueError says why there is none."""
    if is_interpreted():
        logger.warning("TRITON_INTERPRET=1: kernels are interpreted, thousands of times slower")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("no CUDA device that torch can use")
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        number = ".".join(map(str, capability))
        raise ValueError(f"{name} has compute capability {number}; 8.0 is needed")
    return device
