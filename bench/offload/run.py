"""Decoding with more K/V than memory: python -m bench.offload.run.

Sequences with random K/V decode together on a model with random weights, with all K/V in memory and
with a half and an eighth of it (`--shares`), the rest in a file. For each kv_policy it prints

    tok/s       tokens a second of all sequences
    of memory   that divided by the same policy's with all K/V in memory
    again       tokens a second if what memory lacks were computed again in each step, by the
                measured rate of prompts
    fewer       tokens a second of only as many sequences as this memory holds, without a file
    tiles       of the layers of 16 tokens, those that were read
    hits        of these, those in memory
    read        bytes a second that the steps fetch from the file
    kernel      the cores that system calls and page faults of the process keep busy meanwhile
    of disk     what they fetch divided by what the disk gives to direct reads of as many bytes each
                in two threads, just before and just after: one behind the other with policy off,
                else at random places

Tokens are drawn at random and random heads choose at random, so that a step tells little about the
next one: a trained model finds more of what it reads in memory.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Column, Table

from bench.common import tables
from bench.common.checkpoint_shapes import SHAPES, config_of
from bench.common.checkpoints import write_random
from bench.common.random_reads import disk_rate
from memory.attention.offloaded import OffloadedPlan
from memory.attention.offloaded_layout import OffloadedKVLayout, aligned
from memory.attention.seam import Attention, AttentionStep
from memory.attention.tiled import TILED_TYPES, TiledKVLayout, TiledLocalPlan
from memory.offload.unit_pool import OffloadCounts
from memory.pages.kv_range import Range
from memory.policies.setting import OFF
from quant.kv import RECENT_BLOCK, TILE_TOKENS
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.runtime import load_runtime
from serve.models import read_spec

_FILLED = 2048  # tokens stored at once
_PROMPT_ROWS = 256
_SPARE = 512  # tokens of a sequence behind its context
_POLICIES = (OFF, "quest:budget=12%", "quest:budget=6%")


@dataclass(frozen=True, slots=True)
class Figures:
    """seconds: of `rounds` steps with a row of each sequence; kernel_s: the processor's time in the
    kernel meanwhile. prompt_rows_s: rows of a prompt in a second, with all K/V in memory. counts:
    of the measured steps, where K/V is in a file."""

    seconds: float
    kernel_s: float
    rounds: int
    prompt_rows_s: float
    num_layers: int
    counts: OffloadCounts | None = None

    @property
    def step_s(self) -> float:
        return self.seconds / self.rounds


class Decoding:
    """Sequences of num_tokens tokens of random K/V that decode together."""

    def __init__(
        self,
        model: str,
        policy: str,
        kv_dtype: str,
        num_sequences: int,
        num_tokens: int,
        share: float,
        folder: str,
    ) -> None:
        """share: of all K/V in memory, beside recent tokens of int4 K/V; 1: all."""
        self._num_tokens, self._next = num_tokens, num_tokens
        self._rng = random.Random(0)
        settings = {
            "dtype": "int8",
            "load_format": "random",
            "max_model_len": num_tokens + _SPARE,
            "max_num_seqs": num_sequences,
            "max_num_batched_tokens": _FILLED,
            "kv_policy": policy,
            "kv_dtype": kv_dtype,
        }
        whole = num_sequences * (num_tokens + _SPARE)
        config = EngineConfig(model, **settings, kv_cache_bytes=8 << 30)  # type: ignore[arg-type]
        if share < 1:
            pool = whole * _layout(model, kv_dtype).token_bytes * 101 // 100
            in_memory = int(pool * share)
            config = EngineConfig(
                model,
                **settings,  # type: ignore[arg-type]
                kv_cache_bytes=in_memory + _recent_bytes(config, model),
                kv_offload_bytes=pool - in_memory,
                kv_offload_dir=folder,
            )
        self.runtime = load_runtime(config)
        kv = self.runtime.kv
        self._ranges = [kv.open(num_tokens + _SPARE) for _ in range(num_sequences)]
        for item in self._ranges:
            self._fill(item, num_tokens)

    def _grow(self, item: Range, num_tokens: int, num_computed: int) -> None:
        kv = self.runtime.kv
        assert kv.grow(item, num_tokens, num_computed), "all sequences fit"
        kv.commit([item])

    def _fill(self, item: Range, num_tokens: int) -> None:
        layers = self.runtime.model.attention_layers()
        for first in range(0, num_tokens, _FILLED):
            rows = min(_FILLED, num_tokens - first)
            self._grow(item, first + rows, first)
            step = AttentionStep(0, [item.start], [rows], [first + rows])
            plan = self.runtime.attention.plan(step)
            assert isinstance(plan, TiledLocalPlan | OffloadedPlan)
            for layer, each in enumerate(layers):
                k = torch.randn(rows, each.num_kv_heads, each.head_dim)
                plan.store(layer, k, k.roll(1, 0), None)

    def _plan(self, step: AttentionStep) -> Attention:
        return self.runtime.attention.plan(step)

    def step(self) -> float:
        """Returns the seconds of a step with one more token of each sequence."""
        count, starts = len(self._ranges), [item.start for item in self._ranges]
        for item in self._ranges:
            self._grow(item, self._next + 1, self._next)
        self._next += 1
        step = AttentionStep(
            count, starts, [1] * count, [self._next] * count, [self._num_tokens] * count
        )
        ids = torch.tensor([self._rng.randrange(1000) for _ in starts])
        return self._timed(step, ids, torch.full((count,), self._next - 1))

    def prompt_rows_s(self) -> float:
        """Returns how many rows of a prompt are computed in a second, in the middle of a sequence.
        Ends the others."""
        kv, first = self.runtime.kv, self._num_tokens // 2
        while self._ranges:
            kv.close(self._ranges.pop())
        item = kv.open(self._num_tokens)
        self._fill(item, first)
        end = first + _PROMPT_ROWS
        self._grow(item, end, first)
        step = AttentionStep(0, [item.start], [_PROMPT_ROWS], [end], [self._num_tokens])
        ids, positions = torch.arange(_PROMPT_ROWS), torch.arange(first, end)
        seconds = statistics.median([self._timed(step, ids, positions) for _ in range(3)])
        kv.close(item)
        return _PROMPT_ROWS / seconds

    def _timed(self, step: AttentionStep, ids: torch.Tensor, positions: torch.Tensor) -> float:
        with torch.inference_mode():
            began = time.perf_counter()
            hidden = self.runtime.model.forward(ids, positions, self._plan(step))
            self.runtime.model.logits(hidden[-step.num_decodes :])
            return time.perf_counter() - began

    def measure(self, rounds: int) -> Figures:
        for _ in range(3):
            self.step()
        units = self.runtime.offload
        before = None if units is None else units.counts()
        began_s = resource.getrusage(resource.RUSAGE_SELF).ru_stime
        times = [self.step() for _ in range(rounds)]
        kernel_s = resource.getrusage(resource.RUSAGE_SELF).ru_stime - began_s
        after = None if units is None else units.counts()
        counts = None
        if before is not None and after is not None:
            names = OffloadCounts.__dataclass_fields__
            counts = OffloadCounts(**{n: getattr(after, n) - getattr(before, n) for n in names})
        num_layers = len(self.runtime.model.attention_layers())
        rows_s = self.prompt_rows_s() if units is None else 0.0
        return Figures(sum(times), kernel_s, rounds, rows_s, num_layers, counts)

    def close(self) -> None:
        memory = self.runtime.memory
        del self.runtime
        memory.close()


def _layout(model: str, kv_dtype: str) -> OffloadedKVLayout:
    return OffloadedKVLayout(read_spec(Path(model)).attention_layers, kv_dtype, 64)


def _recent_bytes(config: EngineConfig, model: str) -> int:
    """Returns what recent tokens of int4 K/V take in memory."""
    if config.kv_dtype != "int4":
        return 0
    recent = TiledKVLayout(read_spec(Path(model)).attention_layers, "int8", 64)
    tokens = 2 * RECENT_BLOCK * config.max_num_seqs + config.batched_tokens
    return tokens // TILE_TOKENS * aligned(recent.tile_bytes)


def long_checkpoint(shape: str, num_tokens: int, folder: str) -> str:
    """Returns a directory with the shape's configuration for so long a context."""
    path = Path(folder) / "model"
    path.mkdir()
    config = config_of(shape) | {"max_position_embeddings": num_tokens + _SPARE}
    write_random(path, config, shape, has_weights=False)
    return str(path)


