"""What selected K/V saves in decode attention: python -m bench.kernels.selection.

The shape is that of a model of 1B: 16 layers of 32 query heads on 8 K/V heads of 64. One sequence
decodes; its K/V lies in pages of a memfd as an engine's does, and is read by all layers in turn, so
that no cache holds it. Times are medians of one token's attention in all layers. "read" is what a
token reads, the bounds included, over the time, as a share of the memory's read bandwidth between
the measurements.

The bounds lie in the tiles of K/V, or with --bounds beside in a store of their own, a row of tiles
that have those of all layers.

With --model, whole steps of that model are measured, too, whose K/V is filled likewise.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Column, Table

from bench.common.checkpoints import model_directory
from bench.common.topic_keys import topic_keys
from memory.attention.seam import Attention, AttentionLayer, AttentionStep
from memory.attention.tiled import TILED_TYPES, TiledKVLayout, TiledLocalPlan, tiled_ops
from memory.pages.linux_vmm import LinuxMemory
from memory.policies.selection import Selection
from memory.policies.setting import OFF, KVPolicy
from ops.cpu import native_library
from ops.cpu.native_ceilings import Ceilings
from ops.cpu.native_tiled_attention import TiledAttention, TiledAttentionStep
from quant.kv import TILE_TOKENS, bounds_bytes
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.loading.runtime import load_runtime

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 64
_SHARES = (0.06, 0.12, 0.25, 0.5)
_FILLED = 4096  # tokens that are written at once
PLACES = ("tile", "beside")
_PAGE = 4096
_PROBE_BYTES = 256 << 20


class SelectedKV:
    """K/V of one sequence in all layers of a model, and attention of its last token over it."""

    def __init__(
        self, kv_dtype: str, num_tokens: int, num_layers: int, place: str = PLACES[0]
    ) -> None:
        """place: of the bounds, one of PLACES."""
        layer = AttentionLayer(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
        is_beside = place == "beside"
        self.layout = TiledKVLayout([layer] * num_layers, kv_dtype, 64, has_bounds=not is_beside)
        self.layout.pad(_pages_of(self.layout.tile_bytes))
        num_tiles = -(-num_tokens // TILE_TOKENS)
        self._memory, self._address = _mapped(self.layout.tile_bytes, num_tiles)
        self._bounds: tuple[LinuxMemory, int] | None = None
        if is_beside:
            size = bounds_bytes(KV_HEADS, HEAD_DIM)
            self.layout.bounds = [i * size for i in range(num_layers)]
            self._bounds = _mapped(_pages_of(num_layers * size), num_tiles)
        self.num_tokens, self.num_tiles = num_tokens, num_tiles
        self.ops = [op for op in tiled_ops(self.layout) if isinstance(op, TiledAttention)]
        self.bounds_bytes = bounds_bytes(KV_HEADS, HEAD_DIM) * num_layers
        self.tile_bytes = sum(form.tile_bytes for form in self.layout.formats)
        self.q = torch.randn(1, HEADS, HEAD_DIM)
        self._fill()

    def _step(self, num_rows: int, kv_len: int) -> TiledAttentionStep:
        tile_bytes = self.layout.tile_bytes
        step = TiledAttentionStep(self._address, tile_bytes, [0], [num_rows], [kv_len])
        if self._bounds is not None:
            memory, address = self._bounds
            step.add_bounds(address, memory.page_bytes, [0])
        return step

    def _fill(self) -> None:
        for first in range(0, self.num_tokens, _FILLED):
            rows = min(_FILLED, self.num_tokens - first)
            step = self._step(rows, first + rows)
            k = topic_keys(rows, KV_HEADS, HEAD_DIM)
            for op in self.ops:
                op.append(step, k, k.roll(1, 0), None)

    def step(self, share: float | None) -> tuple[TiledAttentionStep, int]:
        """Returns a step that reads this share of the K/V, all if it is None, and its bytes."""
        step = self._step(1, self.num_tokens)
        if share is None:
            return step, self.num_tiles * self.tile_bytes
        selection = Selection(KVPolicy("quest", share=share))
        counts, budgets = selection.plan([1], [self.num_tokens], [0], TILE_TOKENS)
        step.select(counts, budgets)
        return step, budgets[0] * self.tile_bytes + self.num_tiles * self.bounds_bytes

    def attend(self, step: TiledAttentionStep) -> float:
        """Returns the seconds of a token's attention in all layers."""
        began = time.perf_counter()
        for op in self.ops:
            op.attend(step, self.q)
        return time.perf_counter() - began

    def close(self) -> None:
        self._memory.close()
        if self._bounds is not None:
            self._bounds[0].close()


