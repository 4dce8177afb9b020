"""How K/V is dealt to memory nodes, in integers: heads, sequences, or tokens.

head: every node has some K/V heads of every token, so the load is even whatever the lengths are
(Lamina, arXiv 2405.01814, section 4.2). sequence: tokens are dealt in stripes of 16, and the
engine merges what the nodes found (K/V parallelism). request: a sequence is on one node.
A node needs to know none of this: it has layers with some heads and pages of some tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm

from memory.attention.seam import AttentionLayer
from memory.nodes.attach import STRIPE_TOKENS
from memory.pages.layer_groups import LayerGroup

PARTITIONS = ("auto", "head", "request", "sequence")
_MIN_PAGE_BYTES = 16 << 10  # of a node
MAX_PAGES = 30_000  # of a node: Linux allows 65,530 mappings in a process
_MAX_SEQUENCE_NODES = 4  # nodes whose every number divides a page in the sequence partition


class PlacementError(ValueError):
    """So many nodes cannot share these layers in this way. The text names the setting."""


def resolve_partition(name: str, layers: Sequence[AttentionLayer], num_nodes: int) -> str:
    """head where there are heads enough, else sequence. PlacementError."""
    fewest = min(layer.num_kv_heads for layer in layers)
    has_windows = any(layer.window is not None for layer in layers)
    if name == "auto":
        name = "head" if num_nodes <= fewest else "request" if has_windows else "sequence"
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
    """(first, how many) of each share, as even as can be."""
    bounds = [count * i // num_shards for i in range(num_shards + 1)]
    return [(low, high - low) for low, high in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class Shard:
    """Of one node: number `index` of `count`."""

    partition: str
    index: int
    count: int

    def heads(self, layer: AttentionLayer) -> tuple[int, int]:
        """(first, how many) K/V heads of a layer are on it."""
        if self.partition != "head":
            return 0, layer.num_kv_heads
        return partition_evenly(layer.num_kv_heads, self.count)[self.index]

    def layer(self, layer: AttentionLayer) -> AttentionLayer:
        """As the node sees it."""
        _, kv_heads = self.heads(layer)
        group = layer.num_heads // layer.num_kv_heads
        return replace(layer, num_kv_heads=kv_heads, num_heads=group * kv_heads)

    def page_tokens(self, num_tokens: int) -> int:
        """Tokens of a page that lie on it."""
        if self.partition != "sequence":
            return num_tokens
        assert num_tokens % (STRIPE_TOKENS * self.count) == 0, f"{num_tokens} on {self.count}"
        return num_tokens // self.count

    def num_tokens(self, num_tokens: int) -> int:
        """Of a sequence's first tokens, those on it."""
        if self.partition != "sequence":
            return num_tokens
        stripes, rest = divmod(num_tokens, STRIPE_TOKENS)
        turn = stripes % self.count
        own = stripes // self.count + (self.index < turn)
        return own * STRIPE_TOKENS + (rest if self.index == turn else 0)

    def runs(self, first: int, end: int) -> list[tuple[int, int]]:
        """(first, how many) runs of the tokens first to before end that lie on it."""
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


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Pages as the engine counts them: page_tokens of each layer group are one page on every
    node that has a share of them. page_bytes and groups: what the books reckon with; about the
    bytes that a page has on all nodes together."""

    page_tokens: list[int]
    page_bytes: int
    groups: list[LayerGroup]

    def range_slots(self, max_model_len: int) -> list[int]:
        """Pages that a range may have in each group, as the books lay ranges out."""
        unit = lcm(*self.page_tokens)
        return [-(-max_model_len // unit) * unit // tokens for tokens in self.page_tokens]


def page_geometry(
    token_bytes: Sequence[int],
    windows: Sequence[int | None],
    partition: str,
    num_nodes: int,
    node_bytes: int,
) -> PageGeometry:
    """token_bytes: of each layer group, on all nodes together. node_bytes: of K/V on a node."""
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
