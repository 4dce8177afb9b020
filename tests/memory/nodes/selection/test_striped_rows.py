"""Rows of answers that choose among the tiles of all memory nodes, where each has some tokens of a
sequence (memory_partition sequence): they read what local attention reads, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from memory.nodes import placement
from memory.nodes.attach import AttachRequest
from memory.nodes.errors import NoNodeError
from memory.nodes.placement import Shard, choosing_parts, choosing_row
from memory.nodes.split_plan import ChoosingRows
from memory.nodes.wire import ErrorCode, Kind, pack_json
from memory.policies.setting import KVPolicy
from ops.cpu import native_library
from quant.kv import TILE_TOKENS
from tests.memory.nodes.selection.test_selected_rows import (
    PROMPTS,
    QUEST,
    drawn_steps,
    is_same,
    local_results,
    results,
)
from tests.memory.nodes.test_own_rows import Local
from tests.support.engine.raw_engine import WHOLE, RawEngine, Witness
from tests.support.nodes.remote_rig import RemoteRig, layers_of
from transport.direct import direct_pair

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)
CLOSE = {"int8": 1e-3, "int4": 6e-2}
"""How far results that were merged may be from those of one machine, as without a policy; another
tile that is read changes some result by 0.5 or more."""
FORM, FULL, STALE, RANGE, SHAPE, FAULT = ErrorCode


def rig_of(layers, names, kv_dtype="int8", **settings):
    settings = {"kv_policy": QUEST} | settings
    return RemoteRig(layers, tuple(names), "sequence", kv_dtype, **settings)


def distance(some, others):
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


@pytest.mark.covering(2)
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize(("names", "tail_bytes"), [("a", 0), ("ab", 1 << 22), ("abc", 0)])
@pytest.mark.parametrize(
    "kv_policy", [QUEST, KVPolicy("quest", tokens=1), KVPolicy("quest", tokens=100)], ids=str
)
def test_rows_read_what_local_attention_reads(kv_dtype, names, tail_bytes, kv_policy):
    """Steps of rows of prompts and of answers, one or many of a sequence, which complete tiles and
    choose them."""
    layers = layers_of(2)
    rig = rig_of(layers, names, kv_dtype, tail_bytes=tail_bytes, kv_policy=kv_policy)
    local = Local(layers, kv_dtype, kv_policy)
    expected, found = local_results(local, layers), results(rig, layers)
    assert distance(found, expected) < CLOSE[kv_dtype]
    assert rig.attention.selection.counts() == local.selection.counts()
    rig.close()
    whole = local_results(Local(layers, kv_dtype), layers)
    assert distance(expected, whole) > 5 * CLOSE[kv_dtype], "the policy changes what rows read"


def test_tiles_of_equal_scores_are_the_newest_ones():
    """Keys of nothing have the same bounds."""
    layers = layers_of(1)
    local, rig = Local(layers, "int8", QUEST), rig_of(layers, "abc")
    item = rig.kv.open(700)
    generator = torch.Generator().manual_seed(1)
    length, found, expected = 0, [], []
    for num_rows in (200, 130, 1, 1, 5, 40, 1):
        length += num_rows
        q, v = (torch.randn(num_rows, heads, 32, generator=generator) for heads in (8, 4))
        inputs = [[q, torch.zeros(num_rows, 4, 32), v]]
        found += rig.step([(item, num_rows, length)], inputs, [330])
        expected += local.step([(0, num_rows, length)], inputs, [330])
    assert distance(found, expected) < CLOSE["int8"]
    rig.close()


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_a_row_chooses_tiles_that_rows_of_its_prompt_complete_in_the_same_step(names):
    """As when a sequence is computed again that had one token, or whose chunk ends there."""
    layers = layers_of(1)
    local, rig = Local(layers, "int8", QUEST), rig_of(layers, names)
    item = rig.kv.open(700)
    generator = torch.Generator().manual_seed(1)
    length, found, expected = 0, [], []
    for num_rows, prompt in ((200, 330), (131, 330), (3, 333), (2, 335), (8, 342), (1, 342)):
        length += num_rows
        sizes = (8, 4, 4)
        inputs = [[torch.randn(num_rows, heads, 32, generator=generator) for heads in sizes]]
        found += rig.step([(item, num_rows, length)], inputs, [prompt])
        expected += local.step([(0, num_rows, length)], inputs, [prompt])
    assert distance(found, expected) < CLOSE["int8"]
    rig.close()


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_rows_that_may_read_everything_have_the_bits_of_no_policy(share):
    layers = layers_of(2)
    found = []
    for kv_policy in (KVPolicy("quest", share=share), None):
        rig = rig_of(layers, "ab", kv_policy=kv_policy)
        found.append(results(rig, layers))
        rig.close()
    assert is_same(*found) == (share == 1.0)


@pytest.mark.parametrize("most", [1, 150, 4000])
def test_many_rows_choose_in_parts(most, monkeypatch):
    """So no message and no memory of a node grows with the number of rows."""
    layers = layers_of(2)
    rig = rig_of(layers, "ab")
    expected = results(rig, layers)
    rig.close()
    monkeypatch.setattr(placement, "MAX_LISTED", most)
    rig = rig_of(layers, "ab")
    assert is_same(results(rig, layers), expected)
    rig.close()


def test_parts_are_cut_by_what_they_list(monkeypatch):
    monkeypatch.setattr(placement, "MAX_LISTED", 40)
    assert choosing_parts([], 2) == []
    assert choosing_parts([5000], 2) == [slice(0, 1)], "one row in any case"
    positions = [0, 15, 16, 160, 200, 10, 10, 5000, 3]
    cut = choosing_parts(positions, 2)
    assert [row for part in cut for row in range(*part.indices(99))] == list(range(9))
    sizes = [2 * sum(positions[row] // 16 + 1 for row in range(p.start, p.stop)) for p in cut]
    assert sizes == [30, 30, 626, 2]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_each_node_sees_its_own_tiles_and_keys_of_a_row(count):
    for position in range(200):
        tiles = [(tile, tile % count) for tile in range(position // TILE_TOKENS)]
        for number in range(count):
            own = [tile for tile, node in tiles if node == number]
            has_own_tile = position // TILE_TOKENS % count == number
            num_keys = TILE_TOKENS * len(own) + has_own_tile * (position % TILE_TOKENS + 1)
            shard = Shard("sequence", number, count)
            assert choosing_row(shard, position) == (len(own), num_keys)


def test_layers_that_do_not_select_read_everything():
    """Those that see a part of the keys, of another kind, or the K/V of such a layer."""
    layers = layers_of(2)
    layers = [layers[0], replace(layers[1], shares=0)]
    rig, local = rig_of(layers, "ab"), Local(layers, "int8", QUEST)
    found, expected = [], []
    items = [rig.kv.open(700) for _ in PROMPTS]
    for rows, inputs in drawn_steps(layers):
        inputs[1][1:] = [None, None]
        prompts = [PROMPTS[name] for name, _, _ in rows]
        found += rig.step([(items[name], n, length) for name, n, length in rows], inputs, prompts)
        expected += local.step(rows, inputs, prompts)
    assert distance(found, expected) < CLOSE["int8"]
    rig.close()


def test_sinks_belong_to_no_node():
    layers = [replace(layer, sinks=(0.0, 3.0, -5.0, 9.0) * 2) for layer in layers_of(1)]
    rig = rig_of(layers, "ab")
    assert (
        distance(results(rig, layers), local_results(Local(layers, "int8", QUEST), layers)) < 2e-3
    )
    rig.close()


def test_only_lists_and_counts_travel_beside_the_rows(monkeypatch):
    """In a step of one row: four bytes for each tile that may be chosen, and a bit for each."""
    layers = layers_of(1)
    rig = rig_of(layers, "ab", kv_policy=KVPolicy("quest", tokens=64))
    item = rig.kv.open(700)
    q, kv = torch.randn(650, 8, 32), torch.randn(2, 650, 4, 32)
    for first in range(0, 640, 128):
        rows = slice(first, first + 128)
        rig.step([(item, 128, first + 128)], [[q[rows], *kv[:, rows]]], [640])
    sizes = []
    for link in rig.set.partitions[0].links:
        answer = link.answer

        def noted(*which, answer=answer):
            header, frame = answer(*which)
            sizes.append((header.kind, frame.num_bytes - 32))
            return header, frame

        monkeypatch.setattr(link, "answer", noted)
    rig.step([(item, 1, 641)], [[q[640:641], *kv[:, 640:641]]], [640])
    lists = 4 * (4 * 3 + 4)  # four heads: three scores of 20 tiles, and a word of bits
    partial = 8 * 33 * 4
    assert sizes == [(Kind.TILES, lists)] * 2 + [(Kind.PARTIAL, partial)] * 2
    rig.close()


def test_which_rows_choose():
    """A sequence's rows do if one of them may not read everything; those of its prompt never."""
    from memory.attention.seam import AttentionStep

    step = AttentionStep(2, [0, 0, 0], [1, 1, 20], [100, 20, 60], [50, 5, 45])
    rows = ChoosingRows(step, [1, 1, 15], [3, 2] + [4] * 15, num_kv_heads=2)
    assert rows.num_of == [1, 0, 0]
    assert (rows.positions, rows.wanted) == ([99], [2])
    rows = ChoosingRows(step, [1, 1, 15], [3, 2] + [3] * 14 + [4], num_kv_heads=2)
    assert rows.num_of == [1, 0, 15]
    assert rows.positions == [99, *range(45, 60)]
    assert rows.wanted == [2] + [2] * 14 + [3]


