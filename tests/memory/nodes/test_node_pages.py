"""A memory node reads and writes only the pages that a plan needs and that are mapped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from memory.nodes.wire import EditKind, ErrorCode
from memory.pages.layer_groups import READ_BLOCK
from ops.reference import round_kv4
from tests.support.engine.raw_engine import LAYER, REQUEST, RawEngine

MAP, UNMAP, COPY, RELEASE = EditKind
RANGE = ErrorCode.RANGE
KV_DTYPES = ["float32", "bfloat16", "int8", "int4"]
Q1, KV1 = torch.ones(1, 4, 16), torch.ones(1, 2, 16)


@pytest.fixture
def engine(node):
    made = RawEngine.beside(node)
    made.attach()
    made.map_ranges()
    yield made
    made.close()


@pytest.mark.covering(2)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("window", [None, 1, 17, 40, 128, 200])
@pytest.mark.parametrize("prefix_only", [True, False])
def test_only_required_pages_are_touched(node, kv_dtype, window, prefix_only, isa):
    """Only the pages that a plan must have are mapped, so reading one byte beside them is a
    SIGSEGV."""
    layer = replace(LAYER, window=window)
    request = replace(
        REQUEST,
        kv_dtype=kv_dtype,
        layers=[layer],
        group_layers=[[0]],
        page_tokens=[16],
        num_places=[64],
        num_pages=64,
        max_rows=300,
        prefix_only=prefix_only,
    )
    engine = RawEngine.beside(node, request)
    engine.attach()
    generator = torch.Generator().manual_seed(1)
    for num_keys in (1, 15, 16, 17, 64, 129, 255, 256, 300, 513):
        for num_rows in (1, 2, 18, 130):
            if num_rows > num_keys and not prefix_only:
                continue
            row = num_keys if prefix_only else num_keys - num_rows
            first = 0 if window is None or row < window else row + 1 - window
            first -= first % READ_BLOCK
            slots = first // 16, -(-num_keys // 16)
            edits = [(UNMAP, 1, 0, 0, 64)]
            if slots[0] < slots[1]:  # with a window of 1, no page may be needed
                edits.append((MAP, 1, slots[0], 0, slots[1] - slots[0]))
            number = engine.plan(edits, queries=[(1, num_rows, num_keys)])
            engine.query(number, 0, torch.randn(num_rows, 4, 16, generator=generator))
            if prefix_only:
                out, lse = engine.partial(0)
                assert not bool(lse.isnan().any())
            else:
                engine.own(number, 0, *torch.randn(2, num_rows, 2, 16, generator=generator))
                out = engine.result(0)
            assert out.shape == (num_rows, 4, 16)
    for position, num_rows in ((0, 1), (15, 2), (16, 16), (47, 1), (63, 130)):
        end = -(-(position + num_rows) // 16)
        first = position // 16
        edits = [(UNMAP, 1, 0, 0, 64), (MAP, 1, first, 0, end - first)]
        number = engine.plan(edits, appends=[(1, num_rows, position)])
        engine.update(number, 0, *torch.ones(2, num_rows, 2, 16))
        engine.plan()
    assert node.stats().num_offences == 0
    engine.close()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_one_missing_page_is_an_error_and_not_a_signal(node, kv_dtype):
    """One page slot less at either end is refused with RANGE."""
    for window in (None, 40):
        layer = replace(LAYER, window=window)
        request = replace(REQUEST, layers=[layer], group_layers=[[0]], kv_dtype=kv_dtype)
        request = replace(request, page_tokens=[16], num_places=[64], num_pages=64)
        first = 0 if window is None else 256 // 16
        for low, high, code in ((first, 19, None), (first, 18, RANGE), (first + 1, 19, RANGE)):
            engine = RawEngine.beside(node, replace(request, engine=f"{window} {low} {high}"))
            engine.attach()
            engine.plan([(MAP, 0, low, 0, high - low)])
            number = engine.plan(queries=[(0, 1, 300)])
            if code is None:
                engine.query(number, 0, Q1)
                engine.partial(0)
            else:
                assert engine.error() is code
            engine.close()


def test_an_unmapped_page_slot_in_the_middle_is_found_after_an_edit(engine):
    """The node caches that page slots are mapped and checks them again after an unmap."""
    engine.plan([(MAP, 0, 2, 30, 6)])
    engine.query(engine.plan(queries=[(0, 1, 256)], edits=[(MAP, 3, 0, 20, 4)]), 0, Q1)
    engine.partial(0)
    engine.plan([(UNMAP, 0, 4, 0, 1)])
    engine.query(engine.plan(queries=[(0, 1, 128)]), 0, Q1)
    engine.partial(0)
    engine.plan([(MAP, 0, 4, 34, 1)])
    engine.query(engine.plan(queries=[(0, 1, 256)]), 0, Q1)
    engine.partial(0)
    engine.plan([(UNMAP, 0, 4, 0, 1)])
    engine.plan(queries=[(0, 1, 129)])
    assert engine.error() is RANGE


def test_pages_that_were_released_are_zero(engine):
    engine.update(engine.plan(appends=[(0, 1, 0)]), 0, KV1, KV1)
    engine.query(engine.plan(queries=[(0, 1, 1)]), 0, Q1)
    assert torch.equal(engine.partial(0)[0], torch.ones(1, 4, 16))
    engine.query(engine.plan([(RELEASE, 0, 0, 0, 2)], queries=[(0, 1, 1)]), 0, Q1)
    assert not bool(engine.partial(0)[0].any())


def test_a_copied_page_has_the_same_content(engine):
    for layer in range(3):
        engine.update(engine.plan(appends=[(0, 1, 0)]), layer, KV1, 3 * KV1)
    engine.plan([(COPY, 0, 0, 30, 1), (MAP, 1, 0, 30, 1)])
    engine.query(engine.plan(queries=[(1, 1, 1)]), 0, Q1)
    assert torch.equal(engine.partial(0)[0], torch.full((1, 4, 16), 3.0))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_earlier_content_of_a_page_is_not_seen(node, kv_dtype, bad, isa):
    """NaN and infinity in released pages do not reach the next sequence that gets them."""
    engine = RawEngine.beside(node, replace(REQUEST, kv_dtype=kv_dtype))
    engine.attach()
    engine.map_ranges()
    k = torch.full((60, 2, 16), bad)
    ones = torch.ones(16)
    expected = round_kv4(ones, 16) if kv_dtype == "int4" else ones
    for layer in range(3):
        engine.update(engine.plan(appends=[(0, 60, 0)]), layer, k, k)
    moved = [(UNMAP, 0, 0, 0, 2), (UNMAP, 3, 0, 0, 2), (MAP, 1, 0, 0, 2), (MAP, 4, 0, 6, 2)]
    number = engine.plan(moved, appends=[(1, 5, 0)])
    for layer in range(3):
        engine.update(number, layer, *torch.ones(2, 5, 2, 16))
    for num_rows in (1, 3, 20):
        number = engine.plan(queries=[(1, num_rows, 5)])
        for layer in range(3):
            engine.query(number, layer, torch.ones(num_rows, 4, 16))
            out, lse = engine.partial(layer)
            assert torch.allclose(out, expected, atol=0.02) and bool(lse.isfinite().all())
    engine.close()
