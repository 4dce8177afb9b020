"""Decode attention over a part of each row's tiles (kv_policy quest), beside reading everything.

The bytes of a case are the bounds of all tiles and the K/V of those that are read, and `of_all` is
its time as a share of reading everything. `scores` and `choice` are the kernels before attention.
Sequences have random keys, so what is chosen means nothing; what it costs does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu.attention import EIGHT_B, TINY, Heads
from bench.gpu.record import Figures, Record
from bench.gpu.timing import Timing, device, relative_error, time_works

_LAYERS = 8  # of a tile; they take turns
_FILL_ROWS = 32768
_TILE = 16
_SHARES = (0.06, 0.12, 0.25, 0.5)
_MANY = 50  # tiles, of which a share tells something


class Rows:
    """Decode rows over sequences of one length, in layers whose tiles have bounds."""

    def __init__(self, heads: Heads, batch: int, context: int, kind: str, layers: int) -> None:
        from ops.cuda.attention import HeadShape, KVTiles, StepArrays, layer_bytes
        from ops.cuda.selection import SelectingLayer, SelectionArrays
        from ops.kv_tiles import key_bounds_bytes

        self.heads, self.batch, self.context = heads, batch, context
        dtype = torch.int8 if kind == "int8" else torch.bfloat16
        group = None
        if kind == "int8":
            group = next(size for size in (64, 32, 16) if heads.dim % size == 0)
        self.kv_bytes = layer_bytes(heads.kv, heads.dim, dtype, group)
        self.bounds_bytes = key_bounds_bytes(heads.kv, heads.dim)
        size = self.kv_bytes + self.bounds_bytes
        self.per_row = -(-context // _TILE)
        tiles = self.per_row * batch
        self._memory = torch.zeros(tiles * layers * size, dtype=torch.uint8, device=device())
        base = self._memory.data_ptr()
        shape = HeadShape(heads.query, heads.kv, heads.dim)
        self.arrays = StepArrays(batch, batch, context, [shape], device())
        host = torch.zeros(self.arrays.num_words, dtype=torch.int32)
        starts = [i * self.per_row * _TILE for i in range(batch)]
        self.arrays.fill(host, starts, [1] * batch, [context] * batch, batch, batch, batch)
        self.arrays.upload(host)
        self.selection = SelectionArrays(self.arrays, heads.kv)
        kind_of: dict[str, Any] = {"device": device(), "dtype": torch.bfloat16}
        self.q = torch.randn(batch, heads.query, heads.dim, **kind_of)
        count = min(tiles * _TILE, _FILL_ROWS)
        self.k, self.v = (torch.randn(count, heads.kv, heads.dim, **kind_of) for _ in range(2))
        self.layers = [
            SelectingLayer(
                KVTiles(
                    heads.query, heads.kv, heads.dim, heads.dim**-0.5, None, dtype, group,
                    layers * size, number * size,
                ),
                base,
                self.selection,
            )
            for number in range(layers)
        ]  # fmt: skip
        for layer in self.layers:
            self._fill(layer.tiles, base, tiles * _TILE)

    def _fill(self, tiles: Any, base: int, num_tokens: int) -> None:
        """Stores keys that repeat, and their bounds."""
        from ops.triton_kernels.kv import append
        from ops.triton_kernels.selection.bounds import bound_keys

        count = len(self.k)
        for first in range(0, num_tokens, count):
            rows = torch.arange(first, min(first + count, num_tokens), device=device())
            append(tiles, base, self.k[: len(rows)], self.v[: len(rows)], rows)
            bound_keys(tiles, base, rows, len(rows))

    def read(self, budget: int) -> None:
        """From now on rows read so many tiles; 0: all."""
        host = torch.zeros(self.selection.num_words, dtype=torch.int32)
        lengths = np.full(self.batch, self.context, np.int64)
        self.selection.fill(host, lengths, np.full(self.batch, budget, np.int64))
        self.selection.upload(host)

    @cached_property
    def time_of_all(self) -> Timing:
        """The time of rows that read everything."""
        self.read(0)
        return time_works([partial(self.attend, i) for i in range(len(self.layers))])

    def attend(self, number: int = 0) -> Tensor:
        layer = self.layers[number]
        return layer.attend(self.arrays, self.q, self.batch, self.batch, False)

    def score(self, number: int = 0) -> Tensor:
        """Writes the orders of the tiles, from which `choose` takes those that are read."""
        from ops.triton_kernels.selection.scores import score_tiles

        layer, chosen = self.layers[number], self.selection
        orders = chosen.tables(self.heads.kv)
        score_tiles(
            self.q, layer.tiles, layer.base, self.arrays.starts, chosen.choices,
            chosen.num_choices, orders, self.arrays.num_programs,
        )  # fmt: skip
        return orders

    def choose(self) -> None:
        """Chooses among whatever numbers are there: it takes as long for any."""
        from ops.triton_kernels.selection.choice import choose_tiles

        orders = self.selection.tables(self.heads.kv)
        choose_tiles(self.selection.choices, self.selection.num_choices, orders, self.batch)


def run(record: Record) -> None:
    heads, layers = (TINY, 1) if record.is_dry else (EIGHT_B, _LAYERS)
    shapes = [("int8", 1, 32768), ("int8", 1, 131072), ("int8", 16, 32768), ("bf16", 1, 32768)]
    if record.is_dry:
        shapes = [("int8", 1, 40)]
    for kind, batch, context in shapes:
        name = f"{kind} {batch} x {context}"
        # made by the first case that has not been measured
        made = cache(partial(Rows, heads, batch, context, kind, layers))
        record.run(f"{name} all", partial(_all, made))
        for share in _SHARES if not record.is_dry else (0.5,):
            record.run(f"{name} {share:.0%}", partial(_part, made, share))
        record.run(f"{name} scores", partial(_scores, made))
        record.run(f"{name} choice", partial(_choice, made))
        made.cache_clear()


def smoke(record: Record) -> None:
    """Checks what rows read, and their results, against fp64."""
    shapes = [(Heads(8, 2, 64), 3, 700), (Heads(2, 2, 80), 2, 161), (EIGHT_B, 2, 5000)]
    if record.is_dry:
        shapes = [(TINY, 1, 60)]
    for heads, batch, context in shapes:
        for kind in ("int8", "bf16"):
            name = f"{kind} {heads.query}/{heads.kv} x {heads.dim}, {batch} x {context}"
            record.run(name, partial(_check, heads, batch, context, kind))


def _all(made: Callable[[], Rows]) -> Figures:
    rows = made()
    return rows.time_of_all.figures(bytes=rows.batch * rows.per_row * rows.kv_bytes)


def _part(made: Callable[[], Rows], share: float) -> Figures:
    rows = made()
    of_all, budget = rows.time_of_all.seconds, max(1, int(rows.per_row * share))
    rows.read(budget)
    timing = time_works([partial(rows.attend, i) for i in range(len(rows.layers))])
    moved = rows.batch * (rows.per_row * rows.bounds_bytes + budget * rows.kv_bytes)
    return timing.figures(bytes=moved, of_all=timing.seconds / of_all, tiles=budget)


def _scores(made: Callable[[], Rows]) -> Figures:
    rows = made()
    rows.read(max(1, rows.per_row // 8))
    timing = time_works([partial(rows.score, i) for i in range(len(rows.layers))])
    return timing.figures(bytes=rows.batch * rows.per_row * rows.bounds_bytes)


def _choice(made: Callable[[], Rows]) -> Figures:
    rows = made()
    rows.read(max(1, rows.per_row // 8))
    timing = time_works([rows.choose])
    return timing.figures(bytes=rows.batch * rows.per_row * rows.heads.kv * 4)


def _check(heads: Heads, batch: int, context: int, kind: str) -> Figures:
    rows = Rows(heads, batch, context, kind, 1)
    budget = max(2, rows.per_row // 4)
    rows.read(budget)
    out = rows.attend()
    tables = rows.selection.tables(heads.kv)[:batch, :, :budget].long()
    assert bool((tables.diff(dim=2) > 0).all()), "tiles are not in the order of their positions"
    assert bool((tables[..., -1] == rows.per_row - 1).all()), "a row's own tile is not the last"
    expected, num_same = torch.empty_like(out, dtype=torch.float64), 0
    shortfall = 0.0
    size = rows.per_row * _TILE
    for row in range(batch):
        at = torch.arange(row * size, row * size + context, device=device()) % len(rows.k)
        k, v = rows.k[at].double(), rows.v[at].double()
        for head in range(heads.kv):
            tiles = tables[row, head]
            own = slice(head * (heads.query // heads.kv), (head + 1) * (heads.query // heads.kv))
            q = rows.q[row, own].double()
            tokens = (tiles[:, None] * _TILE + torch.arange(_TILE, device=device())).flatten()
            tokens = tokens[tokens < context]
            scores = q @ k[tokens, head].t() * heads.dim**-0.5
            expected[row, own] = scores.softmax(-1) @ v[tokens, head]
            num_best, worst = _compare(q, k[:, head], tiles[:-1])
            num_same, shortfall = num_same + num_best, max(shortfall, worst)
    error = relative_error(out, expected)
    assert error <= (0.03 if kind == "int8" else 0.01), f"error {error:.4g}"
    assert shortfall <= 1, f"a tile is {shortfall:.2g} roundings worse than those of exact bounds"
    num_chosen = batch * heads.kv * (budget - 1)
    best_share = num_same / num_chosen
    # of a few random tiles, those of exact bounds may be others within roundings
    assert num_chosen < _MANY or best_share > 0.85, f"{best_share:.0%} are those of exact bounds"
    return {"error": error, "best_share": best_share}


def _compare(q: Tensor, k: Tensor, chosen: Tensor) -> tuple[int, float]:
    """Returns how many of the chosen tiles are among as many by exact bounds, and by how much the
    worst of them is below the worst of those, in roundings of bounds. q: [heads, D]."""
    keys = k[: (len(k) - 1) // _TILE * _TILE].view(-1, _TILE, k.shape[1])
    above, below = q.clamp(min=0).sum(0), q.clamp(max=0).sum(0)
    scores = keys.amax(1) @ above + keys.amin(1) @ below
    best = scores.topk(len(chosen))
    # bounds are rounded by a step of 1/127 of the largest one, and int8 keys by half a step before
    rounding = 2.1 * float(keys.abs().max() / 127 * (above - below).sum())
    worst = float(best.values.min() - scores[chosen].min())
    return int(torch.isin(chosen, best.indices).sum()), worst / rounding
