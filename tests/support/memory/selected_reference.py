"""The seam over int8 K/V of one sequence whose decoded rows read a part of it, by slow torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memory.attention.seam import AttentionLayer, Finished, Rotation, Ticket
from memory.policies.setting import KVPolicy
from ops.reference import ReferenceBackend, attention_fp64, round_kv
from quant.kv import TILE_TOKENS, fitting_group
from tests.support.memory.selected_kv import chosen_tiles, scores_by, selected_attention


def rounded_bounds(k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the maximum and the minimum of each tile of stored keys k: [T, Hk, D], fp64 [tiles,
    Hk, D], rounded outwards to 127ths of the largest magnitude, whose scale is fp16."""
    count = len(k) // TILE_TOKENS
    tiles = k[: count * TILE_TOKENS].double().reshape(count, TILE_TOKENS, *k.shape[1:])
    most, least = tiles.amax(1), tiles.amin(1)
    exact = torch.maximum(most.abs(), least.abs()).amax(-1, keepdim=True) / 127
    half = exact.half()
    scale = torch.where(
        half.double() < exact, torch.nextafter(half, torch.full_like(half, torch.inf)), half
    ).double()
    steps = torch.where(scale > 0, scale, 1.0)
    return (most / steps).ceil() * scale, (least / steps).floor() * scale


class SelectedReference:
    """Attention of one sequence: `plan` says how many rows are computed and whether they are
    decoded. Implements Attention."""

    def __init__(self, layers: Sequence[AttentionLayer], policy: KVPolicy | None) -> None:
        """policy: None reads everything."""
        self._layers, self._policy, self._backend = layers, policy, ReferenceBackend()
        empty = [torch.zeros(0, x.num_kv_heads, x.head_dim, dtype=torch.float64) for x in layers]
        self._k, self._v = list(empty), list(empty)
        self.is_decoded = False

    def begin(self, layer: int, q: Tensor) -> Ticket:
        return Ticket(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Finished:
        number, layer, q = ticket.layer, self._layers[ticket.layer], ticket.q
        assert k is not None and v is not None
        if rotation is not None:
            k = self._backend.rotary(k, *rotation)
        group = fitting_group(layer.head_dim, 64)
        assert group is not None
        self._k[number] = torch.cat((self._k[number], round_kv(k.float(), group).double()))
        self._v[number] = torch.cat((self._v[number], round_kv(v.float(), group).double()))
        k, v = self._k[number], self._v[number]
        if not self.is_decoded or self._policy is None:
            return Finished(attention_fp64(q, k, v, layer.scale).out.to(q.dtype))
        rows = []
        for i, row in enumerate(q):
            length = len(k) - len(q) + i + 1
            rows.append(self._decode(row, k[:length], v[:length], layer))
        return Finished(torch.stack(rows).to(q.dtype))

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        assert self._policy is not None
        own = (len(k) - 1) // TILE_TOKENS
        budget = -(-self._policy.budget(len(k)) // TILE_TOKENS)
        if budget > own:
            return attention_fp64(q[None], k, v, layer.scale).out[0]
        most, least = (x[:own] for x in rounded_bounds(k))
        scores = scores_by((most, least), q.float(), 8, layer.num_kv_heads)
        chosen, _ = chosen_tiles(scores, budget - 1)
        read = torch.cat((chosen, torch.ones(len(chosen), 1, dtype=torch.bool)), 1)
        return selected_attention(q, k, v, read, layer.scale)
