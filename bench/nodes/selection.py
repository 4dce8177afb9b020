"""Decode steps over memory nodes of which a part of the K/V is read: python -m
bench.nodes.selection.

One node on this machine (shm), or with --nodes several, have the K/V of more sequences than the
engine could hold, which is one here. With --partition sequence each node has some tokens of all
sequences, and rows choose among the tiles of all nodes, in one more round trip for each layer; what
a step waits for that is measured, too: until the lists have arrived and the choice is sent. Two
engines with the same model take turns: one reads everything, the other selects (kv_policy quest).
Engine and nodes have a thread each. The K/V is random. The engine without a node has all threads
and memory for one sequence: sequences take turns in it, and for each answer the K/V of the whole
context is computed again, in chunks as the engine does; only the time of one such computation and
that of a step are measured, and the tokens per second follow from them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Column, Table

from bench.common.checkpoint_shapes import config_of
from bench.common.checkpoints import write_random
from bench.common.node_processes import memory_nodes
from bench.common.topic_keys import topic_keys
from memory.attention.seam import Attention, AttentionStep
from memory.attention.tiled import TiledLocalPlan
from memory.nodes.remote_attention import RemoteAttention
from memory.nodes.remote_plan import RemotePlan
from memory.nodes.split_plan import ChoosingPlan, PrefixPlan
from memory.pages.kv_range import Range
from memory.policies.setting import OFF
from serve.config import EngineConfig
from serve.loading.runtime import load_runtime

_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured. counts: sequences whose K/V the node has. answer: the tokens for which an
    engine without a node computes a context again. node_bytes: of each engine, on all nodes."""

    shape: str = "llama-1b"
    contexts: Sequence[int] = (4096, 16384)
    counts: Sequence[int] = (2, 8)
    policy: str = "quest:budget=12%"
    rounds: int = 7
    answer: int = 64
    node_bytes: int = 2900 << 20
    partitions: Sequence[str] = ("head",)
    num_nodes: int = 1

    @property
    def max_model_len(self) -> int:
        return max(self.contexts) + _CHUNK

    @property
    def most_sequences(self) -> int:
        return max(self.counts)


@dataclass(slots=True)
class Result:
    """Seconds of a step over the nodes for one number of sequences and one context, that reads all
    or selects, and of its waits for choices; in this machine's memory, of a step of one sequence
    and of its whole context."""

    partition: str
    count: int
    context: int
    whole_s: float
    selected_s: float
    choices_s: float
    local_s: float = 0.0
    recompute_s: float = 0.0

    def recomputed_rate(self, answer: int) -> float:
        """Returns tokens per second without a node: a context is computed before each answer."""
        return answer / (self.recompute_s + answer * self.local_s)


class DecodingModel:
    """A model that decodes sequences with random K/V, over a node or in this machine's memory."""

    def __init__(self, config: EngineConfig) -> None:
        self._runtime = load_runtime(config)
        self.choices_s = 0.0
        """Of the last step, the waits for what rows choose."""
        self._lens: list[int] = []
        self._ranges: list[Range] = []

    def open(self, count: int, context: int) -> None:
        """Makes sequences and their K/V."""
        for _ in range(count):
            one = self._runtime.kv.open(context + _CHUNK)
            for first in range(0, context, _CHUNK):
                self._store(one, first, min(context, first + _CHUNK), context)
            self._ranges.append(one)
            self._lens.append(context)
            attention = self._runtime.attention
            if isinstance(attention, RemoteAttention) and attention.tail_cache is not None:
                attention.tail_cache.drop(one.start)  # its prompt has been read

    def _store(self, one: Range, first: int, end: int, context: int) -> None:
        plan = self._plan(0, [one], [end - first], [end], [context])
        kinds = RemotePlan | PrefixPlan | TiledLocalPlan
        assert isinstance(plan, kinds), "K/V in tiles, in one group"
        for number, layer in enumerate(self._runtime.model.attention_layers()):
            k = topic_keys(end - first, layer.num_kv_heads, layer.head_dim)
            plan.store(number, k, k.roll(1, 0), None)

    def _plan(
        self,
        num_decodes: int,
        ranges: list[Range],
        num_rows: list[int],
        kv_lens: list[int],
        prompt_lens: list[int],
    ) -> Attention:
        kv = self._runtime.kv
        for one, length in zip(ranges, kv_lens, strict=True):
            assert kv.grow(one, length), "the sequences fit"
        kv.commit()
        starts = [one.start for one in ranges]
        return self._runtime.attention.plan(
            AttentionStep(num_decodes, starts, num_rows, kv_lens, prompt_lens)
        )

    def step(self) -> float:
        """Returns the seconds of a step with one more token of each sequence."""
        count = len(self._ranges)
        self.choices_s = 0.0
        with torch.inference_mode(), patch.object(ChoosingPlan, "choose", self._choose):
            began = time.perf_counter()
            prompt_lens, positions = list(self._lens), torch.tensor(self._lens)
            self._lens = [length + 1 for length in self._lens]
            plan = self._plan(count, self._ranges, [1] * count, self._lens, prompt_lens)
            ids = torch.full((count,), 7)
            self._runtime.model.logits(self._runtime.model.forward(ids, positions, plan))
            return time.perf_counter() - began

    @property
    def _choose(self) -> Callable[[ChoosingPlan, int], None]:
        choose = ChoosingPlan.choose

        def timed(plan: ChoosingPlan, layer: int) -> None:
            began = time.perf_counter()
            choose(plan, layer)
            self.choices_s += time.perf_counter() - began

        return timed

    def recompute(self, context: int) -> float:
        """Returns the seconds in which the K/V of a context is computed."""
        one = self._runtime.kv.open(context)
        with torch.inference_mode():
            began = time.perf_counter()
            for first in range(0, context, _CHUNK):
                end = min(context, first + _CHUNK)
                plan = self._plan(0, [one], [end - first], [end], [context])
                positions = torch.arange(first, end)
                self._runtime.model.forward(positions % 200, positions, plan)
            seconds = time.perf_counter() - began
        self._runtime.kv.close(one)
        return seconds

    def forget(self) -> None:
        """Ends all sequences."""
        for one in self._ranges:
            self._runtime.kv.close(one)
        self._ranges, self._lens = [], []

    def close(self) -> None:
        self.forget()
        memory = self._runtime.memory
        del self._runtime
        memory.close()


