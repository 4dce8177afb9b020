"""bf16 and fp32 K/V in the layout of memory/, and the expected attention over them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from memory.attention.kv_layout import KVCache, KVLayout
from memory.attention.seam import AttentionLayer
from ops.backend import KeyValues, Partial
from ops.reference import ReferenceBackend

REFERENCE = ReferenceBackend()
TYPES = [torch.float32, torch.bfloat16]
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # relative error of one rounding
Attend = Callable[[Tensor, KeyValues, float, int | None], Partial]


class Range:
    """K and V of one sequence in the middle of three layers; all else is NaN."""

    def __init__(self, kv_heads: int, dim: int, length: int, dtype: torch.dtype) -> None:
        layer = AttentionLayer(kv_heads, kv_heads, dim, 1.0)
        layout = KVLayout([layer] * 3, dtype)
        self.first, self.length = 5, length
        size = (length + 10) * layout.token_bytes
        self._memory = ctypes.create_string_buffer(b"\xff" * size, size)
        self._cache = KVCache(layout, ctypes.addressof(self._memory), size)
        k, v = self.view()
        self.k, self.v = k.normal_(), v.normal_()

    def view(self, length: int | None = None) -> KeyValues:
        """Returns the first `length` positions."""
        return self._cache.views(self.first, self.length if length is None else length)[1]


def exact(
    attend: Attend, q: Tensor, cache: KeyValues, scale: float, window: int | None
) -> tuple[Partial, Tensor]:
    """Returns the reference's attend in float64 and a bound of each element's rounding error."""
    wide = KeyValues(cache.k.double(), cache.v.double())
    expected = attend(q.double(), wide, scale, window)
    spread = attend(q.double(), KeyValues(wide.k, wide.v.abs()), scale, window).out
    # each score: D products and their sum; each sum over keys: L products and rescalings
    most = float(q.double().norm(dim=-1).max() * wide.k.norm(dim=-1).max()) * scale
    score = (q.shape[2] + 8) * 2.0**-24 * most + 1e-6
    sums = (cache.k.shape[2] + 16) * 2.0**-24
    weights = 2.0**-8 if q.dtype == cache.k.dtype == torch.bfloat16 else 0.0
    bound = spread * (weights + 2 * score + sums) + expected.out.abs() * EPS[q.dtype] + 1e-7
    of_lse = score + sums + 1e-6 + 2.0**-23 * expected.lse.abs()
    return expected, torch.cat((bound, of_lse[..., None]), -1)
