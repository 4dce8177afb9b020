"""Attention over segments: in local memory alone, and with nodes in the test's own thread."""

from __future__ import annotations

import ctypes
from dataclasses import replace

from memory.attention.layouts import local_attention, make_layout
from memory.attention.partial import partial_attention
from memory.attention.seam import AttentionStep
from memory.attention.segmented import SegmentedAttention
from memory.attention.tiled import TILED_TYPES
from memory.nodes.node_set import NodeSet, make_kv_managers
from memory.nodes.placement import page_geometry
from memory.nodes.segment_links import SegmentLinks
from ops import get_backend
from tests.support.nodes.remote_rig import Nodes
from tests.support.nodes.remote_setup import make_partitions, template_of

LENGTH, NUM_RANGES, MAX_LEN = 128, 5, 640
MAX_ROWS = 2048


class Segmented:
    """Attention over NUM_RANGES sequences, whose range begins at a multiple of MAX_LEN."""

    def __init__(self, layers, kv_dtype, names=()):
        """names: the nodes that hold later segments."""
        backend, layout = get_backend("cpu"), make_layout(layers, kv_dtype, 64)
        size = NUM_RANGES * MAX_LEN * layout.token_bytes
        self._memory = ctypes.create_string_buffer(size + 64)
        address = ctypes.addressof(self._memory)
        address += -address % 64
        inner = local_attention(layout, address, size, backend)
        partial = partial_attention(layout, address, size, backend)
        self.set, self.ranges, links = None, {}, None
        if names:
            self._attach(layers, kv_dtype, names)
            wide = kv_dtype in TILED_TYPES
            links = SegmentLinks(layers, self.set, backend, self._locate, rotates_wide=wide)
        self.attention = SegmentedAttention(inner, partial, layers, backend, LENGTH, links)

    def _attach(self, layers, kv_dtype, names):
        self.nodes = Nodes(names)
        geometry = page_geometry(
            [make_layout(layers, kv_dtype, 64).token_bytes],
            [None],
            "request",
            len(names),
            1 << 20,
        )
        ids = [list(range(len(layers)))]
        template = replace(
            template_of(
                geometry,
                layers,
                ids,
                engine="test",
                max_len=LENGTH,
                kv_dtype=kv_dtype,
                num_ranges=NUM_RANGES * 4,
                num_pages=400,
                max_rows=MAX_ROWS,
            ),
            by_segment=True,
        )
        partitions = make_partitions(names, "request", geometry, template)
        self.set = NodeSet(partitions, template, "request", self.nodes.connect)
        for one in partitions:
            self.set.place(one)
        self.memories = make_kv_managers(
            partitions,
            geometry,
            num_ranges=NUM_RANGES * 4,
            max_model_len=LENGTH,
            max_rows=LENGTH,
        )

    def _locate(self, start, segment):
        holder = (segment - 1) % len(self.memories)
        return holder, self.ranges[start, segment].index

    def _grow(self, start, length):
        for segment in range(1, -(-length // LENGTH)):
            memory = self.memories[(segment - 1) % len(self.memories)]
            if (start, segment) not in self.ranges:
                self.ranges[start, segment] = memory.open(LENGTH)
            used = min(LENGTH, length - segment * LENGTH)
            assert memory.grow(self.ranges[start, segment], used)
            memory.commit()

    def step(self, rows, inputs, rotation=None):
        """rows: (number of the range, number of rows, tokens after them)."""
        step = AttentionStep(
            sum(n == 1 for _, n, _ in rows),
            [index * MAX_LEN for index, _, _ in rows],
            [n for _, n, _ in rows],
            [length for _, _, length in rows],
        )
        if self.set is not None:
            for index, _, length in rows:
                self._grow(index * MAX_LEN, length)
        plan = self.attention.plan(step)
        outs = []
        for layer, (q, k, v) in enumerate(inputs):
            parts = [None if x is None else x.clone() for x in (k, v)]
            turned = None if k is None else rotation
            outs.append(plan.finish(plan.begin(layer, q), *parts, turned).wait())
        return outs

    def close(self):
        if self.set is not None:
            self.set.close()
