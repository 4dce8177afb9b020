"""What policies that drop K/V cost (kv_policy), on the native kernels: python -m
bench.kernels.key_scores.

One sequence of a 1B shape over int8 K/V, with its layers apart in memory as in an engine. A row's
scores are what h2o and keyformer add to each decoded token, those of 32 rows are what snapkv and
pyramid add to a prompt, once. To drop is to choose what stays, per layer and K/V head, and to move
it: once for a prompt, and every 64 tokens of an answer for h2o, keyformer and window.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from memory.attention.seam import AttentionLayer, AttentionStep
from memory.attention.tiled import TiledKVLayout, TiledLocalAttention, append, tiled_ops
from memory.attention.token_stores import ScoredRows, TiledTokens
from memory.policies.eviction import EVICTION_POLICIES, OBSERVED_ROWS
from ops.cpu.native_tiled_attention import TiledAttentionStep

_LAYER = AttentionLayer(num_heads=32, num_kv_heads=8, head_dim=64, scale=0.125)
_SHARE = 0.25


def _best_ms(run: Callable[[], object], repeat: int) -> float:
    times: list[float] = []
    for _ in range(repeat):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times) * 1e3


def measure(context: int, num_layers: int, repeat: int) -> list[float]:
    """Returns milliseconds in all layers: of a decoded row's attention, its scores, those of the
    observed rows, choosing and moving."""
    layout = TiledKVLayout([_LAYER] * num_layers, "int8", 64)
    num_bytes = -(-context // layout.tile_tokens) * layout.tile_bytes
    memory = torch.zeros(num_bytes + 64, dtype=torch.uint8)
    address = memory.data_ptr() + -memory.data_ptr() % 64
    attention, tokens = TiledLocalAttention(layout, address), TiledTokens(layout, address)
    heads, dim = _LAYER.num_kv_heads, _LAYER.head_dim
    step = TiledAttentionStep(address, layout.tile_bytes, [0], [context], [context])
    for op in tiled_ops(layout):
        k, v = torch.randn(2, context, heads, dim)
        append(op, step, k, v, None)
    row = torch.randn(1, _LAYER.num_heads, dim)
    rows = torch.randn(OBSERVED_ROWS, _LAYER.num_heads, dim)
    sums = np.zeros((num_layers, heads, -(-context // 16) * 16), dtype=np.float32)
    plan = attention.plan(AttentionStep(1, [0], [1], [context]))

    def attend() -> None:
        for layer in range(num_layers):
            plan.finish(plan.begin(layer, row), None, None, None)

    def score(q: torch.Tensor) -> None:
        scorer = tokens.scorer([ScoredRows(0, 0, len(q), context, sums, None, None)])
        for layer in range(num_layers):
            scorer.add(layer, q)

    budget, keep = int(context * _SHARE), EVICTION_POLICIES["h2o"].keep
    chosen = [keep(sums[layer, :, :context], budget) for layer in range(num_layers)]
    return [
        _best_ms(attend, repeat),
        _best_ms(lambda: score(row), repeat),
        _best_ms(lambda: score(rows), max(1, repeat // 10)),
        _best_ms(lambda: [keep(each[:, :context], budget) for each in sums], max(1, repeat // 10)),
        _best_ms(lambda: tokens.take(0, chosen), max(1, repeat // 10)),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=30)
    given = parser.parse_args(arguments)
    title = f"Milliseconds in {given.layers} layers of a 1B shape, int8 K/V"
    table = Table(title=title, caption=f"choose, move: h2o, {_SHARE:.0%} stay")
    names = ("context", "attend a row", "score it", "of that", "score 32 rows", "choose", "move")
    for name in names:
        table.add_column(name, justify="right")
    for context in given.contexts:
        attend, one, many, choose, move = measure(context, given.layers, given.repeat)
        shown = [f"{attend:.2f}", f"{one:.2f}", f"{one / attend:.2f}"]
        table.add_row(f"{context:,}", *shown, f"{many:.1f}", f"{choose:.1f}", f"{move:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
