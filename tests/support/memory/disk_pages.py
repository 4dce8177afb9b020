"""A small disk tier, and pages that repeat their key."""

from __future__ import annotations

from memory.tiers.disk_tier import DiskTier

PAGE = 8192
HEADER = 128


def open_store(directory, *, slots=8, identity=b"model", page=PAGE, **options) -> DiskTier:
    options = {"io": "threads", "growth_bytes": 4 * page, **options}
    return DiskTier(directory, page, slots * page, identity, **options)


def put(store, pages, *keys, **options) -> list[bool]:
    """Stores pages that repeat their key."""
    return [store.store(key, pages.fill(i, key), **options).result() for i, key in enumerate(keys)]


def found(store, pages, key) -> bool:
    """Whether a key is found; its page must then be right."""
    pages.fill(63, b"garbage")
    if not store.load(key, pages.at(63)).result():
        return False
    assert pages.holds(63, key)
    return True
