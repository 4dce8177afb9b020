"""Segments on nodes: attention has the bits of local memory, and a node refuses what does not fit a
session by segment."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from memory.attention.seam import AttentionLayer, AttentionStep
from memory.nodes.edit_log import EditLog
from memory.nodes.errors import NodesLostError
from memory.nodes.segment_links import SegmentLinks
from memory.nodes.wire import ErrorCode, WireError, pack_plan
from ops import get_backend
from ops.reference import round_kv4
from tests.support.engine.raw_engine import WHOLE, RawEngine, Witness
from tests.support.nodes.remote_rig import layers_of, reference
from tests.support.nodes.segment_rig import LENGTH, MAX_LEN, Segmented

FORM, FULL, STALE, RANGE, SHAPE, FAULT = ErrorCode
BOUNDS = {"float32": 1e-5, "bfloat16": 3e-2, "int8": 3e-2, "int4": 6e-2}
SHARING = [*layers_of(2), replace(layers_of(1)[0], shares=0)]
SINKS = [replace(layer, sinks=tuple(x / 8 for x in range(8))) for layer in layers_of(2)]
LATENT = [AttentionLayer(4, 1, 96, 0.1, value_dim=64)] * 2


def steps_of(pick, count=5):
    """Yields steps of decode rows and chunks, some of which cross one end or two of segments."""
    lengths = dict.fromkeys(range(count), 0)
    for _ in range(12):
        chosen = pick.sample(sorted(lengths), pick.randint(1, count))
        rows = {name: pick.choice([1, 1, pick.randint(2, 90), 200]) for name in chosen}
        rows = {name: n for name, n in rows.items() if lengths[name] + n <= MAX_LEN}
        for name in rows:
            lengths[name] += rows[name]
        if rows:
            yield [(name, n, lengths[name]) for name, n in sorted(rows.items(), key=lambda x: x[1])]


def inputs_of(layers, count, dtype, generator):
    made = []
    for layer in layers:
        heads, shared = layer.num_kv_heads, layer.shares is not None
        q, k, v = (
            torch.randn(count, n, layer.head_dim, generator=generator).to(dtype)
            for n in (layer.num_heads, heads, heads)
        )
        made.append((q, None if shared else k, None if shared or layer.value_dim else v))
    return made


@pytest.mark.covering(2)
@pytest.mark.parametrize("names", ["a", "ab", "abc"])
@pytest.mark.parametrize(
    ("layers", "kv_dtype", "is_turned"),
    [
        (layers_of(2), "float32", False),
        (layers_of(2), "float32", True),
        (layers_of(2), "bfloat16", True),
        (layers_of(2), "int8", True),
        (layers_of(2), "int4", True),
        (SINKS, "float32", False),
        (SINKS, "int8", False),
        (SINKS, "int4", False),
        (SHARING, "int8", False),
        (SHARING, "int4", False),
        (SHARING, "bfloat16", False),
        (LATENT, "int8", False),
        (LATENT, "float32", False),
    ],
)
def test_results_have_the_bits_of_local_segments(names, layers, kv_dtype, is_turned):
    dtype = torch.bfloat16 if kv_dtype == "bfloat16" else torch.float32
    local, remote = Segmented(layers, kv_dtype), Segmented(layers, kv_dtype, tuple(names))
    generator = torch.Generator().manual_seed(2)
    for rows in steps_of(random.Random(4)):
        count = sum(n for _, n, _ in rows)
        inputs = inputs_of(layers, count, dtype, generator)
        angles = torch.randn(count, layers[0].head_dim // 2, generator=generator)
        rotation = (angles.cos(), angles.sin()) if is_turned else None
        expected = local.step(rows, inputs, rotation)
        for one, other in zip(remote.step(rows, inputs, rotation), expected, strict=True):
            assert one.dtype == other.dtype == dtype
            assert torch.equal(one, other)
    remote.close()


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "int4"])
def test_the_fold_is_attention_over_all_keys(kv_dtype):
    layers, rig = layers_of(1), Segmented(layers_of(1), kv_dtype, ("a", "b"))
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(3, MAX_LEN, 8, 32, generator=generator)
    q, k, v = whole[0], whole[1, :, :4], whole[2, :, :4]
    stored = [round_kv4(x, 32) if kv_dtype == "int4" else x for x in (k, v)]
    length = 0
    for n in (100, 60, 1, 1, 300, 50, 1):
        rows = slice(length, length + n)
        length += n
        [out] = rig.step([(0, n, length)], [(q[rows], k[rows], v[rows])])
        due = reference(layers[0], q[rows], *(x[:length] for x in stored))
        assert float((out - due).abs().max()) < BOUNDS[kv_dtype]
    rig.close()


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(kv_dtype):
    layers, generator = layers_of(1), torch.Generator().manual_seed(5)
    [(q, k, v)] = inputs_of(layers, 500, torch.float32, generator)
    found = []
    for cuts in ([500], [128, 256, 500], [1, 2, 127, 129, 300, 499, 500]):
        rig, first, outs = Segmented(layers, kv_dtype), 0, []
        for end in cuts:
            rows = slice(first, end)
            outs += rig.step([(1, end - first, end)], [(q[rows], k[rows], v[rows])])
            first = end
        found.append(torch.cat(outs))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


class Link:
    """A link that notes the bytes of plans."""

    url = "a"

    def __init__(self):
        self.sizes = []

    def look(self):
        pass

    def post_plan(self, number, plan):
        self.sizes.append(len(pack_plan(1, number, plan)))


@pytest.mark.parametrize("length", [LENGTH * 4 - 5, LENGTH * 4 * 20_000 - 5])
def test_a_plan_has_a_fixed_size_for_each_segment(length):
    """10 million tokens in four segments take as many bytes as 500."""
    link = Link()
    partition = SimpleNamespace(urls=["a"], links=[link], edits=EditLog(4096, 1, [1]))
    nodes = SimpleNamespace(partitions=[partition])
    links = SegmentLinks(
        layers_of(1),
        nodes,
        get_backend("cpu"),
        lambda start, segment: (0, segment),
        rotates_wide=True,
    )
    rig = Segmented(layers_of(1), "int8")
    attention = rig.attention
    attention._holders, attention._segment_tokens = links, -(-length // LENGTH // 4) * LENGTH
    attention.plan(AttentionStep(1, [0], [1], [length]))
    header, counts, query = 32, 12, 16
    assert link.sizes == [header + counts + 3 * query]


def test_a_lost_node_is_reported_before_anything_is_sent():
    rig = Segmented(layers_of(1), "int8", ("a",))
    rig.nodes.kill("a")
    [inputs] = [inputs_of(layers_of(1), 200, torch.float32, torch.Generator())]
    with pytest.raises(NodesLostError):
        rig.step([(0, 200, 200)], inputs)
    rig.close()


# ---- what a node refuses

BY_SEGMENT = replace(WHOLE, layers=[WHOLE.layers[0]] * 3, by_segment=True)
Q, KV = torch.ones(3, 4, 16), torch.ones(3, 2, 16)


def planned(*queries, appends=()):
    return lambda engine: engine.plan(queries=queries, appends=appends)


def rows_that_do_not_match(engine):
    number = engine.plan(queries=[(0, 2, 40, 2), (1, 1, 64, 0)])
    engine.query(number, 0, Q)
    engine.own(number, 0, KV, KV)


def keys_without_own_rows(engine):
    number = engine.plan(queries=[(0, 3, 40, 0)])
    engine.query(number, 0, Q)
    engine.own(number, 0, KV, KV)


OFFENCES = {
    "own rows after others": (planned((0, 1, 40, 0), (1, 1, 40, 1)), SHAPE),
    "some rows are own": (planned((0, 3, 40, 2)), SHAPE),
    "more own rows than keys": (planned((0, 3, 2, 3)), SHAPE),
    "one row after several": (planned((0, 3, 40, 0), (1, 1, 40, 0)), SHAPE),
    "a segment twice": (planned((0, 1, 40, 0), (0, 1, 40, 0)), SHAPE),
    "keys beyond what is mapped": (planned((0, 1, 65, 0)), RANGE),
    "no keys": (planned((0, 1, 0, 0)), SHAPE),
    "appends": (planned((0, 1, 40, 1), appends=[(0, 1, 40)]), SHAPE),
    "k and v of other rows": (rows_that_do_not_match, STALE),
    "k and v that are not due": (keys_without_own_rows, STALE),
}


@pytest.mark.parametrize(("act", "code"), OFFENCES.values(), ids=OFFENCES)
def test_a_protocol_error_disconnects_only_its_engine(node, act, code):
    witness = Witness.beside(node)
    engine = RawEngine.beside(node, BY_SEGMENT)
    engine.attach()
    engine.map_ranges()
    act(engine)
    assert engine.error() is code
    witness.check()
    witness.close()


def test_own_rows_need_a_session_by_segment(node):
    engine = RawEngine.beside(node, WHOLE)
    engine.attach()
    engine.map_ranges()
    engine.plan(queries=[(0, 1, 40, 1)])
    assert engine.error() is SHAPE


@pytest.mark.parametrize("change", [{"prefix_only": True}, {"layers": WHOLE.layers}])
def test_segments_have_neither_windows_nor_prefixes(change):
    with pytest.raises(WireError, match="segments have neither windows nor prefix_only"):
        replace(BY_SEGMENT, **change).check()