def _pages_of(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def _mapped(page_bytes: int, num_pages: int) -> tuple[LinuxMemory, int]:
    """Returns memory of so many pages, and the address of the first one."""
    memory = LinuxMemory(page_bytes, num_pages)
    address = memory.reserve(num_pages * page_bytes)
    memory.prepare(0, num_pages)
    memory.map(0, 0, num_pages)
    return memory, address


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


def _table(kv: SelectedKV, title: str, rounds: int) -> Table:
    shares = [None, *_SHARES]
    seconds, sizes, bandwidth = measure(kv, shares, rounds)
    table = Table(
        "budget",
        *[Column(name, justify="right") for name in ("ms", "of all", "MB", "of all", "read")],
        title=f"{kv.num_tokens:,} tokens, {title}, memory {bandwidth / 1e9:.1f} GB/s",
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


class SelectingModel:
    """A model that decodes one sequence after num_tokens tokens of random K/V."""

    def __init__(self, model: str, num_tokens: int, kv_policy: str) -> None:
        config = EngineConfig(
            model=model_directory(model) or DEFAULT_MODEL,
            dtype="int8",
            max_model_len=num_tokens + 64,
            max_num_seqs=1,
            kv_policy=kv_policy,
        )
        self._runtime = load_runtime(config)
        kv = self._runtime.kv
        self._range = kv.open(num_tokens + 64)
        assert kv.grow(self._range, num_tokens + 64), "one sequence fits"
        kv.commit()
        layers = self._runtime.model.attention_layers()
        for first in range(0, num_tokens, _FILLED):
            rows = min(_FILLED, num_tokens - first)
            plan = self._plan(0, rows, first + rows)
            assert isinstance(plan, TiledLocalPlan), "K/V in tiles, in one group"
            for number, layer in enumerate(layers):
                k = topic_keys(rows, layer.num_kv_heads, layer.head_dim)
                plan.store(number, k, k.roll(1, 0), None)
        self._num_tokens = num_tokens

    def _plan(self, num_decodes: int, rows: int, end: int) -> Attention:
        step = AttentionStep(num_decodes, [self._range.start], [rows], [end], [end - 1])
        return self._runtime.attention.plan(step)

    def step(self) -> float:
        """Returns the seconds of a step with one more token."""
        runtime = self._runtime
        with torch.inference_mode():
            began = time.perf_counter()
            ids, positions = torch.tensor([7]), torch.tensor([self._num_tokens])
            hidden = runtime.model.forward(ids, positions, self._plan(1, 1, self._num_tokens + 1))
            runtime.model.logits(hidden)
            return time.perf_counter() - began

    def close(self) -> None:
        memory = self._runtime.memory
        del self._runtime
        memory.close()


def _step_table(model: str, num_tokens: int, rounds: int) -> Table:
    table = Table(
        "kv_policy",
        *[Column(name, justify="right") for name in ("step ms", "of all")],
        title=f"{model}, {num_tokens:,} tokens",
    )
    whole = 0.0
    for policy in (OFF, *[f"quest:budget={100 * share:g}%" for share in _SHARES]):
        selecting = SelectingModel(model, num_tokens, policy)
        seconds = statistics.median([selecting.step() for _ in range(rounds + 1)][1:])
        selecting.close()
        whole = whole or seconds
        table.add_row(policy, f"{1e3 * seconds:.1f}", f"{seconds / whole:.3f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--kv-dtype", choices=TILED_TYPES, nargs="+", default=["int8"])
    parser.add_argument("--bounds", choices=PLACES, nargs="+", default=[PLACES[0]])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", help="whose steps are measured, such as random:llama-1b")
    options = parser.parse_args()
    console = Console()
    threads = native_library.num_threads()
    for kv_dtype in options.kv_dtype:
        console.print(f"{kv_dtype} K/V, {options.layers} layers, {threads} threads")
        for context, place in itertools.product(options.context, options.bounds):
            kv = SelectedKV(kv_dtype, context, options.layers, place)
            console.print(_table(kv, f"bounds: {place}", options.rounds))
            kv.close()
    if options.model:
        for context in options.context:
            console.print(_step_table(options.model, context, options.rounds))


if __name__ == "__main__":
    main()
