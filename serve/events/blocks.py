"""Pages of the prefix cache as blocks with hashes, and the events about them in vLLM's format.

An event is a list that begins with its kind, as vLLM's subscribers decode it (`as_map`: as those
of later versions do). A block's hash is 64
bits of its name: the last block of a page has the page's name, an earlier one H(name, its number).
Names are chained and keyed, so a hash stands for all tokens from the first on, and two engines
give the same tokens different hashes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from typing import NamedTuple

from memory.prefix.block_recorder import (
    BLOCK_TOKENS,
    AllRemoved,
    PageEvent,
    RemovedPage,
    StoredPage,
)

Event = list[object]
"""One of the three kinds of events: BlockStored, BlockRemoved, AllBlocksCleared."""

_NAMES = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
MEDIUM = "GPU"
"""vLLM's name of the memory in which kernels read K/V, whatever device computes."""
_PAGE_BYTES = 500  # about what a page takes here without its tokens


class _Page(NamedTuple):
    """A page that followers know. last: the hash of its last block, or of the last one before it if
    none ends in it; None: no block ends before."""

    parent_hash: int | None
    hashes: list[int]
    last: int | None
    tokens: array[int]
    salt: str | None


class PublishedBlocks:
    """The blocks that followers know, and the events that tell them about changes."""

    def __init__(self) -> None:
        self._pages: dict[bytes, _Page] = {}  # parents before children

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def num_bytes(self) -> int:
        """About how much memory the blocks take here."""
        num_tokens = sum(len(page.tokens) for page in list(self._pages.values()))
        return len(self._pages) * _PAGE_BYTES + num_tokens * array("i").itemsize

    def apply(self, changes: Iterable[PageEvent]) -> list[Event]:
        """Notes changes and returns their events. Neighbours of a chain share an event."""
        events: list[Event] = []
        run = _Run()
        removed: list[int] = []
        for change in changes:
            if isinstance(change, StoredPage):
                _flush_removed(removed, events)
                run.add(self._store(change), events)
                continue
            run.flush(events)
            if isinstance(change, RemovedPage):
                page = self._pages.pop(change.key, None)
                removed += [] if page is None else page.hashes
            else:
                assert isinstance(change, AllRemoved)
                removed.clear()
                self._pages.clear()
                events.append(all_cleared())
        run.flush(events)
        _flush_removed(removed, events)
        return events

    def snapshot(self) -> list[Event]:
        """Returns events that tell somebody who knows nothing, or wrong things, all blocks."""
        events = [all_cleared()]
        run = _Run()
        for page in self._pages.values():
            run.add(page, events)
        run.flush(events)
        return events

    def _store(self, stored: StoredPage) -> _Page:
        parent = None if stored.parent is None else self._pages[stored.parent]
        parent_hash = None if parent is None else parent.last
        hashes = block_hashes(stored.key, len(stored.tokens) // BLOCK_TOKENS)
        last = hashes[-1] if hashes else parent_hash
        page = _Page(parent_hash, hashes, last, stored.tokens, stored.salt)
        self._pages[stored.key] = page
        return page


class _Run:
    """Pages that follow one another in a chain and become one event."""

    def __init__(self) -> None:
        self._pages: list[_Page] = []

    def add(self, page: _Page, events: list[Event]) -> None:
        """Adds a page; flushes first if it does not follow the last one."""
        if not page.hashes:
            return
        if self._pages and page.parent_hash != self._pages[-1].last:
            self.flush(events)
        self._pages.append(page)

    def flush(self, events: list[Event]) -> None:
        """Appends the event of these pages, if there are any, and forgets them."""
        if not self._pages:
            return
        first = self._pages[0]
        hashes = [each for page in self._pages for each in page.hashes]
        tokens = [token for page in self._pages for token in page.tokens]
        event: Event = [
            "BlockStored",
            hashes,
            first.parent_hash,
            tokens,
            BLOCK_TOKENS,
            None,
            MEDIUM,
        ]
        event.append(None)  # vLLM's lora_name, which some of its subscribers require
        if first.salt is not None:
            is_first = first.parent_hash is None  # the first block's hash has the salt, in vLLM too
            salted: list[object] = [[first.salt] if is_first else None]
            event.append(salted + [None] * (len(hashes) - 1))
        events.append(event)
        self._pages = []


def _flush_removed(hashes: list[int], events: list[Event]) -> None:
    if hashes:
        events.append(["BlockRemoved", list(hashes), MEDIUM])
        hashes.clear()


def as_map(event: Event) -> dict[str, object]:
    """Returns an event in the form of vLLM's later versions, with the names of its values."""
    kind = event[0]
    assert isinstance(kind, str)
    return {"type": kind, **dict(zip(_NAMES[kind], event[1:], strict=False))}


def all_cleared() -> Event:
    return ["AllBlocksCleared"]


def block_hashes(name: bytes, count: int) -> list[int]:
    """Returns the hashes of the blocks that end in a page."""
    names = [
        hashlib.blake2b(name + number.to_bytes(4, "big"), digest_size=16).digest()
        for number in range(count - 1)
    ]
    return [int.from_bytes(each[-8:], "big") for each in [*names, name][:count]]
