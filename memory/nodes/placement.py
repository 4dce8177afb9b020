"""Partitions K/V over memory nodes, in integers: by heads, sequences or tokens.

In mode `head` every node has some K/V heads of every token, so the load is even for all lengths
(Lamina, arXiv 2405.01814, section 4.2). In mode `sequence` stripes of 16 tokens go round the nodes,
and the engine merges their partial results (K/V parallelism). In mode `request` each sequence is
on one node. A node does not know the mode: its layers have some heads, its pages some tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from memory.attention.seam import AttentionLayer
from memory.nodes.attach import STRIPE_TOKENS
from memory.nodes.wire import HEADER_BYTES
from memory.pages.layer_groups import LayerGroup

PARTITIONS = ("auto", "head", "request", "sequence")
_MIN_PAGE_BYTES = 16 << 10  # of a page on a node
MAX_PAGES = 30_000  # on a node; Linux allows a process 65,530 mappings
MAX_LISTED = 1 << 20
"""Of scores of tiles in the lists of one message, if it has more than one row."""
_MAX_SEQUENCE_NODES = 4  # each smaller number of nodes divides a page of mode `sequence`, too


class PlacementError(ValueError):
    """These layers cannot be partitioned over so many nodes. The text names the setting."""


def resolve_partition(name: str, layers: Sequence[AttentionLayer], num_nodes: int) -> str:
    """Returns the mode. `auto` is `head` if each node gets a K/V head, else `request`; with both,
    results have the bits of local attention. Raises PlacementError for an impossible mode."""
    fewest = min(layer.num_kv_heads for layer in layers)
    has_windows = any(layer.window is not None for layer in layers)
    if name == "auto":
        name = "head" if num_nodes <= fewest else "request"
    if name == "head" and num_nodes > fewest:
        raise PlacementError(
            f"memory_partition head needs a K/V head for each of {num_nodes} nodes, the model has "
            f"{fewest}; use request or sequence"
        )
    if name == "sequence" and has_windows:
        raise PlacementError(
            "memory_partition sequence: the model has sliding windows; use head or request"
        )
    if name == "sequence" and num_nodes > _MAX_SEQUENCE_NODES:
        raise PlacementError(
            f"memory_partition sequence supports {_MAX_SEQUENCE_NODES} nodes at most, not "
            f"{num_nodes}; use request"
        )
    return name


def partition_evenly(count: int, num_shards: int) -> list[tuple[int, int]]:
    """Returns (first, length) of each shard, as even as possible."""
    bounds = [count * i // num_shards for i in range(num_shards + 1)]
    return [(low, high - low) for low, high in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class Shard:
    """The shard of one node: part `index` of `count`. partition is head, request or sequence."""

    partition: str
    index: int
    count: int

    def heads(self, layer: AttentionLayer) -> tuple[int, int]:
        """Returns (first, number) of the layer's K/V heads in this shard."""
        if self.partition != "head":
            return 0, layer.num_kv_heads
        return partition_evenly(layer.num_kv_heads, self.count)[self.index]

    def layer(self, layer: AttentionLayer) -> AttentionLayer:
        """Returns the layer with the heads that the node has."""
        first, kv_heads = self.heads(layer)
        group = layer.num_heads // layer.num_kv_heads
        sinks = layer.sinks
        if sinks is not None:
            sinks = sinks[first * group : (first + kv_heads) * group]
        return replace(layer, num_kv_heads=kv_heads, num_heads=group * kv_heads, sinks=sinks)

    def page_tokens(self, num_tokens: int) -> int:
        """Returns how many of a page's tokens are in this shard."""
        if self.partition != "sequence":
            return num_tokens
        assert num_tokens % (STRIPE_TOKENS * self.count) == 0, f"{num_tokens} on {self.count}"
        return num_tokens // self.count

    def num_tokens(self, num_tokens: int) -> int:
        """Returns how many of a sequence's first `num_tokens` tokens are in this shard."""
        if self.partition != "sequence":
            return num_tokens
        stripes, rest = divmod(num_tokens, STRIPE_TOKENS)
        turn = stripes % self.count
        own = stripes // self.count + (self.index < turn)
        return own * STRIPE_TOKENS + (rest if self.index == turn else 0)

    def runs(self, first: int, end: int) -> list[tuple[int, int]]:
        """Returns the tokens of [first, end) in this shard, as runs (first, length)."""
        if self.partition != "sequence":
            return [(first, end - first)]
        found: list[tuple[int, int]] = []
        stripe = first // STRIPE_TOKENS
        stripe += (self.index - stripe) % self.count
        while stripe * STRIPE_TOKENS < end:
            low = max(first, stripe * STRIPE_TOKENS)
            high = min(end, (stripe + 1) * STRIPE_TOKENS)
            found.append((low, high - low))
            stripe += self.count
        return found