# ---- what a node refuses

STRIPED = replace(
    WHOLE,
    layers=[replace(layer, head_dim=32) for layer in WHOLE.layers[:2]],
    group_layers=[[0, 1]],
    page_tokens=[32],
    num_places=[8],
    kv_dtype="int8",
    prefix_only=True,
    kv_policy=QUEST,
    stripe=(1, 2),
)
Q, KV = torch.ones(1, 4, 32), torch.ones(2, 1, 2, 32)
CHOOSING = {"queries": [(0, 1, 32, 1)], "positions": [64], "wanted": [1]}
"""A row at position 64: the second node of two has tiles 1 and 3, and not the row's own."""


def attached(node, request=STRIPED):
    engine = RawEngine.beside(node, request)
    engine.attach()
    engine.map_ranges(4)
    return engine


def listed(engine, number, layer=0):
    engine.query(number, layer, Q)
    header, _ = engine.receive()
    assert (header.kind, header.layer, header.rows) == (Kind.TILES, layer, 1)


def test_a_row_is_answered_after_its_choice(node):
    engine = attached(node)
    number = engine.plan(**CHOOSING)
    for layer, count in ((0, 1), (1, 0)):
        listed(engine, number, layer)
        engine.choice(number, [[count, count]], layer)
        _, lse = engine.partial(layer)
        assert bool((lse > -torch.inf).all()) == (count > 0), "without its own tile"
    engine.close()


