"""Rows of answers that read a part of their K/V on memory nodes: by the rule of local attention,
with its bits, and nothing else of it."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memory.attention import tiled
from memory.nodes.wire import ErrorCode, Kind
from memory.policies.setting import KVPolicy
from ops.cpu import native_library
from ops.cpu.native_tiled_attention import TiledAttention
from quant.kv import TILE_TOKENS
from tests.memory.nodes.test_own_rows import Local, steps_of
from tests.support.engine.raw_engine import WHOLE, RawEngine, Witness
from tests.support.nodes.remote_rig import NUM_RANGES, RemoteRig, layers_of

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)
FEW = KVPolicy("quest", tokens=64)
QUEST = KVPolicy("quest", share=0.25)
PROMPTS = (0, 30, 100, 333)
"""The lengths of the sequences' prompts."""


def drawn_steps(layers, seed=5):
    """Yields steps of rows of prompts and of answers, one or many of a sequence, and their q, k and
    v."""
    generator = torch.Generator().manual_seed(seed)
    for rows in steps_of(random.Random(seed), range(len(PROMPTS))):
        count = sum(n for _, n, _ in rows)
        yield (
            rows,
            [
                [torch.randn(count, heads, 32, generator=generator) for heads in (8, 4, 4)]
                for _ in layers
            ],
        )


def prompts_of(rows):
    return [PROMPTS[name] for name, _, _ in rows]


def local_results(local, layers, policies=None):
    """Returns the results of all drawn steps over this machine's memory. policies: those of the
    sequences, if they have budgets of their own."""
    found = []
    for rows, inputs in drawn_steps(layers):
        found += local.step(rows, inputs, prompts_of(rows), of_rows(policies, rows))
    return found


def of_rows(policies, rows):
    return None if policies is None else [policies[name] for name, _, _ in rows]


