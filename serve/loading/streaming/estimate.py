"""What a model is made of, from its sizes, before it is packed: what `Division` finds then."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from serve.loading.streaming import placement, tables
from serve.loading.streaming.placement import Mixtures, Needs
from serve.loading.streaming.source import PANEL
from serve.models.packed_cache.layout import PAGE
from serve.models.packed_cache.writer import round_up


def expected_needs(
    *,
    layers: Sequence[float],
    head: float,
    num_out: int,
    table: float,
    num_rows: int,
    fixed: float = 0.0,
    mixtures: Sequence[Mixtures] = (),
) -> Needs:
    """Returns the needs of a model of so many bytes. layers: of each layer's products without
    experts; head: of the last product, whose outputs are num_out; table: of the embedding with
    num_rows; fixed: of norms and the like. What is given of them as too little gives needs that
    are too little."""
    units = [round_up(int(each), PAGE) for each in layers]
    if num_out > PANEL:
        panels = -(-num_out // PANEL)
        cuts = placement.head_cuts(int(head), panels, int(max(layers, default=0)))
        parts = [head * (end - first) / panels for first, end in pairwise(cuts)]
        units += [round_up(int(each), PAGE) for each in parts]
    else:
        fixed += head
    row_bytes = tables.memory_for(int(table / max(1, num_rows)))
    is_read = placement.is_large(int(table), row_bytes)
    return Needs(
        fixed_bytes=int(fixed if is_read else fixed + table),
        table_bytes=int(table) if is_read else 0,
        row_bytes=row_bytes if is_read else 0,
        units=tuple(units),
        mixtures=tuple(mixtures),
    )
