"""The K/V accounting's edits, applied on a node, make both map the same pages."""

from __future__ import annotations

import random

import pytest

from memory.attention.seam import AttentionLayer
from memory.attention.tiled import TiledKVLayout
from memory.kv_manager import KVManager
from memory.nodes.attach import AttachRequest, NodeLayout
from memory.nodes.edit_log import EditLog
from memory.nodes.placement import Shard, page_geometry
from memory.nodes.server.node_session import NodeSession
from memory.nodes.wire import Append, Edit, EditKind, NodePlan, Query, pack_plan, read_header
from memory.pages.kv_range import UNMAPPED
from memory.prefix.index import PrefixHasher
from ops import get_backend
from tests.support.engine.fakes import FakeMemory
from tests.support.memory.kv_model import KVModel, ModelSequence

NUM_RANGES, NUM_PAGES, MAX_LEN, MAX_ROWS = 5, 40, 400, 150
PROMPTS = [[(i * i * k) % 7 for i in range(MAX_LEN)] for k in (1, 2, 3)]


class NodeModel(KVModel):
    """Sequences whose tokens are in the pages that the node's page slots map. The node's session
    is real, and only its memory is a dictionary."""

    def __init__(self, shard: Shard, windows) -> None:
        layers = [AttentionLayer(8, 8, 64, 0.125, window) for window in windows]
        sizes = [TiledKVLayout([layer], "int8", 64).token_bytes for layer in layers]
        geometry = page_geometry(sizes, windows, shard.partition, shard.count, 1 << 20)
        slots = geometry.range_slots(MAX_LEN)
        self.shard = shard
        self.log = EditLog(geometry.page_bytes, NUM_RANGES, slots)
        self.log.on_release = lambda: self.plan([], [])
        self.kv = KVManager(
            self.log,
            num_pages=NUM_PAGES,
            num_ranges=NUM_RANGES,
            max_model_len=MAX_LEN,
            groups=geometry.groups,
            max_rows=MAX_ROWS,
            in_background=False,
        )
        self.request = AttachRequest(
            engine="e",
            epoch=1,
            kv_dtype="int8",
            kv_group=64,
            layers=[shard.layer(layer) for layer in layers],
            group_layers=[[i] for i in range(len(layers))],
            page_tokens=[shard.page_tokens(tokens) for tokens in geometry.page_tokens],
            num_places=slots,
            num_ranges=NUM_RANGES,
            num_pages=NUM_PAGES,
            min_pages=1,
            max_rows=MAX_ROWS,
        )
        self.page_tokens = geometry.page_tokens
        self.hasher = PrefixHasher(self.kv.page_end, b"secret")
        self.running: list[ModelSequence] = []
        self.num_hit_tokens = self.num_plans = 0
        self.max_rows = MAX_ROWS
        self.edits = dict.fromkeys(EditKind, 0)
        self.attach()

    def attach(self) -> None:
        """Attaches to a node that holds no K/V."""
        self.memory = FakeMemory(NodeLayout(self.request).page_bytes)
        self.session = NodeSession(self.request, self.memory, get_backend("cpu"))

    def plan(self, queries, appends) -> None:
        """Sends a plan as the engine does; the node refuses nothing."""
        self.num_plans += 1
        edits = self.log.take()
        for edit in edits:
            self.edits[edit.kind] += 1
        message = memoryview(
            bytearray(pack_plan(1, self.num_plans, NodePlan(edits, queries, appends)))
        )
        self.session.plan(read_header(message), message)

    def advance(self, sequence, num_tokens) -> bool:
        before = sequence.num_computed
        self._past = sequence, before
        return super().advance(sequence, num_tokens)

    def check_reads(self, sequence) -> None:
        """Runs between the commit and the writes, as the step's plan does."""
        self.kv.commit()
        index, shard = sequence.kv_range.index, self.shard
        past = sequence.num_computed
        rows = min(len(sequence.tokens) - past, MAX_ROWS, sequence.kv_range.capacity - past)
        keys, own = shard.num_tokens(past), shard.num_tokens(past + rows) - shard.num_tokens(past)
        queries = [Query(index, 1, keys)] if keys else []
        self.plan(queries, [Append(index, own, keys)] if own else [])
        super().check_reads(sequence)

    def _pages(self, sequence, number, position):
        part = number * NUM_RANGES + sequence.kv_range.index
        slot = position // self.page_tokens[number]
        page = self.session._slots.mapped(part)[slot]
        assert page != UNMAPPED
        offset = self.session.layout.part_offset(part) + slot * self.memory.page_bytes
        assert self.memory.mapped[offset] == page
        return [self.memory.content.setdefault(page, {})]

    def compare(self) -> None:
        """Compares the page slots of the accounting and of the node."""
        self.kv.commit()
        self.plan([], [])
        for part in range(NUM_RANGES * len(self.page_tokens)):
            there = list(self.session._slots.mapped(part))
            while there and there[-1] == UNMAPPED:
                there.pop()
            assert list(self.kv.space.mapped(part)) == there

    def lose(self) -> None:
        for sequence in list(self.running):
            self.close(sequence)
        self.kv.reset(NUM_PAGES)
        self.log.take()
        self.attach()


SHARDS = [
    (Shard("head", 0, 2), (None,)),
    (Shard("request", 0, 1), (None, 100)),
    (Shard("sequence", 1, 2), (None,)),
    (Shard("sequence", 2, 3), (None,)),
    (Shard("head", 1, 3), (None, 40, 130)),
]


@pytest.mark.parametrize(("shard", "windows"), SHARDS)
def test_a_node_maps_what_the_accounting_maps(shard, windows, monkeypatch):
    monkeypatch.setattr("memory.range_mapper._UNMAP_SLOTS", 2)
    rng = random.Random(3)
    model = NodeModel(shard, windows)
    model.kv.space.max_mappings = 60
    for number in range(1500):
        operation = rng.random()
        if operation < 0.2:
            prompt = rng.choice(PROMPTS)[: rng.randint(1, 300)]
            if rng.random() < 0.4:  # repeats whole pages, so that the last one is copied
                prompt = prompt[: max(1, len(prompt) // 96) * 96]
            else:
                prompt = [*prompt[:-1], rng.randrange(3)]
            model.open(prompt, rng.choice("ab"))
        elif operation < 0.8 and model.running:
            model.advance(rng.choice(model.running), rng.choice([1, 1, 2, 30, 200]))
        elif operation < 0.95 and model.running:
            model.close(rng.choice(model.running))
        elif operation < 0.97:
            model.kv.trim()
        elif operation < 0.975:
            model.lose()
        if number % 10 == 0:
            model.compare()
            model.kv.check_integrity()
    assert min(model.edits.values()) > 5, model.edits
    assert model.num_hit_tokens > 1000
    for sequence in list(model.running):
        model.close(sequence)
    model.kv.close_all()
    model.compare()
    assert not model.memory.mapped


def test_page_slots_behind_the_last_range_are_a_bug():
    log = EditLog(4096, 2, [3, 5])
    log.map(4096 * (2 * 3 + 5 + 4), 7, 1)
    log.unmap(0, 2)
    assert log.take() == [
        Edit(EditKind.MAP, 3, 4, 7, 1),
        Edit(EditKind.UNMAP, 0, 0, 0, 2),
    ]
    assert log.take() == []
    with pytest.raises(AssertionError, match="behind the last range"):
        log.map(4096 * 2 * (3 + 5), 0, 1)
