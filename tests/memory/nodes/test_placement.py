"""Partitioning puts every head of every token on one node, and both sides agree on it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.attention.seam import AttentionLayer
from memory.kv_manager import KVManager
from memory.nodes.attach import AttachRequest, NodeLayout
from memory.nodes.edit_log import EditLog
from memory.nodes.placement import (
    MAX_PAGES,
    PARTITIONS,
    PlacementError,
    Shard,
    page_geometry,
    partition_evenly,
    resolve_partition,
)
from serve.config import PARTITIONS as CONFIGURED

LAYER = AttentionLayer(8, 4, 64, 0.125, None)
COUNTS = st.integers(1, 9)
TOKENS = st.integers(0, 700)


def shards(partition, count):
    return [Shard(partition, index, count) for index in range(count)]


def heads(num_kv_heads, group=2, window=None):
    return AttentionLayer(num_kv_heads * group, num_kv_heads, 64, 0.125, window)


@given(st.integers(0, 10**6), COUNTS)
def test_partitioning_is_even_and_leaves_nothing_out(count, num_shards):
    parts = partition_evenly(count, num_shards)
    assert [low for low, _ in parts] == [0, *(low + n for low, n in parts[:-1])]
    assert sum(n for _, n in parts) == count
    assert max(n for _, n in parts) - min(n for _, n in parts) <= 1


@given(st.sampled_from(["head", "request", "sequence"]), st.integers(1, 6), COUNTS, COUNTS)
def test_every_head_is_on_one_node_or_on_all(partition, count, num_kv_heads, group):
    layer = heads(max(num_kv_heads, count), group)
    covered = []
    for shard in shards(partition, count):
        first, num_heads = shard.heads(layer)
        part = shard.layer(layer)
        assert (part.num_kv_heads, part.num_heads) == (num_heads, num_heads * group)
        assert (part.head_dim, part.scale, part.window) == (64, 0.125, None)
        covered += range(first, first + num_heads)
        assert num_heads > 0
    times = 1 if partition == "head" else count
    assert sorted(covered) == sorted([*range(layer.num_kv_heads)] * times)


@given(st.integers(1, 8), TOKENS, TOKENS.map(lambda n: n + 1))
def test_every_token_is_on_one_node(count, first, length):
    """`runs` names the tokens of a shard; `num_tokens` counts those before a position, which is
    the index of the next one."""
    end = first + length
    covered = []
    for shard in shards("sequence", count):
        own = [i for low, n in shard.runs(first, end) for i in range(low, low + n)]
        assert own == sorted(own) and all(first <= i < end for i in own)
        assert len(own) == shard.num_tokens(end) - shard.num_tokens(first)
        assert all(n > 0 for _, n in shard.runs(first, end))
        assert all(i // 16 % count == shard.index for i in own)
        covered += own
    assert sorted(covered) == [*range(first, end)]
    for partition in ("head", "request"):
        for shard in shards(partition, count):
            assert shard.runs(first, end) == [(first, length)]
            assert shard.num_tokens(end) == end


@given(st.integers(1, 8), st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_rows_appended_step_by_step_are_read_from_where_they_are(count, steps):
    """A node's tokens have no gaps, since each step begins where the last one ended."""
    for shard in shards("sequence", count):
        index, total = 0, 0
        for rows in steps:
            assert shard.num_tokens(total) == index
            index += sum(n for _, n in shard.runs(total, total + rows))
            total += rows
        assert shard.num_tokens(total) == index


@given(st.integers(1, 4), st.integers(1, 40))
def test_pages_begin_together_on_all_nodes(count, units):
    """Pages begin at the same token on every node, and each node's page holds its share of the
    tokens."""
    tokens = 16 * count * units
    for shard in shards("sequence", count):
        assert shard.page_tokens(tokens) == 16 * units
        for page in range(4):
            assert shard.num_tokens(page * tokens) == page * 16 * units


GEOMETRIES = st.tuples(
    st.lists(st.integers(1, 4000).map(lambda x: 4 * x), min_size=1, max_size=3),
    st.sampled_from(["head", "request", "sequence"]),
    st.integers(1, 4),
    st.integers(1 << 16, 1 << 40),
    st.integers(1, 3000),
)


