"""An engine that sends a memory node any message that a test wants."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch

from memory.attention.seam import AttentionLayer
from memory.nodes.attach import AttachRequest, NodeLayout
from memory.nodes.wire import (
    HEADER_BYTES,
    Append,
    Edit,
    EditKind,
    ErrorCode,
    Header,
    Kind,
    NodePlan,
    Query,
    WireType,
    pack_json,
    pack_plan,
    read_header,
    read_json,
)
from memory.nodes.wire_rows import WireRows
from transport.base import PeerLostError
from transport.direct import direct_pair
from transport.messages import post_bytes, view_of

LAYER = AttentionLayer(4, 2, 16, 0.25, None)
WINDOWED = replace(LAYER, window=40)
REQUEST = AttachRequest(
    engine="test",
    epoch=1,
    kv_dtype="float32",
    kv_group=16,
    layers=[LAYER, LAYER, WINDOWED],
    group_layers=[[0, 1], [2]],
    page_tokens=[32, 64],
    num_places=[8, 4],
    num_ranges=3,
    num_pages=40,
    min_pages=1,
    max_rows=64,
    prefix_only=True,
)
WHOLE = replace(REQUEST, prefix_only=False)
"""For sessions whose rows attend over all keys, their own included."""
NODE_BYTES = 4 << 20
"""The memory of the node that tests use."""
PATIENCE_S = 20.0


def page_bytes(request: AttachRequest = REQUEST) -> int:
    return NodeLayout(request).page_bytes


class RawEngine:
    """The engine's end of a connection to a node."""

    def __init__(self, endpoint, request: AttachRequest = REQUEST):
        self.endpoint = endpoint
        self.request = request
        self.num_plans = 0
        self.rows = [WireRows.of(layer) for layer in request.layers]

    @classmethod
    def beside(cls, node, request: AttachRequest = REQUEST) -> RawEngine:
        """Connects in-process, so that the node handles messages in the sending thread."""
        ours, theirs = direct_pair()
        node.adopt(theirs)
        return cls(ours, request)

    def send(self, message: bytes) -> None:
        """Sends a message; a connection that the node has ended shows in `receive`."""
        with contextlib.suppress(PeerLostError):
            post_bytes(self.endpoint, message)

    def receive(self, timeout_s: float = PATIENCE_S) -> tuple[Header, bytes]:
        frame = self.endpoint.poll(timeout_s)
        assert frame is not None, "no answer"
        message = view_of(frame)
        try:
            return read_header(message), bytes(message)
        finally:
            del message
            self.endpoint.release(frame)

    def error(self) -> ErrorCode:
        """Returns the error code that the node sends before it ends the connection."""
        header, message = self.receive()
        while header.kind in (Kind.PARTIAL, Kind.RESULT):  # answers to earlier messages
            header, message = self.receive()
        assert header.kind is Kind.ERROR, header
        content = read_json(memoryview(message))
        assert content["text"]
        try:
            assert self.endpoint.poll(PATIENCE_S) is None, "the connection stays open"
        except PeerLostError:
            return ErrorCode(content["code"])
        raise AssertionError("the connection goes on")

    def attach(self) -> int:
        """Attaches and returns the number of granted pages."""
        self.send(pack_json(Kind.ATTACH, self.request.epoch, self.request.to_json()))
        header, message = self.receive()
        assert (header.kind, header.epoch) == (Kind.ATTACHED, self.request.epoch)
        num_pages = read_json(memoryview(message))["num_pages"]
        assert isinstance(num_pages, int)
        return num_pages

    def plan(
        self,
        edits=(),
        queries=(),
        appends=(),
        number=None,
        epoch=None,
        prompt_lens=(),
        policies=(),
        positions=(),
        wanted=(),
    ) -> int:
        """Sends a plan, given as tuples of integers with the EditKind first in edits. Returns
        its number."""
        self.num_plans += 1
        number = self.num_plans if number is None else number
        plan = NodePlan(
            [Edit(*edit) for edit in edits],
            [Query(*query) for query in queries],
            [Append(*append) for append in appends],
            list(prompt_lens),
            list(policies),
            list(positions),
            list(wanted),
        )
        self.send(pack_plan(self.request.epoch if epoch is None else epoch, number, plan))
        return number

    def query(self, number, layer, q, epoch=None, rows=None) -> None:
        self._rows(Kind.QUERY, number, layer, bytes_of(q), len(q) if rows is None else rows, epoch)

    def update(self, number, layer, k, v, epoch=None, rows=None) -> None:
        content = bytes_of(k) + bytes_of(v)
        self._rows(Kind.UPDATE, number, layer, content, len(k) if rows is None else rows, epoch)

    def own(self, number, layer, k, v, epoch=None, rows=None) -> None:
        content = bytes_of(k) + bytes_of(v)
        self._rows(Kind.OWN, number, layer, content, len(k) if rows is None else rows, epoch)

    def choice(self, number, counts, layer=0, rows=None) -> None:
        """counts: of each row, how many tiles each K/V head chooses."""
        content = bytes_of(torch.tensor(counts, dtype=torch.int32))
        rows = len(counts) if rows is None else rows
        self._rows(Kind.CHOICE, number, layer, content, rows, None)

    def _rows(self, kind, number, layer, content, rows, epoch):
        epoch = self.request.epoch if epoch is None else epoch
        header = Header(kind, epoch, number, layer, WireType.FLOAT32, rows)
        self.send(header.packed() + content)

    def partial(self, layer) -> tuple[torch.Tensor, torch.Tensor]:
        header, message = self.receive()
        assert header.kind is Kind.PARTIAL, read_json(memoryview(message))
        assert header.layer == layer
        body = memoryview(bytearray(message[HEADER_BYTES:]))
        return self.rows[layer].read_partial(body, header)

    def result(self, layer) -> torch.Tensor:
        header, message = self.receive()
        assert header.kind is Kind.RESULT, read_json(memoryview(message))
        assert header.layer == layer
        return self.rows[layer].read_result(memoryview(bytearray(message[HEADER_BYTES:])), header)

    def map_ranges(self, num_places=2) -> None:
        """Maps pages of its own in each range and group."""
        self.plan(self.all_mapped(num_places))

    def all_mapped(self, num_places: int) -> list[tuple[int, ...]]:
        parts = range(self.request.num_ranges * len(self.request.page_tokens))
        return [(EditKind.MAP, part, 0, part * num_places, num_places) for part in parts]

    def close(self) -> None:
        self.endpoint.close()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


