"""K/V on memory nodes: what is asked of them, the members that share it, and their books."""

from __future__ import annotations

from memory.attach import AttachRequest
from memory.edit_log import EditLog
from memory.kv_manager import KVManager
from memory.node_set import Member


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


def books_of(members, geometry, template, max_len) -> list[KVManager]:
    """Once the members have their places."""
    range_tokens = template.num_places[0] * geometry.page_tokens[0]
    return [
        KVManager(
            member.edits,
            num_pages=member.num_pages,
            num_ranges=template.num_ranges,
            max_model_len=max_len,
            groups=geometry.groups,
            max_rows=template.max_rows,
            in_background=False,
            first_start=number * template.num_ranges * range_tokens,
            max_mappings=member.max_mappings,
        )
        for number, member in enumerate(members)
    ]
