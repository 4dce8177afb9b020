"""Attention over int8 latents on the native kernels (ops/csrc/attention_latent*.inl).

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form: a layer keeps one
vector for each token, which all query heads read. All of it is K, its first value_dim numbers are
V.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops.cpu.native_library import address, library
from ops.cpu.native_rotation import check_rotation
from ops.cpu.native_tiled_attention import TiledAttentionStep


class LatentAttention:
    """One layer over int8 latents. append rotates, quantizes and stores; attend computes
    attention."""

    def __init__(
        self,
        *,
        offset_bytes: int,
        num_heads: int,
        value_dim: int,
        rope_dim: int,
        group: int,
        rope_group: int,
        scale: float,
    ) -> None:
        """rope_dim: the numbers after the first value_dim. group, rope_group: numbers that share
        a scale in the two parts."""
        for dim, size in ((value_dim, group), (rope_dim, rope_group)):
            assert size > 0 and size % 16 == 0 and dim > 0 and dim % size == 0, f"{dim} {size}"
        assert value_dim + rope_dim <= library().MAX_LATENT_DIM, f"{value_dim} + {rope_dim}"
        assert num_heads > 0 and scale > 0, f"{num_heads=} {scale=}"
        self._heads, self._value_dim, self._dim = num_heads, value_dim, value_dim + rope_dim
        self._op: Any = library().LatentAttention(
            offset_bytes, num_heads, value_dim, rope_dim, group, rope_group, scale
        )

    def append(
        self,
        step: TiledAttentionStep,
        k: Tensor,
        v: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Stores k: [T, 1, D] fp32; v is None. The rotation turns the first of the numbers after
        value_dim."""
        assert v is None, "V is a part of K"
        assert k.dtype == torch.float32 and k.shape == (step.num_rows, 1, self._dim), f"{k.shape}"
        if k.stride(2) != 1:
            k = k.contiguous()
        cos = sin = half = 0
        if rotation is not None:
            check_rotation(rotation, step.num_rows, self._dim - self._value_dim)
            cos, sin, half = rotation[0].data_ptr(), rotation[1].data_ptr(), rotation[0].shape[1]
        self._op.append(step.plan, k.data_ptr(), k.stride(0), cos, sin, half)

    def begin(self, step: TiledAttentionStep, q: Tensor) -> None:
        """Does nothing: attend computes all (see TiledAttention)."""

    def attend(
        self,
        step: TiledAttentionStep,
        q: Tensor,
        lse: Tensor | None = None,
        begun: Tensor | None = None,
        *,
        with_matrix: bool = True,
    ) -> Tensor:
        """Returns attention [T, H, value_dim] for q: [T, H, D] fp32; writes lse: [T, H] fp32,
        natural log.

        A row that sees no key gets 0 and an lse of -inf. The bits of a row and head depend neither
        on other rows nor on other heads, nor on with_matrix: whether the processor's matrix
        instructions are used, if it has them.
        """
        assert q.dtype == torch.float32, f"{q.dtype}"
        assert q.shape == (step.num_rows, self._heads, self._dim), f"{q.shape}"
        if lse is not None:
            assert lse.shape == q.shape[:2] and lse.dtype == torch.float32 and lse.is_contiguous()
        if q.stride()[1:] != (self._dim, 1):
            q = q.contiguous()
        out = torch.empty(*q.shape[:2], self._value_dim)
        self._op.attend(
            step.plan, q.data_ptr(), q.stride(0), out.data_ptr(), address(lse), with_matrix
        )
        return out
