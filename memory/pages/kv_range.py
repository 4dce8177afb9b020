"""One sequence's range of virtual addresses and the pages it holds, in integers only."""

from __future__ import annotations

from dataclasses import dataclass, field

from memory.pages.allocator import runs_of
from memory.pages.layer_groups import GroupPages

UNMAPPED = -1
"""Stands for the page of a page slot that has none."""


@dataclass(slots=True)
class RangePart:
    """The part of a range that belongs to one layer group. It is a row of page slots.

    index: the part's number in the address space.
    pages: the page of each slot; the first num_released slots have lost theirs (UNMAPPED), because
        their tokens are behind the group's window.
    num_mapped: the address space maps the pages of the slots before this one.
    num_unmapped: the address space maps nothing at the slots before this one.
    copies: (source page, slot) pairs to copy at the next commit.
    num_offered: the leading slots whose pages were offered to the prefix cache.
    num_cached: the leading slots that the prefix cache holds with these very pages; it keeps them
        while this range holds them.
    newest: the page keys of the last state that was offered to the prefix cache.
    num_fewer: how many tokens fewer than the range the group's layers hold (evicting_kv.py).
    """

    group: GroupPages
    index: int
    pages: list[int] = field(default_factory=list)
    num_released: int = 0
    num_mapped: int = 0
    num_unmapped: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_offered: int = 0
    num_cached: int = 0
    newest: list[bytes] = field(default_factory=list)
    num_fewer: int = 0

    def clear(self) -> None:
        self.pages.clear()
        self.copies.clear()
        self.newest.clear()
        self.num_released = self.num_mapped = self.num_unmapped = 0
        self.num_offered = self.num_cached = self.num_fewer = 0

    def slots_for(self, num_tokens: int) -> int:
        """Returns how many slots the part has where the range has num_tokens tokens."""
        return self.group.slots_for(num_tokens - self.num_fewer)

    @property
    def capacity(self) -> int:
        """The tokens that the range can have with the part's pages."""
        return self.group.capacity(len(self.pages)) + self.num_fewer

    @property
    def held(self) -> list[int]:
        return self.pages[self.num_released :] if self.num_released else self.pages

    @property
    def is_committed(self) -> bool:
        """Whether the next commit has nothing to do."""
        return self.num_mapped == len(self.pages) and not self.copies


@dataclass(slots=True)
class Range:
    """One range, with a part for each layer group.

    start: the range's first token address, counted in tokens, as attention counts them.
    capacity: the tokens that fit into its pages.
    promised_tokens: the tokens it was opened for.
    promised_pages: the pages it may still need for these tokens.
    num_due_mappings: the most mappings that the next commit makes for its prefix hit.
    dropped: the tokens of its sequence whose K/V was dropped (evicting_kv.py); start, capacity and
        promised tokens count without them.
    """

    index: int
    parts: list[RangePart]
    start: int = 0
    capacity: int = 0
    promised_tokens: int = 0
    promised_pages: int = 0
    num_due_mappings: int = 0
    dropped: int = 0
    is_open: bool = False

    @property
    def pages(self) -> list[int]:
        """All pages that it holds."""
        return [page for part in self.parts for page in part.held]

    @property
    def num_offered(self) -> int:
        """The leading page keys whose pages were offered to the prefix cache."""
        return sum([part.num_offered for part in self.parts])


@dataclass(frozen=True, slots=True)
class PartHit:
    """A prefix hit's pages in one layer group.

    The `shared` pages are mapped from slot `first` on; the `copied` ones after them are copied,
    because the sequence's next tokens are written into them.
    """

    first: int
    shared: list[int]
    copied: list[int]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A cached prefix of num_tokens tokens, with the pages that later tokens can read."""

    num_tokens: int
    parts: list[PartHit]

    @property
    def num_calls(self) -> int:
        """The most system calls and copies that mapping it takes: one per run of consecutive
        shared pages and one per copied page."""
        return sum([len(runs_of(part.shared)) + len(part.copied) for part in self.parts])