def _config(model: Path, sizes: Sizes) -> EngineConfig:
    """Returns that of an engine that has room for one sequence."""
    return EngineConfig(
        model=str(model),
        load_format="random",
        dtype="int8",
        kv_dtype="int8",
        max_model_len=sizes.max_model_len,
        max_num_seqs=1,
        max_num_batched_tokens=_CHUNK,
        speculation="off",
        prefix_cache=False,
    )


def measure(sizes: Sizes, folder: Path) -> list[Result]:
    model = folder / "model"
    model.mkdir()
    config = config_of(sizes.shape) | {"max_position_embeddings": sizes.max_model_len}
    write_random(model, config, sizes.shape, has_weights=False)
    found: list[Result] = []
    for partition in sizes.partitions:
        found += _over_nodes(model, sizes, folder, partition)
    local = DecodingModel(_config(model, sizes))
    for context in sizes.contexts:
        recompute_s = local.recompute(context)
        local.open(1, context)
        local_s = statistics.median([local.step() for _ in range(sizes.rounds + 1)][1:])
        local.forget()
        for result in found:
            if result.context == context:
                result.local_s, result.recompute_s = local_s, recompute_s
    local.close()
    return found


def _over_nodes(model: Path, sizes: Sizes, folder: Path, partition: str) -> list[Result]:
    found = []
    node_bytes = sizes.node_bytes // sizes.num_nodes
    with memory_nodes(sizes.num_nodes, folder, capacity=str(2 * node_bytes)) as urls:
        far = replace(
            _config(model, sizes),
            max_num_seqs=sizes.most_sequences,
            memory_nodes=tuple(urls),
            memory_node_key_file=folder / "key",
            memory_node_bytes=node_bytes,
            memory_partition=partition,
            compute_threads=1,
        )
        policies = (OFF, sizes.policy)
        engines = [DecodingModel(replace(far, kv_policy=policy)) for policy in policies]
        for context in sizes.contexts:
            for count in sizes.counts:
                for engine in engines:
                    engine.open(count, context)
                rounds = []
                for _ in range(sizes.rounds + 1):
                    rounds.append([*[one.step() for one in engines], engines[1].choices_s])
                medians = [statistics.median(times) for times in zip(*rounds[1:], strict=True)]
                found.append(Result(partition, count, context, *medians))
                for engine in engines:
                    engine.forget()
        for engine in engines:
            engine.close()
    return found


def table_of(found: Sequence[Result], sizes: Sizes) -> Table:
    columns = ["all, ms", "selected, ms", "of all", "choices, ms"]
    columns += ["tokens/s", "selected", "computed again"]
    where = "one node" if sizes.num_nodes == 1 else f"{sizes.num_nodes} nodes"
    table = Table(
        "partition",
        "context",
        "sequences",
        *[Column(name, justify="right") for name in columns],
        title=f"decode steps over {where} (shm), a thread each, {sizes.shape}",
        caption=f"selected: {sizes.policy}; computed again: the context, for every "
        f"{sizes.answer} tokens",
    )
    for one in found:
        rates = one.count / one.whole_s, one.count / one.selected_s
        table.add_row(
            one.partition,
            f"{one.context:,}",
            str(one.count),
            f"{1e3 * one.whole_s:.1f}",
            f"{1e3 * one.selected_s:.1f}",
            f"{one.selected_s / one.whole_s:.2f}",
            f"{1e3 * one.choices_s:.1f}",
            *(f"{rate:.2f}" for rate in (*rates, one.recomputed_rate(sizes.answer))),
        )
    for context in sizes.contexts:
        one = next(result for result in found if result.context == context)
        table.caption = (
            f"{table.caption}\n{context:,} tokens here: a step of one sequence "
            f"{1e3 * one.local_s:.1f} ms, the context {one.recompute_s:.1f} s"
        )
    return table


QUICK = Sizes("tiny", contexts=(512, 1024), counts=(2, 3), rounds=2, answer=8, node_bytes=16 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.nodes.selection",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, as a smoke test")
    usual = Sizes()
    parser.add_argument("--context", type=int, nargs="+", default=usual.contexts)
    parser.add_argument("--sequences", type=int, nargs="+", default=usual.counts)
    parser.add_argument("--partition", nargs="+", default=usual.partitions, metavar="NAME")
    parser.add_argument("--nodes", type=int, default=usual.num_nodes)
    options = parser.parse_args()
    sizes = replace(usual, contexts=options.context, counts=options.sequences)
    if options.quick:
        sizes = QUICK
    sizes = replace(sizes, partitions=options.partition, num_nodes=options.nodes)
    with tempfile.TemporaryDirectory(prefix="mergestep-selection-") as folder:
        found = measure(sizes, Path(folder))
    console = Console()
    console.width = max(console.width, 120)
    console.print(table_of(found, sizes))


if __name__ == "__main__":
    main()
