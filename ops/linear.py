"""A linear layer as separate calls: what the fused kernels must equal, and the plain types' way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ops.backend import Backend, Fusion, Norm


class PlainLinear:
    """norm, product, activation and residual one after the other."""

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
    """x: [T, N] -> [T, N]."""
    if norm.kind == "rms":
        return backend.rms_norm(x, norm.weight, norm.eps)
    return backend.layer_norm(x, norm.weight, norm.bias, norm.eps)


def split_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """[out, groups] as fp16 [out, groups] times fp32 powers of two [out]."""
    largest = scales.float().abs().amax(1)
    _, exponent = torch.frexp(largest)
    channels = torch.ldexp(torch.ones_like(largest), exponent.clamp(-126, 127))  # of fp32
    return (scales.float() / channels[:, None]).half().contiguous(), channels.contiguous()
