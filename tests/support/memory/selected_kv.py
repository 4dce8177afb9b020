"""What decoded rows should read of K/V that is selected, computed slowly from the bounds that the
kernels stored."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.backend import Partial
from ops.reference import attention_fp64, hadamard
from quant.kv import TILE_TOKENS
from tests.support.memory.int8_kv import Cache

CLEAR = 1e-5  # relative distance of scores whose order rounding cannot change


def topic_keys(length: int, heads: int, dim: int) -> Tensor:
    """Returns keys that resemble their neighbours, so that tiles differ, with one large
    dimension."""
    topics = torch.randn(-(-length // 24), heads, dim).repeat_interleave(24, 0)[:length]
    keys = topics + 0.5 * torch.randn(length, heads, dim)
    keys[..., dim // 3] *= 6
    return keys


def tiles_of(cache: Cache, num_tiles: int, sequence: int = 0) -> Tensor:
    """Returns the memory of the first num_tiles tiles of a sequence, uint8 [tiles, bytes]."""
    first = cache.address - cache.memory.data_ptr() + sequence * cache.range_bytes
    tiles = cache.memory[first : first + num_tiles * cache.tile_bytes]
    return tiles.view(num_tiles, cache.tile_bytes)


def bounds_of(cache: Cache, num_tiles: int, sequence: int = 0) -> tuple[Tensor, Tensor]:
    """Returns the stored maximum and minimum of each tile, head and dimension, fp64
    [tiles, Hk, D]."""
    heads, dim = cache.kv_heads, cache.dim
    head_bytes = -(-2 * dim // 64) * 64
    parts = tiles_of(cache, num_tiles, sequence)[:, cache.bounds_offset :]
    if cache.bounds_range_bytes:
        first = cache.bounds_address - cache.bounds_memory.data_ptr()
        first += sequence * cache.bounds_range_bytes
        beside = cache.bounds_memory[first : first + num_tiles * cache.bounds_tile_bytes]
        parts = beside.reshape(num_tiles, cache.bounds_tile_bytes)
    bytes_ = parts[:, : heads * head_bytes].reshape(num_tiles, heads, head_bytes)
    sides = bytes_.contiguous().view(torch.int8)[..., : 2 * dim].double()
    halves = parts[:, heads * head_bytes :][:, : 2 * heads].contiguous().view(torch.float16)
    scales = halves.double().reshape(num_tiles, heads, 1)
    return sides[..., :dim] * scales, -sides[..., dim:] * scales


def scores_by(bounds: tuple[Tensor, Tensor], q: Tensor, bits: int, kv_heads: int) -> Tensor:
    """Returns the scores of tiles with these bounds, fp64 [tiles, Hk, D], for one row q: [H, D],
    fp64 [Hk, tiles]. What multiplies the bounds is rounded to 255ths of its largest value; q is
    transformed for int4."""
    most, least = (x.permute(1, 0, 2) for x in bounds)
    turned = (hadamard(q) if bits == 4 else q).reshape(kv_heads, -1, q.shape[-1])
    sides = torch.stack((turned.clamp(min=0).sum(1), (-turned).clamp(min=0).sum(1)))
    top = sides.amax((0, 2))[:, None]
    step = torch.where(top > 0, torch.tensor(255.0) / top, torch.tensor(0.0))
    above, below = (sides * step).round().double() * (top / 255).double()
    return (above[:, None] * most - below[:, None] * least).sum(-1)


def scores_of(cache: Cache, q: Tensor, num_tiles: int, sequence: int = 0) -> Tensor:
    """Returns the scores of the first num_tiles tiles for one row q: [H, D], fp64 [Hk, tiles]."""
    bounds = bounds_of(cache, num_tiles, sequence)
    return scores_by(bounds, q, cache.op.bits, cache.kv_heads)


def chosen_tiles(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns which tiles are chosen, bool [Hk, tiles], and of which heads the choice is clear."""
    order = scores.sort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, order.indices[:, :count], value=True)
    if count in (0, scores.shape[1]):
        return chosen, torch.ones(len(scores), dtype=torch.bool)
    gap = order.values[:, count - 1] - order.values[:, count]
    return chosen, gap > CLEAR * order.values.abs().amax(-1)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, read: Tensor, scale: float, **options
) -> Tensor:
    """Returns the attention of one row q: [H, D] over keys k, v: [T, Hk, D] of those tiles that are
    `read`: bool [Hk, tiles], fp64 [H, D]."""
    is_seen = read.repeat_interleave(TILE_TOKENS, 1)[:, : len(k)]
    return attention_over(q, k, v, is_seen, scale, **options).out


def attention_over(
    q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor, scale: float, **options
) -> Partial:
    """Returns the attention of one row q: [H, D] over keys k, v: [T, Hk, D] that `is_seen`: bool
    [Hk, T], in fp64."""
    heads, kv_heads = len(q), k.shape[1]
    per_kv, sinks = heads // kv_heads, options.pop("sinks", None)
    parts = []
    for h in range(kv_heads):
        keys = is_seen[h]
        own = slice(h * per_kv, (h + 1) * per_kv)
        more = {} if sinks is None else {"sinks": sinks[own]}
        parts.append(
            attention_fp64(
                q[None, own], k[keys, h : h + 1], v[keys, h : h + 1], scale,
                first_position=len(k), **options, **more,
            )
        )  # fmt: skip
    return Partial(torch.cat([x.out[0] for x in parts]), torch.cat([x.lse[0] for x in parts]))
