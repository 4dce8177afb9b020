"""Attention over segments of sequences, as every rank computes it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from memory.attention.layouts import Layout
from memory.attention.partial import partial_attention
from memory.attention.seam import AttentionLayer, PlannedAttention
from memory.attention.segmented import SegmentedAttention
from memory.attention.tiled import RecentLayers, TiledKVLayout
from memory.nodes.segment_links import HasPartitions, Locate, SegmentLinks
from ops.backend import Backend


def fold_segments(
    inner: PlannedAttention,
    layout: Layout,
    where: tuple[int, int],
    backend: Backend,
    segment_tokens: int,
    held: tuple[HasPartitions, Locate, Container[int]] | None,
    recent: RecentLayers | None = None,
) -> SegmentedAttention:
    """Returns attention that is the fold over segments. where: the address and the end of this
    machine's K/V of these layers, which `inner` attends over. held: the holders, where segments are
    on them, and the starts of sequences that began there; None: this machine has all. recent: the
    store of recent tokens of int4 K/V, only without holders."""
    assert recent is None or held is None, "recent tokens beside holders"
    address, end = where
    layers = segmented_layers(layout.layers)
    partial = partial_attention(layout, address, end - address, backend, recent=recent)
    links = None
    if held is not None:
        wide = isinstance(layout, TiledKVLayout)
        nodes, locate, begun_away = held
        links = SegmentLinks(layers, nodes, backend, locate, begun_away, rotates_wide=wide)
    return SegmentedAttention(inner, partial, layers, backend, segment_tokens, links)


def segmented_layers(layers: Sequence[AttentionLayer]) -> list[AttentionLayer]:
    """Returns the layers of the group without windows as holders see them: a window that is longer
    than any sequence is none."""
    return [replace(layer, window=None, chunk=None) for layer in layers]
