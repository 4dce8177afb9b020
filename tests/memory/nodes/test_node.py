"""A memory node refuses messages that break the protocol, and other engines are not affected."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch

from memory.nodes.wire import EditKind, ErrorCode, Header, Kind, WireType, pack_json
from tests.support.engine.raw_engine import (
    LAYER,
    NODE_BYTES,
    REQUEST,
    RawEngine,
    Witness,
    page_bytes,
)

MAP, UNMAP, COPY, RELEASE = EditKind
FORM, FULL, STALE, RANGE, SHAPE, FAULT = ErrorCode


Q1, Q2 = torch.ones(1, 4, 16), torch.ones(2, 4, 16)
KV1 = torch.ones(1, 2, 16)


def planned(number_of_message=1, **plan):
    def act(engine):
        engine.plan(**plan)

    return act


def queried(q, layer=0, queries=((0, 1, 40),), **more):
    def act(engine):
        number = engine.plan(queries=queries)
        engine.query(more.pop("number", number), layer, q, **more)

    return act


def updated(k, v, layer=0, appends=((0, 1, 40),), **more):
    def act(engine):
        number = engine.plan(appends=appends)
        engine.update(more.pop("number", number), layer, k, v, **more)

    return act


def after_unmapping(is_update):
    """Sends rows whose pages were mapped when they were planned and are unmapped when they
    arrive."""

    def act(engine):
        first = engine.plan(queries=[(0, 1, 40)], appends=[(0, 1, 40)])
        engine.plan([(UNMAP, 0, 0, 0, 2)])
        if is_update:
            engine.update(first, 0, KV1, KV1)
            engine.plan()  # the rows would be written now
        else:
            engine.query(first, 0, Q1)

    return act


def sent(message):
    def act(engine):
        engine.send(message)

    return act


def after_many_plans(engine):
    number = engine.plan(queries=[(0, 1, 40)])
    for _ in range(8):
        engine.plan(queries=[(0, 1, 40)])
    engine.query(number, 0, Q1)


def twice_the_same(engine):
    engine.plan(number=77)
    engine.plan(number=77)


def twice_queried(engine):
    number = engine.plan(queries=[(0, 1, 40)])
    for _ in range(2):
        engine.query(number, 0, Q1)


def twice_updated(engine):
    number = engine.plan(appends=[(0, 1, 40)])
    for _ in range(2):
        engine.update(number, 0, KV1, KV1)


HUGE = 2**32 - 1
PAGES = REQUEST.num_pages
OFFENCES = {
    # form
    "nothing": (sent(b""), FORM),
    "half a header": (sent(bytes(16)), FORM),
    "zeros": (sent(bytes(64)), FORM),
    "http": (sent(b"POST /v1/chat/completions HTTP/1.1\r\n\r\n"), FORM),
    "attach again": (sent(pack_json(Kind.ATTACH, 1, REQUEST.to_json())), FORM),
    "attached": (sent(pack_json(Kind.ATTACHED, 1, {})), FORM),
    "partial": (sent(Header(Kind.PARTIAL, 1).packed()), FORM),
    "drain": (sent(Header(Kind.DRAIN, 1).packed()), FORM),
    "error": (sent(pack_json(Kind.ERROR, 1, {})), FORM),
    "half a plan": (sent(Header(Kind.PLAN, 1, 9).packed() + bytes(8)), FORM),
    "huge counts": (
        sent(Header(Kind.PLAN, 1, 9).packed() + struct.pack("<III", HUGE, HUGE, HUGE)),
        FORM,
    ),
    "an edit of no kind": (
        sent(Header(Kind.PLAN, 1, 9).packed() + struct.pack("<8I", 1, 0, 0, 4, 0, 0, 0, 1)),
        FORM,
    ),
    # epochs and plans
    "plan of an old epoch": (planned(epoch=0), STALE),
    "plan of a later epoch": (planned(epoch=2), STALE),
    "query of an old epoch": (queried(Q1, epoch=0), STALE),
    "update of a later epoch": (updated(KV1, KV1, epoch=2), STALE),
    "a plan twice": (twice_the_same, STALE),
    "query of no plan": (queried(Q1, number=99), STALE),
    "update of no plan": (updated(KV1, KV1, number=99), STALE),
    "query of a plan long ago": (after_many_plans, STALE),
    "a plan before the last one": (planned(number=1), STALE),
    "the same query twice": (twice_queried, STALE),
    "the same update twice": (twice_updated, STALE),
    "query of what is unmapped since": (after_unmapping(False), STALE),
    "update of what is unmapped since": (after_unmapping(True), STALE),
    # edits
    "map into no part": (planned(edits=[(MAP, 6, 0, 0, 1)]), RANGE),
    "map into part 2^32 - 1": (planned(edits=[(MAP, HUGE, 0, 0, 1)]), RANGE),
    "map behind a range": (planned(edits=[(MAP, 0, 8, 0, 1)]), RANGE),
    "map over the end of a range": (planned(edits=[(MAP, 5, 3, 0, 2)]), RANGE),
    "map slot 2^32 - 1": (planned(edits=[(MAP, 0, HUGE, 0, HUGE)]), RANGE),
    "map a page that is none": (planned(edits=[(MAP, 0, 0, PAGES, 1)]), RANGE),
    "map pages over the end": (planned(edits=[(MAP, 0, 0, PAGES - 1, 2)]), RANGE),
    "map nothing": (planned(edits=[(MAP, 0, 0, 0, 0)]), RANGE),
    "map 2^32 - 1 pages": (planned(edits=[(MAP, 0, 0, 1, HUGE)]), RANGE),
    "unmap behind a range": (planned(edits=[(UNMAP, 0, 7, 0, 2)]), RANGE),
    "unmap in no part": (planned(edits=[(UNMAP, 6, 0, 0, 1)]), RANGE),
    "unmap nothing": (planned(edits=[(UNMAP, 0, 0, 0, 0)]), RANGE),
    "copy from no page": (planned(edits=[(COPY, 0, PAGES, 0, 1)]), RANGE),
    "copy to no page": (planned(edits=[(COPY, 0, 0, HUGE, 1)]), RANGE),
    "release over the end": (planned(edits=[(RELEASE, 0, 0, PAGES - 1, 2)]), RANGE),
    "release nothing": (planned(edits=[(RELEASE, 0, 0, 0, 0)]), RANGE),
    "a bad edit after a good one": (
        planned(edits=[(MAP, 0, 2, 30, 1), (MAP, 0, 9, 0, 1)]),
        RANGE,
    ),
    # queries and appends of the same rows
    "query no range": (planned(queries=[(3, 1, 40)]), RANGE),
    "query range 2^32 - 1": (planned(queries=[(HUGE, 1, 40)]), RANGE),
    "query no rows": (planned(queries=[(0, 0, 40)]), RANGE),
    "query no keys": (planned(queries=[(0, 1, 0)]), SHAPE),
    "query beyond what is mapped": (planned(queries=[(0, 1, 65)]), RANGE),
    "query beyond the window's pages": (planned(queries=[(0, 1, 129)]), RANGE),
    "query 2^32 - 1 keys": (planned(queries=[(0, 1, HUGE)]), RANGE),
    "too many rows": (planned(queries=[(0, 65, 40)]), SHAPE),
    "2^32 - 1 rows": (planned(queries=[(0, HUGE, 40)]), SHAPE),
    "too many queries": (planned(queries=[(0, 1, 40)] * 65), SHAPE),
    "queries without rows": (planned(queries=[(0, 0, 40)] * 65), SHAPE),
    "a range queried twice": (planned(queries=[(0, 1, 40), (0, 1, 40)]), SHAPE),
    "a range written twice": (planned(appends=[(0, 1, 40), (0, 1, 41)]), SHAPE),
    "one row after a chunk": (planned(queries=[(0, 2, 40), (1, 1, 40)]), SHAPE),
    "append to no range": (planned(appends=[(3, 1, 0)]), RANGE),
    "append nothing": (planned(appends=[(0, 0, 0)]), RANGE),
    "append behind what is mapped": (planned(appends=[(0, 1, 64)]), RANGE),
    "append over the end of it": (planned(appends=[(0, 5, 60)]), RANGE),
    "append at 2^32 - 1": (planned(appends=[(0, 1, HUGE)]), RANGE),
    "append too many rows": (planned(appends=[(0, 40, 0), (1, 25, 0)]), SHAPE),
    # rows
    "q of more rows than planned": (queried(Q2), SHAPE),
    "q of fewer rows": (queried(Q1, queries=((0, 2, 40),)), SHAPE),
    "no q": (queried(Q1[:0], rows=0), SHAPE),
    "q without queries": (queried(Q1[:0], rows=0, queries=()), SHAPE),
    "rows that are not there": (queried(Q1, queries=((0, 2, 40),), rows=2), SHAPE),
    "more q than rows": (queried(Q2, rows=1), SHAPE),
    "2^32 - 1 rows of q": (queried(Q1, rows=HUGE), SHAPE),
    "q of no layer": (queried(Q1, layer=3), RANGE),
    "q of layer 65535": (queried(Q1, layer=65535), RANGE),
    "k of no layer": (updated(KV1, KV1, layer=3), RANGE),
    "k without v": (updated(KV1, KV1[:0]), SHAPE),
    "k and v of more rows": (updated(Q2, Q2), SHAPE),
    "k and v without appends": (updated(KV1, KV1, appends=()), SHAPE),
    "2^32 - 1 rows of k and v": (updated(KV1, KV1, rows=HUGE), SHAPE),
}


@pytest.mark.parametrize(("act", "code"), OFFENCES.values(), ids=OFFENCES)
@pytest.mark.row("M5")
def test_a_protocol_error_disconnects_only_its_engine(node, act, code):
    witness = Witness.beside(node)
    leased = node.stats().bytes_leased
    engine = RawEngine.beside(node)
    engine.attach()
    engine.map_ranges()
    assert node.stats().bytes_leased == 2 * leased
    act(engine)
    assert engine.error() is code
    assert node.stats().bytes_leased == leased
    assert node.stats().num_offences == 1
    witness.check()
    witness.close()


BEFORE_ATTACHING = {
    "nothing": (b"", FORM),
    "a plan": (Header(Kind.PLAN, 1, 1).packed() + bytes(12), FORM),
    "a query": (Header(Kind.QUERY, 1, 1, 0, WireType.FLOAT32, 1).packed() + bytes(256), FORM),
    "no json": (Header(Kind.ATTACH, 1).packed() + b"{", FORM),
    "no fields": (pack_json(Kind.ATTACH, 1, {}), SHAPE),
    "no epoch": (pack_json(Kind.ATTACH, 1, REQUEST.to_json() | {"epoch": 0}), SHAPE),
}


@pytest.mark.parametrize(("message", "code"), BEFORE_ATTACHING.values(), ids=BEFORE_ATTACHING)
def test_an_engine_that_does_not_attach_is_disconnected(node, message, code):
    engine = RawEngine.beside(node)
    engine.send(message)
    assert engine.error() is code
    assert node.stats().num_attached == 0


def test_absurd_requests_take_no_memory(node):
    """Large numbers in a request reserve no more memory than the node grants."""
    before = resident_bytes()
    tall = replace(LAYER, num_heads=4096, num_kv_heads=4096, head_dim=512)
    wide = {"num_places": [2000, 2000], "page_tokens": [1 << 20, 1 << 20]}
    requests = {
        "parts": (replace(REQUEST, num_ranges=1 << 20, num_places=[1, 1]), SHAPE, None),
        "places": (replace(REQUEST, num_ranges=1 << 12, num_places=[1 << 16, 1]), SHAPE, None),
        "addresses": (replace(REQUEST, num_ranges=9999, **wide), SHAPE, None),
        "pages": (replace(REQUEST, num_pages=1 << 22, min_pages=1 << 22), FULL, None),
        "heads": (replace(REQUEST, layers=[tall, tall, replace(tall, window=40)]), FULL, None),
        "all pages": (replace(REQUEST, num_pages=1 << 22), None, NODE_BYTES // page_bytes()),
        "many ranges": (replace(REQUEST, num_ranges=1 << 18), None, PAGES),
        "too many ranges": (replace(REQUEST, num_ranges=1 << 19), FULL, None),
    }
    for number, (name, (request, code, granted)) in enumerate(requests.items()):
        engine = RawEngine.beside(node, replace(request, engine=name, epoch=1 + number))
        if code is None:
            assert engine.attach() == granted, name
            engine.close()
        else:
            engine.send(pack_json(Kind.ATTACH, 1 + number, engine.request.to_json()))
            assert engine.error() is code, name
        assert node.stats().bytes_leased == 0
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
