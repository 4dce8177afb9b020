"""The engine's half of split attention: the step's rows among themselves.

What memory nodes hold is the past; causal attention of the step's own rows over the step's own
k and v is computed here, meanwhile, and merged with what the nodes answer. k and v are rounded
exactly as the nodes' K/V is, so that a row sees the same numbers now and later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from memory.attention import AttentionLayer
from memory.int8_attention import Int8KVLayout, int8_ops
from ops.backend import Backend, KeyValues
from ops.native import Int8AttentionStep
from quant.kv import TILE_TOKENS


class NewPart(Protocol):
    """For all layers of a model."""

    def plan(self, num_decodes: int, num_rows: Sequence[int]) -> object:
        """num_rows: of each sequence; the first num_decodes have one."""

    def attend(
        self, plan: object, layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q: [T, H, D]; k, v: [T, Hk, D], rotated -> out [T, H, D] fp32, lse [T, H] fp32."""


class Int8NewPart:
    """Through a small int8 K/V of its own, which holds one layer's rows of one step."""

    def __init__(
        self, layers: Sequence[AttentionLayer], group: int, max_rows: int, max_num_seqs: int
    ) -> None:
        layouts = [Int8KVLayout([layer], group) for layer in layers]
        self._ops = [int8_ops(layout)[0] for layout in layouts]
        self._tile_bytes = [layout.tile_bytes for layout in layouts]
        num_tiles = -(-max_rows // TILE_TOKENS) + max_num_seqs
        # zeros, because rows that were never written have scales too
        self._memory = torch.zeros(num_tiles * max(self._tile_bytes) + 64, dtype=torch.uint8)
        address = self._memory.data_ptr()
        self._address = address + -address % 64

    def plan(self, num_decodes: int, num_rows: Sequence[int]) -> object:
        tiles = [0]
        for rows in num_rows:
            tiles.append(tiles[-1] + -(-rows // TILE_TOKENS))
        assert tiles[-1] * max(self._tile_bytes) <= self._memory.numel(), f"{tiles[-1]} tiles"
        return {
            size: Int8AttentionStep(
                self._address, size, [tile * size for tile in tiles[:-1]], num_rows, num_rows
            )
            for size in set(self._tile_bytes)
        }

    def attend(
        self, plan: object, layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(plan, dict)
        step, op = plan[self._tile_bytes[layer]], self._ops[layer]
        op.append(step, k.float(), v.float(), None)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        return op.attend(step, q.float(), lse), lse


class PlainNewPart:
    """In bf16 or fp32: k and v are where they are."""

    def __init__(
        self, layers: Sequence[AttentionLayer], dtype: torch.dtype, backend: Backend
    ) -> None:
        self._layers = list(layers)
        self._dtype = dtype
        self._backend = backend

    def plan(self, num_decodes: int, num_rows: Sequence[int]) -> object:
        return num_decodes, list(num_rows[num_decodes:])

    def attend(
        self, plan: object, layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(plan, tuple)
        row, chunks = plan
        shape = self._layers[layer]
        q, k, v = (x.to(self._dtype).contiguous() for x in (q, k, v))
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        if row:
            out, lse = _own_key(q[:row], k[:row], v[:row], shape.scale)
            outs.append(out)
            lses.append(lse)
        for num_rows in chunks:
            own = slice(row, row + num_rows)
            cache = KeyValues(k[own].transpose(0, 1)[None], v[own].transpose(0, 1)[None])
            out, lse = self._backend.prefill_attention(q[own], cache, shape.scale, shape.window)
            outs.append(out.float())
            lses.append(lse)
            row += num_rows
        if len(outs) == 1:
            return outs[0], lses[0]
        return torch.cat(outs), torch.cat(lses)


def _own_key(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Each row over its own key alone: out is its v, lse the score."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.view(rows, kv_heads, heads // kv_heads, dim).float()
    lse = (grouped * k.float()[:, :, None]).sum(-1).mul_(scale)
    out = v.float()[:, :, None].expand(grouped.shape).reshape(rows, heads, dim)
    return out, lse.view(rows, heads)
