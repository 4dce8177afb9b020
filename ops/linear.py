"""Shared parts of linear layers: the unfused layer, and the storage format of int4 scales."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ops.backend import Backend, Fusion, Norm


class PlainLinear:
    """A LinearOp that calls norm, product, activation and residual one after the other.

    Fused kernels must equal it.
    """

    def __init__(
        self, backend: Backend, product: Callable[[Tensor], Tensor], fusion: Fusion
    ) -> None:
        self._backend = backend
        self._product = product
        self._fusion = fusion

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        norm, activation, is_gated = self._fusion
        if norm is not None:
            x = apply_norm(self._backend, x, norm)
        y = self._product(x)
        if activation is not None:
            act = self._backend.gated_activation if is_gated else self._backend.activation
            y = act(y, activation)
        return y if residual is None else residual + y


def apply_norm(backend: Backend, x: Tensor, norm: Norm) -> Tensor:
    """Normalizes x: [T, N]."""
    if norm.kind == "rms":
        return backend.rms_norm(x, norm.weight, norm.eps)
    return backend.layer_norm(x, norm.weight, norm.bias, norm.eps)


def split_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Splits scales: [out, groups] into fp16 [out, groups] and fp32 powers of two [out]."""
    largest = scales.float().abs().amax(1)
    _, exponent = torch.frexp(largest)
    channels = torch.ldexp(torch.ones_like(largest), exponent.clamp(-126, 127))  # normal fp32
    return (scales.float() / channels[:, None]).half().contiguous(), channels.contiguous()