def _row(
    name: str,
    found: Figures,
    whole: Figures,
    count: int,
    num_tokens: int,
    share: float,
    fewer: str,
    disk: float,
) -> list[str]:
    missing = int(count * num_tokens * (1 - share))
    again = count / (whole.step_s + missing / whole.prompt_rows_s)
    row = [name, f"{count / found.step_s:.1f}", f"{whole.step_s / found.step_s:.3f}"]
    if found.counts is None:
        return [*row, *[""] * 7]
    counts = found.counts
    read = counts.fetched_bytes / found.seconds
    hits = counts.units_held / max(1, counts.units_read)
    tiles = counts.units_read / (found.rounds * found.num_layers * count * num_tokens / TILE_TOKENS)
    return [
        *row,
        f"{again:.3f}",
        fewer,
        f"{tiles:.2f}",
        f"{hits:.2f}",
        f"{read / 1e6:.0f}",
        f"{found.kernel_s / found.seconds:.2f}",
        f"{read / disk:.2f}",
    ]


def _disk_rate(folder: str, unit_bytes: int, policy: str) -> float:
    return disk_rate(folder, unit_bytes, in_order=policy == OFF)


def _table(model: str, given: argparse.Namespace, num_tokens: int) -> Table:
    figures = ("tok/s", "of memory", "again", "fewer", "tiles", "hits")
    names = (*figures, "read MB/s", "kernel", "of disk")
    table = Table(
        "kv_policy, kv_dtype, K/V in memory",
        *[Column(name, justify="right") for name in names],
        title=f"{given.shape}, {given.sequences} sequences of {num_tokens:,} tokens",
    )
    for policy in given.policies:
        whole: dict[str, Figures] = {}
        for share in (1.0, *given.shares):
            for kv_dtype in given.kv_dtypes:
                row = _measured(model, policy, kv_dtype, given, num_tokens, share, whole)
                table.add_row(*row)
    return table


