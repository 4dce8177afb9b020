"""What selected K/V saves in decode attention: python -m bench.kernels.selection.

The shape is that of a model of 1B: 16 layers of 32 query heads on 8 K/V heads of 64. One sequence
decodes; its K/V lies in pages of a memfd as an engine's does, and is read by all layers in turn, so
that no cache holds it. Times are medians of one token's attention in all layers. Keys are those of
topics, each of which lasts a while, because the choice among equal tiles takes other times than
that among different ones. "read" is what a token reads, the bounds included, over the time, as a
share of the memory's read bandwidth between the measurements.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Column, Table

from memory.attention.seam import AttentionLayer
from memory.attention.tiled import TILED_TYPES, TiledKVLayout, tiled_ops
from memory.pages.linux_vmm import LinuxMemory
from memory.policies.selection import Selection
from memory.policies.setting import KVPolicy
from ops.cpu import native_library
from ops.cpu.native_ceilings import Ceilings
from ops.cpu.native_tiled_attention import TiledAttention, TiledAttentionStep
from quant.kv import TILE_TOKENS, bounds_bytes

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 64
_SHARES = (0.06, 0.12, 0.25, 0.5)
_FILLED = 4096  # tokens that are written at once
_TOPIC = 48
_PAGE = 4096
_PROBE_BYTES = 256 << 20


class SelectedKV:
    """K/V of one sequence in all layers of a model, and attention of its last token over it."""

    def __init__(self, kv_dtype: str, num_tokens: int, num_layers: int) -> None:
        layer = AttentionLayer(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
        self.layout = TiledKVLayout([layer] * num_layers, kv_dtype, 64, has_bounds=True)
        self.layout.pad(-(-self.layout.tile_bytes // _PAGE) * _PAGE)
        num_tiles = -(-num_tokens // TILE_TOKENS)
        self._memory = LinuxMemory(self.layout.tile_bytes, num_tiles)
        self._address = self._memory.reserve(num_tiles * self.layout.tile_bytes)
        self._memory.prepare(0, num_tiles)
        self._memory.map(0, 0, num_tiles)
        self.num_tokens, self.num_tiles = num_tokens, num_tiles
        self.ops = [op for op in tiled_ops(self.layout) if isinstance(op, TiledAttention)]
        self.bounds_bytes = bounds_bytes(KV_HEADS, HEAD_DIM) * num_layers
        self.tile_bytes = sum(form.tile_bytes for form in self.layout.formats)
        self.q = torch.randn(1, HEADS, HEAD_DIM)
        self._fill()

    def _step(self, num_rows: int, kv_len: int) -> TiledAttentionStep:
        return TiledAttentionStep(self._address, self.layout.tile_bytes, [0], [num_rows], [kv_len])

    def _fill(self) -> None:
        for first in range(0, self.num_tokens, _FILLED):
            rows = min(_FILLED, self.num_tokens - first)
            step = self._step(rows, first + rows)
            topics = torch.randn(-(-rows // _TOPIC), KV_HEADS, HEAD_DIM)
            k = topics.repeat_interleave(_TOPIC, 0)[:rows] + torch.randn(rows, KV_HEADS, HEAD_DIM)
            for op in self.ops:
                op.append(step, k, k.roll(1, 0), None)

    def step(self, share: float | None) -> tuple[TiledAttentionStep, int]:
        """Returns a step that reads this share of the K/V, all if it is None, and its bytes."""
        step = self._step(1, self.num_tokens)
        if share is None:
            return step, self.num_tiles * self.tile_bytes
        selection = Selection(KVPolicy("quest", share=share))
        budgets = selection.budgets([1], [self.num_tokens], TILE_TOKENS)
        step.select(1, budgets)
        return step, budgets[0] * self.tile_bytes + self.num_tiles * self.bounds_bytes

    def attend(self, step: TiledAttentionStep) -> float:
        """Returns the seconds of a token's attention in all layers."""
        began = time.perf_counter()
        for op in self.ops:
            op.attend(step, self.q)
        return time.perf_counter() - began

    def close(self) -> None:
        self._memory.close()


def read_bandwidth(buffer: torch.Tensor) -> float:
    began = time.perf_counter()
    Ceilings.read(buffer)
    return buffer.numel() / (time.perf_counter() - began)


def measure(
    kv: SelectedKV, shares: Sequence[float | None], rounds: int
) -> tuple[list[float], list[int], float]:
    """Returns the median time for each share, the bytes that it reads, and the bandwidth. The
    shares take turns, so that what else the machine does meets them all."""
    steps = [kv.step(share) for share in shares]
    buffer = torch.ones(_PROBE_BYTES, dtype=torch.uint8)
    times: list[list[float]] = [[] for _ in steps]
    bandwidths: list[float] = []
    for i in range(rounds + 1):
        for place, (step, _) in enumerate(steps):
            seconds = kv.attend(step)
            if i:
                times[place].append(seconds)
        bandwidths.append(read_bandwidth(buffer))
    medians = [statistics.median(found) for found in times]
    return medians, [size for _, size in steps], statistics.median(bandwidths)


def _table(kv: SelectedKV, rounds: int) -> Table:
    shares = [None, *_SHARES]
    seconds, sizes, bandwidth = measure(kv, shares, rounds)
    table = Table(
        "budget",
        *[Column(name, justify="right") for name in ("ms", "of all", "MB", "of all", "read")],
        title=f"{kv.num_tokens:,} tokens, memory {bandwidth / 1e9:.1f} GB/s",
    )
    for share, spent, size in zip(shares, seconds, sizes, strict=True):
        table.add_row(
            "all" if share is None else f"{100 * share:g} %",
            f"{1e3 * spent:.2f}",
            f"{spent / seconds[0]:.3f}",
            f"{size / 1e6:.0f}",
            f"{size / sizes[0]:.3f}",
            f"{size / spent / bandwidth:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--kv-dtype", choices=TILED_TYPES, nargs="+", default=["int8"])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    console = Console()
    threads = native_library.num_threads()
    for kv_dtype in options.kv_dtype:
        console.print(f"{kv_dtype} K/V, {options.layers} layers, {threads} threads")
        for context in options.context:
            kv = SelectedKV(kv_dtype, context, options.layers)
            console.print(_table(kv, options.rounds))
            kv.close()


if __name__ == "__main__":
    main()
