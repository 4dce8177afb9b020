"""The KV manager keeps its promises in examples and under random operations (hypothesis)."""

from __future__ import annotations

import contextlib
import random
import time

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import memory.range_mapper
from memory.pages.layer_groups import LayerGroup
from tests.support.engine.fakes import check_mapping, make_kv
from tests.support.memory.kv_model import KVModel
from tests.support.profile import examples

PROMPTS = [[(i * i * k) % 3 for i in range(40)] for k in (1, 2)]
# tiles within pages, tiles across pages, tokens across pages; the last one maps in a thread
LAYOUTS = [
    {"tokens_per_page": 4},
    {"tile_tokens": 4, "page_bytes": 64 * 6},
    {"tile_tokens": 4, "page_bytes": 64 * 3, "num_pages": 40},
    {"page_bytes": 96, "num_pages": 40, "in_background": True},
]
# A full group and a window, the same with tiles across pages, windows alone, three groups, blocks
# whose pages end with them, cross their ends, or hold several, and records of states.
FULL, TILES = LayerGroup(64), LayerGroup(64, 4)
GROUPS = [
    {"groups": (FULL, LayerGroup(32, window=6, read_block=2)), "num_pages": 30},
    {
        "groups": (TILES, LayerGroup(48, 4, window=9, read_block=4)),
        "page_bytes": 192,
        "num_pages": 60,
    },
    {
        "groups": (LayerGroup(64, window=7, read_block=4),),
        "page_bytes": 96,
        "num_pages": 40,
        "in_background": True,
    },
    {
        "groups": (FULL, LayerGroup(64, window=3, read_block=1), LayerGroup(16, window=20)),
        "page_bytes": 64,
        "num_pages": 260,
        "max_model_len": 160,
    },
    {"groups": (FULL, LayerGroup(64, window=8, read_block=4, by_block=True)), "num_pages": 40},
    {"groups": (TILES, LayerGroup(48, 4, 8, 4, by_block=True)), "page_bytes": 320, "num_pages": 40},
    {"groups": (TILES, LayerGroup(16, 4, 8, 8, by_block=True)), "num_pages": 40},
    {"groups": (FULL, LayerGroup(64, 8, 2, 8, is_state=True)), "num_pages": 40},
    {"groups": (TILES, LayerGroup(64, 4, 2, 4, is_state=True)), "num_pages": 40},
]
for _layout in GROUPS:
    _layout["max_rows"] = 8


def test_grow_maps_only_at_commit():
    kv, memory = make_kv()
    item = kv.open(9)
    assert kv.grow(item, 9)
    assert not memory.mapped
    assert item.capacity == 12
    kv.commit()
    assert len(memory.mapped) == 3
    check_mapping(kv, memory)


def test_consecutive_pages_are_one_call():
    kv, memory = make_kv()
    item = kv.open(40)
    kv.grow(item, 40)
    kv.commit()
    assert memory.num_calls == 1


def test_a_closed_range_is_used_again_without_a_call():
    kv, memory = make_kv(num_pages=10, num_ranges=2)
    first = kv.open(40)
    assert kv.grow(first, 40)
    kv.commit()
    calls = memory.num_calls
    kv.close(first)
    assert (kv.num_in_use, kv.num_mapped, kv.num_available) == (0, 10, 10)
    again = kv.open(8)
    assert again is first, "best fit takes the range with mapped pages"
    assert kv.grow(again, 8)
    kv.commit()
    assert memory.num_calls == calls, "nothing had to be mapped"
    assert (kv.num_in_use, kv.num_available) == (2, 8)


def test_stale_pages_of_a_range_are_available():
    kv, memory = make_kv(num_pages=10, num_ranges=2)
    first = kv.open(40)
    kv.grow(first, 40)
    kv.commit()
    kv.close(first)
    small = kv.open(4)
    assert kv.grow(small, 4)
    assert kv.can_fit(36)
    other = kv.open(36)
    assert other is not small
    assert kv.grow(other, 36)
    kv.commit()
    check_mapping(kv, memory)
    assert (len(small.pages), len(other.pages)) == (1, 9)
    assert not kv.grow(small, 5)
    kv.check_integrity()


def test_stale_pages_that_moved_are_replaced():
    kv, memory = make_kv(num_pages=6, num_ranges=2)
    first = kv.open(24)
    kv.grow(first, 24)
    kv.commit()
    kv.close(first)
    again, other = kv.open(4), kv.open(16)
    assert again is first
    assert kv.grow(again, 4)
    assert kv.grow(other, 16)  # takes pages that `again` still maps
    kv.commit([other])
    kv.close(other)
    assert kv.grow(again, 20)
    kv.commit()
    check_mapping(kv, memory)
    kv.check_integrity()


