"""Rows that attend on a node over all keys of their sequence: their own k and v arrive after q,
and the results have the bits of local attention."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace

import pytest
import torch

from memory.attention.layouts import local_attention, make_layout
from memory.attention.seam import AttentionStep
from memory.attention.tiled import TILED_TYPES
from memory.nodes.wire import ErrorCode, WireFormat, WireType
from memory.policies.selection import selection_of
from ops import get_backend
from tests.support.engine.raw_engine import WHOLE, RawEngine, Witness
from tests.support.nodes.remote_rig import NUM_RANGES, RemoteRig, layers_of

FORM, FULL, STALE, RANGE, SHAPE, FAULT = ErrorCode
Q1, KV1 = torch.ones(1, 4, 16), torch.ones(1, 2, 16)
MAX_LEN = 1024


class Local:
    """Local attention over ranges of MAX_LEN tokens."""

    def __init__(self, layers, kv_dtype, kv_policy=None):
        self.selection = selection_of(kv_policy)
        layout = make_layout(layers, kv_dtype, 64, has_bounds=self.selection is not None)
        size = NUM_RANGES * MAX_LEN * layout.token_bytes
        self._memory = ctypes.create_string_buffer(size + 64)
        address = ctypes.addressof(self._memory)
        address += -address % 64
        self._attention = local_attention(
            layout, address, size, get_backend("cpu"), selection=self.selection
        )

    def step(self, rows, inputs, prompt_lens=None, policies=None):
        """rows: (number of the range, number of rows, tokens after them). prompt_lens, policies:
        as in AttentionStep."""
        step = AttentionStep(
            sum(n == 1 for _, n, _ in rows),
            [index * MAX_LEN for index, _, _ in rows],
            [n for _, n, _ in rows],
            [length for _, _, length in rows],
            prompt_lens,
            policies,
        )
        plan = self._attention.plan(step)
        return [
            plan.finish(plan.begin(layer, q), None if k is None else k.clone(), v, None).wait()
            for layer, (q, k, v) in enumerate(inputs)
        ]


def steps_of(pick, lengths):
    """Yields steps, each a list of (sequence, number of rows), decode rows first."""
    lengths = dict.fromkeys(lengths, 0)
    for _ in range(14):
        chosen = pick.sample(sorted(lengths), pick.randint(1, len(lengths)))
        rows = {name: pick.choice([1, 1, 1, pick.randint(2, 90)]) for name in chosen}
        rows = {name: n for name, n in rows.items() if lengths[name] + n <= 700}
        for name in rows:
            lengths[name] += rows[name]
        if rows:
            yield [(name, n, lengths[name]) for name, n in sorted(rows.items(), key=lambda x: x[1])]


@pytest.mark.covering(2)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("names", ["a", "ab", "abcd"])
@pytest.mark.parametrize(("windows", "tail_bytes"), [((), 0), ((), 1 << 22), ((None, 40), 0)])
def test_results_have_the_bits_of_local_attention(kv_dtype, names, windows, tail_bytes):
    layers = layers_of(2, windows=windows)
    dtype = torch.float32 if kv_dtype in TILED_TYPES else getattr(torch, kv_dtype)
    kind = WireType.BFLOAT16 if dtype is torch.bfloat16 else WireType.FLOAT32
    rig = RemoteRig(
        layers, tuple(names), "head", kv_dtype, WireFormat(kind, kind), tail_bytes=tail_bytes
    )
    local, generator = Local(layers, kv_dtype), torch.Generator().manual_seed(1)
    items = {name: rig.kv.open(700) for name in range(4)}
    for rows in steps_of(random.Random(5), items):
        count = sum(n for _, n, _ in rows)
        inputs = [
            [torch.randn(count, heads, 32, generator=generator).to(dtype) for heads in (8, 4, 4)]
            for _ in layers
        ]
        expected = local.step(rows, inputs)
        found = rig.step([(items[name], n, length) for name, n, length in rows], inputs)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    rig.close()


# ---- what a node refuses


def began(*, queries=((0, 1, 40),), layer=0, own=(KV1, KV1), number=None, own_layer=None, **more):
    """Sends q, then k and v."""

    def act(engine):
        planned = engine.plan(queries=queries)
        engine.query(planned, layer, Q1)
        at = layer if own_layer is None else own_layer
        engine.own(planned if number is None else number, at, *own, **more)

    return act


def without_q(engine):
    engine.own(engine.plan(queries=[(0, 1, 40)]), 0, KV1, KV1)


def twice(engine):
    began()(engine)
    engine.own(engine.num_plans, 0, KV1, KV1)


def after_another_layer(engine):
    number = engine.plan(queries=[(0, 1, 40)])
    engine.query(number, 0, Q1)
    engine.query(number, 1, Q1)
    engine.own(number, 0, KV1, KV1)


def planned(**plan):
    return lambda engine: engine.plan(**plan)


OFFENCES = {
    "k and v without q": (without_q, STALE),
    "k and v twice": (twice, STALE),
    "k and v of another layer": (began(own_layer=1), STALE),
    "k and v of an abandoned layer": (after_another_layer, STALE),
    "k and v of no layer": (began(own_layer=3), RANGE),
    "k and v of no plan": (began(number=99), STALE),
    "k without v": (began(own=(KV1, KV1[:0])), SHAPE),
    "k and v of more rows": (began(own=(torch.ones(2, 2, 16),) * 2), STALE),
    "2^32 - 1 rows": (began(rows=2**32 - 1), STALE),
    "more rows than keys": (planned(queries=[(0, 2, 1)]), SHAPE),
    "keys beyond what is mapped": (planned(queries=[(0, 1, 65)]), RANGE),
}


@pytest.mark.parametrize(("act", "code"), OFFENCES.values(), ids=OFFENCES)
@pytest.mark.row("M5")
def test_a_protocol_error_disconnects_only_its_engine(node, act, code):
    witness = Witness.beside(node)
    engine = RawEngine.beside(node, WHOLE)
    engine.attach()
    engine.map_ranges()
    act(engine)
    assert engine.error() is code
    witness.check()
    witness.close()


def test_a_session_for_prefixes_takes_no_keys_of_querying_rows(node):
    engine = RawEngine.beside(node, replace(WHOLE, prefix_only=True))
    engine.attach()
    engine.map_ranges()
    began()(engine)
    assert engine.error() is STALE


@pytest.mark.parametrize(("kind", "code"), [("own", STALE), ("update", SHAPE)])
def test_a_layer_that_shares_the_keys_of_another_takes_none(node, kind, code):
    layers = [WHOLE.layers[0], replace(WHOLE.layers[0], shares=0)]
    sizes = {"group_layers": [[0, 1]], "page_tokens": [32], "num_places": [8]}
    request = replace(WHOLE, layers=layers, **sizes)
    engine = RawEngine.beside(node, request)
    engine.attach()
    engine.map_ranges()
    if kind == "own":
        engine.own(engine.plan(queries=[(0, 1, 40)]), 1, KV1, KV1)
    else:
        engine.update(engine.plan(appends=[(0, 1, 40)]), 1, KV1, KV1)
    assert engine.error() is code
