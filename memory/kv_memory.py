"""K/V memory as the scheduler, the runner and the engine loop see it.

`KVManager` implements `KVMemory` for one pool of pages, `PartitionedKV` for several pools with
whole sequences, `KVBesideStates` for those and a pool of states, `SegmentedKV` for several pools
with parts of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from memory.pages.kv_range import PrefixHit, Range
from memory.pages.layer_groups import PageLayout
from memory.prefix.page_store import PrefixStats
from memory.prefix.question import Question
from memory.prefix.store_stats import StoreStats


class KVMemory(Protocol):
    """Ranges of virtual addresses, one per sequence, and the pages mapped into them.

    Only one thread at a time calls it, except where a method says that any thread may.
    """

    page_bytes: int
    max_model_len: int
    token_bytes: int
    """Bytes of one token's K/V in all layers."""
    layout: PageLayout
    """Of the K/V, and of states in the same pool."""

    @property
    def state_interval(self) -> int | None:
        """Tokens of a record of states, which each row changes; None if no layer has states."""

    # ---- sizes

    @property
    def partitions(self) -> Sequence[KVPartition]:
        """The pools of pages; a range belongs to one of them."""

    def page_end(self, key_number: int, /) -> int:
        """Returns how many tokens must be computed before that page key can be formed."""

    def pages_for(self, num_tokens: int) -> int:
        """Returns the most pages that a sequence holds until it has num_tokens tokens."""

    @property
    def num_pages(self) -> int:
        """All pages."""

    @property
    def num_available(self) -> int:
        """Pages that are free or that only the prefix cache holds."""

    @property
    def num_cached(self) -> int:
        """Pages that only the prefix cache holds."""

    @property
    def num_in_use(self) -> int:
        """Pages that sequences hold or that are being copied to or from a page store."""

    @property
    def num_lent(self) -> int:
        """Pages whose memory other engines use at present."""

    @property
    def num_mapped(self) -> int:
        """Pages with physical memory."""

    def index_tables(self) -> list[Collection[object]]:
        """Returns the containers of the prefix cache's index, to estimate their memory. Any thread
        may call it."""

    @property
    def num_saved(self) -> int:
        """Pages that prefix sharing saves: how many more sequences would hold without it. While
        pages are copied to or from a page store, the count is a little lower."""

    @property
    def max_sequence_pages(self) -> int:
        """The most pages that one sequence can hold."""

    def fits_alone(self, num_tokens: int) -> bool:
        """Returns whether a sequence of so many tokens fits while no other one runs."""

    def shares_memory(self, one: Range, other: Range) -> bool:
        """Returns whether pages that one range releases can be used by the other, which could not
        grow."""

    def can_fit(self, num_tokens: int, spare_pages: int = 0, hit: PrefixHit | None = None) -> bool:
        """Returns whether a new range can be opened and grown to num_tokens such that
        spare_pages are left. Pages promised to growing prompts do not count as free."""

    def ranges_to_close(self, num_tokens: int, candidates: Sequence[Range]) -> list[Range] | None:
        """Returns those of the candidates that have to be closed so that num_tokens fit, or None
        if they do not fit even then."""

    # ---- prefix cache

    @property
    def prefixes(self) -> PrefixState:
        """The prefix cache."""

    def match(self, keys: Sequence[bytes], max_tokens: int) -> PrefixHit | None:
        """Returns the longest cached prefix of a sequence with these page keys, of at most
        max_tokens tokens, or None."""

    def num_shared_pages(self, hit: PrefixHit) -> int:
        """Returns how many pages of a hit other sequences hold already: these cost nothing."""

    def num_cached_tokens(self, keys: Sequence[bytes]) -> int:
        """Returns the length in tokens of the cached prefix of a sequence with these page keys.
        Any thread may call it."""

    def map_seconds(self, hit: PrefixHit) -> float:
        """Returns the time in seconds that mapping the hit takes, estimated from past calls."""

    def fetch(
        self,
        keys: Sequence[bytes],
        compute_s: Callable[[int, int], float] = lambda num_tokens, num_cached: 0.0,
    ) -> bool:
        """Starts to load evicted pages of a sequence with these page keys from the page store,
        into pages that no sequence was promised, unless computing them takes less time.
        Returns whether a load is in progress.

        compute_s(n, k): seconds to compute the first n tokens if k are cached; 0: unknown.
        """

    def insert_prefix(self, target: Range, keys: Sequence[bytes], num_computed: int) -> None:
        """Inserts the range's complete pages into the prefix cache. keys: the sequence's page
        keys, as far as they are known."""

    # ---- ranges

    def open(self, num_tokens: int, hit: PrefixHit | None = None) -> Range:
        """Returns a range with pages for num_tokens promised to it; `grow` gives it the pages.
        The tokens of a hit are there at once. The caller has checked can_fit and frees the range
        with `close`."""

    def grow(self, target: Range, num_tokens: int, num_computed: int = 0) -> bool:
        """Gives the range pages for num_tokens in all. Returns False, and gives none, if there are
        too few. Pages that no token after num_computed can reach are released."""

    def close(self, target: Range) -> None:
        """Releases the pages of a range whose sequence has ended or is preempted."""

    # ---- mapping

    @property
    def maps_ahead(self) -> bool:
        """Whether a thread maps pages ahead of need."""

    def commit(self, targets: Iterable[Range] | None = None) -> None:
        """Maps what ranges were given since the last commit. Raises OSError; the call can be
        repeated. targets: map these ranges only."""

    def map_ahead(self, wanted: Iterable[tuple[Range, int]]) -> None:
        """Lets the thread map what ranges will need to hold so many tokens. Gives no page: a
        range that needs one before may still take it."""

    def trim(self) -> None:
        """Unmaps what no sequence needs and returns free pages' memory to the system."""

    def close_all(self, timeout_s: float = 30.0) -> None:
        """Drops the prefix cache, returns all memory, ends the threads. Pages that are not yet in
        the page store are written to it until timeout_s is over."""

    def check_integrity(self) -> None:
        """Raises AssertionError for a broken invariant. For tests and idle moments."""


