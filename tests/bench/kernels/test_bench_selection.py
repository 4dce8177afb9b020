"""The measurements of selected K/V, on small sizes."""

from __future__ import annotations

import pytest
import torch

from bench.kernels import selection, selection_mass
from bench.kernels.selection_mass import RULES, captured, page_bounds
from ops.cpu import native_library
from quant.kv import TILE_TOKENS

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built")
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_shares_read_that_many_bytes_and_the_bounds(kv_dtype):
    kv = selection.SelectedKV(kv_dtype, 1600, 2)
    try:
        seconds, sizes, bandwidth = selection.measure(kv, [None, 0.12, 0.5], 1)
        found = [kv.ops[0].attend(kv.step(share)[0], kv.q) for share in (None, 0.12)]
    finally:
        kv.close()
    assert min(seconds) > 0 and bandwidth > 0
    bounds = 100 * kv.bounds_bytes
    assert sizes == [100 * kv.tile_bytes, 12 * kv.tile_bytes + bounds, 50 * kv.tile_bytes + bounds]
    assert not torch.equal(*found)


@pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built")
def test_the_place_of_the_bounds_changes_no_bit():
    found = []
    for place in selection.PLACES:
        torch.manual_seed(2)
        kv = selection.SelectedKV("int8", 800, 2, place)
        step, _ = kv.step(0.12)
        found.append([op.attend(step, kv.q) for op in kv.ops])
        kv.close()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_the_rules_find_the_page_that_has_the_weight():
    k = torch.randn(20 * TILE_TOKENS, 2, 32)
    q = torch.randn(4, 32)
    for head in range(2):  # one key that both query heads of the K/V head want
        k[70, head] = 30 * torch.nn.functional.normalize(q[2 * head : 2 * head + 2].sum(0), dim=0)
    for rule in RULES:
        assert captured(q, k, 1.0, rule, 0.3) > 0.95, rule.name
        assert captured(q, k, 1.0, rule, 1.0) == pytest.approx(1.0)


def test_rounded_bounds_hold_the_keys():
    k = torch.randn(6 * TILE_TOKENS, 2, 32)
    for rule in RULES:
        most, least = page_bounds(k, rule)
        pages = k[: len(most) * rule.tiles * TILE_TOKENS].unflatten(0, (len(most), -1))
        assert bool((most >= pages.amax(1) - 1e-6).all()), rule.name
        assert bool((least <= pages.amin(1) + 1e-6).all()), rule.name


def test_masses_of_a_text(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 40)
    masses = selection_mass.measure("default", 128, text)
    assert masses.count > 0
    for (name, share), total in masses.total.items():
        assert 0 < total / masses.count <= 1 + 1e-5, (name, share)
        if name == "largest":
            assert total <= masses.total["best", share] + 1e-3
