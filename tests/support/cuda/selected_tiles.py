"""Sequences whose decode rows read a part of their tiles, on the kernels, and what they should
read by slow torch in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tests.support.cuda.cuda_kv import BF16, DEVICE, Tiles
from tests.support.memory.selected_kv import chosen_tiles, selected_attention

from ops.cuda.selection import SelectingLayer, SelectionArrays  # isort: skip
from ops.kv_tiles import key_bounds_bytes, layer_bytes  # isort: skip

TILE = 16


class SelectedTiles(Tiles):
    """Tiles with room for bounds, which `bound` writes."""

    def __init__(self, heads, kv_heads, dim, dtype, group=None, *, lens, **more) -> None:
        room = key_bounds_bytes(kv_heads, dim)
        super().__init__(heads, kv_heads, dim, dtype, group, None, lens, room=room, **more)

    def bound(self, rows: Sequence[int] | None = None) -> None:
        """Writes the bounds of all complete tiles, or of those that these token numbers complete,
        by the kernel."""
        from ops.triton_kernels.selection.bounds import bound_keys

        if rows is None:
            pairs = zip(self.starts, self.lens, strict=True)
            rows = [start + i for start, length in pairs for i in range(length)]
        numbers = torch.tensor(rows, dtype=torch.int64, device=DEVICE)
        bound_keys(self.layer, self.base, numbers, len(numbers))

    def bounds_bytes(self) -> tuple[int, int]:
        """Returns where the bounds begin in a tile, and how many bytes they take."""
        layer = self.layer
        size = layer_bytes(layer.num_kv_heads, layer.head_dim, layer.dtype, layer.group)
        return layer.offset + size, key_bounds_bytes(layer.num_kv_heads, layer.head_dim)

    def bounds(self, sequence: int, count: int) -> tuple[Tensor, Tensor]:
        """Returns the stored largest and smallest values of `count` tiles, fp64 [tiles, Hk, D]."""
        heads, dim, stride = self.layer.num_kv_heads, self.layer.head_dim, self.layer.tile_stride
        at, size = self.bounds_bytes()
        first = self.starts[sequence] // TILE * stride + at
        found = self.memory[first:].as_strided((count, size), (stride, 1)).cpu().contiguous()
        sides = found[:, : 2 * heads * dim].contiguous().view(torch.int8).double()
        sides = sides.view(count, heads, 2, dim)
        scales = found[:, 2 * heads * dim :][:, : 4 * heads].contiguous().view(torch.float32)
        sides = sides * scales.double()[..., None, None]
        return sides[:, :, 0], sides[:, :, 1]

    def select(
        self,
        q: Tensor,
        sequences: Sequence[int],
        kv_lens: Sequence[int],
        budgets: Sequence[int],
        *,
        padding: int = 0,
        min_split: int = 64,
    ) -> tuple[Tensor, Tensor]:
        """Returns the attention of decode rows of these sequences, and the tables of their tiles.
        budgets: tiles; 0: all."""
        rows = len(sequences)
        arrays = self.rows_of(sequences, kv_lens, padding=padding, min_split=min_split)
        selection = SelectionArrays(arrays, self.layer.num_kv_heads)
        host = torch.full((selection.num_words,), -7, dtype=torch.int32)
        selection.fill(host, np.asarray(kv_lens, np.int64), np.asarray(budgets, np.int64))
        selection.upload(host)
        layer = SelectingLayer(self.layer, self.base, selection, sinks=self.attention.sinks)
        out = layer.attend(arrays, q, rows + padding, rows + padding, False)
        return out, selection.tables(self.layer.num_kv_heads)[:rows].cpu()

    def rows_of(self, sequences, kv_lens, *, padding: int = 0, min_split: int = 64):
        """Returns a step with one decode row of each of these sequences, which may be the same."""
        starts, lens = self.starts, self.lens
        self.starts, self.lens = [starts[i] for i in sequences], list(kv_lens)
        try:
            count = len(self.lens)
            return self.arrays([1] * count, count, padding=(padding, 0), min_split=min_split)
        finally:
            self.starts, self.lens = starts, lens

    def chosen(self, q: Tensor, sequence: int, kv_len: int, budget: int) -> tuple[Tensor, Tensor]:
        """Returns what `chosen_by` does, for one row q: [H, D] and the stored bounds."""
        own = (kv_len - 1) // TILE
        if not 0 < budget <= own:
            return chosen_by(q, None, own, 0)
        return chosen_by(q, self.bounds(sequence, own), own, budget)

    def attention_over(
        self, q: Tensor, sequence: int, kv_len: int, read: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the attention of one row over tiles, bool [Hk, tiles], in fp64, and the largest
        error that roundings make."""
        (k, v), q, scale = self.read(sequence, kv_len), q.cpu(), self.layer.scale
        read = read.expand(self.layer.num_kv_heads, -1)
        options = {"soft_cap": self.layer.soft_cap, "sinks": self.sinks}
        out = selected_attention(q, k, v, read, scale, **options)
        if q.dtype == torch.float32:
            return out, torch.full_like(out, 1e-5)
        spread = selected_attention(q, k, v.abs(), read, scale, **options)
        many, score = 1, 0.0
        if self.layer.num_groups > 2:  # then keys and values are rounded, too
            most = float(q.double().norm(dim=-1).max() * k.norm(dim=-1).max())
            many, score = 2, scale * BF16 * most
        return out, spread * (BF16 * many * 1.05 + 2 * score) + out.abs() * BF16 + 1e-6


def read_by(table: Tensor, budget: int, num_tiles: int) -> Tensor:
    """Returns which tiles a table [Hk, most] lists first, bool [Hk, tiles], and checks that they
    are in the order of their positions."""
    listed = table[:, :budget].long()
    assert (listed.diff(dim=1) > 0).all(), f"{listed}"
    read = torch.zeros(len(table), num_tiles, dtype=torch.bool)
    return read.scatter_(1, listed, value=True)


def chosen_by(
    q: Tensor, bounds: tuple[Tensor, Tensor] | None, own: int, budget: int
) -> tuple[Tensor, Tensor]:
    """Returns the tiles that one row q: [H, D] should read, bool [Hk, tiles], and of which heads
    the choice is clear. bounds: the largest and smallest values of the `own` tiles before the
    row's, [tiles, Hk, D]; None: all tiles are read."""
    if bounds is None:
        return torch.ones(1, own + 1, dtype=torch.bool), torch.ones(1, dtype=torch.bool)
    most, least = (x.permute(1, 0, 2) for x in bounds)
    of_heads = q.double().cpu().reshape(len(most), -1, q.shape[-1])
    above, below = of_heads.clamp(min=0).sum(1), of_heads.clamp(max=0).sum(1)
    chosen, is_clear = chosen_tiles(
        (above[:, None] * most + below[:, None] * least).sum(-1), budget - 1
    )
    return torch.cat((chosen, torch.ones(len(chosen), 1, dtype=torch.bool)), 1), is_clear


def rounded_bounds(k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bounds of complete tiles of stored keys k: [T, Hk, D], as `bound_keys` rounds
    them, fp64 [tiles, Hk, D]."""
    count = len(k) // TILE
    tiles = k[: count * TILE].double().reshape(count, TILE, *k.shape[1:])
    most, least = tiles.amax(1), tiles.amin(1)
    largest = torch.maximum(most.abs(), least.abs()).amax(-1, keepdim=True)
    steps = (largest.float() / 127 * (1 + 2.0**-20)).double()
    safe = torch.where(steps > 0, steps, 1.0)
    return (most / safe).ceil() * steps, (least / safe).floor() * steps