def test_growth_prefers_used_pages_to_fresh_ones():
    kv, _ = make_kv(num_pages=64)
    for _ in range(5):
        for item in [kv.open(8), kv.open(20)]:
            kv.grow(item, 8)
            kv.commit()
            kv.close(item)
    assert kv.num_mapped == 2, "the pages of the first sequence serve all later ones"


def test_promised_pages_are_not_available():
    kv, _ = make_kv(num_pages=10)
    first = kv.open(32)  # 8 pages are promised, none is mapped yet
    assert kv.num_in_use == 0
    assert not kv.can_fit(12)
    assert kv.can_fit(8)
    assert kv.grow(first, 16)
    assert not kv.can_fit(12)
    kv.close(first)
    assert kv.can_fit(40)
    kv.check_integrity()


def test_a_refused_grow_changes_nothing():
    kv, _ = make_kv(num_pages=4)
    first, second = kv.open(8), kv.open(8)
    assert kv.grow(first, 12)
    assert not kv.grow(second, 12)
    assert second.pages == []
    kv.check_integrity()


def test_a_failed_map_is_tried_again():
    kv, memory = make_kv()
    item = kv.open(4)
    kv.grow(item, 4)
    memory.fail_next = "map"
    with pytest.raises(OSError, match="no memory"):
        kv.commit()
    kv.commit()
    check_mapping(kv, memory)


def test_a_range_that_cannot_be_mapped_does_not_stop_the_others():
    kv, memory = make_kv(num_ranges=4)
    items = [kv.open(8) for _ in range(4)]
    for item in items:
        kv.grow(item, 8)
    memory.fail_next = "map"
    with pytest.raises(OSError, match="no memory"):
        kv.commit(items[:1])
    kv.commit(items[1:])
    assert [len(kv.space.mapped(item.index)) for item in items] == [0, 2, 2, 2]
    kv.check_integrity()
    for item in items:
        kv.close(item)
    again = [kv.open(8) for _ in range(4)]
    for item in again:
        assert kv.grow(item, 8)
    kv.commit(again)
    check_mapping(kv, memory)


def test_trim_unmaps_everything_idle():
    kv, memory = make_kv()
    keep, drop = kv.open(8), kv.open(8)
    kv.grow(keep, 8)
    kv.grow(drop, 8)
    kv.commit()
    kv.close(drop)
    kv.trim()
    assert (kv.num_mapped, len(memory.mapped)) == (2, 2)
    check_mapping(kv, memory)


def test_token_addresses_are_range_start_plus_position():
    kv, _ = make_kv(tokens_per_page=3)  # 64-byte tokens do not divide most sizes
    assert kv.range_tokens * kv.token_bytes % kv.page_bytes == 0
    assert kv.ranges[2].start == 2 * kv.range_tokens


def wait_for_thread(kv) -> None:
    while kv.space.is_busy:
        time.sleep(0.001)
    kv.space.collect()


def test_mapping_ahead_leaves_nothing_to_do_at_the_step():
    kv, memory = make_kv(in_background=True)
    item = kv.open(4)
    kv.grow(item, 4)
    kv.commit()
    kv.map_ahead([(item, 6)])
    wait_for_thread(kv)
    calls, at_steps = memory.num_calls, kv.space.stats.num_calls
    assert kv.grow(item, 6)
    kv.commit()
    assert (memory.num_calls, kv.space.stats.num_calls) == (calls, at_steps)
    next_item = kv.open(8)
    assert kv.grow(next_item, 8)
    kv.commit()
    assert kv.space.stats.num_calls == at_steps, "the next sequence finds its pages mapped"
    check_mapping(kv, memory)
    kv.close(item)
    kv.close(next_item)
    kv.close_all()
    assert not memory.mapped


@pytest.mark.parametrize(("fails", "beside_kernels"), [("map", True), ("prepare", False)])
def test_a_failed_mapping_ahead_is_made_at_the_step(fails, beside_kernels, caplog):
    kv, memory = make_kv(in_background=True, num_ranges=1)
    memory.maps_during_kernels = beside_kernels
    item = kv.open(4)
    kv.grow(item, 4)
    kv.commit()
    memory.fail_next = fails
    kv.map_ahead([(item, 6)])
    wait_for_thread(kv)
    assert memory.fail_next is None and "mapping ahead failed" in caplog.text
    assert len(kv.space.mapped(item.index)) == 1
    check_mapping(kv, memory)
    at_steps = kv.space.stats.num_calls
    assert kv.grow(item, 6)
    kv.commit()
    assert kv.space.stats.num_calls == at_steps + 1
    check_mapping(kv, memory)
    kv.close_all()