@given(GEOMETRIES)
def test_pages_of_the_accounting_and_of_nodes_agree(drawn):
    token_bytes, partition, num_nodes, node_bytes, max_len = drawn
    windows = [None, *[4096] * (len(token_bytes) - 1)]
    geometry = page_geometry(token_bytes, windows, partition, num_nodes, node_bytes)
    unit = 16
    if partition == "sequence":
        unit *= [1, 2, 6, 12][num_nodes - 1]
    assert all(tokens % unit == 0 for tokens in geometry.page_tokens)
    # the accounting's ranges are those that the node lays out
    slots = geometry.range_slots(max_len)
    log = EditLog(geometry.page_bytes, 3, slots)
    kv = KVManager(
        log,
        num_pages=10**4,
        num_ranges=3,
        max_model_len=max_len,
        groups=geometry.groups,
        max_rows=256,
        in_background=False,
    )
    for group, tokens, count in zip(kv.layout.groups, geometry.page_tokens, slots, strict=True):
        assert group.tokens_in(1) == tokens and group.slots_for(tokens + 1) == 2
        assert kv.range_tokens == tokens * count >= max_len
    # no node has more pages than a process has mappings for
    shard = 1 if partition == "request" else num_nodes
    widest = max(token_bytes) * geometry.page_tokens[token_bytes.index(max(token_bytes))]
    assert node_bytes // max(1, widest // shard) <= MAX_PAGES + 1


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.sampled_from([16, 64, 80, 128]))
def test_a_page_has_room_on_every_node(num_kv_heads, num_nodes, num_windows, head_dim):
    """In every shard, the node's page holds its part of the accounting's page."""
    layers = [
        AttentionLayer(num_kv_heads, num_kv_heads, head_dim, 1.0, None if i == 0 else 64 * i)
        for i in range(num_windows)
    ]
    for partition in ("head", "request", "sequence"):
        try:
            resolve_partition(partition, layers, num_nodes)
        except PlacementError:
            continue
        token_bytes = [num_kv_heads * head_dim * 8] * num_windows
        windows = [layer.window for layer in layers]
        geometry = page_geometry(token_bytes, windows, partition, num_nodes, 1 << 30)
        for shard in shards(partition, 1 if partition == "request" else num_nodes):
            request = AttachRequest(
                engine="e",
                epoch=1,
                kv_dtype="float32",
                kv_group=64,
                layers=[shard.layer(layer) for layer in layers],
                group_layers=[[i] for i in range(num_windows)],
                page_tokens=[shard.page_tokens(tokens) for tokens in geometry.page_tokens],
                num_places=geometry.range_slots(500),
                num_ranges=4,
                num_pages=10,
                min_pages=1,
                max_rows=64,
            )
            request.check()
            layout = NodeLayout(request)
            wanted = sum(item.token_bytes for item in layout.groups[:1]) * request.page_tokens[0]
            assert layout.page_bytes >= wanted


@pytest.mark.parametrize(
    ("name", "kv_heads", "window", "num_nodes", "due"),
    [
        ("auto", 4, None, 4, "head"),
        ("auto", 4, None, 1, "head"),
        ("auto", 2, None, 4, "request"),
        ("auto", 2, 64, 4, "request"),
        ("head", 4, 64, 3, "head"),
        ("request", 1, 64, 9, "request"),
        ("sequence", 1, None, 4, "sequence"),
    ],
)
def test_the_chosen_partition(name, kv_heads, window, num_nodes, due):
    layers = [heads(4), heads(kv_heads, window=window)]
    assert resolve_partition(name, layers, num_nodes) == due


@pytest.mark.parametrize(
    ("name", "kv_heads", "window", "num_nodes", "match"),
    [
        ("head", 2, None, 3, "needs a K/V head for each of 3 nodes, the model has 2"),
        ("sequence", 4, 64, 2, "the model has sliding windows"),
        ("sequence", 4, None, 5, "supports 4 nodes at most, not 5"),
    ],
)
def test_an_impossible_partition_names_the_setting(name, kv_heads, window, num_nodes, match):
    with pytest.raises(PlacementError, match=match) as caught:
        resolve_partition(name, [heads(kv_heads, window=window)], num_nodes)
    assert str(caught.value).startswith("memory_partition")


def test_the_settings_know_all_partitions():
    assert CONFIGURED == PARTITIONS
    assert [n for n, _ in pairwise(PARTITIONS)] == ["auto", "head", "request"]
