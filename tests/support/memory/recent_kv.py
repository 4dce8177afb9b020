"""int4 K/V with recent tokens in int8 on real kernels, and the expected attention over it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memory.attention.seam import AttentionLayer, Finished, Rotation, Ticket
from ops.cpu.native_tiled_attention import Int4Attention, TiledAttentionStep
from ops.reference import ReferenceBackend, attention_fp64, round_kv, round_kv4
from quant.kv import RECENT_BLOCK, Int8KVFormat, fitting_group, fitting_int4_group
from tests.support.memory.int8_kv import Cache, rounded_query4


class RecentCache(Cache):
    """A Cache in int4 with a store of recent tokens, which has the layer after a tile's first
    bytes, too."""

    def __init__(self, *, heads, kv_heads, dim, group=64, tokens, sequences=1, **switches):
        group8 = fitting_group(dim, group)
        form = Int8KVFormat(kv_heads, dim, group8)
        shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "group": group}
        place = (form.tile_bytes, group8)
        self.recent = Cache(**shape, tokens=tokens, sequences=sequences)
        super().__init__(
            **shape, tokens=tokens, sequences=sequences, bits=4, recent=place, **switches
        )
        self.group8 = group8
        assert isinstance(self.op, Int4Attention)

    def step(self, sequences, num_rows, kv_lens, prefix_only=False) -> TiledAttentionStep:
        step = super().step(sequences, num_rows, kv_lens, prefix_only)
        if not prefix_only:
            recent = self.recent
            starts = [i * recent.range_bytes for i in sequences]
            step.add_recent(recent.address, recent.tile_bytes, starts)
        return step


def recent_attention_fp64(
    q: Tensor, rounded_q: Tensor, k: Tensor, v: Tensor, groups: tuple[int, int], scale, **options
) -> tuple[Tensor, Tensor]:
    """Returns attention and log-sum-exp of rows at the end of k and v, each of which reads its own
    block in int8 and earlier keys in int4. rounded_q: q as int4 kernels round it. groups: of int4
    and of int8."""
    length, first = len(k), len(k) - len(q)
    zeros = torch.zeros_like(k, dtype=torch.float64)
    old_k = torch.cat((round_kv4(k.float(), groups[0]).double(), zeros), -1)
    new_k = torch.cat((zeros, round_kv(k.double(), groups[1])), -1)
    old_v, new_v = round_kv4(v.float(), groups[0]).double(), round_kv(v.double(), groups[1])
    both = torch.cat((rounded_q.double(), q.double()), -1)
    outs, lses = [], []
    for block in range(first // RECENT_BLOCK * RECENT_BLOCK, length, RECENT_BLOCK):
        begin, end = max(first, block), min(length, block + RECENT_BLOCK)
        part = attention_fp64(
            both[begin - first : end - first],
            torch.cat((old_k[:block], new_k[block:end])),
            torch.cat((old_v[:block], new_v[block:end])),
            scale,
            **options,
        )
        outs.append(part.out)
        lses.append(part.lse)
    return torch.cat(outs), torch.cat(lses)


class RecentReference:
    """Attention of one sequence, whose tokens are all in one step, as int4 K/V with recent tokens
    in int8 has it; without has_recent all keys are int4. Implements Attention."""

    def __init__(self, layers: Sequence[AttentionLayer], *, has_recent: bool) -> None:
        self._layers, self._has_recent, self._backend = layers, has_recent, ReferenceBackend()

    def begin(self, layer: int, q: Tensor) -> Ticket:
        return Ticket(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Finished:
        layer, q = self._layers[ticket.layer], ticket.q
        assert k is not None and v is not None
        if rotation is not None:
            k = self._backend.rotary(k, *rotation)
        old, new = fitting_int4_group(layer.head_dim, 64), fitting_group(layer.head_dim, 64)
        rounded, options = rounded_query4(q), {"window": layer.window, "sinks": layer.sinks}
        if self._has_recent:
            out, _ = recent_attention_fp64(q, rounded, k, v, (old, new), layer.scale, **options)
        else:
            k, v = (round_kv4(x.float(), old) for x in (k, v))
            out, _ = attention_fp64(rounded, k, v, layer.scale, **options)
        return Finished(out.to(q.dtype))