def planned(**plan):
    return lambda engine: engine.plan(**plan)


def chosen(counts, **more):
    def act(engine):
        number = engine.plan(**CHOOSING)
        listed(engine, number)
        engine.choice(number, counts, **more)

    return act


def unlisted(engine):
    engine.choice(engine.plan(**CHOOSING), [[1, 1]])


def chosen_twice(engine):
    chosen([[1, 1]])(engine)
    engine.partial(0)
    engine.choice(engine.num_plans, [[1, 1]])


def before_own(engine):
    """Row 80 is in tile 5, which this node has; its k and v are due."""
    plan = {"queries": [(0, 1, 33, 1)], "positions": [80], "wanted": [1]}
    number = engine.plan(appends=[(0, 1, 32)], **plan)
    listed(engine, number)
    engine.choice(number, [[1, 1]])


def own_twice(engine):
    plan = {"queries": [(0, 1, 33, 1)], "positions": [80], "wanted": [1]}
    number = engine.plan(appends=[(0, 1, 32)], **plan)
    listed(engine, number)
    engine.own(number, 0, *KV)
    engine.own(number, 0, *KV)


def own_without_q(engine):
    engine.own(engine.plan(appends=[(0, 1, 32)], **CHOOSING), 0, *KV)


OFFENCES = {
    "a choice without lists": (unlisted, STALE),
    "a choice twice": (chosen_twice, STALE),
    "a choice before k and v": (before_own, STALE),
    "k and v twice": (own_twice, STALE),
    "k and v without q": (own_without_q, STALE),
    "more tiles than are listed": (chosen([[2, 1]]), RANGE),
    "fewer tiles than none": (chosen([[1, -1]]), RANGE),
    "a choice of too few heads": (chosen([[1]]), SHAPE),
    "a choice of more rows": (chosen([[1, 1]] * 2), SHAPE),
    "a choice of 2^32 - 1 rows": (chosen([[1, 1]], rows=2**32 - 1), SHAPE),
    "a choice of another layer": (chosen([[1, 1]], layer=1), STALE),
    "a choice of no layer": (chosen([[1, 1]], layer=7), RANGE),
    "keys that do not fit the position": (planned(**CHOOSING | {"positions": [80]}), SHAPE),
    "a position of 2^32 - 1": (planned(**CHOOSING | {"positions": [2**32 - 1]}), SHAPE),
    "keys beyond what is mapped": (
        planned(queries=[(0, 1, 160, 1)], positions=[320], wanted=[1]),
        RANGE,
    ),
    "some rows of a query": (planned(**CHOOSING | {"queries": [(0, 2, 32, 1)]}), SHAPE),
    "choosing rows after others": (
        planned(queries=[(1, 1, 32), (0, 1, 32, 1)], positions=[64], wanted=[1]),
        SHAPE,
    ),
    "no position": (planned(**CHOOSING | {"positions": []}), FORM),
    "no number of tiles": (planned(**CHOOSING | {"wanted": []}), FORM),
    "more numbers of tiles": (planned(**CHOOSING | {"wanted": [1, 1]}), FORM),
    "2^32 - 1 rows": (planned(**CHOOSING | {"queries": [(0, 1, 32, 2**32 - 1)]}), FORM),
    "appends of others first": (
        planned(appends=[(1, 1, 3), (0, 1, 32)], **CHOOSING),
        SHAPE,
    ),
}


