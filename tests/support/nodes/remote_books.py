"""K/V on memory nodes: what is asked of them, and the members that share it."""

from __future__ import annotations

from memory.nodes.attach import AttachRequest
from memory.nodes.edit_log import EditLog
from memory.nodes.node_set import Member


def template_of(geometry, layers, group_layers, *, max_len, kv_dtype="float32", **settings):
    """settings: engine, num_ranges, num_pages, max_rows."""
    return AttachRequest(
        epoch=1,
        kv_dtype=kv_dtype,
        kv_group=64,
        layers=list(layers),
        group_layers=group_layers,
        page_tokens=geometry.page_tokens,
        num_places=geometry.range_places(max_len),
        min_pages=1,
        **settings,
    )


def members_of(urls, partition, geometry, template) -> list[Member]:
    shares = [[url] for url in urls] if partition == "request" else [list(urls)]
    sizes = geometry.page_bytes, template.num_ranges, template.num_places
    return [Member(share, EditLog(*sizes)) for share in shares]
