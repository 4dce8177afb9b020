"""What selection plans, and where the bounds of keys lie in a layout."""

from __future__ import annotations

import pytest

from memory.attention.layouts import make_layout
from memory.attention.seam import AttentionLayer
from memory.attention.tiled import TiledKVLayout, is_selectable
from memory.policies.selection import Selection, selection_of
from memory.policies.setting import parse_kv_policy
from quant.kv import bounds_bytes


def selection(text: str) -> Selection:
    found = selection_of(parse_kv_policy(text))
    assert found is not None
    return found


def test_policies_that_evict_select_nothing() -> None:
    assert selection_of(None) is None
    assert selection_of(parse_kv_policy("h2o:budget=20%")) is None


def test_rows_after_the_prompt_select_and_are_counted() -> None:
    quest = selection("quest:budget=10%,least=1")
    counts, budgets = quest.plan(
        [1, 4, 30, 1, 3], [900, 64, 40, 10, 161], [800, 62, 40, 10, 20], 16
    )
    assert counts == [1, 2, 0, 0, 3]
    assert budgets == [6, 1, 1, 1, 1, 2]
    assert quest.counts() == {"read": 12, "held": 57 + 4 + 4 + 10 + 10 + 11}


def test_a_budget_in_tokens_is_the_same_at_any_length() -> None:
    quest = selection("quest:budget=33,least=1")
    assert quest.plan([1] * 4, [1, 47, 48, 5000], [0] * 4, 16) == ([1] * 4, [1, 3, 3, 3])


def test_sequences_may_have_budgets_of_their_own() -> None:
    quest = selection("quest:budget=10%,least=1")
    own = [None, parse_kv_policy("quest:budget=64"), parse_kv_policy("quest:budget=50%,least=1")]
    rows, lengths, prompts = [1, 2, 1], [900, 161, 161], [800, 20, 20]
    found = quest.plan(rows, lengths, prompts, 16, own)
    assert found == ([1, 2, 1], [6, 4, 4, 6])
    assert quest.counts() == {"read": 20, "held": 57 + 10 + 11 + 11}
    assert quest.plan(rows, lengths, prompts, 16, [None] * 3) == quest.plan(
        rows, lengths, prompts, 16
    )


def test_a_budget_of_everything_is_every_tile() -> None:
    for text in ("quest:budget=100%", "quest:budget=1000"):
        lengths = [1, 15, 16, 17, 999, 1000]
        _, budgets = selection(text).plan([1] * 6, lengths, [0] * 6, 16)
        assert budgets == [-(-length // 16) for length in lengths]


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_bounds_follow_the_layers_that_see_all_keys(kv_dtype: str) -> None:
    whole = AttentionLayer(8, 2, 64, 0.125)
    layers = [
        whole,
        AttentionLayer(8, 2, 64, 0.125, window=128),
        AttentionLayer(4, 4, 80, 0.1, sinks=(0.0,) * 4),
        AttentionLayer(8, 2, 64, 0.125, shares=0),
        AttentionLayer(8, 2, 64, 0.125, window=32, shares=1),
        AttentionLayer(8, 2, 64, 0.125, is_late=True),
    ]
    plain = make_layout(layers, kv_dtype, 64)
    layout = make_layout(layers, kv_dtype, 64, has_bounds=True)
    assert isinstance(plain, TiledKVLayout) and isinstance(layout, TiledKVLayout)
    assert plain.bounds == [None] * 6
    sizes = [form.tile_bytes for form in layout.formats]
    of_64, of_80 = bounds_bytes(2, 64), bounds_bytes(4, 80)
    second = sizes[0] + of_64
    third = second + sizes[1]
    last = third + sizes[2] + of_80
    assert layout.offsets == [0, second, third, 0, second, last]
    assert layout.bounds == [sizes[0], None, third + sizes[2], sizes[0], None, None]
    assert layout.tile_bytes == plain.tile_bytes + of_64 + of_80
    assert all(offset % 64 == 0 for offset in (*layout.offsets, *filter(None, layout.bounds)))


def test_bounds_are_a_sixteenth_of_int8_kv() -> None:
    layout = make_layout([AttentionLayer(32, 8, 64, 0.125)] * 16, "int8", 64)
    share = 16 * bounds_bytes(8, 64) / (layout.token_bytes * 16)
    assert 0.06 < share < 0.065


def test_latent_layers_and_those_with_few_keys_are_left_as_they_are() -> None:
    assert is_selectable(AttentionLayer(8, 2, 64, 0.125))
    assert not is_selectable(AttentionLayer(8, 2, 64, 0.125, window=10))
    assert not is_selectable(AttentionLayer(8, 2, 64, 0.125, chunk=256))
    assert not is_selectable(AttentionLayer(8, 1, 96, 0.125, value_dim=64))
