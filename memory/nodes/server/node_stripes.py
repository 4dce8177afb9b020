"""A step's queries on a node that has some tiles of each sequence, where rows choose among the
tiles of all nodes.

The node lists its own tiles that a row may choose, is told how many of each list are chosen, and
attends to these and to the row's own tile, if that is here. Each row is a sequence of its own,
since the keys that it sees here do not end where those of the next one end. Rows that read
everything attend over the prefix, as where no row chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memory.nodes.attach import STRIPE_TOKENS
from memory.nodes.placement import Shard, choosing_parts, choosing_row
from memory.nodes.server.node_attention import TiledNodeAttention
from memory.nodes.wire import Append, NodePlan
from ops.backend import Partial
from ops.cpu.native_latent_attention import LatentAttention
from ops.cpu.native_tile_lists import TileList, TileShares
from ops.cpu.native_tiled_attention import TiledAttention, TiledAttentionStep


class ChoosingPart(NamedTuple):
    """Rows that choose together: which of the choosing rows, and what is theirs on this node."""

    rows: slice
    step: TiledAttentionStep
    shares: TileShares

    @property
    def num_rows(self) -> int:
        return self.shares.num_rows


class StripedQueries:
    """The planned queries of one layer group. Those whose rows choose come first."""

    def __init__(
        self, group: TiledNodeAttention, plan: NodePlan, own: Sequence[Append], shard: Shard
    ) -> None:
        """own: the appended rows of the sequences whose rows choose."""
        choosing = [query for query in plan.queries if query.num_own]
        rest = [query for query in plan.queries if not query.num_own]
        self._group = group
        self._own = group.plan_appends(own) if own else None
        self._rest = group.plan_queries(rest) if rest else None
        self.num_rows = sum([query.num_own for query in choosing])
        firsts = zip(choosing, plan.positions, strict=True)
        self._ranges, positions = [], list[int]()
        for query, first in firsts:
            self._ranges += [query.range] * query.num_rows
            positions += range(first, first + query.num_rows)
        self._rows = [choosing_row(shard, position) for position in positions]
        num_tiles = {i: row.num_tiles for i, row in zip(self._ranges, self._rows, strict=True)}
        self.is_late = any(a.position < num_tiles[a.range] * STRIPE_TOKENS for a in own)
        """Whether rows may choose tiles that this step completes, with their own keys or with those
        of rows before them that do not choose, so that k and v have to be written first."""
        layers = zip(group.layout.layers, group.layout.bounds, strict=True)
        heads = [layer.num_kv_heads for layer, bounds in layers if bounds is not None]
        cut = choosing_parts(positions, max(heads, default=1))
        self.parts = [self._part(rows, plan.wanted) for rows in cut]
        self._whole: TiledAttentionStep | None = None

    def _part(self, rows: slice, wanted: Sequence[int]) -> ChoosingPart:
        own = self._rows[rows]
        num_tiles = [row.num_tiles for row in own]
        listed = [min(n, most) for n, most in zip(num_tiles, wanted[rows], strict=True)]
        return ChoosingPart(rows, self._step(rows), TileShares(num_tiles, listed))

    def _step(self, rows: slice) -> TiledAttentionStep:
        keys = [row.num_keys for row in self._rows[rows]]
        return self._group.step(self._ranges[rows], [1] * len(keys), keys, True)

    def selects(self, layer: int) -> bool:
        """Returns whether the rows of a layer choose; those of others read everything."""
        return self._group.layout.bounds[layer] is not None

    def write(self, layer: int, k: Tensor, v: Tensor | None) -> None:
        """Writes k and v of the sequences whose rows choose."""
        assert self._own is not None, "no rows of k and v"
        self._group.append(self._own, layer, k, v)

    def list(self, layer: int, q: Tensor, number: int) -> Tensor:
        """Returns the lists of a part. q: of all querying rows."""
        part = self.parts[number]
        return self._op(layer).list_tiles(part.step, q[part.rows].float(), part.shares)

    def attend_listed(
        self, layer: int, q: Tensor, number: int, lists: Tensor, counts: Tensor
    ) -> Partial:
        """Attends with the rows of a part to the counts[row, head] best tiles of their lists."""
        part = self.parts[number]
        rows = q[part.rows].float()
        lse = torch.empty(rows.shape[:2], dtype=torch.float32)
        listed = TileList(part.shares, lists)
        return Partial(self._op(layer).attend_listed(part.step, rows, listed, counts, lse), lse)

    def attend_all(self, layer: int, q: Tensor) -> Partial:
        """Attends with the choosing rows to everything, in a layer that does not select."""
        if self._whole is None:
            self._whole = self._step(slice(0, self.num_rows))
        lse = torch.empty(self.num_rows, q.shape[1], dtype=torch.float32)
        rows = q[: self.num_rows].float()
        return Partial(self._group.ops[layer].attend(self._whole, rows, lse), lse)

    def attend_rest(self, layer: int, q: Tensor) -> Partial | None:
        """Attends with the other rows over the prefix; returns None if there are none."""
        if self._rest is None:
            return None
        return Partial(*self._group.query(self._rest, layer, q[self.num_rows :]))

    def _op(self, layer: int) -> TiledAttention:
        op = self._group.ops[layer]
        assert not isinstance(op, LatentAttention), "a layer whose rows choose"
        return op
