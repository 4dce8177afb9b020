"""Shared parts of linear layers: the unfused layer, rounding to 4 bits and its scales' format."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from ops.backend import NF4_VALUES, Backend, Fusion, Norm


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


def nf4_bounds() -> Tensor:
    """Returns the 15 numbers half way between neighbouring NF4 values."""
    values = torch.tensor(NF4_VALUES)
    return (values[1:] + values[:-1]) / 2


def round_to_4_bits(weight: Tensor, group: int, *, is_nf4: bool) -> tuple[Tensor, Tensor]:
    """Rounds weight: [out, in] in any float type to codes: [out, in] uint8, scales: [out, groups].

    int4: the nearest of 16 even steps, of which the first is the group's largest magnitude. NF4:
    the nearest of NF4_VALUES times the group's largest magnitude; of two equally near ones the
    smaller. Codes are rounded with the scales as they are stored.
    """
    padded = functional.pad(weight.float(), (0, -weight.shape[1] % group))
    parts = padded.reshape(len(weight), -1, group)
    if is_nf4:
        scales = _as_stored(parts.abs().amax(2))
        codes = torch.bucketize(parts / _nonzero(scales)[..., None], nf4_bounds().to(weight.device))
    else:
        extreme = parts.gather(2, parts.abs().argmax(2, keepdim=True))
        scales = _as_stored(extreme[..., 0] / -8)
        codes = ((parts / _nonzero(scales)[..., None]).round() + 8).clamp(0, 15)
    return codes.to(torch.uint8).flatten(1)[:, : weight.shape[1]].contiguous(), scales


def _as_stored(scales: Tensor) -> Tensor:
    halves, channels = split_scales(scales)
    return halves.float() * channels[:, None]


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)
