"""Finds the cached prefix of a sequence, where layer groups need different pages of it.

A hit of n tokens needs all pages of a group that rows from n on can reach. Without a window these
are all pages before n, otherwise only those within the last window before n. Pages behind a window
may have been evicted. (Layer-specific prefix caching: Jenga, arXiv 2503.18292.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import takewhile

from memory.pages.kv_range import PartHit, PrefixHit, Range, RangePart
from memory.pages.layer_groups import GroupPages, PageLayout
from memory.prefix.cache import PrefixCache


class PrefixFinder:
    """Looks up pages by a sequence's page keys; key i covers layout.page_end(i) tokens."""

    def __init__(self, layout: PageLayout, cache: PrefixCache) -> None:
        self._layout = layout
        self._cache = cache

    def num_tokens(
        self, keys: Sequence[bytes], max_tokens: int, is_there: Callable[[bytes], bool]
    ) -> int:
        """Returns the length of the longest prefix, at most max_tokens, whose pages are all
        there."""
        chains = [(group, group.keys_of(keys)) for group in self._layout.groups]
        found = max_tokens
        while found > 0:
            most = found
            for group, chain in chains:
                found = _reachable(group, chain, found, is_there)
            if found == most or len(chains) == 1:
                break
        return max(0, found)

    def match(self, keys: Sequence[bytes], max_tokens: int) -> PrefixHit | None:
        index = self._cache.index
        num_tokens = self.num_tokens(keys, max_tokens, index.has_key)
        if not num_tokens:
            return None
        parts: list[PartHit] = []
        for group in self._layout.groups:
            first, end = group.first_slot(num_tokens), group.slots_for(num_tokens)
            chain = group.keys_of(keys)[first:end]
            num_shared = group.num_complete(num_tokens) - first
            pages = [index.page_of(key) for key in chain]
            parts.append(PartHit(first, pages[:num_shared], pages[num_shared:]))
            if group.window is None:
                index.touch(chain[-1])
            else:
                self._cache.use(pages)
        return PrefixHit(num_tokens, parts)

    def use(self, keys: Sequence[bytes]) -> None:
        """Marks the pages of these keys as just used, as far as they are cached."""
        index = self._cache.index
        self._cache.use([index.page_of(key) for key in keys if index.has_key(key)])

    def num_shared_pages(self, hit: PrefixHit) -> int:
        """Returns how many of the hit's pages sequences hold already, so that they cost nothing.
        Pages of a window group do not count, because the window passes them and needs others."""
        references = self._cache.num_references
        return sum(
            sum([references(page) > 1 for page in part.shared])
            for group, part in zip(self._layout.groups, hit.parts, strict=True)
            if group.window is None
        )

    def insert(self, target: Range, keys: Sequence[bytes], num_computed: int) -> None:
        """Inserts the pages of the range that num_computed tokens complete into the cache."""
        for part in target.parts:
            group, end, numbers = part.group, part.num_offered, part.group.key_numbers
            while numbers[end] < len(keys) and group.page_end(end) <= num_computed:
                end += 1
            if end == part.num_offered:
                continue
            first = max(part.num_offered, part.num_released)
            if group.window is None:
                first = self._first_uncached(part, keys)
            for slot in range(first, end):
                key, parent = keys[numbers[slot]], self._parent(group, keys, slot)
                is_minor = group.by_block or (group.is_state and not is_kept(group, slot, end))
                self._cache.insert(key, parent, part.pages[slot], is_minor=is_minor)
            if group.is_state:
                self._replace_newest(part, [keys[numbers[slot]] for slot in range(first, end)])
            part.num_offered = end

    def _replace_newest(self, part: RangePart, keys: Sequence[bytes]) -> None:
        """Keeps the last record among those with these page keys as the sequence's newest. The
        earlier one is worth less now, unless it was hit or its place is a power of two."""
        group = part.group
        if part.newest and not is_kept(group, part.num_offered - 1, sys.maxsize):
            self._cache.demote(part.newest)
        part.newest = list(keys[-group.slots_for(1) :])

    def _first_uncached(self, part: RangePart, keys: Sequence[bytes]) -> int:
        """Returns the first slot whose page is offered again. For these keys the cache held pages
        of another sequence, which it may have evicted since, and these pages with them."""
        numbers, knows = part.group.key_numbers, self._cache.index.has
        slot = part.num_cached
        while slot < part.num_offered and knows(keys[numbers[slot]], part.pages[slot]):
            slot += 1
        part.num_cached = slot
        return slot

    def fetch(
        self, keys: Sequence[bytes], num_spare: int, compute_s: Callable[[int, int], float]
    ) -> bool:
        """Starts to load the longest prefix that is in memory or the store and whose missing pages
        fit into num_spare pages, unless computing it is faster. Returns whether a load is in
        progress, or the store finds out what it has; if so, call again after that.

        compute_s(n, k): seconds to compute the first n tokens if k are cached; 0: unknown.
        """
        cache, index = self._cache, self._cache.index
        if not cache.has_store or cache.is_fetching:
            return cache.is_fetching
        if cache.question.ask([key for key in keys if not index.has_key(key)]):
            return True
        end = self._layout.range_tokens
        while num_tokens := self.num_tokens(
            keys, end, lambda key: index.has_key(key) or cache.is_stored(key)
        ):
            needed = self._needed(keys, num_tokens)
            cached = [index.page_of(key) for key, _ in needed if index.has_key(key)]
            excess = len(needed) - len(cached) - min(num_spare, cache.num_free_excluding(cached))
            if excess <= 0 or len(needed) == len(cached):
                num_cached = self.num_tokens(keys, num_tokens, index.has_key)
                load_s = cache.load_times.seconds(len(needed) - len(cached))
                if 0.0 < compute_s(num_tokens, num_cached) < load_s:
                    cache.load_times.declined()
                    cache.stats.num_declined += 1
                    return False
                return cache.fetch(needed, num_spare)
            first = self._layout.groups[0]
            end = first.tokens_in(max(0, first.slots_for(num_tokens) - excess))
        return False

    def _needed(self, keys: Sequence[bytes], num_tokens: int) -> list[tuple[bytes, bytes | None]]:
        """Returns the (key, parent key) pairs of the pages that a hit of num_tokens tokens
        needs."""
        found: list[tuple[bytes, bytes | None]] = []
        for group in self._layout.groups:
            first, end = group.first_slot(num_tokens), group.slots_for(num_tokens)
            found += [
                (keys[group.key_numbers[slot]], self._parent(group, keys, slot))
                for slot in range(first, end)
            ]
        return found

    def _parent(self, group: GroupPages, keys: Sequence[bytes], slot: int) -> bytes | None:
        """Returns the key of the parent, which pages of a window group do not have, because a page
        behind the window is evicted before its successors. A state is worth nothing without the
        K/V before it, so that its parent is the last page of that."""
        if group.is_state:
            group, slot = self._layout.groups[0], self._kv_slots(group, slot)
        if group.window is not None or slot == 0:
            return None
        return keys[group.key_numbers[slot - 1]]

    def _kv_slots(self, group: GroupPages, slot: int) -> int:
        """Returns how many slots of the first group are complete where a state's slot is."""
        return self._layout.groups[0].num_complete(group.page_end(slot))