def results(rig, layers, policies=None):
    """Returns the results of all drawn steps over a rig's nodes. policies: as in local_results."""
    items = [kv.open(700) for kv in rig.kvs for _ in range(len(PROMPTS) // len(rig.kvs))]
    found = []
    for rows, inputs in drawn_steps(layers):
        named = [(items[name], n, length) for name, n, length in rows]
        for item, n, length in named:
            assert rig.kvs[_partition(rig, item)].grow(item, length, length - n)
        for kv in rig.kvs:
            kv.commit()
        found += rig.step(named, inputs, prompts_of(rows), of_rows(policies, rows))
    return found


def _partition(rig, item):
    return item.start // (rig.kv.range_tokens * NUM_RANGES)


def is_same(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize(
    ("names", "partition", "windows", "tail_bytes"),
    [
        ("a", "head", (), 0),
        ("abcd", "head", (), 1 << 22),
        ("ab", "head", (None, 40), 0),
        ("ab", "request", (), 1 << 22),
        ("a", "request", (None, 40), 1 << 22),
    ],
)
def test_results_have_the_bits_of_local_attention(kv_dtype, names, partition, windows, tail_bytes):
    layers = layers_of(2, windows=windows)
    rig = RemoteRig(
        layers, tuple(names), partition, kv_dtype, tail_bytes=tail_bytes, kv_policy=QUEST
    )
    local = Local(layers, kv_dtype, QUEST)
    expected = local_results(local, layers)
    assert is_same(results(rig, layers), expected)
    assert rig.attention.selection.counts() == local.selection.counts()
    assert 0 < local.selection.num_read < local.selection.num_held / 2
    rig.close()
    whole = local_results(Local(layers, kv_dtype), layers)
    assert not is_same(expected, whole), "the policy changes what rows read"


def test_single_rows_attend_before_their_k_and_v_are_there(monkeypatch):
    """A node begins steps in which no row selects, or each sequence has one row, and only
    these."""
    begun = []
    begin = TiledAttention.begin

    def note(op, step, q):
        begun.append((step.num_single_rows, step.num_rows))
        return begin(op, step, q)

    monkeypatch.setattr(TiledAttention, "begin", note)
    layers = layers_of(2)
    rig = RemoteRig(layers, ("a",), "head", "int8", kv_policy=QUEST)
    results(rig, layers)
    rig.close()
    expected, kinds = [], set()
    for rows, _ in drawn_steps(layers):
        counts = [n for _, n, _ in rows]
        is_single, selects = max(counts) == 1, any(n > PROMPTS[name] for name, _, n in rows)
        kinds.add((is_single, selects))
        if 1 in counts and (is_single or not selects):
            expected += [(counts.count(1), sum(counts)) for _ in layers]
    assert kinds >= {(False, False), (False, True), (True, True)}, "steps of these are drawn"
    assert begun == expected


@pytest.mark.parametrize(("names", "partition"), [("ab", "head"), ("ab", "request")])
def test_budgets_of_sequences_have_the_bits_of_local_attention(names, partition):
    own = (None, FEW, KVPolicy("quest", share=0.5, least=16), KVPolicy("quest", share=1.0))
    layers = layers_of(2)
    rig = RemoteRig(layers, tuple(names), partition, "int8", kv_policy=QUEST)
    local = Local(layers, "int8", QUEST)
    expected = local_results(local, layers, own)
    assert is_same(results(rig, layers, own), expected)
    assert rig.attention.selection.counts() == local.selection.counts()
    rig.close()
    same = local_results(Local(layers, "int8", QUEST), layers)
    assert not is_same(expected, same), "the budgets change what rows read"


@pytest.mark.parametrize(
    "kv_policy", [KVPolicy("quest", share=1.0), KVPolicy("quest", tokens=1024)]
)
def test_a_budget_of_everything_gives_the_bits_of_no_policy(kv_policy):
    layers = layers_of(2)
    found = []
    for one in (kv_policy, None):
        rig = RemoteRig(layers, ("a", "b"), "head", "int8", kv_policy=one)
        found.append(results(rig, layers))
        rig.close()
    assert is_same(*found)


def test_rows_of_unknown_prompts_read_everything():
    """Such as those of an evaluation, whose steps name no prompts."""
    layers = layers_of(1)
    inputs = [[torch.randn(250, heads, 32) for heads in (8, 4, 4)]]
    one = [[x[:1] for x in inputs[0]]]
    found = []
    for kv_policy in (QUEST, None):
        rig = RemoteRig(layers, ("a",), "head", "int8", kv_policy=kv_policy)
        item = rig.kv.open(400)
        found.append([*rig.step([(item, 250, 250)], inputs), *rig.step([(item, 1, 251)], one)])
        rig.close()
    assert is_same(*found)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("most", [1, 150, 4000])
def test_many_rows_choose_in_parts(kv_dtype, most, monkeypatch):
    """What they choose from takes memory that is in no account of K/V, and an engine that computes
    many answers again, or that lies about its prompts, names as many rows as it likes."""
    layers = layers_of(2)
    expected = local_results(Local(layers, kv_dtype, QUEST), layers)
    monkeypatch.setattr(tiled, "MAX_SCORES", most)
    rig = RemoteRig(layers, ("a",), "head", kv_dtype, kv_policy=QUEST)
    assert is_same(results(rig, layers), expected)
    rig.close()
    assert is_same(local_results(Local(layers, kv_dtype, QUEST), layers), expected)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(1, 40)), min_size=1))
def test_parts_have_all_rows_in_their_order_and_few_scores(drawn):
    drawn = [(rows, min(rows, scoring), tiles) for rows, scoring, tiles in drawn]
    found = list(tiled._runs_of(*zip(*drawn, strict=True), 60))
    lefts, order = [[rows, scoring] for rows, scoring, _ in drawn], []
    for runs in found:
        for i, rows, scoring, left in runs:
            assert rows > 0 and (scoring == rows or lefts[i][1] == lefts[i][0] - rows + scoring)
            lefts[i] = [lefts[i][0] - rows, lefts[i][1] - scoring]
            assert lefts[i][0] == left
            order.append(i)
        assert sum(drawn[i][2] * scoring for i, _, scoring, _ in runs) <= 60
    assert order == sorted(order) and not any(map(any, lefts))
    whole = sum(scoring * tiles for _, scoring, tiles in drawn)
    assert len(found) <= 1 + whole / 20, "each but the last has no room for another row"


# ---- what is read


