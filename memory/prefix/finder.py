"""How much of a sequence is at hand, when layer groups need different pages of it.

A hit of n tokens takes of a group all pages that rows from n on can reach: all before n without a
window, else only those within the last window before n. What is behind a window may be forgotten.
(Layer-specific prefix caching: Jenga, arXiv 2503.18292.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from memory.pages.kv_range import PartHit, PrefixHit, Range, RangePart
from memory.pages.layer_groups import GroupPages, PageLayout
from memory.prefix.cache import PrefixCache


class PrefixFinder:
    """Pages by a sequence's keys: key i is due at layout.page_end(i) tokens."""

    def __init__(self, layout: PageLayout, cache: PrefixCache) -> None:
        self._layout = layout
        self._cache = cache

    def num_tokens(
        self, keys: Sequence[bytes], max_tokens: int, is_there: Callable[[bytes], bool]
    ) -> int:
        """The longest beginning, at most max_tokens, whose pages are all there."""
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

    def num_shared_pages(self, hit: PrefixHit) -> int:
        """Pages of a hit that others hold already, so that they cost nothing. Behind a window
        other pages take their place: those do not count."""
        references = self._cache.num_references
        return sum(
            sum([references(page) > 1 for page in part.shared])
            for group, part in zip(self._layout.groups, hit.parts, strict=True)
            if group.window is None
        )

    def insert(self, target: Range, keys: Sequence[bytes], num_computed: int) -> None:
        """Let the cache know the range's pages that are complete by now."""
        for part in target.parts:
            group, end, numbers = part.group, part.num_offered, part.group.key_numbers
            while numbers[end] < len(keys) and group.page_end(end) <= num_computed:
                end += 1
            if end == part.num_offered:
                continue
            first = max(part.num_offered, part.num_released)
            if group.window is None:
                first = self._first_unsettled(part, keys)
            for place in range(first, end):
                parent = self._parent(group, keys, place)
                self._cache.insert(keys[numbers[place]], parent, part.pages[place])
            part.num_offered = end

    def _first_unsettled(self, part: RangePart, keys: Sequence[bytes]) -> int:
        """From there on pages are offered again: the cache knows others, of a sequence that may
        have ended since, or may have forgotten these with those."""
        numbers, knows = part.group.key_numbers, self._cache.index.has
        place = part.num_cached
        while place < part.num_offered and knows(keys[numbers[place]], part.pages[place]):
            place += 1
        part.num_cached = place
        return place

    def fetch(
        self, keys: Sequence[bytes], num_spare: int, compute_s: Callable[[int, int], float]
    ) -> bool:
        """Begin to bring back what the store knows of the longest beginning whose missing pages
        fit into num_spare ones, unless computing it is quicker; whether something is on its way.

        compute_s(n, k): seconds to compute the first n tokens when k are known; 0: who knows.
        """
        cache, index = self._cache, self._cache.index
        if not cache.has_store or cache.is_fetching:
            return cache.is_fetching
        end = self._layout.range_tokens
        while num_tokens := self.num_tokens(
            keys, end, lambda key: index.has_key(key) or cache.is_stored(key)
        ):
            needed = self._needed(keys, num_tokens)
            known = [index.page_of(key) for key, _ in needed if index.has_key(key)]
            excess = len(needed) - len(known) - min(num_spare, cache.num_free_excluding(known))
            if excess <= 0 or len(needed) == len(known):
                num_known = self.num_tokens(keys, num_tokens, index.has_key)
                load_s = cache.load_times.seconds(len(needed) - len(known))
                if 0.0 < compute_s(num_tokens, num_known) < load_s:
                    cache.load_times.declined()
                    cache.stats.num_declined += 1
                    return False
                return cache.fetch(needed, num_spare)
            first = self._layout.groups[0]
            end = first.tokens_in(max(0, first.slots_for(num_tokens) - excess))
        return False

    def _needed(self, keys: Sequence[bytes], num_tokens: int) -> list[tuple[bytes, bytes | None]]:
        """Keys, with their parents, of what a hit of so many tokens takes; complete pages only."""
        found: list[tuple[bytes, bytes | None]] = []
        for group in self._layout.groups:
            first, end = group.first_slot(num_tokens), group.slots_for(num_tokens)
            found += [
                (keys[group.key_numbers[place]], self._parent(group, keys, place))
                for place in range(first, end)
            ]
        return found

    @staticmethod
    def _parent(group: GroupPages, keys: Sequence[bytes], place: int) -> bytes | None:
        """A page behind a window goes before those that continue it, so it is nobody's parent."""
        if group.window is not None or place == 0:
            return None
        return keys[group.key_numbers[place - 1]]


def _reachable(
    group: GroupPages, chain: Sequence[bytes], num_tokens: int, is_there: Callable[[bytes], bool]
) -> int:
    """The longest beginning, at most num_tokens, of which this group's pages are there."""
    if group.window is None:
        num_known = sum(1 for _ in takewhile(is_there, chain))
        return min(num_tokens, group.tokens_in(num_known))
    num_tokens = min(num_tokens, group.tokens_in(len(chain)))
    while num_tokens > 0:
        places = range(group.first_slot(num_tokens), group.slots_for(num_tokens))
        gap = next((place for place in reversed(places) if not is_there(chain[place])), None)
        if gap is None:
            break
        num_tokens = group.tokens_in(gap)
    return num_tokens
