"""The same where K/V is in several memories, as on memory nodes, and records are in another one."""

from __future__ import annotations

import random

import numpy as np

from memory.kv_beside_states import KVBesideStates
from memory.kv_manager import KVManager
from memory.pages.allocator import PageAllocator
from memory.pages.layer_groups import LayerGroup
from memory.pages.linux_vmm import LinuxMemory
from memory.prefix.index import PrefixHasher
from memory.states.layout import StateLayout
from memory.states.local import LocalStates
from tests.support.memory.states_model import LAYERS, PAGE, Running, StatesModel, kv_values


class StatesBesideModel(StatesModel):
    """K/V groups in partitions of this machine's pages, and records in pages of their own."""

    def __init__(
        self,
        groups: tuple[LayerGroup, ...],
        *,
        interval: int,
        num_partitions: int = 2,
        num_pages: int = 50,
        num_records: int = 26,
        num_ranges: int = 6,
        max_model_len: int = 160,
        max_rows: int = 24,
    ) -> None:
        """num_pages: of each partition."""
        self.layout, self.interval, self.max_rows = (
            StateLayout(LAYERS, interval),
            interval,
            max_rows,
        )
        self.layout.pad(PAGE)
        self.rng, self.num_pages = random.Random(3), num_pages
        self.memories = [LinuxMemory(PAGE, num_pages) for _ in range(num_partitions)]
        sizes = {"num_ranges": num_ranges, "max_model_len": max_model_len, "max_rows": max_rows}
        partitions: list[KVManager] = []
        for memory in self.memories:
            first = sum(len(one.ranges) * one.range_tokens for one in partitions)
            partitions.append(
                KVManager(memory, num_pages=num_pages, groups=groups, first_start=first, **sizes)
            )
        self.records_memory = LinuxMemory(PAGE, num_records)
        records = KVManager(
            self.records_memory, num_pages=num_records, groups=[self.layout.group()], **sizes
        )
        self.kv = KVBesideStates(partitions, records)
        self._values = []  # of each partition, and of each group there
        for partition, memory in zip(partitions, self.memories, strict=True):
            address = memory.reserve(partition.total_bytes)
            self._values.append([kv_values(partition, address, i) for i in range(len(groups))])
        address = self.records_memory.reserve(records.total_bytes)
        self.states = LocalStates(self.layout, address, records.total_bytes)
        views = self.states.layers
        self._records = [(c.numpy(), None if h is None else h.numpy()) for c, h, _ in views]
        self.hasher = PrefixHasher(self.kv.page_end, b"secret")
        self.running: list[Running] = []

    # ---- where they lie

    def record_start(self, start: int) -> int:
        return self.kv.record_start(start)

    def kv_rows(self, start: int) -> list[np.ndarray]:
        number = self._partition_at(start)
        first = self.kv.partitions[number].ranges[0].start
        return [values[start - first :] for values in self._values[number]]

    def _partition_at(self, start: int) -> int:
        firsts = [one.ranges[0].start for one in self.kv.partitions]
        return max(i for i, first in enumerate(firsts) if first <= start)

    @property
    def record_pages(self) -> PageAllocator:
        return self.kv.records.allocator

    @property
    def pools(self) -> list[KVManager]:
        return [*self.kv.partitions, self.kv.records]

    def evict(self, count: int) -> None:
        prefixes = self.rng.choice(self.pools).prefixes
        for _ in range(count):
            if prefixes.num_evictable:
                prefixes.evict()

    @property
    def num_evicted(self) -> int:
        return sum(pool.prefixes.stats.num_evicted for pool in self.pools)

    # ---- loss

    def lose(self) -> list[Running]:
        """Loses the K/V of a partition, which then has other pages. Returns the sequences that
        were there, which are closed."""
        number = self.rng.randrange(len(self.kv.partitions))
        partition = self.kv.partitions[number]
        found = [it for it in self.running if self._partition_at(it.kv_range.start) == number]
        for sequence in found:
            self.close(sequence)
        partition.reset(0)
        self.kv.check_integrity()
        partition.reset(self.rng.randint(self.num_pages // 2, self.num_pages))
        return found

    def finish(self) -> None:
        for sequence in list(self.running):
            self.close(sequence)
        self.kv.check_integrity()
        self.kv.close_all()
        self.kv.check_integrity()
        for pool in self.pools:
            assert (pool.num_mapped, pool.num_in_use, pool.num_cached) == (0, 0, 0)
            assert pool.allocator.num_free == pool.num_pages
        self._values.clear()
        self._records.clear()
        for memory in (*self.memories, self.records_memory):
            memory.close()
