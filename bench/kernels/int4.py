"""Products with 4 to 6 bits by kind, group and number of rows: python -m bench.kernels.int4.

For up to 8 rows the table has the bytes read and their share of the rate of reading memory; for
more rows, operations and their share of the rate of the int8 product of that shape. --times has how
much faster than the int8 product it is instead. Reading memory, the int8 products and the others
take turns in every round, and the figures are medians, or with --fastest of the fastest calls, for
machines with other work. Weights rotate through more memory than caches hold. q4_k, q5_k and q6_k
are the k-quants of GGUF files, whose groups are given.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.kernels.ops_linear import (
    FAR,
    INT4_TABLES,
    LINEAR_SHAPE,
    random_int4,
    random_superblocks,
)
from ops import LinearOp
from ops.cpu import native_library
from ops.cpu.heap import keep_freed_memory
from ops.cpu.native_ceilings import Ceilings
from ops.cpu.native_quantized_linear import Int8Linear, NativeLinear
from ops.superblocks import SUPERBLOCK_KINDS

ROWS = (1, 4, 8, 16, 32, 128, 512)
GROUPS = (16, 32, 64, 128)
FEW = 64 << 20  # bytes of weights where multiplying takes far longer than reading
MAX_READING_ROWS = 8


@dataclass
class Reading:
    """The times of products with so many rows: an entry for every round in each list."""

    rows: int
    shape: tuple[int, int]
    seconds: list[float] = field(default_factory=list)  # of one product
    int8_seconds: list[float] = field(default_factory=list)
    read_rates: list[float] = field(default_factory=list)  # bytes per second

    def keep_fastest(self) -> None:
        self.seconds, self.int8_seconds = [min(self.seconds)], [min(self.int8_seconds)]
        self.read_rates = [max(self.read_rates)]

    def speedup(self) -> float:
        pairs = zip(self.int8_seconds, self.seconds, strict=True)
        return statistics.median(int8 / own for int8, own in pairs)

    def cell(self, size_bytes: int) -> str:
        seconds = statistics.median(self.seconds)
        if self.rows > MAX_READING_ROWS:
            operations = 2.0 * self.rows * self.shape[0] * self.shape[1]
            return f"{operations / seconds / 1e9:.0f} GOP/s, {self.speedup():.0%}"
        pairs = zip(self.seconds, self.read_rates, strict=True)
        share = statistics.median(size_bytes / own / read for own, read in pairs)
        return f"{size_bytes / seconds / 1e9:.1f} GB/s, {share:.0%}"


def on_huge_pages(size_bytes: int) -> Tensor:
    """Returns memory like that of weights: reading small pages is slower."""
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).fill_(1)


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def some_of(ops: Sequence[NativeLinear], rows: int) -> Sequence[NativeLinear]:
    """Returns fewer products where multiplying takes nearly all of the time."""
    return ops if rows <= MAX_READING_ROWS else ops[: max(2, FEW // ops[0].size_bytes)]


class Bench:
    """Measures products beside int8 products and reading memory."""

    def __init__(
        self, far: int, rounds: int, shape: tuple[int, int], *, is_fastest: bool = False
    ) -> None:
        """far: bytes of weights of each kind. shape: inputs, outputs. is_fastest: the times are
        those of the fastest calls."""
        self.far, self.rounds, self.shape = far, rounds, shape
        self._fold = min if is_fastest else statistics.mean
        self.read_rates: list[float] = []  # all that were measured, in bytes per second
        self._memory = on_huge_pages(far)
        num_in, num_out = shape
        weight, count = torch.randn(num_out, num_in), max(2, far // (num_in * num_out))
        self._int8 = [Int8Linear(weight, None) for _ in range(count)]

    def measure(self, ops: Sequence[NativeLinear], rows: int) -> Reading:
        reading, x = Reading(rows, self.shape), torch.randn(rows, self.shape[0])
        own, int8 = some_of(ops, rows), some_of(self._int8, rows)
        self._seconds_each(own, x)
        parts = self._memory.chunk(max(1, len(self._memory) // FEW))
        for _ in range(self.rounds):
            seconds = self._fold(seconds_of(partial(Ceilings.read, part)) for part in parts)
            reading.read_rates.append(len(parts[0]) / seconds)
            reading.int8_seconds.append(self._seconds_each(int8, x))
            reading.seconds.append(self._seconds_each(own, x))
        if self._fold is min:
            reading.keep_fastest()
        self.read_rates += reading.read_rates
        return reading

    def _seconds_each(self, ops: Sequence[LinearOp], x: Tensor) -> float:
        return self._fold(seconds_of(partial(op, x)) for op in ops)


def packed(bench: Bench, kind: str, group: int) -> Sequence[NativeLinear]:
    if kind in SUPERBLOCK_KINDS:
        return random_superblocks(kind, bench.far, bench.shape)
    return random_int4(kind, group, bench.far, bench.shape)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.int4", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round with little memory")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kinds", default=",".join((*INT4_TABLES, *SUPERBLOCK_KINDS)))
    parser.add_argument("--groups", default=",".join(map(str, GROUPS)))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--shape", default=",".join(map(str, LINEAR_SHAPE)), help="inputs,outputs")
    parser.add_argument("--times", action="store_true", help="how much faster than int8")
    parser.add_argument("--fastest", action="store_true", help="times of the fastest calls")
    sets = native_library.library().instruction_sets()
    parser.add_argument("--isa", choices=sets, default=sets[0], help="instruction set")
    options = parser.parse_args()
    native_library.library().choose_instruction_set(options.isa)
    keep_freed_memory()
    torch.set_num_threads(1)
    num_in, num_out = numbers(options.shape)
    far, rounds = (1 << 20, 1) if options.quick else (FAR, options.rounds)
    bench = Bench(far, rounds, (num_in, num_out), is_fastest=options.fastest)
    table = Table("kind", "group", *(f"M={rows}" for rows in numbers(options.rows)))
    for kind in options.kinds.split(","):
        own = SUPERBLOCK_KINDS.get(kind)
        for group in numbers(options.groups) if own is None else [own.group]:
            ops = packed(bench, kind, group)
            readings = [bench.measure(ops, rows) for rows in numbers(options.rows)]
            size_bytes, is_times = ops[0].size_bytes, options.times
            cells = [f"{r.speedup():.2f}x" if is_times else r.cell(size_bytes) for r in readings]
            table.add_row(kind, str(group), *cells)
    Console(width=160).print(table)
    rates = sorted(rate / 1e9 for rate in bench.read_rates)
    print(
        f"isa {options.isa}, {native_library.num_threads()} threads, K={num_in} "
        f"N={num_out}, reading memory {rates[len(rates) // 10]:.1f} to "
        f"{rates[len(rates) * 9 // 10]:.1f} GB/s (10th and 90th percentile)"
    )


if __name__ == "__main__":
    main()
