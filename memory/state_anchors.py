"""Ties cached records of states to cached K/V in other memory. Integers and bytes only.

A record is worth nothing without the K/V before it. Where both have pages of one pool, the record
is a child of the last K/V page before its end, and is evicted with it. Here they have pools and
indices of their own, so a record is dropped when its anchor, that K/V page, has left them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from memory.prefix.cache import PrefixCache


class StateAnchors:
    """The anchors of all cached records."""

    def __init__(self, kv: Sequence[PrefixCache], records: PrefixCache) -> None:
        """kv: the caches that may have an anchor."""
        self._kv = list(kv)
        self._records = records
        self._anchors: dict[bytes, bytes] = {}  # by the record's key
        self._tied: dict[bytes, set[bytes]] = {}  # records' keys by their anchor's
        for number, cache in enumerate(kv):
            cache.index.listener = _Removals(partial(self._lose_anchor, number))
        records.index.listener = _Removals(self._untie)

    def tie(self, record: bytes, anchor: bytes) -> None:
        """Ties a record, if it is cached, or drops it if its anchor is not."""
        if not self._records.index.has_key(record):
            return
        if not any(cache.index.has_key(anchor) for cache in self._kv):
            self._drop(record)
            return
        self._anchors[record] = anchor
        self._tied.setdefault(anchor, set()).add(record)

    def _lose_anchor(self, number: int, anchor: bytes) -> None:
        """Drops an anchor's records after it has left the index of this number."""
        others = (cache for i, cache in enumerate(self._kv) if i != number)
        if anchor in self._tied and not any(cache.index.has_key(anchor) for cache in others):
            for record in [*self._tied[anchor]]:
                self._drop(record)

    def _drop(self, record: bytes) -> None:
        index = self._records.index
        self._records.drop(index.evict_tree(index.page_of(record)))

    def _untie(self, record: bytes) -> None:
        anchor = self._anchors.pop(record, None)
        if anchor is not None:
            self._tied[anchor].discard(record)
            if not self._tied[anchor]:
                del self._tied[anchor]

    def check_integrity(self) -> None:
        """Raises AssertionError for a broken invariant."""
        tied = {key: anchor for anchor, keys in self._tied.items() for key in keys}
        assert tied == self._anchors, "a record without its anchor"
        for record, anchor in tied.items():
            assert self._records.index.has_key(record), "a record that is not cached"
            assert any(cache.index.has_key(anchor) for cache in self._kv), "a record without K/V"


class _Removals:
    """An IndexListener that wants to know of removals alone."""

    def __init__(self, removed: Callable[[bytes], None]) -> None:
        self.removed = removed

    def inserted(self, key: bytes, parent: bytes | None) -> None:
        pass