class KVPartition(KVMemory, Protocol):
    """One pool of pages and the ranges over it."""

    ranges: list[Range]
    on_close: Callable[[Range], None]
    """Called with each range that is closed."""

    def reset(self, num_pages: int, max_mappings: int = ...) -> None:
        """Starts anew with so many pages and mappings after all K/V was lost. No range is open."""


class PrefixState(Protocol):
    """The prefix cache as the engine sees it."""

    @property
    def stats(self) -> PrefixStats: ...

    @property
    def question(self) -> Question: ...

    @property
    def has_store(self) -> bool: ...

    @property
    def is_asking(self) -> bool:
        """Whether the store finds out which pages it can load."""

    @property
    def is_fetching(self) -> bool:
        """Whether pages are being loaded from the store, or it finds out which ones it can load."""

    @property
    def is_transferring(self) -> bool:
        """Whether pages are being copied to or from the store and can be had by no sequence."""

    def store_stats(self) -> StoreStats:
        """Returns the store's counters, all zero without a store. Any thread may call it."""

    def is_cached(self, key: bytes) -> bool:
        """Returns whether the cache has the page with this key. Any thread may call it."""

    def is_stored(self, key: bytes) -> bool:
        """Returns whether the store can probably load the page."""

    def poll(self) -> None:
        """Completes transfers that have ended; starts to write old pages to the store."""

    def wait(self, timeout_s: float) -> None:
        """Waits until a transfer has ended or the time is over."""

    def write_unwritten(self) -> bool:
        """Starts to write pages that are not in the store. Returns False if there are none or
        the store has failed for so long that it is left alone."""