class ChoosingRow(NamedTuple):
    """A row that chooses among the tiles of all nodes, as one node sees it, which has num_tiles of
    those before the row's own, and num_keys keys in all that the row may see."""

    num_tiles: int
    num_keys: int


def choosing_row(shard: Shard, position: int) -> ChoosingRow:
    """Returns the row at a position of a sequence, as the node with this shard sees it."""
    first = position - position % STRIPE_TOKENS
    return ChoosingRow(shard.num_tokens(first) // STRIPE_TOKENS, shard.num_tokens(position + 1))


def choosing_parts(positions: Sequence[int], num_kv_heads: int) -> list[slice]:
    """Divides rows at these positions into parts that choose one after the other, so that the lists
    of one part have MAX_LISTED numbers at most, or are those of one row. All nodes and the engine
    divide them in the same way."""
    parts: list[slice] = []
    first = free = 0
    for row, position in enumerate(positions):
        need = (position // STRIPE_TOKENS + 1) * num_kv_heads
        if row > first and need > free:
            parts.append(slice(first, row))
            first = row
        free = (MAX_LISTED if row == first else free) - need
    return [*parts, slice(first, len(positions))] if positions else []


def largest_lists(layers: Sequence[AttentionLayer], num_tiles: int, max_rows: int) -> int:
    """Returns the most bytes of lists in a message of a node that has up to num_tiles tiles of a
    sequence: scores of 4 bytes, and a bit for each."""
    heads = max(layer.num_kv_heads for layer in layers)
    of_row = heads * num_tiles
    listed = max(of_row, min(MAX_LISTED, of_row * max_rows))
    return HEADER_BYTES + 4 * (listed + listed // 32 + heads * max_rows)


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Pages as the engine counts them: page_tokens[g] tokens of layer group g are one page on each
    node that holds some of them. The K/V accounting uses page_bytes and groups; page_bytes is about
    the size of a page on all nodes together."""

    page_tokens: list[int]
    page_bytes: int
    groups: list[LayerGroup]

    def range_slots(self, max_model_len: int) -> list[int]:
        """Returns the page slots of a range in each group, as the K/V accounting lays ranges
        out."""
        unit = lcm(*self.page_tokens)
        return [-(-max_model_len // unit) * unit // tokens for tokens in self.page_tokens]


def page_geometry(
    token_bytes: Sequence[int],
    windows: Sequence[int | None],
    partition: str,
    num_nodes: int,
    node_bytes: int,
) -> PageGeometry:
    """Chooses the page size.

    token_bytes is the size of a token in each layer group, on all nodes together; node_bytes is
    the K/V memory of a node.
    """
    unit = STRIPE_TOKENS
    if partition == "sequence":
        unit *= lcm(*range(1, num_nodes + 1))
    widest = max(token_bytes)
    num_shards = num_nodes if partition != "request" else 1
    least = max(_MIN_PAGE_BYTES, node_bytes // MAX_PAGES)
    units = -(-least * num_shards // (unit * widest))
    tokens = unit * max(1, units)
    page_tokens = [tokens * (widest // own) for own in token_bytes]
    whole = lcm(*page_tokens)
    page_bytes = -(-tokens * widest // whole) * whole
    return PageGeometry(
        page_tokens,
        page_bytes,
        [
            LayerGroup(page_bytes // count, STRIPE_TOKENS, window)
            for count, window in zip(page_tokens, windows, strict=True)
        ],
    )
