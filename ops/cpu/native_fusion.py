"""Helpers of the native linear layers: sizes, biases, activations and norms of a `Fusion`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ops.backend import Fusion, Norm
from ops.cpu.native_library import address

ACTIVATIONS = {
    None: 0,
    "silu": 1,
    "gelu": 2,
    "gelu_tanh": 3,
    "relu": 4,
    "relu2": 5,
    "swiglu_oai": 6,
}
NORMS = {"rms": 1, "layer": 2}
"""The library's numbers of activations and norms."""


def set_norm(op: Any, norm: Norm | None, num_in: int) -> tuple[Tensor, Tensor | None] | None:
    """Passes the norm's addresses to op. The caller keeps the returned tensors, [num_in], alive."""
    if norm is None:
        return None
    weight = norm.weight.float().contiguous()
    bias = None if norm.bias is None else norm.bias.float().contiguous()
    assert weight.shape == (num_in,), f"{weight.shape} for {num_in} inputs"
    assert bias is None or bias.shape == (num_in,), f"{bias.shape} for {num_in} inputs"
    op.set_norm(NORMS[norm.kind], weight.data_ptr(), address(bias), norm.eps)
    return weight, bias


def sizes(rows: int, num_in: int, fusion: Fusion) -> tuple[int, int]:
    """Returns (outputs after gating, inputs)."""
    if not fusion.is_gated:
        return rows, num_in
    assert rows % 2 == 0 and fusion.activation is not None, "gates, as many factors, an activation"
    return rows // 2, num_in


def checked_bias(bias: Tensor | None, num_out: int, fusion: Fusion) -> Tensor | None:
    if bias is None:
        return None
    assert bias.shape == ((2 if fusion.is_gated else 1) * num_out,), f"{bias.shape} for {num_out}"
    return bias.float().contiguous()
