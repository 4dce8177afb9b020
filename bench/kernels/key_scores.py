"""What policies that drop K/V cost (kv_policy), on the native kernels: python -m
bench.kernels.key_scores.

One sequence of a 1B shape over int8 K/V, with its layers apart in memory as in an engine. A row's
scores are what h2o and keyformer add to each decoded token, those of 32 rows are what snapkv and
pyramid add to a prompt, once. To drop is to choose what stays, per layer and K/V head, and to move
it: once for a prompt, and every 64 tokens of an answer for h2o, keyformer and window.

The second table is of a prompt's last rows, as they are computed in one step: their attention, and
their scores in blocks and in a call for each row, by the type of K/V.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from memory.attention.kv_layout import KVCache, KVLayout
from memory.attention.local import LocalAttention
from memory.attention.seam import AttentionLayer, AttentionStep, PlannedAttention
from memory.attention.tiled import TiledKVLayout, TiledLocalAttention, append, tiled_ops
from memory.attention.token_stores import PlainTokens, ScoredRows, TiledTokens, TokenStore
from memory.policies.eviction import EVICTION_POLICIES, OBSERVED_ROWS
from ops.cpu.backend import CpuBackend
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


def _prompt_memory(
    kv_dtype: str, context: int, num_layers: int
) -> tuple[PlannedAttention, TokenStore, object]:
    """Returns attention over a sequence of `context` tokens, what scores it, and their memory."""
    layers = [_LAYER] * num_layers
    if kv_dtype == "int8":
        layout = TiledKVLayout(layers, "int8", 64)
        num_bytes = -(-context // layout.tile_tokens) * layout.tile_bytes
        memory = torch.zeros(num_bytes + 64, dtype=torch.uint8)
        address = memory.data_ptr() + -memory.data_ptr() % 64
        step = TiledAttentionStep(address, layout.tile_bytes, [0], [context], [context])
        for op in tiled_ops(layout):
            k, v = torch.randn(2, context, _LAYER.num_kv_heads, _LAYER.head_dim)
            append(op, step, k, v, None)
        return TiledLocalAttention(layout, address), TiledTokens(layout, address), memory
    plain = KVLayout(layers, getattr(torch, kv_dtype))
    memory = torch.randn(context * plain.token_elements).to(plain.dtype)
    cache = KVCache(plain, memory.data_ptr(), memory.numel() * memory.element_size())
    return LocalAttention(layers, cache, CpuBackend()), PlainTokens(cache), memory


def measure_prompt(
    kv_dtype: str, context: int, num_rows: int, num_layers: int, repeat: int
) -> list[float]:
    """Returns milliseconds in all layers of a prompt's last rows: of their attention, of their
    scores in one call, and in a call for each row."""
    attention, tokens, memory = _prompt_memory(kv_dtype, context, num_layers)
    heads, dim = _LAYER.num_kv_heads, _LAYER.head_dim
    q = torch.randn(num_rows, _LAYER.num_heads, dim)
    sums = np.zeros((num_layers, heads, -(-context // 16) * 16), dtype=np.float32)
    plan = attention.plan(AttentionStep(0, [0], [num_rows], [context]))

    def attend() -> None:
        for layer in range(num_layers):
            plan.finish(plan.begin(layer, q), None, None, None)

    def score(first: int, end: int) -> None:
        kv_len = context - num_rows + end
        scorer = tokens.scorer([ScoredRows(0, first, end, kv_len, sums, None, None)])
        for layer in range(num_layers):
            scorer.add(layer, q)

    def score_each() -> None:
        for row in range(num_rows):
            score(row, row + 1)

    times = [
        _best_ms(attend, repeat),
        _best_ms(lambda: score(0, num_rows), repeat),
        _best_ms(score_each, repeat),
    ]
    del memory
    return times


def _print_prompts(contexts: Sequence[int], num_rows: int, num_layers: int, repeat: int) -> None:
    title = f"Milliseconds of the last {num_rows} rows of a prompt in {num_layers} layers"
    table = Table(title=title)
    names = ("K/V", "context", "attend", "score", "of that", "row by row", "times")
    for name in names:
        table.add_column(name, justify="left" if name == "K/V" else "right")
    for kv_dtype in ("int8", "bfloat16", "float32"):
        for context in contexts:
            rows = min(num_rows, context)
            attend, block, single = measure_prompt(kv_dtype, context, rows, num_layers, repeat)
            shown = [f"{attend:.1f}", f"{block:.1f}", f"{block / attend:.2f}"]
            table.add_row(
                kv_dtype, f"{context:,}", *shown, f"{single:.1f}", f"{single / block:.1f}"
            )
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--rows", type=int, default=64, help="of a prompt's step")
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
    _print_prompts(given.contexts, given.rows, given.layers, max(1, given.repeat // 10))


if __name__ == "__main__":
    main()