@pytest.mark.parametrize(("act", "code"), OFFENCES.values(), ids=OFFENCES)
def test_a_protocol_error_disconnects_only_its_engine(node, act, code):
    witness = Witness.beside(node)
    engine = attached(node)
    act(engine)
    assert engine.error() is code
    witness.check()
    witness.close()


def test_a_node_of_an_earlier_version_is_refused(monkeypatch):
    """It knows the policy, but no stripes."""
    from_json = AttachRequest.from_json.__func__

    def without_stripe(cls, content):
        content.pop("stripe", None)
        return from_json(cls, content)

    monkeypatch.setattr(AttachRequest, "from_json", classmethod(without_stripe))
    with pytest.raises(NoNodeError, match=r"kv_policy quest needs whole ranges of K/V in tiles"):
        rig_of(layers_of(1), "ab")


def test_a_node_without_stripes_takes_no_choice(node):
    engine = attached(node, replace(STRIPED, prefix_only=False, stripe=None))
    engine.choice(engine.plan(queries=[(0, 1, 40)], prompt_lens=[3]), [[1, 1]])
    assert engine.error() is FORM


def test_lists_that_fit_into_no_message_are_refused(node):
    """Many slots may have the same page, so little memory makes long sequences."""
    ours, theirs = direct_pair()
    theirs.max_message_bytes = 1 << 20
    node.adopt(theirs)
    engine = RawEngine(ours, replace(STRIPED, num_places=[1 << 20]))
    engine.send(pack_json(Kind.ATTACH, 1, engine.request.to_json()))
    assert engine.error() is SHAPE


def test_layers_of_abandoned_plans_take_no_memory(node):
    """An engine may begin layers of many plans and never choose."""
    engine = attached(node)
    numbers = []
    for _ in range(5):
        numbers.append(engine.plan(**CHOOSING))
        listed(engine, numbers[-1])
    [connection] = node._connections
    assert len(connection.session._layers_begun) == 2
    engine.choice(numbers[-2], [[1, 1]])
    engine.partial(0)
    engine.choice(numbers[-3], [[1, 1]])
    assert engine.error() is STALE