def is_kept(group: GroupPages, slot: int, end: int) -> bool:
    """Returns whether a state's page is worth as much as K/V: it is the last one before slot `end`,
    or its number is a power of two, so that the prefixes of a long prompt that other prompts may
    share are at most half as long as they could be. Others are evicted first."""
    number = group.page_end(slot) // group.tile_tokens
    return number == group.page_end(end - 1) // group.tile_tokens or number & (number - 1) == 0


def _reachable(
    group: GroupPages, chain: Sequence[bytes], num_tokens: int, is_there: Callable[[bytes], bool]
) -> int:
    """Returns the longest prefix, at most num_tokens tokens, whose pages of this group are
    there."""
    if group.is_state:
        num_tokens = num_tokens // group.tile_tokens * group.tile_tokens
    if group.window is None:
        num_cached = sum(1 for _ in takewhile(is_there, chain))
        found = min(num_tokens, group.tokens_in(num_cached))
        return found - found % group.hit_tokens
    while num_tokens > 0:
        slots = range(group.first_slot(num_tokens), group.slots_for(num_tokens))
        if slots.stop > len(chain) and slots:
            num_tokens = group.tokens_in(len(chain))
            continue
        gap = next((slot for slot in reversed(slots) if not is_there(chain[slot])), None)
        if gap is None:
            break
        num_tokens = group.tokens_in(gap)
    return num_tokens
