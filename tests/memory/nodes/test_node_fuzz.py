"""Random messages to a memory node get an answer or an error and never end the process."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from memory.attention.tiled import TILED_TYPES
from memory.nodes.placement import Shard, choosing_row
from memory.nodes.wire import HEADER_BYTES, EditKind, Header, Kind
from memory.policies.setting import KVPolicy
from tests.memory.nodes.selection.test_striped_rows import STRIPED
from tests.support.engine.raw_engine import REQUEST, RawEngine, Witness

MAP, UNMAP, COPY, RELEASE = EditKind
PAGES = REQUEST.num_pages
KV_DTYPES = ["float32", "bfloat16", "int8", "int4"]
BUDGETS = [
    None,
    KVPolicy("quest", share=0.5),
    KVPolicy("quest", tokens=1),
    KVPolicy("quest", tokens=2**32 - 1, least=2**32 - 1),
]


class Fuzzer:
    """Sends messages that are mostly valid and sometimes not."""

    def __init__(self, seed, node, kv_dtype):
        self.rng = random.Random(seed)
        request = replace(self.request(kv_dtype), engine=f"{seed} {kv_dtype}", kv_dtype=kv_dtype)
        self.engine = RawEngine.beside(node, request)
        self.engine.attach()
        self.plans = []  # (number, rows of q, rows of k)
        self.sent = set()
        self.engine.map_ranges(4)

    def request(self, kv_dtype):
        """Returns what the engine asks for."""
        prefix_only = self.rng.random() < 0.5
        self.selects = kv_dtype in TILED_TYPES and not prefix_only and self.rng.random() < 0.5
        policy = KVPolicy("quest", share=0.25) if self.selects else None
        return replace(REQUEST, prefix_only=prefix_only, kv_policy=policy)

    def number(self, usual, most):
        """Draws a number that is mostly below `usual` and sometimes at a limit."""
        if self.rng.random() < 0.995:
            return self.rng.randrange(max(1, usual))
        return self.rng.choice([most, most + 1, 2 * most, 2**31, 2**32 - 3])

    def edit(self):
        kind = self.rng.choice([MAP, MAP, MAP, COPY, RELEASE, UNMAP])
        most = self.engine.request.num_ranges * len(self.engine.request.num_places)
        part = self.number(most, most)
        slots = 8 if part < 3 else 4
        slot = self.number(slots, slots)
        count = self.number(4, slots) + (self.rng.random() < 0.95)
        if self.rng.random() < 0.99:
            count = min(count, max(1, slots - slot))
        page = self.number(PAGES, PAGES)
        if kind in (MAP, RELEASE) and self.rng.random() < 0.99:
            page = min(page, max(0, PAGES - count))
        if kind is COPY:
            slot = self.number(PAGES, PAGES)
        return kind, part, slot, page, count

    def plan(self):
        rng = self.rng
        edits = [self.edit() for _ in range(rng.choice([0, 0, 1, 3]))]
        if any(edit[0] is UNMAP for edit in edits):
            edits += self.engine.all_mapped(4) if rng.random() < 0.95 else []
            self.plans = self.plans if rng.random() < 0.05 else []
        singles = [(self.number(3, 3), 1, 1 + self.number(128, 256))] * rng.randrange(3)
        chunks = [
            (self.number(3, 3), 2 + self.number(20, 64), 22 + self.number(107, 235))
            for _ in range(rng.randrange(2))
        ]
        queries, appends = self.mostly_once(singles + chunks), []
        if rng.random() < 0.005:
            rng.shuffle(queries)
        for _ in range(rng.randrange(3)):
            rows = 1 + self.number(20, 64)
            appends.append((self.number(3, 3), rows, self.number(100, 256)))
        appends = self.mostly_once(appends)
        lengths = [self.number(256, 256) for _ in queries] if self.selects else []
        if rng.random() < 0.005:
            lengths.append(3)
        policies = [rng.choice(BUDGETS) for _ in lengths] if rng.random() < 0.5 else []
        number = self.engine.plan(edits, queries, appends, prompt_lens=lengths, policies=policies)
        self.plans.append((number, sum(q[1] for q in queries), sum(a[1] for a in appends)))

    def mostly_once(self, items):
        """Returns each range mostly once, since a node refuses a range twice in a plan."""
        return (
            list({item[0]: item for item in items}.values()) if self.rng.random() < 0.99 else items
        )

    def rows(self):
        rng = self.rng
        number, num_query_rows, num_append_rows = rng.choice(self.plans[-3:])
        if rng.random() < 0.005:
            number += rng.choice([9, 2**31])
        layer = self.number(3, 3)
        layer %= 65536
        off = rng.choice([-1, 1]) if rng.random() < 0.005 else 0
        if num_query_rows and (rng.random() < 0.5 or not num_append_rows):
            count = min(max(0, num_query_rows + off), 200)
            if self.is_first(number, layer, Kind.QUERY):
                self.engine.query(number, layer, torch.randn(count, 4, 16))
                if self.engine.request.prefix_only == (rng.random() < 0.005):
                    self.engine.own(number, layer, *torch.randn(2, count, 2, 16))
        elif num_append_rows or rng.random() < 0.005:
            count = min(max(0, num_append_rows + off), 200)
            if self.is_first(number, layer, Kind.UPDATE):
                self.engine.update(number, layer, *torch.randn(2, count, 2, 16))

    def is_first(self, *message):
        """Whether the message is new; a repeated one, sometimes sent, is an offence."""
        is_new = message not in self.sent
        self.sent.add(message)
        return is_new or self.rng.random() < 0.005

    def noise(self):
        rng = self.rng
        header = Header(rng.choice(list(Kind)), 1, rng.randrange(4), rng.randrange(4), rows=1)
        data = bytearray(header.packed() + rng.randbytes(rng.choice([0, 12, 44, 256])))
        if rng.random() < 0.5:
            data[rng.randrange(HEADER_BYTES)] = rng.randrange(256)
        self.engine.send(bytes(data[: rng.randrange(len(data) + 1)]))

    def run(self, num_messages):
        """Sends messages and returns the kinds of the node's answers."""
        self.plan()
        for _ in range(num_messages):
            draw = self.rng.random()
            if draw < 0.3:
                self.plan()
            elif draw < 0.99:
                self.rows()
            else:
                self.noise()
            if self.engine.endpoint.is_lost:
                break
        found = []
        while self.engine.endpoint._inbox:
            header, _ = self.engine.receive()
            found.append(header.kind)
        self.engine.close()
        return found


