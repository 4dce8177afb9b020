"""What the policies that drop K/V need of int8 tiles: the weights that rows give to keys, and the
move of the tokens that stay (ops/csrc/key_scores.inl); and the weights over bf16 and fp32 K
(ops/csrc/key_scores_plain.inl)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ops.cpu.native_library import TYPES, library

_TILE = 16


Floats = npt.NDArray[np.float32]


class ScorePlan:
    """The rows of a step that give scores, shared by all layers. tile_bytes: for plain K, the bytes
    of a token."""

    def __init__(self, tile_bytes: int) -> None:
        self.plan: Any = library().ScorePlan(tile_bytes)
        self._kept: list[object] = []  # the arrays whose addresses the plan has
        self.num_rows = 0

    def add(
        self,
        base: int,
        first_row: int,
        num_rows: int,
        kv_len: int,
        sums: Floats,
        noise: Floats | None = None,
        sharpness: Floats | None = None,
    ) -> None:
        """Adds the last num_rows of the kv_len rows of a sequence, [first_row, first_row +
        num_rows) of the step.

        base: the address of its range. sums: [layers, Hk, at least kv_len rounded up to tiles]; the
        rows' weights are added to it. noise: is added to the scores, as sums; sharpness:
        [num_rows], by which they are multiplied. The arrays must stay where they are.
        """
        assert sums.shape[2] % _TILE == 0 and sums.shape[2] >= kv_len, f"{sums.shape} {kv_len=}"
        assert sums.flags.c_contiguous and 0 < num_rows <= kv_len, f"{num_rows=} {kv_len=}"
        assert noise is None or (noise.shape == sums.shape and noise.flags.c_contiguous)
        assert sharpness is None or sharpness.shape == (num_rows,)
        self._kept += [sums, noise, sharpness]
        self.num_rows = max(self.num_rows, first_row + num_rows)
        self.plan.add(
            base,
            first_row,
            num_rows,
            kv_len,
            sums.ctypes.data,
            sums.shape[2],
            0 if noise is None else noise.ctypes.data,
            0 if sharpness is None else sharpness.ctypes.data,
        )


class KeyScoring:
    """One layer's K/V in int8 tiles; the arguments are those of Int8Attention."""

    def __init__(
        self,
        *,
        offset_bytes: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        group: int,
        scale: float,
        soft_cap: float = 0.0,
    ) -> None:
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._op: Any = library().KeyScoring(
            offset_bytes, num_heads, num_kv_heads, head_dim, group, scale, soft_cap
        )

    def add(self, plan: ScorePlan, number: int, q: Tensor) -> None:
        """Adds the weights of the plan's rows in this layer, the `number`th of its sums. q: [rows
        of the step, H, D] fp32, which is rounded to 8 bits. Rows are scored in blocks, but added
        one after the other, so the bits do not depend on how rows are cut into steps."""
        _add(self._op, plan, number, q, (self._num_heads, self._head_dim))

    def gather(
        self, source: int, target: int, tile_bytes: int, kept: npt.NDArray[np.int32]
    ) -> None:
        """Copies tokens of the range at address `source` to the first places of that at `target`,
        perhaps the same. kept: [Hk, tokens], for each head the tokens that stay, rising."""
        assert kept.dtype == np.int32 and kept.flags.c_contiguous, f"{kept.dtype}"
        assert kept.shape[0] == self._num_kv_heads, f"{kept.shape}"
        self._op.gather(source, target, tile_bytes, kept.ctypes.data, kept.shape[1])


class PlainKeyScoring:
    """One layer's K in bf16 or fp32, in the tokens of a range: [Hk, D] at offset_bytes of each."""

    def __init__(
        self,
        *,
        offset_bytes: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        scale: float,
        soft_cap: float = 0.0,
    ) -> None:
        assert self.can_score(head_dim, dtype), f"{head_dim=} {dtype}"
        self._shape = num_heads, head_dim
        self._op: Any = library().PlainKeyScoring(
            offset_bytes, num_heads, num_kv_heads, head_dim, TYPES[dtype], scale, soft_cap
        )

    @staticmethod
    def can_score(head_dim: int, dtype: torch.dtype) -> bool:
        return head_dim % 16 == 0 and dtype in TYPES

    def add(self, plan: ScorePlan, number: int, q: Tensor) -> None:
        """Adds weights as KeyScoring.add does, without rounding q."""
        _add(self._op, plan, number, q, self._shape)


def _add(op: Any, plan: ScorePlan, number: int, q: Tensor, shape: tuple[int, int]) -> None:
    assert q.dtype == torch.float32 and len(q) >= plan.num_rows, f"{q.dtype} {q.shape}"
    assert q.shape[1:] == shape, f"{q.shape}"
    if q.stride()[1:] != (shape[1], 1):
        q = q.contiguous()
    op.add(plan.plan, number, q.data_ptr(), q.stride(0))
