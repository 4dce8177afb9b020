"""Layer groups: layers that need the K/V of the same tokens share pages; sizes in integers.

Layers that see everything are one group, and those of each sliding window another one. A group
has its own bytes per token, so a page of it holds another number of tokens than a page of the
next group, but all take their pages from one pool. Every range begins at the same token in all
groups and keeps a place for each of its tokens: virtual memory costs nothing, and K/V of
position p stays at start + p in every layer. Behind a window the places lose their pages.
(Groups of one page size: after Jenga, arXiv 2503.18292, which cuts small pages from large ones.)
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

READ_BLOCK = 128
"""Positions of the largest block of keys that a kernel reads at once (csrc: KEY_BLOCK, STRETCH)."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """token_bytes: of a token in all layers of the group. tile_tokens: tokens that are stored
    interleaved and need their memory together. window: keys a row sees, itself included.
    read_block: keys are read in blocks of so many positions from a range's start, whole blocks
    that the window reaches, whatever is masked of them."""

    token_bytes: int
    tile_tokens: int = 1
    window: int | None = None
    read_block: int = READ_BLOCK

    def __post_init__(self) -> None:
        assert self.token_bytes > 0, f"{self}"
        assert self.read_block % self.tile_tokens == 0 or self.window is None, f"{self}"
        assert self.window is None or self.window > 0, f"{self}"

    def __str__(self) -> str:
        reach = "" if self.window is None else f" within {self.window}"
        return f"{self.token_bytes}{reach}"


class GroupPages:
    """Tokens and pages of one group. A *place* is a page's number in its range."""

    def __init__(self, group: LayerGroup, page_bytes: int, max_rows: int) -> None:
        """max_rows: tokens that one step computes of a sequence, at most."""
        self.layers = group
        self.token_bytes = group.token_bytes
        self.tile_tokens = group.tile_tokens
        self.window = group.window
        self.read_block = group.read_block
        self.page_bytes = page_bytes
        self._tile_bytes = group.token_bytes * group.tile_tokens
        self.unit_tokens = lcm(page_bytes, self._tile_bytes) // group.token_bytes
        self.max_pages = self._pages_in_reach(max_rows)
        self.max_decode_pages = self._pages_in_reach(1)
        # Which key of a sequence names a place; they are in the order in which pages of all
        # groups become complete. Without other groups, key i names place i.
        self.key_numbers: Sequence[int] = range(sys.maxsize)

    def _pages_in_reach(self, num_rows: int) -> int:
        if self.window is None:
            return sys.maxsize
        tokens = self.window - 1 + num_rows + self.read_block - 1
        return self.slots_for(tokens) + 1

    def slots_for(self, num_tokens: int) -> int:
        """Places that a range's first tokens take."""
        num_tiles = -(-num_tokens // self.tile_tokens)
        return -(-num_tiles * self._tile_bytes // self.page_bytes)

    def tokens_in(self, num_places: int) -> int:
        """Tokens that fit into a range's first places."""
        return num_places * self.page_bytes // self._tile_bytes * self.tile_tokens

    def page_end(self, place: int) -> int:
        """Tokens from the range's start on that give the page its whole content."""
        return -(-(place + 1) * self.page_bytes // self._tile_bytes) * self.tile_tokens

    def num_complete(self, num_tokens: int) -> int:
        """Leading places that so many tokens fill; the next token is written behind them."""
        return num_tokens // self.tile_tokens * self._tile_bytes // self.page_bytes

    def first_slot(self, num_computed: int) -> int:
        """The first one that anything may read when so many tokens are computed."""
        if self.window is None or num_computed < self.window:
            return 0
        first = (num_computed + 1 - self.window) // self.read_block * self.read_block
        return first // self.tile_tokens * self._tile_bytes // self.page_bytes

    def keys_of(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Of a sequence's page keys, those of this group, place by place."""
        numbers = self.key_numbers
        if isinstance(numbers, range):
            return keys
        return [keys[number] for number in numbers[: bisect_left(numbers, len(keys))]]


class PageLayout:
    """The groups of a model on pages of one size. range_tokens: from one range to the next."""

    def __init__(
        self, groups: Sequence[LayerGroup], page_bytes: int, max_model_len: int, max_rows: int
    ) -> None:
        self.groups = [GroupPages(group, page_bytes, max_rows) for group in groups]
        # A range starts on a page and holds a whole number of tiles, so that a tile's address
        # is simply (range start + position) // tile_tokens * tile_bytes.
        unit = lcm(*(group.unit_tokens for group in self.groups))
        self.range_tokens = -(-max_model_len // unit) * unit
        self.page_end: Callable[[int], int] = self.groups[0].page_end
        """Tokens that must be computed before a sequence's key of that number is due."""
        if len(groups) > 1:
            self._order_keys(max_model_len)

    def _order_keys(self, max_model_len: int) -> None:
        pages = sorted(
            (group.page_end(place), number, place)
            for number, group in enumerate(self.groups)
            for place in range(group.slots_for(max_model_len) + 1)
        )
        ends = [end for end, _, _ in pages]
        self.page_end = ends.__getitem__
        for number, group in enumerate(self.groups):
            group.key_numbers = [i for i, (_, other, _) in enumerate(pages) if other == number]

    @property
    def token_bytes(self) -> int:
        """Of a token in all layers."""
        return sum(group.token_bytes for group in self.groups)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a sequence holds at most until it has so many tokens."""
        return sum([min(g.slots_for(num_tokens), g.max_pages) for g in self.groups])

    def pages_at(self, num_tokens: int) -> int:
        """Pages that a sequence holds at most while it decodes at so many tokens."""
        return sum([min(g.slots_for(num_tokens), g.max_decode_pages) for g in self.groups])
