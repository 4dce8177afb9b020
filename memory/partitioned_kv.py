"""Several pools of pages as one K/V memory: each sequence is whole in one of them.

This is the request partition of memory nodes. A sequence goes to the partition that has its prefix
cached, or else to the one with the most available pages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from memory.kv_manager import KVManager
from memory.pages.kv_range import PrefixHit, Range
from memory.prefix.page_store import PrefixStats
from memory.prefix.question import Question
from memory.prefix.store_stats import StoreStats


@dataclass(frozen=True, slots=True)
class PartitionHit(PrefixHit):
    """A prefix hit in the partition with this number."""

    partition: int


class PartitionedKV:
    """Implements `KVMemory` (kv_memory.py) over partitions of one layout. The ranges of partition i
    begin at i * partition_tokens."""

    state_interval: int | None = None

    def __init__(self, partitions: Sequence[KVManager]) -> None:
        first = partitions[0]
        self.partitions = list(partitions)
        self.page_bytes = first.page_bytes
        self.max_model_len = first.max_model_len
        self.layout = first.layout
        self.token_bytes = first.token_bytes
        self.range_tokens = first.range_tokens
        self.page_end = first.page_end
        self.pages_for = first.pages_for
        self.ranges = [item for partition in partitions for item in partition.ranges]
        self.prefixes = PartitionedPrefixes(self.partitions)
        self.avoided: frozenset[int] = frozenset()
        """Partitions that get new sequences only if no other one has room."""
        self._partition_tokens = first.range_tokens * len(first.ranges)

    def partition_of(self, target: Range) -> int:
        """Returns the number of the partition that the range belongs to."""
        return target.start // self._partition_tokens

    def _of(self, target: Range) -> KVManager:
        return self.partitions[self.partition_of(target)]

    def shares_memory(self, one: Range, other: Range) -> bool:
        return self.partition_of(one) == self.partition_of(other)

    # ---- sizes

    @property
    def num_pages(self) -> int:
        return sum([partition.num_pages for partition in self.partitions])

    @property
    def num_available(self) -> int:
        return sum([partition.num_available for partition in self.partitions])

    @property
    def num_cached(self) -> int:
        return sum([partition.num_cached for partition in self.partitions])

    @property
    def num_in_use(self) -> int:
        return sum([partition.num_in_use for partition in self.partitions])

    @property
    def num_lent(self) -> int:
        return sum([partition.num_lent for partition in self.partitions])

    @property
    def num_mapped(self) -> int:
        return sum([partition.num_mapped for partition in self.partitions])

    def index_tables(self) -> list[Collection[object]]:
        return [table for partition in self.partitions for table in partition.index_tables()]

    @property
    def num_saved(self) -> int:
        return sum([partition.num_saved for partition in self.partitions])

    @property
    def max_sequence_pages(self) -> int:
        return max(item.num_pages for item in self.partitions)

    def fits_alone(self, num_tokens: int) -> bool:
        return self.pages_for(num_tokens) <= self.max_sequence_pages

    def can_fit(self, num_tokens: int, spare_pages: int = 0, hit: PrefixHit | None = None) -> bool:
        if isinstance(hit, PartitionHit):
            return self.partitions[hit.partition].can_fit(num_tokens, self._share(spare_pages), hit)
        return self._fitting(num_tokens, self._share(spare_pages)) is not None

    def _share(self, pages: int) -> int:
        """Returns one partition's share of pages that must stay free. A lost partition, which has
        no pages, has no share."""
        return -(-pages // max(1, sum([partition.num_pages > 0 for partition in self.partitions])))

    def _fitting(self, num_tokens: int, spare_pages: int) -> KVManager | None:
        fitting = [
            (number not in self.avoided, partition.num_available, -number)
            for number, partition in enumerate(self.partitions)
            if partition.can_fit(num_tokens, spare_pages)
        ]
        return self.partitions[-max(fitting)[2]] if fitting else None

    def ranges_to_close(self, num_tokens: int, candidates: Sequence[Range]) -> list[Range] | None:
        """Returns ranges of one partition, that of the last candidate if possible."""
        numbers = [self.partition_of(target) for target in reversed(candidates)]
        for number in dict.fromkeys([*numbers, *range(len(self.partitions))]):
            own = [target for target in candidates if self.partition_of(target) == number]
            if self.partitions[number].ranges_to_close(num_tokens, own) is not None:
                return own
        return None

    def map_seconds(self, hit: PrefixHit) -> float:
        assert isinstance(hit, PartitionHit)
        return self.partitions[hit.partition].map_seconds(hit)

    # ---- prefix cache

    def match(self, keys: Sequence[bytes], max_tokens: int) -> PrefixHit | None:
        """Returns the longest hit in a partition that has room for the sequence. If only other
        partitions have room, returns None: to compute the prefix again is better than to leave a
        node idle. max_tokens: the sequence's tokens less one."""
        hits = self._hits(keys, max_tokens)
        if not hits:
            return None
        fitting = [hit for hit in hits if self.can_fit(max_tokens + 1, hit=hit)]
        if self.avoided:
            best = self._fitting(max_tokens + 1, 0)
            if best is not None and self.partitions.index(best) not in self.avoided:
                fitting = [hit for hit in fitting if hit.partition not in self.avoided]
        if not fitting and self.can_fit(max_tokens + 1):
            return None
        return max(fitting or hits, key=lambda hit: hit.num_tokens)

    def _hits(self, keys: Sequence[bytes], max_tokens: int) -> Sequence[PartitionHit]:
        """Returns the longest hit in each partition that has one."""
        found = [(item.match(keys, max_tokens), i) for i, item in enumerate(self.partitions)]
        return [PartitionHit(hit.num_tokens, hit.parts, i) for hit, i in found if hit is not None]

    def num_shared_pages(self, hit: PrefixHit) -> int:
        assert isinstance(hit, PartitionHit)
        return self.partitions[hit.partition].num_shared_pages(hit)

    def num_cached_tokens(self, keys: Sequence[bytes]) -> int:
        return max([partition.num_cached_tokens(keys) for partition in self.partitions])

    def fetch(
        self,
        keys: Sequence[bytes],
        compute_s: Callable[[int, int], float] = lambda num_tokens, num_known: 0.0,
    ) -> bool:
        return False  # partitions have no page store

    def insert_prefix(self, target: Range, keys: Sequence[bytes], num_computed: int) -> None:
        self._of(target).insert_prefix(target, keys, num_computed)

    # ---- ranges

    def open(self, num_tokens: int, hit: PrefixHit | None = None) -> Range:
        if isinstance(hit, PartitionHit):
            return self.partitions[hit.partition].open(num_tokens, hit)
        partition = self._fitting(num_tokens, 0)
        assert partition is not None, f"no memory has room for {num_tokens} tokens"
        return partition.open(num_tokens)

    def grow(self, target: Range, num_tokens: int, num_computed: int = 0) -> bool:
        return self._of(target).grow(target, num_tokens, num_computed)

    def close(self, target: Range) -> None:
        self._of(target).close(target)

    def commit(self, targets: Iterable[Range] | None = None) -> None:
        wanted = None if targets is None else list(targets)
        for number, partition in enumerate(self.partitions):
            if wanted is None:
                partition.commit()
            else:
                partition.commit([item for item in wanted if self.partition_of(item) == number])

    @property
    def maps_ahead(self) -> bool:
        return False

    def map_ahead(self, wanted: Iterable[tuple[Range, int]]) -> None:
        """Does nothing: pages of memory nodes are not mapped ahead."""

    def trim(self) -> None:
        for partition in self.partitions:
            partition.trim()

    def close_all(self, timeout_s: float = 30.0) -> None:
        for partition in self.partitions:
            partition.close_all(timeout_s)

    def check_integrity(self) -> None:
        for partition in self.partitions:
            partition.check_integrity()


class PartitionedPrefixes:
    """The prefix caches of all partitions as one (`PrefixState`), without a page store."""

    is_asking = is_fetching = is_transferring = has_store = False

    def __init__(self, partitions: Sequence[KVManager]) -> None:
        self._partitions = partitions
        self._stats = PrefixStats()
        self.question = Question()  # it stays empty: there is no page store to ask

    @property
    def stats(self) -> PrefixStats:
        self._stats.num_evicted = sum([m.prefixes.stats.num_evicted for m in self._partitions])
        return self._stats

    def store_stats(self) -> StoreStats:
        return StoreStats()

    def is_cached(self, key: bytes) -> bool:
        return any(partition.prefixes.is_cached(key) for partition in self._partitions)

    def is_stored(self, key: bytes) -> bool:
        return False

    def poll(self) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        pass

    def write_unwritten(self) -> bool:
        return False
