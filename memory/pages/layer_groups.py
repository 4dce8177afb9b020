"""Layer groups: layers that need the K/V of the same tokens share pages. Integers only.

Layers with full attention are one group, and the layers of each sliding window are another one;
where upper layers keep less (evicting_kv.py), neighbouring layers are a group. A group has its own
bytes per token, so its pages hold another number of tokens than those of other groups, but all
groups take pages from one pool. A range begins at the same token in all groups and has addresses
for all of its tokens: virtual memory costs nothing, and the K/V of position p stays at start + p in
every layer. The page slots behind a window lose their pages. (Groups of one page size: after Jenga,
arXiv 2503.18292, which cuts small pages from large ones.)
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

READ_BLOCK = 128
"""The largest block of key positions that a kernel reads at once (csrc: KEY_BLOCK, STRETCH)."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The sizes of one layer group.

    token_bytes: the bytes of a token in all layers of the group.
    tile_tokens: the tokens that are stored interleaved and so need their memory together.
    window: the keys that a row sees, itself included; None: all.
    by_block: a row sees the keys of its own block of `window` positions, counted from the range's
        start. The blocks are a copy in more bits of what another group has, so that pages of
        complete blocks are worth little.
    max_tokens: the leading tokens of a sequence that are kept here; None: all. Later ones are in
        other memory.
    hit_tokens: a cached prefix ends at a multiple of so many tokens, because the next rows need
        what is not in its pages.
    is_state: a tile holds the state after its last computed token, and not what its tokens add, so
        that a prefix ends where a tile does.
    read_block: kernels read keys in blocks of so many positions, counted from a range's start, and
        read whole blocks even if they mask part of one.
    """

    token_bytes: int
    tile_tokens: int = 1
    window: int | None = None
    read_block: int = READ_BLOCK
    max_tokens: int | None = None
    by_block: bool = False
    is_state: bool = False
    hit_tokens: int = 1

    def __post_init__(self) -> None:
        assert self.token_bytes > 0, f"{self}"
        assert self.read_block % self.tile_tokens == 0 or self.window is None, f"{self}"
        assert self.window is None or self.window > 0, f"{self}"
        assert self.max_tokens is None or self.window is None, f"{self}"
        assert not self.by_block or self.window, f"{self}"

    def __str__(self) -> str:
        kind = "a block of " if self.by_block else ""
        reach = "" if self.window is None else f" within {kind}{self.window}"
        if self.is_state:
            return f"a state of {self.token_bytes * self.tile_tokens} every {self.tile_tokens}"
        return f"{self.token_bytes}{reach}"


def kept_bytes(groups: Sequence[LayerGroup]) -> int:
    """Returns the bytes of a token in all layers, without those of recent tokens alone, and of
    states."""
    return sum(group.token_bytes for group in groups if not (group.by_block or group.is_state))


class GroupPages:
    """Converts between tokens, page slots and keys of one group."""

    def __init__(self, group: LayerGroup, page_bytes: int, max_rows: int) -> None:
        """max_rows: the most tokens of a sequence that one step computes."""
        self.layers = group
        self.token_bytes = group.token_bytes
        self.tile_tokens = group.tile_tokens
        self.window = group.window
        self.read_block = group.read_block
        self.by_block = group.by_block
        self.is_state = group.is_state
        self.hit_tokens = group.hit_tokens
        self.page_bytes = page_bytes
        self._tile_bytes = group.token_bytes * group.tile_tokens
        self.unit_tokens = lcm(page_bytes, self._tile_bytes) // group.token_bytes
        self._max_tokens = sys.maxsize if group.max_tokens is None else group.max_tokens
        self.max_pages = self._pages_in_reach(max_rows)
        # A second state is there only while an interval begins.
        self.max_decode_pages = self.slots_for(1) if self.is_state else self._pages_in_reach(1)
        # The number of the page key for each slot. Keys are in the order in which the pages of all
        # groups become complete. With one group, key i is the key of slot i.
        self.key_numbers: Sequence[int] = range(sys.maxsize)

    def _pages_in_reach(self, num_rows: int) -> int:
        if self.window is None:
            return sys.maxsize if self.layers.max_tokens is None else self.slots_for(sys.maxsize)
        if self.is_state:  # the record before the rows, and those of their intervals
            return self.slots_for(1) * (1 + -(-num_rows // self.tile_tokens))
        tokens = self.window - 1 + num_rows
        if not self.by_block or self.window % self.read_block:
            tokens += self.read_block - 1
        return self.slots_for(tokens) + 1

    def slots_for(self, num_tokens: int) -> int:
        """Returns how many slots a range's first num_tokens tokens take, as far as these are kept
        here."""
        num_tiles = -(-min(num_tokens, self._max_tokens) // self.tile_tokens)
        return -(-num_tiles * self._tile_bytes // self.page_bytes)

    def tokens_in(self, num_slots: int) -> int:
        """Returns how many tokens fit into a range's first slots."""
        return num_slots * self.page_bytes // self._tile_bytes * self.tile_tokens

    def capacity(self, num_slots: int) -> int:
        """Returns how many tokens a range can have with so many slots: any number if these hold all
        tokens that are kept here."""
        num_tokens = self.tokens_in(num_slots)
        return num_tokens if num_tokens < self._max_tokens else sys.maxsize

    def page_end(self, slot: int) -> int:
        """Returns how many tokens from the range's start on make the slot's page complete."""
        return -(-(slot + 1) * self.page_bytes // self._tile_bytes) * self.tile_tokens

    def num_complete(self, num_tokens: int) -> int:
        """Returns how many leading slots num_tokens tokens fill; the next token is written behind
        them."""
        return num_tokens // self.tile_tokens * self._tile_bytes // self.page_bytes

    def first_slot(self, num_computed: int) -> int:
        """Returns the first slot that later rows can read once num_computed tokens are computed."""
        if self.window is None or num_computed < self.window:
            return 0
        first = num_computed + 1 - self.window
        if self.by_block:
            first = num_computed // self.window * self.window
        first = first // self.read_block * self.read_block
        return first // self.tile_tokens * self._tile_bytes // self.page_bytes

    def keys_of(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Returns those of a sequence's page keys that belong to this group, in slot order."""
        numbers = self.key_numbers
        if isinstance(numbers, range):
            return keys
        return [keys[number] for number in numbers[: bisect_left(numbers, len(keys))]]


class PageLayout:
    """The layer groups of a model on pages of one size. range_tokens: the tokens from the start of
    one range to the start of the next."""

    def __init__(
        self, groups: Sequence[LayerGroup], page_bytes: int, max_model_len: int, max_rows: int
    ) -> None:
        self.groups = [GroupPages(group, page_bytes, max_rows) for group in groups]
        # A range starts on a page and holds a whole number of tiles, so that a tile's address
        # is simply (range start + position) // tile_tokens * tile_bytes.
        unit = lcm(*(group.unit_tokens for group in self.groups))
        self.range_tokens = -(-max_model_len // unit) * unit
        self.page_end: Callable[[int], int] = self.groups[0].page_end
        """Returns how many tokens must be computed before that page key can be formed."""
        if len(groups) > 1:
            self.page_end = order_keys(self.groups, max_model_len)

    @property
    def is_bounded(self) -> bool:
        """Whether the pages of a sequence in some group are bounded."""
        return any(group.max_pages < sys.maxsize for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """The bytes of a token in all layers, as `kept_bytes`."""
        return kept_bytes([group.layers for group in self.groups])

    def pages_for(self, num_tokens: int) -> int:
        """Returns the most pages that a sequence holds until it has num_tokens tokens."""
        return sum([min(g.slots_for(num_tokens), g.max_pages) for g in self.groups])

    def pages_of(self, num_tokens: Sequence[int]) -> int:
        """Returns the pages of a sequence of which each group holds so many tokens."""
        parts = zip(self.groups, num_tokens, strict=True)
        return sum([group.slots_for(count) for group, count in parts])

    def pages_at(self, num_tokens: int) -> int:
        """Returns the most pages that a sequence holds while it decodes at num_tokens tokens; of
        states those that it holds nearly always."""
        return sum([min(g.slots_for(num_tokens), g.max_decode_pages) for g in self.groups])


def order_keys(groups: Sequence[GroupPages], max_model_len: int) -> Callable[[int], int]:
    """Numbers the page keys of the groups in the order in which the pages become complete. Returns
    a function as PageLayout.page_end."""
    pages = sorted(
        (group.page_end(slot), number, slot)
        for number, group in enumerate(groups)
        for slot in range(group.slots_for(max_model_len) + 1)
    )
    ends = [end for end, _, _ in pages]
    for number, group in enumerate(groups):
        group.key_numbers = [i for i, (_, other, _) in enumerate(pages) if other == number]
    return ends.__getitem__