class Spoiled:
    """A sequence on one node with one layer: the K/V of some of its tiles becomes noise there,
    after it was written; the bounds stay as they were."""

    NUM_TILES = 14
    LIKELY = (3, 8, 11)
    """Tiles whose keys are like the query; those of others are its opposite."""

    def __init__(self, kv_policy, kv_dtype="int8"):
        self.rig = RemoteRig(layers_of(1), ("a",), "head", kv_dtype, kv_policy=kv_policy)
        self.item = self.rig.kv.open(240)
        self.q = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(2))
        self.q[:] = self.q[:, ::2].repeat_interleave(2, 1)  # the query heads of a K/V head agree
        count = self.NUM_TILES * TILE_TOKENS
        k = -self.q[:, ::2].expand(count, -1, -1).clone()
        for tile in self.LIKELY:
            k[tile * TILE_TOKENS : (tile + 1) * TILE_TOKENS] *= -1.0
        self.v = torch.randn(count, 4, 32, generator=torch.Generator().manual_seed(3))
        self.rig.step(
            [(self.item, count, count)], [[torch.zeros(count, 8, 32), k, self.v]], [count]
        )
        self.num_tokens = count

    def answer(self):
        """Returns the result of one more row, which is computed anew each time."""
        length = self.num_tokens + 1
        one = [[self.q, torch.zeros(1, 4, 32), torch.zeros(1, 4, 32)]]
        return self.rig.step([(self.item, 1, length)], one, [self.num_tokens])[0]

    def spoil(self, tiles):
        session = self._session()
        layout, group = session.layout.groups[0], session._groups[0]
        for tile in tiles:
            address = group._address + tile * layout.tile_bytes
            ctypes.memset(address, 0x55, layout.formats[0].tile_bytes)

    def _session(self):
        [connection] = self.rig.nodes.nodes["a"]._connections
        return connection.session


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_what_is_not_selected_is_not_read(kv_dtype):
    sequence = Spoiled(FEW, kv_dtype)
    expected = sequence.answer()
    sequence.spoil(set(range(sequence.NUM_TILES)) - {*sequence.LIKELY})
    assert torch.equal(sequence.answer(), expected)
    for tile in sequence.LIKELY:
        sequence.spoil([tile])
        assert not torch.equal(sequence.answer(), expected), f"tile {tile} is read"
        expected = sequence.answer()
    sequence.rig.close()


def test_without_a_policy_everything_is_read():
    sequence = Spoiled(None)
    expected = sequence.answer()
    sequence.spoil([0])
    assert not torch.equal(sequence.answer(), expected)
    sequence.rig.close()


def test_the_work_of_an_answer_is_what_is_read(monkeypatch):
    """By which the engine knows how long a node may take."""
    seen = {}
    for kv_policy in (FEW, None):
        sequence = Spoiled(kv_policy)
        [link] = sequence.rig.set.partitions[0].links
        answer = link.answer
        works = seen.setdefault(kv_policy, [])

        def noted(number, layer, work=0, works=works, answer=answer):
            works.append(work)
            return answer(number, layer, work)

        monkeypatch.setattr(link, "answer", noted)
        sequence.answer()
        sequence.rig.close()
    assert seen == {FEW: [4 * 16 + 14], None: [225]}


# ---- what a node refuses


def attached(node, **settings):
    layers = [replace(layer, head_dim=32) for layer in WHOLE.layers]
    request = replace(WHOLE, layers=layers, kv_dtype="int8", kv_policy=QUEST, **settings)
    engine = RawEngine.beside(node, request)
    engine.attach()
    engine.map_ranges()
    return engine


@pytest.mark.parametrize("lengths", [(), (5, 5), (5, 5, 5, 5)])
def test_a_plan_without_a_length_for_each_query_is_refused(node, lengths):
    witness = Witness.beside(node)
    engine = attached(node)
    engine.plan(queries=[(0, 1, 40), (1, 1, 40), (2, 1, 40)], prompt_lens=lengths)
    assert engine.error() is ErrorCode.FORM
    witness.check()
    witness.close()


def test_any_length_of_a_prompt_is_taken(node):
    engine = attached(node)
    for length in (0, 39, 40, 41, 2**32 - 1):
        number = engine.plan(queries=[(0, 1, 40)], prompt_lens=[length])
        engine.query(number, 0, torch.ones(1, 4, 32))
        engine.own(number, 0, *torch.ones(2, 1, 2, 32))
        header, _ = engine.receive()
        assert header.kind is Kind.RESULT
    engine.close()