@pytest.mark.parametrize("beside_kernels", [True, False])
def test_a_bug_in_mapping_ahead_does_not_stop_the_thread(beside_kernels, monkeypatch, caplog):
    """A step that waits for the thread would hang."""
    kv, memory = make_kv(in_background=True, num_ranges=1)
    memory.maps_during_kernels = beside_kernels
    item = kv.open(4)
    kv.grow(item, 4)
    kv.commit()
    with monkeypatch.context() as patch:
        patch.setattr(memory, "map" if beside_kernels else "prepare", lambda *_: 1 / 0)
        kv.map_ahead([(item, 6)])
        wait_for_thread(kv)
    assert "ZeroDivisionError" in caplog.text
    assert kv.grow(item, 6)
    kv.commit()
    check_mapping(kv, memory)
    kv.close_all()


def test_too_many_mappings_unmap_idle_ranges():
    kv, memory = make_kv(num_pages=64, num_ranges=4, max_model_len=64)
    kv.space.max_mappings = 12
    scattered = [kv.open(4) for _ in range(2)]
    for length in range(4, 44, 4):  # pages alternate, so none merge
        for item in scattered:
            assert kv.grow(item, length)
    kv.commit()
    assert kv.space.num_mappings == 20
    assert not kv.can_fit(4)
    for item in scattered:
        kv.close(item)
    assert kv.can_fit(4)
    again = kv.open(4)
    kv.grow(again, 4)
    kv.grow(again, 64)
    kv.commit()
    assert [bool(kv.space.mapped(item.index)) for item in scattered] == [True, False]
    check_mapping(kv, memory)
    kv.check_integrity()


class KVMachine(RuleBasedStateMachine):
    """Sequences share, append, close, evict, trim and fail in any order, and contents are checked.

    The thread that maps ahead is off, since its progress decides which pages are taken next and
    examples could not be repeated. The random operations below have it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model: KVModel | None = None

    @initialize(layout=st.sampled_from(LAYOUTS + GROUPS))
    def start(self, layout: dict[str, int]) -> None:
        self.model = KVModel(**{**layout, "in_background": False})

    @rule(prompt=st.sampled_from(PROMPTS), length=st.integers(1, 40), salt=st.sampled_from("ab"))
    def open(self, prompt: list[int], length: int, salt: str) -> None:
        self.model.open(prompt[:length], salt)

    @precondition(lambda self: self.model and self.model.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 40))
    def advance(self, data: st.DataObject, num_tokens: int) -> None:
        sequence = data.draw(st.sampled_from(self.model.running))
        available = self.model.kv.num_available
        end = min(len(sequence.tokens), sequence.num_computed + num_tokens)
        missing = self.model.num_missing(sequence, end)
        longest = self.model.kv.max_model_len
        if not self.model.advance(sequence, num_tokens) and len(sequence.tokens) < longest:
            assert missing > available or sequence.num_computed + 1 == len(sequence.tokens)

    @precondition(lambda self: self.model and self.model.running)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.model.close(data.draw(st.sampled_from(self.model.running)))

    @rule(fail=st.sampled_from(["map", "copy_page"]))
    def commit_with_a_failure(self, fail: str) -> None:
        """Edits that fail stay due, and the next commit makes all of them."""
        self.model.memory.fail_next = fail
        with contextlib.suppress(OSError):
            self.model.kv.commit()
        self.model.memory.fail_next = None

    @rule()
    def trim(self) -> None:
        self.model.kv.trim()
        check_mapping(self.model.kv, self.model.memory)
        assert self.model.kv.num_mapped == self.model.kv.num_in_use + self.model.kv.num_cached

    @invariant()
    def consistent(self) -> None:
        if self.model:
            self.model.check()

    def teardown(self) -> None:
        if self.model:
            self.model.finish()


TestKVMachine = KVMachine.TestCase
# at most 40,000 operations
TestKVMachine.settings = examples(400, steps=100)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS + GROUPS)
def test_25_000_random_operations(layout, monkeypatch):
    """More operations than hypothesis has time for produce prefix hits and evictions."""
    monkeypatch.setattr(memory.range_mapper, "_UNMAP_SLOTS", 3)
    rng = random.Random(5)
    model = KVModel(**layout)
    for number in range(25_000):
        operation = rng.random()
        if operation < 0.15:
            prompt = rng.choice(PROMPTS)[: rng.randint(1, 40)]
            model.open([*prompt[:-1], rng.randrange(3)], rng.choice("ab"))
        elif operation < 0.8 and model.running:
            model.advance(rng.choice(model.running), rng.choice([1, 1, 2, 8, 40]))
        elif operation < 0.92 and model.running:
            model.close(rng.choice(model.running))
        elif operation < 0.97:
            model.map_ahead()
        elif operation < 0.975:
            model.kv.trim()
        if number % 20 == 0:
            model.check()
    assert model.num_hit_tokens > 3_000
    assert model.kv.prefixes.stats.num_evicted > 500
    model.finish()
