"""The cost of K/V in virtual memory: python -m bench.kernels.kv_memory [--quick].

It measures steps of the embedded model whose sequences all grow, with pages mapped before the run,
ahead of need by a thread, and in the step; the cost of one page; decode attention over mapped pages
and over plain memory; unused mapped memory and the number of mappings; and the memory of a model
with sliding windows. Arms alternate within one run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from bench.load.results.metrics import percentile
from memory.kv_manager import KVManager
from memory.pages.layer_groups import LayerGroup
from memory.pages.linux_vmm import LinuxMemory
from ops.cpu.native_tiled_attention import Int8Attention, TiledAttentionStep
from quant.kv import TILE_TOKENS, Int8KVFormat
from serve.config import EngineConfig
from serve.loading.runtime import Runtime, load_runtime
from serve.request import Request
from serve.runner.runner import ModelRunner
from serve.sampling_params import SamplingParams
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence, make_sequences
from serve.scheduler.step_plan import SchedulerLimits

ARMS = ("mapped before", "ahead, in the thread", "at the step")
_HEADS, _KV_HEADS, _DIM, _LAYERS = 32, 8, 64, 16  # Llama-3.2-1B


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a few seconds, as a smoke test")
    quick = parser.parse_args().quick
    console = Console()
    console.print(step_table(rounds=1 if quick else 18, tokens=60 if quick else 900))
    console.print(page_table(rounds=3 if quick else 30))
    console.print(layout_table(context=256 if quick else 4096, rounds=3 if quick else 15))
    console.print(waste_table(quick))
    console.print(window_table(*((2048, 256) if quick else (8192, 1024))))


# ---- steps


class Arm:
    """One mode of mapping. All arms share the weights and the memory, one after the other."""

    def __init__(self, name: str, runtime: Runtime, num_sequences: int, tokens: int) -> None:
        self.name, self.tokens = name, tokens
        self._runtime = runtime
        self._limits = SchedulerLimits(num_sequences, 512, 512)
        self.forget()

    def forget(self) -> None:
        self.steps_s: list[float] = []
        self.num_calls = self.num_waits = 0

    def _manager(self) -> KVManager:
        old, memory = self._runtime.kv, self._runtime.memory
        assert isinstance(memory, LinuxMemory)
        return KVManager(
            memory,
            num_pages=old.num_pages,
            num_ranges=self._limits.max_num_seqs,
            max_model_len=old.max_model_len,
            groups=[group.layers for group in old.layout.groups],
            in_background=self.name == ARMS[1],
        )

    def run(self) -> None:
        """Times every step of all sequences from their first token to the last one."""
        kv = self._manager()
        if self.name == ARMS[0]:
            for item in [kv.open(self.tokens) for _ in kv.ranges]:
                kv.grow(item, self.tokens)
            kv.commit()
            for item in kv.ranges:
                kv.close(item)
        calls, waits = kv.space.stats.num_calls, kv.space.stats.num_waits
        runner = ModelRunner(self._runtime.model, kv, self._runtime.attention)
        scheduler = Scheduler(self._limits, kv)
        for index in range(self._limits.max_num_seqs):
            scheduler.add(_sequence(index, self.tokens))
        while (plan := scheduler.schedule(0.0)) is not None:
            began = time.perf_counter()
            result = runner.run(plan, lambda: None)
            self.steps_s.append(time.perf_counter() - began)
            scheduler.update(plan, result.tokens)
        self.num_calls += kv.space.stats.num_calls - calls
        self.num_waits += kv.space.stats.num_waits - waits
        kv.close_all()


def _sequence(index: int, tokens: int) -> Sequence:
    """Returns a sequence; prompts have different lengths, so that not all grow in the same step."""
    prompt = tuple(range(10, 12 + 3 * index % 32))
    params = SamplingParams(
        temperature=0.0, max_tokens=tokens - len(prompt), ignore_eos=True, seed=0
    )
    return make_sequences(Request(str(index), None, prompt, params, 0.0), frozenset())[0]


def step_table(rounds: int, tokens: int) -> Table:
    table = Table("pages are mapped", "steps", "mean ms", "p50", "p99", "p99.9", "calls", "waits")
    table.title = "16 sequences of the embedded model that grow"
    runtime = load_runtime(EngineConfig(max_num_seqs=16, kv_cache_bytes=1 << 30))
    arms = [Arm(name, runtime, 16, tokens) for name in ARMS]
    for number in range(rounds + 1):
        for arm in arms:
            arm.run()
            if number == 0:  # warm-up
                arm.forget()
    percentiles = (partial(percentile, percent=p) for p in (50, 99, 99.9))
    statistics_of_steps: list[Callable[[list[float]], float]] = [statistics.mean, *percentiles]
    base = arms[0].steps_s
    for arm in arms:
        figures = [
            f"{1e3 * statistic(arm.steps_s):.2f} ({statistic(arm.steps_s) / statistic(base):.3f})"
            for statistic in statistics_of_steps
        ]
        calls, waits = str(arm.num_calls), str(arm.num_waits)
        table.add_row(arm.name, str(len(arm.steps_s)), *figures, calls, waits)
    runtime.memory.close()
    return table


# ---- pages


def page_table(rounds: int) -> Table:
    """Measures single pages; medians."""
    table = Table("us", "64 KiB", "2 MiB", title="What one page costs")
    columns = [_page_costs(size, rounds) for size in (64 << 10, 2 << 20)]
    for name in columns[0]:
        table.add_row(name, *(f"{1e6 * column[name]:.1f}" for column in columns))
    began = time.perf_counter()
    memory = LinuxMemory(1 << 20, 1)
    memory.reserve(1 << 40)
    table.add_row("reserving 1 TiB", f"{1e6 * (time.perf_counter() - began):.0f}", "")
    memory.close()
    return table


def _page_costs(page_bytes: int, rounds: int) -> dict[str, float]:
    memory = LinuxMemory(page_bytes, 2 * rounds)
    memory.reserve(4 * rounds * page_bytes)
    pages = range(rounds)
    costs = {
        "map, never used": _median(lambda i: memory.map(2 * i * page_bytes, i, 1), pages),
        "prepare, in the thread": _median(lambda i: memory.prepare(rounds + i, 1), pages),
        "map, prepared": _median(
            lambda i: memory.map((2 * i + 2 * rounds) * page_bytes, rounds + i, 1), pages
        ),
        "map in another place": _median(
            lambda i: memory.map((2 * i + 1) * page_bytes, i, 1), pages
        ),
        "copy": _median(lambda i: memory.copy_page(i, rounds + i), pages),
        "unmap": _median(lambda i: memory.unmap(2 * i * page_bytes, 1), pages),
    }
    memory.close()
    return costs


def _median(call: Callable[[int], None], numbers: Iterable[int]) -> float:
    taken = []
    for number in numbers:
        began = time.perf_counter()
        call(number)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


# ---- layouts


class Layout:
    """K/V of 8 sequences in all layers, in one memory layout."""

    def __init__(self, name: str, address: int, tile_stride: int, layer_stride: int) -> None:
        self.name, self.address, self.tile_stride = name, address, tile_stride
        form = Int8KVFormat(_KV_HEADS, _DIM, 64)
        self._ops = [
            Int8Attention(
                offset_bytes=i * layer_stride,
                num_heads=_HEADS,
                num_kv_heads=_KV_HEADS,
                head_dim=_DIM,
                group=form.group,
                scale=_DIM**-0.5,
            )
            for i in range(_LAYERS)
        ]
        self.taken: list[float] = []

    def step(self, starts: list[int], rows: int, context: int) -> TiledAttentionStep:
        n = len(starts)
        return TiledAttentionStep(self.address, self.tile_stride, starts, [rows] * n, [context] * n)

    def fill(self, starts: list[int], context: int) -> None:
        k = torch.randn(len(starts) * context, _KV_HEADS, _DIM)
        for op in self._ops:
            op.append(self.step(starts, context, context), k, k.roll(1, 0), None)

    def time(self, starts: list[int], context: int, q: torch.Tensor) -> None:
        step = self.step(starts, 1, context)
        began = time.perf_counter()
        for op in self._ops:
            op.attend(step, q)
        self.taken.append(time.perf_counter() - began)


def layout_table(context: int, rounds: int, sequences: int = 8) -> Table:
    """Measures decode attention through all layers, with K/V out of cache."""
    tile = Int8KVFormat(_KV_HEADS, _DIM, 64).tile_bytes
    tiles = context // TILE_TOKENS
    page = tile * _LAYERS
    assert page % 4096 == 0, "a page of one tile needs no padding at this shape"
    plane = torch.zeros(sequences * tiles * page + 64, dtype=torch.uint8)
    base = plane.data_ptr() + -plane.data_ptr() % 64
    memories = [LinuxMemory(page, sequences * tiles) for _ in range(2)]
    addresses = [memory.reserve(sequences * tiles * page) for memory in memories]
    memories[0].map(0, 0, sequences * tiles)
    order = list(range(sequences * tiles))
    random.Random(3).shuffle(order)
    for place, number in enumerate(order):
        memories[1].map(place * page, number, 1)
    planes = Layout("plain memory, a plane for each layer", base, tile, sequences * tiles * tile)
    layouts = [
        (planes, tiles * tile),
        (Layout("pages of all layers, in order", addresses[0], page, tile), tiles * page),
        (Layout("pages of all layers, shuffled", addresses[1], page, tile), tiles * page),
    ]
    q = torch.randn(sequences, _HEADS, _DIM)
    for layout, range_bytes in layouts:
        layout.fill([i * range_bytes for i in range(sequences)], context)
    for _ in range(rounds + 1):
        for layout, range_bytes in layouts:
            layout.time([i * range_bytes for i in range(sequences)], context, q)
    table = Table("K/V lies in", "ms", "of plain memory's speed")
    table.title = (
        f"Decode attention, {sequences} sequences of {context}, 1B shape, {_LAYERS} layers"
    )
    plain = planes.taken[1:]
    for layout, _ in layouts:
        ratios = [a / b for a, b in zip(plain, layout.taken[1:], strict=True)]
        milliseconds = 1e3 * statistics.median(layout.taken[1:])
        table.add_row(layout.name, f"{milliseconds:.2f}", f"{statistics.median(ratios):.3f}")
    for memory in memories:
        memory.close()
    return table


# ---- waste


def waste_table(quick: bool) -> Table:
    """Measures unused memory while sequences of mixed lengths come and go, without kernels."""
    table = Table("K/V", "sequences", "tokens", "unused", "free, kept", "mappings", "of 65,530")
    table.title = "Mapped in vain: lengths 50-950, half of the sequences replaced three times"
    shapes = [("1B shape", 16_896 * TILE_TOKENS, 1), ("embedded", 1_408 * TILE_TOKENS, 2)]
    for name, tile_bytes, page_tiles in shapes[1:] if quick else shapes:
        for count in (64,) if quick else (64, 256) if page_tiles == 1 else (64, 256, 1000):
            table.add_row(name, str(count), *_waste(count, tile_bytes, page_tiles))
    return table


def _waste(count: int, tile_bytes: int, page_tiles: int) -> list[str]:
    rng = random.Random(count)
    page_bytes = tile_bytes * page_tiles
    num_pages = count * 60 // page_tiles
    memory = LinuxMemory(page_bytes, num_pages)
    kv = KVManager(
        memory,
        num_pages=num_pages,
        num_ranges=count,
        max_model_len=1024,
        token_bytes=tile_bytes // TILE_TOKENS,
        tile_tokens=TILE_TOKENS,
    )
    memory.reserve(kv.total_bytes)
    lengths: dict[int, int] = {}
    for _ in range(4):
        _replace_half(kv, lengths, count, rng)
    tokens = sum(lengths.values())
    used, held = tokens * kv.token_bytes, kv.num_in_use * page_bytes
    kept = kv.num_mapped * page_bytes - held
    mappings = kv.space.num_mappings
    for item in kv.ranges:
        kv.close(item)
    kv.close_all()
    memory.close()
    shares = [f"{1 - used / held:.1%}", f"{kept / held:.1%}"]
    return [f"{tokens:,}", *shares, f"{mappings:,}", f"{mappings / 65_530:.1%}"]


def _replace_half(kv: KVManager, lengths: dict[int, int], count: int, rng: random.Random) -> None:
    """Ends half of the sequences and opens new ones, which grow side by side."""
    for item in [r for r in kv.ranges if r.is_open and rng.random() < 0.5]:
        kv.close(item)
        del lengths[item.index]
    new = []
    while len(lengths) < count:
        item = kv.open(1)
        lengths[item.index] = rng.randint(50, 950)
        new.append(item)
    for share in range(1, 11):
        for item in new:
            is_grown = kv.grow(item, max(1, lengths[item.index] * share // 10))
            assert is_grown, "the pool is too small"
        kv.commit()
        kv.map_ahead([(item, item.capacity + 1) for item in new[:: 1 + len(new) // 4]])


# ---- windows


def window_table(context: int, window: int, rows: int = 256) -> Table:
    """One sequence of a model with 20 layers of that window and 4 full ones, 1B-shaped heads."""
    layer = Int8KVFormat(_KV_HEADS, _DIM, 64).token_bytes
    page_bytes = -(-20 * layer * TILE_TOKENS // 4096) * 4096
    full = LayerGroup(24 * layer, TILE_TOKENS)
    groups = [LayerGroup(4 * layer, TILE_TOKENS), LayerGroup(20 * layer, TILE_TOKENS, window)]
    table = Table("K/V kept of", "MiB at most", "sequences in 4 GiB", "us to map a chunk")
    table.title = (
        f"A sequence of {context:,} tokens, 20 layers with a window of {window:,} and 4 without"
    )
    arms: list[tuple[str, list[LayerGroup]]] = [
        ("all tokens in every layer", [full]),
        ("what windows reach", groups),
    ]
    for name, layers in arms:
        memory = LinuxMemory(page_bytes, 2 * context // TILE_TOKENS)
        kv = KVManager(
            memory,
            num_pages=2 * context // TILE_TOKENS,
            num_ranges=1,
            max_model_len=context,
            groups=layers,
            max_rows=rows,
        )
        memory.reserve(kv.total_bytes)
        held, seconds = _grow(kv, context, rows)
        mib = page_bytes / (1 << 20)
        fit = (4 << 30) // page_bytes // kv.pages_for(context)
        table.add_row(
            name,
            f"{held * mib:.1f}",
            str(fit),
            f"{1e6 * seconds / context * rows:.0f}",
        )
        kv.close(kv.ranges[0])
        kv.close_all()
        memory.close()
    return table


def _grow(kv: KVManager, context: int, rows: int) -> tuple[int, float]:
    """Maps a prompt in chunks; returns the most pages that it held and the seconds of mapping."""
    item, held, began = kv.open(context), 0, time.perf_counter()
    for start in range(0, context, rows):
        is_grown = kv.grow(item, start + rows, start)
        assert is_grown, "the pool is too small"
        kv.commit()
        held = max(held, kv.num_in_use)
    return held, time.perf_counter() - began


if __name__ == "__main__":
    main()
