"""Records which token blocks the prefix cache has gained and lost, for followers outside.

A follower, such as a router, knows blocks of BLOCK_TOKENS tokens; a page holds any number of
tokens. A page stands for the blocks that end in it: as a page is evicted before its ancestors, a
block is cached for as long as that page is. The compute thread records, one other thread takes
(`take`). If that thread is late by MAX_EVENTS events, everything is forgotten, which the follower
is told; a page that is known no more is recorded again, with its ancestors, before its next child.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from memory.pages.layer_groups import PageLayout

BLOCK_TOKENS = 16
MAX_EVENTS = 100_000  # that wait to be taken


class StoredPage(NamedTuple):
    """A page that is cached from now on. tokens: those of its blocks; salt: that of its keys."""

    key: bytes
    parent: bytes | None
    tokens: array[int]
    salt: str | None


class RemovedPage(NamedTuple):
    key: bytes


class AllRemoved(NamedTuple):
    """No page is known any more, though some may be cached."""


PageEvent = StoredPage | RemovedPage | AllRemoved


class _NamedTokens(NamedTuple):
    token_ids: Sequence[int]
    keys: Sequence[bytes]
    salt: str | None


class BlockRecorder:
    """Implements `IndexListener` for the layers without a window, whose K/V a hit needs from the
    first token on."""

    def __init__(
        self, layout: PageLayout, *, with_salted: bool = False, max_events: int = MAX_EVENTS
    ) -> None:
        """with_salted: prompts with a salt are recorded, too."""
        self._group = next((it for it in layout.groups if it.window is None), None)
        self._with_salted = with_salted
        self._max_events = max_events
        self._slots: dict[bytes, int] = {}  # of the pages that are recorded
        self._events: deque[PageEvent] = deque()
        self._computed: _NamedTokens | None = None
        self._is_computed = False
        self._loaded: _NamedTokens | None = None
        self._is_awake = False
        self.wake: Callable[[], None] = lambda: None
        """Is called when there is an event, once until the next `take`."""
        self.num_overflows = 0

    @property
    def has_blocks(self) -> bool:
        """Whether any layer sees all tokens; without one no page is recorded."""
        return self._group is not None

    # ---- the compute thread

    def begin(self, token_ids: Sequence[int], keys: Sequence[bytes], salt: str | None) -> None:
        """Says whose pages are inserted until `end`."""
        self._computed = self._named(token_ids, keys, salt)
        self._is_computed = True

    def end(self) -> None:
        self._computed, self._is_computed = None, False

    def expect_loads(
        self, token_ids: Sequence[int], keys: Sequence[bytes], salt: str | None
    ) -> None:
        """Says whose pages the page store will load; there is one such sequence at a time."""
        self._loaded = self._named(token_ids, keys, salt)

    def _named(
        self, token_ids: Sequence[int], keys: Sequence[bytes], salt: str | None
    ) -> _NamedTokens | None:
        is_hidden = bool(salt) and not self._with_salted
        return None if is_hidden else _NamedTokens(token_ids, keys, salt or None)

    def inserted(self, key: bytes, parent: bytes | None) -> None:
        source = self._computed if self._is_computed else self._loaded
        if source is not None:
            self._record(source, key, parent)

    def removed(self, key: bytes) -> None:
        if self._slots.pop(key, None) is not None:
            self._add(RemovedPage(key))

    def _record(self, source: _NamedTokens, key: bytes, parent: bytes | None) -> None:
        """Records a page unless it is none of this sequence, or of layers with a window."""
        if self._group is None:
            return
        numbers, keys = self._group.key_numbers, source.keys
        slot = 0 if parent is None else self._slots.get(parent, -2) + 1
        if slot < 0:  # its parent was forgotten
            self._record_chain(source, key)
        elif numbers[slot] < len(keys) and keys[numbers[slot]] == key:
            self._add_page(source, slot, parent)

    def _record_chain(self, source: _NamedTokens, key: bytes) -> None:
        """Records a page and those of its ancestors that are not known any more."""
        assert self._group is not None
        keys = self._group.keys_of(source.keys)
        if key in keys:
            for slot in range(keys.index(key) + 1):
                parent = keys[slot - 1] if slot else None
                if keys[slot] not in self._slots and not self._add_page(source, slot, parent):
                    return

    def _add_page(self, source: _NamedTokens, slot: int, parent: bytes | None) -> bool:
        """Returns False if it was forgotten at once, because too many events wait."""
        assert self._group is not None
        group = self._group
        first = (group.page_end(slot - 1) if slot else 0) // BLOCK_TOKENS * BLOCK_TOKENS
        end = group.page_end(slot) // BLOCK_TOKENS * BLOCK_TOKENS
        key = source.keys[group.key_numbers[slot]]
        self._slots[key] = slot
        tokens = array("i", source.token_ids[first:end])
        return self._add(StoredPage(key, parent, tokens, source.salt))

    def _add(self, event: PageEvent) -> bool:
        is_full = len(self._events) >= self._max_events
        if is_full:
            self.num_overflows += 1
            self._events.clear()
            self._slots.clear()
            event = AllRemoved()
        self._events.append(event)
        if not self._is_awake:
            self._is_awake = True
            self.wake()
        return not is_full

    # ---- the thread that takes the events

    def take(self, max_events: int) -> list[PageEvent]:
        """Returns the oldest events and removes them; an empty list if there are none."""
        self._is_awake = False  # before the deque is read: what is added later wakes again
        taken: list[PageEvent] = []
        try:
            while len(taken) < max_events:
                taken.append(self._events.popleft())
        except IndexError:  # it is empty
            pass
        return taken
