"""One sequence's range and what it holds: a part for each layer group. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, field

from memory.pages.allocator import runs_of
from memory.pages.layer_groups import GroupPages

UNMAPPED = -1
"""Stands for a page where there is none (any more)."""


@dataclass(slots=True)
class RangePart:
    """The places of one layer group. index: in the address space. pages: by place; the first
    num_passed of them are UNMAPPED, because no row reaches behind its window any more.

    valid: places before it show their pages in the address space; num_unmapped: places before it
    show nothing. copies: (source page, place) that are due at the next commit. num_known:
    leading places that have been offered to the prefix cache; it knows the first num_settled of
    them with these very pages, and keeps them as long as they are held here.
    """

    group: GroupPages
    index: int
    pages: list[int] = field(default_factory=list)
    num_passed: int = 0
    valid: int = 0
    num_unmapped: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_known: int = 0
    num_settled: int = 0

    def clear(self) -> None:
        self.pages.clear()
        self.copies.clear()
        self.num_passed = self.valid = self.num_unmapped = 0
        self.num_known = self.num_settled = 0

    @property
    def held(self) -> list[int]:
        return self.pages[self.num_passed :] if self.num_passed else self.pages

    @property
    def is_settled(self) -> bool:
        """Nothing is due at the next commit."""
        return self.valid == len(self.pages) and not self.copies


@dataclass(slots=True)
class Range:
    """One range. start: where it begins, in tokens, as attention counts them. capacity: tokens
    that fit in its pages; num_promised: tokens it was opened for; promised: pages that it may
    still need until it has them. num_due: mappings of its hit that the next commit makes, at
    most."""

    index: int
    parts: list[RangePart]
    start: int = 0
    capacity: int = 0
    num_promised: int = 0
    promised: int = 0
    num_due: int = 0
    is_open: bool = False

    @property
    def pages(self) -> list[int]:
        """All that it holds."""
        return [page for part in self.parts for page in part.held]

    @property
    def num_known(self) -> int:
        """Leading keys whose pages have been offered to the prefix cache."""
        return sum([part.num_known for part in self.parts])


@dataclass(frozen=True, slots=True)
class PartHit:
    """Of one group: `shared` pages to map from place `first` on, then `copied` ones to copy,
    because the sequence's next tokens are written into them."""

    first: int
    shared: list[int]
    copied: list[int]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """num_tokens whose K/V is at hand, as far as later tokens reach back."""

    num_tokens: int
    parts: list[PartHit]

    @property
    def num_calls(self) -> int:
        """System calls and copies to map it, at most: one for a run of consecutive pages."""
        return sum([len(runs_of(part.shared)) + len(part.copied) for part in self.parts])