def _measured(
    model: str,
    policy: str,
    kv_dtype: str,
    given: argparse.Namespace,
    num_tokens: int,
    share: float,
    whole: dict[str, Figures],
) -> list[str]:
    """Returns a row of the table. whole: the figures of each kv_dtype with all K/V in memory, which
    the first row of each adds."""
    count, folder, unit = given.sequences, given.folder, _layout(model, kv_dtype).unit_bytes[0]

    def figures(num_sequences: int, in_memory: float) -> Figures:
        sizes = num_sequences, num_tokens, in_memory
        decoding = Decoding(model, policy, kv_dtype, *sizes, folder)
        found = decoding.measure(given.rounds)
        decoding.close()
        return found

    before = _disk_rate(folder, unit, policy) if share < 1 else 0.0
    name = f"{policy}, {kv_dtype}, {'all' if share == 1 else format(share, '.3g')}"
    try:
        found = figures(count, share)
    except ConfigError:  # the bounds and a layer do not fit
        return [name, "too little"]
    disk, fewer = 0.0, ""
    if share < 1:
        disk = (before + _disk_rate(folder, unit, policy)) / 2
        fits = int(count * share)  # sequences whose K/V is all in memory
        fewer = f"{fits / figures(fits, 1.0).step_s:.1f}" if fits else "none fits"
    return _row(
        name, found, whole.setdefault(kv_dtype, found), count, num_tokens, share, fewer, disk
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-1b")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--context", type=int, nargs="+", default=[16384])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.125])
    parser.add_argument("--policies", nargs="+", default=_POLICIES)
    parser.add_argument("--kv-dtypes", nargs="+", choices=TILED_TYPES, default=["int8"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of the file")
    given = parser.parse_args(arguments)
    for num_tokens in given.context:
        with tempfile.TemporaryDirectory() as made:
            model = long_checkpoint(given.shape, num_tokens, made)
            tables.console().print(_table(model, given, num_tokens))


if __name__ == "__main__":
    main()
