"""Memory nodes in the test's own thread, and attention over them beside local attention."""

from __future__ import annotations

from dataclasses import replace

import torch

from memory.attention.grouped import group_layers
from memory.attention.layouts import make_layout
from memory.attention.seam import AttentionLayer, AttentionStep, layers_in
from memory.attention.tiled import TILED_TYPES
from memory.nodes.new_token_attention import PlainNewTokenAttention, TiledNewTokenAttention
from memory.nodes.node_set import NodeSet, make_kv_managers
from memory.nodes.placement import page_geometry
from memory.nodes.prompt_tail_cache import PromptTailCache
from memory.nodes.remote_attention import RemoteAttention
from memory.nodes.server.node import MemoryNode
from memory.nodes.wire import FULL_WIRE
from ops import get_backend
from tests.support.nodes.remote_setup import make_partitions, template_of
from transport.base import PeerLostError
from transport.direct import direct_pair

MIB = 1 << 20
NUM_RANGES = 6
MAX_ROWS = 256


class Nodes:
    """Memory nodes by name; a test can make them unreachable."""

    def __init__(self, names, capacity_bytes=16 * MIB):
        backend = get_backend("cpu")
        self.nodes = {name: MemoryNode(capacity_bytes, backend) for name in names}
        self.gone = set()
        self.ends = {}

    def connect(self, url, timeout_s):
        if url in self.gone:
            raise PeerLostError("there is no listener")
        engine_end, node_end = direct_pair()
        self.nodes[url].adopt(node_end)
        self.ends[url] = engine_end
        return engine_end

    def kill(self, url):
        self.gone.add(url)
        self.ends[url].close()

    def leased(self):
        return sum(node.stats().bytes_leased for node in self.nodes.values())


class RemoteRig:
    """K/V accounting, nodes and the attention seam for some layers."""

    def __init__(
        self,
        layers,
        names=("a", "b"),
        partition="head",
        kv_dtype="float32",
        wire=FULL_WIRE,
        max_len=1024,
        num_pages=400,
        tail_bytes=0,
        capacity_bytes=16 * MIB,
        nodes=None,
        lanes=None,
        kv_policy=None,
    ):
        """Each node has capacity_bytes, the prompt tail cache tail_bytes. nodes: other ones, which
        are connected by `names`."""
        backend = get_backend("cpu")
        self.layers = layers
        self.max_len = max_len
        self.nodes = Nodes(names, capacity_bytes) if nodes is None else nodes
        groups = group_layers(layers, max_len)
        layouts = [
            make_layout(layers_in(layers, ids), kv_dtype, 64, has_bounds=kv_policy is not None)
            for _, ids in groups
        ]
        token_bytes = [layout.token_bytes for layout in layouts]
        geometry = page_geometry(
            token_bytes, [window for window, _ in groups], partition, len(names), 1 << 20
        )
        template = template_of(
            geometry,
            layers,
            [ids for _, ids in groups],
            engine="test",
            max_len=max_len,
            kv_dtype=kv_dtype,
            num_ranges=NUM_RANGES,
            num_pages=num_pages,
            max_rows=MAX_ROWS,
            prefix_only=partition == "sequence",
            kv_policy=kv_policy,
        )
        partitions = make_partitions(names, partition, geometry, template)
        self.set = NodeSet(partitions, template, partition, self.nodes.connect, wire=wire)
        self.set.lanes = lanes
        for one in partitions:
            self.set.place(one)
        self.kvs = make_kv_managers(
            partitions, geometry, num_ranges=NUM_RANGES, max_model_len=max_len, max_rows=MAX_ROWS
        )
        self.kv = self.kvs[0]
        self.tail_cache = PromptTailCache(template, max_len, tail_bytes) if tail_bytes else None
        if self.tail_cache is not None:
            for kv in self.kvs:
                kv.on_close = lambda target: self.tail_cache.drop(target.start)
        if kv_dtype in TILED_TYPES:
            sizes = (64, MAX_ROWS, NUM_RANGES)
            new = TiledNewTokenAttention(layers, kv_dtype, *sizes, self.tail_cache)
        else:
            new = PlainNewTokenAttention(layers, getattr(torch, kv_dtype), backend, self.tail_cache)
        self.attention = RemoteAttention(
            layers,
            new,
            backend,
            self.set,
            self.kv.range_tokens,
            NUM_RANGES,
            wire,
            self.tail_cache,
            selection=template.selection,
        )

    def step(self, rows, inputs, prompt_lens=None, policies=None):
        """Returns every layer's result. rows: (range, number of rows, tokens after them).
        inputs: (q, k, v) for each layer. prompt_lens, policies: as in AttentionStep."""
        for item, num_rows, kv_len in rows:
            assert self.kv.grow(item, kv_len, kv_len - num_rows)
        self.kv.commit()
        num_decodes = sum(1 for _, n, _ in rows if n == 1)
        step = AttentionStep(
            num_decodes,
            [item.start for item, _, _ in rows],
            [n for _, n, _ in rows],
            [length for _, _, length in rows],
            prompt_lens,
            policies,
        )
        plan = self.attention.plan(step)
        outs = []
        for layer, (q, k, v) in enumerate(inputs):
            ticket = plan.begin(layer, q)
            outs.append(plan.finish(ticket, None if k is None else k.clone(), v, None).wait())
        return outs

    def close(self):
        self.set.close()


def reference(layer: AttentionLayer, q, k, v):
    """Returns attention in fp64. q: [n, H, D], the last n positions; k, v: [L, Hk, D]."""
    n, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    k = k.double().repeat_interleave(heads // kv_heads, 1)
    v = v.double().repeat_interleave(heads // kv_heads, 1)
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * layer.scale
    position = torch.arange(length - n, length)[:, None]
    key = torch.arange(length)[None]
    hidden = key > position
    if layer.window is not None:
        hidden |= key <= position - layer.window
    scores.masked_fill_(hidden, float("-inf"))
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v)


def layers_of(count=2, heads=8, kv_heads=4, dim=32, windows=()):
    layer = AttentionLayer(heads, kv_heads, dim, dim**-0.5, None)
    made = [layer] * count
    for number, window in enumerate(windows):
        made[number] = replace(layer, window=window)
    return made
