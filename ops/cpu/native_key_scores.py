"""What the policies that drop K/V need of int8 tiles: the weights that rows give to keys, and the
move of the tokens that stay (ops/csrc/key_scores.inl)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ops.cpu.native_library import library

_TILE = 16


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

    def add(
        self,
        base: int,
        tile_bytes: int,
        kv_len: int,
        q: Tensor,
        sums: npt.NDArray[np.float32],
        noise: npt.NDArray[np.float32] | None = None,
        sharpness: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Adds the weights of the last rows of a sequence to sums: [Hk, at least kv_len rounded up
        to tiles].

        base: the address of its range. kv_len: its keys with those of the rows. q: [rows, H, D]
        fp32 with dense heads. noise: is added to the scores, as sums; sharpness: [rows], by which
        they are multiplied. Rows and heads are added one after the other, so the bits do not
        depend on how rows are cut into calls.
        """
        assert q.shape[1:] == (self._num_heads, self._head_dim), f"{q.shape}"
        assert q.stride()[1:] == (self._head_dim, 1), f"{q.stride()}"
        assert sums.shape[0] == self._num_kv_heads and sums.flags.c_contiguous
        assert sums.shape[1] >= -(-kv_len // _TILE) * _TILE, f"{sums.shape} {kv_len=}"
        assert noise is None or (noise.shape == sums.shape and noise.flags.c_contiguous)
        assert sharpness is None or sharpness.shape == (len(q),)
        self._op.add(
            base,
            tile_bytes,
            len(q),
            kv_len,
            q.data_ptr(),
            q.stride(0),
            sums.ctypes.data,
            sums.shape[1],
            0 if noise is None else noise.ctypes.data,
            0 if sharpness is None else sharpness.ctypes.data,
        )

    def gather(
        self, source: int, target: int, tile_bytes: int, kept: npt.NDArray[np.int32]
    ) -> None:
        """Copies tokens of the range at address `source` to the first places of that at `target`,
        perhaps the same. kept: [Hk, tokens], for each head the tokens that stay, rising."""
        assert kept.dtype == np.int32 and kept.flags.c_contiguous, f"{kept.dtype}"
        assert kept.shape[0] == self._num_kv_heads, f"{kept.shape}"
        self._op.gather(source, target, tile_bytes, kept.ctypes.data, kept.shape[1])
