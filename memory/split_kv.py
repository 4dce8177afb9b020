"""Several K/V memories as one: whole sequences are in one of them (the request partition).

What `KVManager` is for one memory this is for some: the scheduler sees the same methods. A
sequence goes where its beginning is known, else where most pages can be had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from memory.kv_manager import KVManager
from memory.pages.kv_range import PrefixHit, Range
from memory.prefix.page_store import PrefixStats
from memory.prefix.store_stats import StoreStats


@dataclass(frozen=True, slots=True)
class HomedHit(PrefixHit):
    """home: number of the memory that knows it."""

    home: int


class PartitionedKV:
    """Memories of the same layout, one after the other: number i begins at i * member_tokens."""

    def __init__(self, members: Sequence[KVManager]) -> None:
        first = members[0]
        self.members = list(members)
        self.page_bytes = first.page_bytes
        self.max_model_len = first.max_model_len
        self.layout = first.layout
        self.token_bytes = first.token_bytes
        self.range_tokens = first.range_tokens
        self.page_end = first.page_end
        self.pages_for = first.pages_for
        self.ranges = [item for member in members for item in member.ranges]
        self.space = first.space  # whose thread is asked for; there is none
        self.prefixes = SplitPrefixes(self.members)
        self._member_tokens = first.range_tokens * len(first.ranges)

    def home_of(self, target: Range) -> int:
        return target.start // self._member_tokens

    def _of(self, target: Range) -> KVManager:
        return self.members[self.home_of(target)]

    def shares_memory(self, one: Range, other: Range) -> bool:
        return self.home_of(one) == self.home_of(other)

    # ---- sizes

    @property
    def num_pages(self) -> int:
        return sum([member.num_pages for member in self.members])

    @property
    def num_available(self) -> int:
        return sum([member.num_available for member in self.members])

    @property
    def num_cached(self) -> int:
        return sum([member.num_cached for member in self.members])

    @property
    def num_in_use(self) -> int:
        return sum([member.num_in_use for member in self.members])

    @property
    def num_mapped(self) -> int:
        return sum([member.num_mapped for member in self.members])

    @property
    def num_saved(self) -> int:
        return sum([member.num_saved for member in self.members])

    @property
    def most_pages(self) -> int:
        """That one sequence may have."""
        return max(member.num_pages for member in self.members)

    def can_fit(self, num_tokens: int, spare_pages: int = 0, hit: PrefixHit | None = None) -> bool:
        if isinstance(hit, HomedHit):
            return self.members[hit.home].can_fit(num_tokens, self._share(spare_pages), hit)
        return self._fitting(num_tokens, self._share(spare_pages)) is not None

    def _share(self, pages: int) -> int:
        """Of pages that are to stay free, those of one memory; a lost one has none."""
        return -(-pages // max(1, sum([member.num_pages > 0 for member in self.members])))

    def _fitting(self, num_tokens: int, spare_pages: int) -> KVManager | None:
        fitting = [m for m in self.members if m.can_fit(num_tokens, spare_pages)]
        return max(fitting, key=lambda member: member.num_available, default=None)

    def room_without(self, num_tokens: int, leaving: Sequence[Range]) -> list[Range] | None:
        """As KVManager's: of ranges in one memory, that of the last one if that will do."""
        homes = [self.home_of(target) for target in reversed(leaving)]
        for home in dict.fromkeys([*homes, *range(len(self.members))]):
            own = [target for target in leaving if self.home_of(target) == home]
            if self.members[home].room_without(num_tokens, own) is not None:
                return own
        return None

    def map_seconds(self, hit: PrefixHit) -> float:
        assert isinstance(hit, HomedHit)
        return self.members[hit.home].map_seconds(hit)

    # ---- prefix cache

    def match(self, keys: Sequence[bytes], max_tokens: int) -> PrefixHit | None:
        """The longest one whose memory has room for it; with room elsewhere alone, none: rather
        compute it again than leave a node idle. max_tokens: one less than the sequence has."""
        found = [(member.match(keys, max_tokens), home) for home, member in enumerate(self.members)]
        hits = [HomedHit(hit.num_tokens, hit.parts, home) for hit, home in found if hit is not None]
        if not hits:
            return None
        fitting = [hit for hit in hits if self.can_fit(max_tokens + 1, hit=hit)]
        if not fitting and self.can_fit(max_tokens + 1):
            return None
        return max(fitting or hits, key=lambda hit: hit.num_tokens)

    def num_held(self, hit: PrefixHit) -> int:
        assert isinstance(hit, HomedHit)
        return self.members[hit.home].num_held(hit)

    def num_known_tokens(self, keys: Sequence[bytes]) -> int:
        return max([member.num_known_tokens(keys) for member in self.members])

    def fetch(
        self,
        keys: Sequence[bytes],
        compute_s: Callable[[int, int], float] = lambda num_tokens, num_known: 0.0,
    ) -> bool:
        return False  # there is no store

    def remember(self, target: Range, keys: Sequence[bytes], num_computed: int) -> None:
        self._of(target).remember(target, keys, num_computed)

    # ---- ranges

    def open(self, num_tokens: int, hit: PrefixHit | None = None) -> Range:
        if isinstance(hit, HomedHit):
            return self.members[hit.home].open(num_tokens, hit)
        member = self._fitting(num_tokens, 0)
        assert member is not None, f"no memory has room for {num_tokens} tokens"
        return member.open(num_tokens)

    def grow(self, target: Range, num_tokens: int, num_computed: int = 0) -> bool:
        return self._of(target).grow(target, num_tokens, num_computed)

    def close(self, target: Range) -> None:
        self._of(target).close(target)

    def commit(self, targets: Iterable[Range] | None = None) -> None:
        wanted = None if targets is None else list(targets)
        for home, member in enumerate(self.members):
            if wanted is None:
                member.commit()
            else:
                member.commit([item for item in wanted if self.home_of(item) == home])

    def look_ahead(self, wanted: Iterable[tuple[Range, int]]) -> None:
        """Nothing is mapped ahead."""

    def trim(self) -> None:
        for member in self.members:
            member.trim()

    def close_all(self, timeout_s: float = 30.0) -> None:
        for member in self.members:
            member.close_all(timeout_s)

    def check_integrity(self) -> None:
        for member in self.members:
            member.check_integrity()


class SplitPrefixes:
    """The prefix caches of several memories: keys are looked for in all of them."""

    is_fetching = is_transferring = has_store = False

    def __init__(self, members: Sequence[KVManager]) -> None:
        self._members = members
        self._stats = PrefixStats()
        self.index = self

    @property
    def stats(self) -> PrefixStats:
        self._stats.num_evicted = sum([m.prefixes.stats.num_evicted for m in self._members])
        return self._stats

    def store_stats(self) -> StoreStats:
        return StoreStats()

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """As PrefixIndex.match, of the memory that knows most."""
        return max([member.prefixes.index.match(keys) for member in self._members], key=len)

    def poll(self) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        pass

    def write_some(self) -> bool:
        return False


Books = KVManager | PartitionedKV
