"""The attach request and the partitions of K/V on memory nodes."""

from __future__ import annotations

from memory.nodes.attach import AttachRequest
from memory.nodes.edit_log import EditLog
from memory.nodes.node_set import NodePartition


def template_of(geometry, layers, group_layers, *, max_len, kv_dtype="float32", **settings):
    """Returns a request. settings: engine, num_ranges, num_pages, max_rows,
    prefix_only."""
    return AttachRequest(
        epoch=1,
        kv_dtype=kv_dtype,
        kv_group=64,
        layers=list(layers),
        group_layers=group_layers,
        page_tokens=geometry.page_tokens,
        num_places=geometry.range_slots(max_len),
        min_pages=1,
        **settings,
    )


def make_partitions(urls, mode, geometry, template) -> list[NodePartition]:
    urls_of = [[url] for url in urls] if mode == "request" else [list(urls)]
    sizes = geometry.page_bytes, template.num_ranges, template.num_places
    return [NodePartition(one, EditLog(*sizes)) for one in urls_of]
