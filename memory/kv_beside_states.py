"""K/V in several pools, and states in another one: a sequence needs both. Integers only.

The K/V of a model over memory nodes is in their pages, and its states are in this machine's memory,
whose pages are records of states. A sequence has a range in both. The scheduler sees one range, and
K/V pages alone in all counts: how many states a sequence needs does not depend on its length, so
that the records are bounded by the number of sequences, as `can_fit` says.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memory.kv_manager import KVManager
from memory.pages.kv_range import PrefixHit, Range
from memory.pages.layer_groups import GroupPages, order_keys
from memory.partitioned_kv import PartitionedKV, PartitionedPrefixes, PartitionHit
from memory.state_anchors import StateAnchors


@dataclass(frozen=True, slots=True)
class StatefulHit(PartitionHit):
    """A prefix hit of K/V, and of the record at its end."""

    kv: PartitionHit
    record: PrefixHit


class _Ranges(NamedTuple):
    """What a sequence has of both memories."""

    kv: Range
    record: Range


class KVBesideStates(PartitionedKV):
    """Implements `KVMemory` (kv_memory.py) over partitions of K/V and one memory of states."""

    def __init__(self, partitions: Sequence[KVManager], records: KVManager) -> None:
        """records: its only layer group is one of states, whose records are pages."""
        super().__init__(partitions)
        self.records, self.state_interval = records, records.state_interval
        self._open: dict[int, _Ranges] = {}  # by the start of the K/V's range
        self._lacks_record: set[int] = set()  # the starts of ranges that could not grow
        # keys of both: a prefix is the same text in either memory
        groups = [
            GroupPages(group.layers, group.page_bytes, 1)
            for group in (*self.layout.groups, *records.layout.groups)
        ]
        self.page_end = order_keys(groups, self.max_model_len)
        self._group, self._states = groups[0], groups[-1]
        assert self._states.is_state and self._states.slots_for(1) == 1, f"{records.layout.groups}"
        state_numbers = set(self._states.key_numbers)
        most = max(numbers[-1] for numbers in (group.key_numbers for group in groups))
        self._kv_numbers = [i for i in range(most + 1) if i not in state_numbers]
        self._anchors = StateAnchors(
            [partition.prefixes for partition in partitions], records.prefixes
        )
        self.prefixes = _Prefixes(partitions, records)

    def record_start(self, start: int) -> int:
        """Returns where the states of the sequence begin whose range begins at `start`."""
        return self._open[start].record.start

    def _split(self, keys: Sequence[bytes]) -> tuple[list[bytes], Sequence[bytes]]:
        """Returns the page keys of the K/V, and those of the records."""
        numbers = self._kv_numbers
        kv = [keys[number] for number in numbers[: bisect_left(numbers, len(keys))]]
        return kv, self._states.keys_of(keys)

    # ---- sizes

    def index_tables(self) -> list[Collection[object]]:
        return [*super().index_tables(), *self.records.index_tables()]

    def fits_alone(self, num_tokens: int) -> bool:
        return super().fits_alone(num_tokens) and self.records.fits_alone(num_tokens)

    def can_fit(self, num_tokens: int, spare_pages: int = 0, hit: PrefixHit | None = None) -> bool:
        kv = hit.kv if isinstance(hit, StatefulHit) else None
        record = hit.record if isinstance(hit, StatefulHit) else None
        # Each sequence needs a second record while an interval begins.
        num_open = len(self._open)
        spare = num_open + 1 if num_open else 0
        return super().can_fit(num_tokens, spare_pages, kv) and self.records.can_fit(
            num_tokens, spare, record
        )

    def shares_memory(self, one: Range, other: Range) -> bool:
        return other.start in self._lacks_record or super().shares_memory(one, other)

    def ranges_to_close(self, num_tokens: int, candidates: Sequence[Range]) -> list[Range] | None:
        kv = [self._open[target.start].kv for target in candidates]
        found = super().ranges_to_close(num_tokens, kv)
        if found is None:
            return None
        starts = {target.start for target in found}
        for chosen in ([it for it in candidates if it.start in starts], [*candidates]):
            records = [self._open[target.start].record for target in chosen]
            if self.records.ranges_to_close(num_tokens, records) is not None:
                return chosen
        return None

    # ---- prefix cache

    def _hits(self, keys: Sequence[bytes], max_tokens: int) -> list[StatefulHit]:
        kv_keys, record_keys = self._split(keys)
        found = []
        for number, partition in enumerate(self.partitions):
            num_tokens = self._reach(partition, kv_keys, record_keys, max_tokens)
            if not num_tokens:
                continue
            kv = partition.match(kv_keys, num_tokens)
            record = self.records.match(record_keys, num_tokens)
            assert kv is not None and kv.num_tokens == num_tokens, f"{kv} of {num_tokens} tokens"
            assert record is not None and record.num_tokens == num_tokens, f"{record}"
            part = PartitionHit(num_tokens, kv.parts, number)
            parts = [*kv.parts, *record.parts]
            found.append(StatefulHit(num_tokens, parts, number, part, record))
        return found

    def _reach(
        self,
        partition: KVManager,
        kv_keys: Sequence[bytes],
        record_keys: Sequence[bytes],
        most: int,
    ) -> int:
        """Returns the length of the longest prefix, at most `most`, of which the partition has the
        K/V, and whose state is there."""
        while most > 0:
            found = self.records.num_cached_tokens(record_keys, most)
            found = partition.num_cached_tokens(kv_keys, found)
            if found == most:
                break
            most = found
        return most

    def map_seconds(self, hit: PrefixHit) -> float:
        assert isinstance(hit, StatefulHit)
        return super().map_seconds(hit.kv) + self.records.map_seconds(hit.record)

    def num_shared_pages(self, hit: PrefixHit) -> int:
        assert isinstance(hit, StatefulHit)
        return super().num_shared_pages(hit.kv)

    def num_cached_tokens(self, keys: Sequence[bytes]) -> int:
        kv_keys, record_keys = self._split(keys)
        most = self.range_tokens
        return max([self._reach(item, kv_keys, record_keys, most) for item in self.partitions])

    def insert_prefix(self, target: Range, keys: Sequence[bytes], num_computed: int) -> None:
        kv_keys, record_keys = self._split(keys)
        ranges = self._open[target.start]
        super().insert_prefix(ranges.kv, kv_keys, num_computed)
        [part] = ranges.record.parts
        first = part.num_offered
        self.records.insert_prefix(ranges.record, record_keys, num_computed)
        if self._group.window is not None:
            return  # K/V behind a window is evicted, but not what comes after it
        for slot in range(first, part.num_offered):
            num_kv = self._group.num_complete(self._states.page_end(slot))
            if num_kv:
                anchor = keys[self._group.key_numbers[num_kv - 1]]
                self._anchors.tie(record_keys[slot], anchor)

    # ---- ranges

    def open(self, num_tokens: int, hit: PrefixHit | None = None) -> Range:
        kv_hit, record_hit = (hit.kv, hit.record) if isinstance(hit, StatefulHit) else (None, None)
        kv = super().open(num_tokens, kv_hit)
        record = self.records.open(num_tokens, record_hit)
        self._open[kv.start] = _Ranges(kv, record)
        target = Range(kv.index, [*kv.parts, *record.parts], kv.start, is_open=True)
        target.capacity = min(kv.capacity, record.capacity)
        return target

    def grow(self, target: Range, num_tokens: int, num_computed: int = 0) -> bool:
        if num_tokens <= target.capacity:
            return True
        kv, record = self._open[target.start]
        self._lacks_record.discard(target.start)
        if not super().grow(kv, num_tokens, num_computed):
            return False
        fits = self.records.grow(record, num_tokens, num_computed)
        if not fits:
            self._lacks_record.add(target.start)
        target.capacity = min(kv.capacity, record.capacity)
        return fits

    def close(self, target: Range) -> None:
        kv, record = self._open.pop(target.start)
        self._lacks_record.discard(target.start)
        target.is_open = False
        super().close(kv)
        self.records.close(record)

    # ---- mapping

    def commit(self, targets: Iterable[Range] | None = None) -> None:
        if targets is None:
            super().commit()
            self.records.commit()
            return
        wanted = [self._open[target.start] for target in targets]
        super().commit([ranges.kv for ranges in wanted])
        self.records.commit([ranges.record for ranges in wanted])

    @property
    def maps_ahead(self) -> bool:
        return self.records.maps_ahead

    def map_ahead(self, wanted: Iterable[tuple[Range, int]]) -> None:
        """Lets the thread map records; pages of memory nodes are not mapped ahead."""
        self.records.map_ahead([(self._open[it.start].record, count) for it, count in wanted])

    def trim(self) -> None:
        super().trim()
        self.records.trim()

    def close_all(self, timeout_s: float = 30.0) -> None:
        super().close_all(timeout_s)
        self.records.close_all(timeout_s)

    def check_integrity(self) -> None:
        super().check_integrity()
        self.records.check_integrity()
        self._anchors.check_integrity()
        num_open = len(self.records.ranges) - self.records.num_idle
        assert num_open == len(self._open), f"{num_open} ranges of records, {len(self._open)} open"


class _Prefixes(PartitionedPrefixes):
    """Both memories' caches as one."""

    def __init__(self, partitions: Sequence[KVManager], records: KVManager) -> None:
        super().__init__(partitions)
        self._records = records.prefixes

    def is_cached(self, key: bytes) -> bool:
        return super().is_cached(key) or self._records.is_cached(key)
