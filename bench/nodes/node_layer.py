"""The time of a layer over a memory node beside its kernels, by transport
(bench.nodes.memory_nodes).

The layer has the shape of Llama-3.2-1B's and 16 decode rows with a short prefix, and the node has
one thread. The message path is the time of `begin`, `finish` and `wait` in this process, without
waiting for the answer: it makes headers, copies q, k and v into the window with their checksums,
and puts the answer together. The same run times the whole layer and the copies alone.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench.common.node_processes import KEY, memory_nodes
from memory.attention.seam import AttentionLayer, AttentionStep
from memory.attention.tiled import TiledKVLayout
from memory.kv_manager import KVManager
from memory.nodes.attach import AttachRequest
from memory.nodes.edit_log import EditLog
from memory.nodes.new_token_attention import TiledNewTokenAttention
from memory.nodes.node_set import NodePartition, NodeSet
from memory.nodes.placement import page_geometry
from memory.nodes.remote_attention import RemoteAttention
from memory.nodes.server.node import MemoryNode
from memory.nodes.wire import FULL_WIRE
from ops import get_backend
from ops.cpu import native_library
from transport import connect, listen

_LAYERS, _ROWS, _PREFIX = 16, 16, 32
_LAYER = AttentionLayer(32, 8, 64, 64**-0.5)
_WINDOW_BYTES = 32 << 20


def measure_layers(folder: Path, num_steps: int) -> tuple[Table, dict[str, Any]]:
    """Returns the medians in microseconds by transport, and their table."""
    native_library.set_num_threads(1)
    table = Table("transport", "message path µs", "of it copies", "answer µs", "layer µs")
    table.title = f"{_ROWS} rows, {_LAYER.num_heads}/{_LAYER.num_kv_heads} heads of 64, one node"
    table.caption = "medians of layers; the goal for the message path is 60"
    node = MemoryNode(1 << 30, get_backend("cpu"))
    info = {"capacity_bytes": 1 << 30}
    listener = listen("inproc://layer", key=KEY, info=info, window_bytes=_WINDOW_BYTES)
    threading.Thread(target=node.serve, args=(listener,), daemon=True).start()
    found = {"inproc": _measure("inproc://layer", num_steps)}
    listener.close()
    node.close()
    for scheme in ("shm", "tcp"):
        with memory_nodes(1, folder, scheme=scheme) as urls:
            found[scheme] = _measure(urls[0], num_steps)
    for name, values in found.items():
        table.add_row(name, *(f"{value:.0f}" for value in values))
    return table, found


class _Timer:
    """Notes how long the calls of a method take, in microseconds."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._call: Callable[..., Any] = getattr(owner, name)
        self.times: list[float] = []

    def __enter__(self) -> _Timer:
        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return self._call(*args, **named)
            finally:
                self.times.append((time.perf_counter() - began) * 1e6)

        setattr(self._owner, self._name, timed)
        return self

    def __exit__(self, *_: object) -> None:
        delattr(self._owner, self._name)

    @property
    def median(self) -> float:
        return statistics.median(self.times)


@torch.inference_mode()
def _measure(url: str, num_steps: int) -> list[float]:
    kv, attention, nodes = _attention(url)
    items = [kv.open(_PREFIX + num_steps + 40) for _ in range(_ROWS)]
    generator = torch.Generator().manual_seed(0)

    def inputs(rows: int) -> list[torch.Tensor]:
        heads = (_LAYER.num_heads, _LAYER.num_kv_heads, _LAYER.num_kv_heads)
        return [torch.randn(rows, h, _LAYER.head_dim, generator=generator) for h in heads]

    _step(kv, attention, items, _PREFIX, _PREFIX, inputs(_PREFIX * _ROWS))
    one = inputs(_ROWS)
    length = _PREFIX
    for _ in range(20):
        length += 1
        _step(kv, attention, items, 1, length, one)
    layers, link = [], nodes.partitions[0].links[0]
    with _Timer(link, "answer") as answers, _Timer(link.endpoint, "post") as posts:
        for _ in range(num_steps):
            length += 1
            layers += _step(kv, attention, items, 1, length, one)
    count = len(layers)
    assert len(answers.times) == count
    rows_posts = [t for i, t in enumerate(posts.times) if i % (2 * _LAYERS + 1)]
    copies = [sum(rows_posts[2 * i : 2 * i + 2]) for i in range(count)]
    path = [layer - answer for layer, answer in zip(layers, answers.times, strict=True)]
    nodes.close()
    return [statistics.median(values) for values in (path, copies, answers.times, layers)]


def _step(
    kv: KVManager,
    attention: RemoteAttention,
    items: list[Any],
    rows: int,
    length: int,
    inputs: list[torch.Tensor],
) -> list[float]:
    """Runs one step in which every item gets `rows` tokens, up to `length` in all. Returns the
    microseconds of each layer."""
    for item in items:
        assert kv.grow(item, length, length - rows)
    kv.commit()
    num = len(items)
    starts = [item.start for item in items]
    step = AttentionStep(num if rows == 1 else 0, starts, [rows] * num, [length] * num)
    plan = attention.plan(step)
    q, k, v = inputs
    times = []
    for layer in range(_LAYERS):
        began = time.perf_counter()
        plan.finish(plan.begin(layer, q), k, v, None).wait()
        times.append((time.perf_counter() - began) * 1e6)
    return times


def _attention(url: str) -> tuple[KVManager, RemoteAttention, NodeSet]:
    layers = [_LAYER] * _LAYERS
    geometry = page_geometry(
        [TiledKVLayout(layers, "int8", 64).token_bytes], [None], "head", 1, 1 << 30
    )
    max_len, backend = 4096, get_backend("cpu")
    slots = geometry.range_slots(max_len)
    edits = EditLog(geometry.page_bytes, _ROWS, slots)
    template = AttachRequest(
        engine="bench",
        epoch=1,
        kv_dtype="int8",
        kv_group=64,
        layers=layers,
        group_layers=[list(range(_LAYERS))],
        page_tokens=geometry.page_tokens,
        num_places=slots,
        num_ranges=_ROWS,
        num_pages=2000,
        min_pages=1,
        max_rows=_ROWS * _PREFIX,
    )
    nodes = NodeSet(
        [NodePartition([url], edits)],
        template,
        "head",
        lambda url, s: connect(url, key=KEY, window_bytes=_WINDOW_BYTES, timeout_s=s),
    )
    nodes.place(nodes.partitions[0])
    kv = KVManager(
        edits,
        num_pages=nodes.partitions[0].num_pages,
        num_ranges=_ROWS,
        max_model_len=max_len,
        groups=geometry.groups,
        in_background=False,
    )
    new = TiledNewTokenAttention(layers, "int8", 64, _ROWS * _PREFIX, _ROWS)
    attention = RemoteAttention(layers, new, backend, nodes, kv.range_tokens, _ROWS, FULL_WIRE)
    return kv, attention, nodes
