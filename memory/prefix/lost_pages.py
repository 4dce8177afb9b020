"""Removes pages from the prefix cache whose content is lost."""

from __future__ import annotations

from collections.abc import Iterable

from memory.prefix.cache import PrefixCache


def drop_pages(prefixes: PrefixCache, pages: Iterable[int]) -> None:
    """Drops cached pages and all that follow them, so that no later sequence finds them. Ranges
    that hold them keep them."""
    for page in pages:
        if page in prefixes.index:
            prefixes.drop(prefixes.index.evict_tree(page))