class StripedFuzzer(Fuzzer):
    """Of a session with a stripe: rows that choose, k and v of their sequences, and choices."""

    def request(self, kv_dtype):
        count = self.rng.randrange(1, 4)
        stripe = self.rng.randrange(count), count
        self.shard = Shard("sequence", *stripe)
        return replace(STRIPED, stripe=stripe)

    def plan(self):
        rng, shard = self.rng, self.shard
        edits = [self.edit() for _ in range(rng.choice([0, 0, 0, 0, 1]))]
        if any(edit[0] is UNMAP for edit in edits):
            edits += self.engine.all_mapped(4)
        indices = rng.sample(range(3), 3)
        queries, appends, positions, wanted, listed = [], [], [], [], []
        for index in indices[: rng.randrange(3)]:
            length = 1 + self.number(128 * shard.count, 2**31 - 2)
            rows = min(length, 1 + self.number(3, 64), 100)
            keys = shard.num_tokens(length) + (rng.random() < 0.005)
            queries.append((index, rows, keys, rows))
            positions.append(length - rows)
            tiles = [choosing_row(shard, length - rows + i).num_tiles for i in range(rows)]
            wanted += [self.number(6, 2**31 - 2) for _ in tiles]
            listed += [min(n, most) for n, most in zip(tiles, wanted[-rows:], strict=True)]
            first = shard.num_tokens(max(0, length - rows - rng.choice([0, 0, 5, 20])))
            if own := shard.num_tokens(length) - first:
                appends.append((index, own, first))
        num_own = sum(a[1] for a in appends)
        for index in rng.sample(range(3), rng.randrange(3)):
            queries.append((index, 1 + self.number(5, 64), 1 + self.number(127, 256), 0))
        for index in indices[len(positions) :][: rng.randrange(2)]:
            appends.append((index, 1 + self.number(20, 64), self.number(100, 256)))
        if rng.random() < 0.01:
            rng.shuffle(rng.choice([queries, appends, positions]))
        number = self.engine.plan(edits, queries, appends, positions=positions, wanted=wanted)
        num_rows, num_updated = sum(q[1] for q in queries), sum(a[1] for a in appends) - num_own
        self.plans.append((number, num_rows, listed, num_own, num_updated))

    def rows(self):
        rng, engine = self.rng, self.engine
        number, num_rows, listed, num_own, num_updated = rng.choice(self.plans[-3:])
        layer = self.number(2, 2) % 65536
        if num_rows and rng.random() < 0.7 and self.is_first(number, layer, Kind.QUERY):
            engine.query(number, layer, torch.randn(min(num_rows, 200), 4, 32))
            if num_own and rng.random() < 0.995:
                engine.own(number, layer, *torch.randn(2, min(num_own, 200), 2, 32))
            if listed and rng.random() < 0.99:
                self.choose(number, layer, listed)
        elif num_updated and self.is_first(number, layer, Kind.UPDATE):
            engine.update(number, layer, *torch.randn(2, min(num_updated, 200), 2, 32))

    def choose(self, number, layer, listed):
        """Chooses as many tiles of each row and head as are listed, fewer, or what cannot be."""
        counts = [[self.rng.randrange(n + 1) for _ in range(2)] for n in listed]
        if self.rng.random() < 0.01:
            self.rng.choice(counts)[0] = self.rng.choice([-1, 2**31 - 1, 9])
        self.engine.choice(number, counts, layer)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("fuzzer", "kv_dtype"),
    [(Fuzzer, kv_dtype) for kv_dtype in KV_DTYPES]
    + [(StripedFuzzer, kv_dtype) for kv_dtype in TILED_TYPES],
)
def test_random_messages(node, fuzzer, kv_dtype):
    witness = Witness.beside(node)
    leased = node.stats().bytes_leased
    num_answered = num_chosen = num_refused = 0
    for seed in range(60):
        found = fuzzer(seed, node, kv_dtype).run(60)
        num_answered += found.count(Kind.PARTIAL) + found.count(Kind.RESULT)
        num_chosen += found.count(Kind.TILES)
        assert Kind.ERROR not in found[:-1]
        assert {*found} <= {Kind.PARTIAL, Kind.RESULT, Kind.TILES, Kind.ERROR}
        num_refused += Kind.ERROR in found
        assert node.stats().bytes_leased == leased
    witness.check()
    witness.close()
    stats = node.stats()
    assert (stats.num_offences, stats.num_refused) == (num_refused, 0)
    assert num_answered > 100 and num_refused > 30
    assert (num_chosen > 100) == (fuzzer is StripedFuzzer)