class Witness:
    """An engine that keeps to the protocol and checks its queries' results."""

    NUM_TOKENS = 50

    def __init__(self, endpoint, request: AttachRequest | None = None):
        self.engine = RawEngine(endpoint, request or replace(REQUEST, engine="witness"))
        self.engine.attach()
        self.engine.map_ranges()
        self.generator = torch.Generator().manual_seed(4)
        self.first = None
        plan = self.engine.plan(appends=[(0, self.NUM_TOKENS, 0)])
        for layer, shape in enumerate(self.engine.request.layers):
            size = self.NUM_TOKENS, shape.num_kv_heads, shape.head_dim
            k, v = (torch.randn(size, generator=self.generator) for _ in range(2))
            self.engine.update(plan, layer, k, v)
        self.q = [
            torch.randn(3, shape.num_heads, shape.head_dim, generator=self.generator)
            for shape in self.engine.request.layers
        ]
        self.check()

    @classmethod
    def beside(cls, node) -> Witness:
        ours, theirs = direct_pair()
        node.adopt(theirs)
        return cls(ours)

    def check(self) -> None:
        """The result has the same bits every time."""
        plan = self.engine.plan(queries=[(0, 3, self.NUM_TOKENS)])
        found = []
        for layer, q in enumerate(self.q):
            self.engine.query(plan, layer, q)
            found += self.engine.partial(layer)
        self.first = self.first or found
        assert all(torch.equal(one, other) for one, other in zip(self.first, found, strict=True))
        assert all(bool(part.isfinite().all()) for part in found)

    def close(self) -> None:
        self.engine.close()
