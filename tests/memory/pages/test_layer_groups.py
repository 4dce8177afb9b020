"""Layer groups with windows release pages, limit what prefix hits need, and keep kernels out of
the released pages."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from memory.attention.grouped import group_layers
from memory.attention.layouts import local_attention, make_layout
from memory.attention.seam import AttentionLayer, AttentionStep
from memory.attention.tiled import TILED_TYPES
from memory.pages.layer_groups import GroupPages, LayerGroup
from memory.prefix.index import PrefixHasher
from ops import get_backend
from ops.cpu import native_library
from tests.support.engine.fakes import check_mapping, make_kv

FULL, WINDOW = LayerGroup(64), LayerGroup(32, window=16, read_block=8)


def make_groups(*groups: LayerGroup, num_pages: int = 400, **settings):
    """Returns make_kv's pair with pages of 256 bytes: 4 tokens of FULL, 8 of WINDOW."""
    defaults = {"max_model_len": 600, "max_rows": 8, "num_ranges": 4}
    return make_kv(num_pages, groups=groups, **(defaults | settings))


def run(kv, item, start: int, end: int, rows: int = 1) -> list[tuple[int, ...]]:
    """Grows step by step and returns the number of pages of each part after each step."""
    held = []
    for position in range(start, end, rows):
        assert kv.grow(item, min(end, position + rows), position)
        kv.commit()
        held.append(tuple(len(part.held) for part in item.parts))
    return held


def test_pages_of_a_window_stay_bounded_and_are_all_released():
    kv, memory = make_groups(FULL, WINDOW)
    item = kv.open(1)
    held = run(kv, item, 0, 600)
    assert held[-1][0] == 150
    assert max(count for _, count in held) == 3, "16 tokens and a read block of 8"
    assert kv.num_in_use == len(item.pages)
    check_mapping(kv, memory)
    kv.check_integrity()
    assert kv.space.num_mappings < 150 + 3 + 64 + 1, "released page slots are unmapped"
    kv.trim()
    assert len(memory.mapped) == len(item.pages)
    check_mapping(kv, memory)
    kv.close(item)
    kv.close_all()
    assert (kv.num_in_use, kv.num_mapped, len(memory.mapped)) == (0, 0, 0)


def test_a_failed_unmap_behind_a_window_is_tried_again():
    kv, memory = make_groups(WINDOW)
    item = kv.open(1)
    run(kv, item, 0, 200)
    memory.fail_next = "unmap"
    kv.trim()
    assert len(memory.mapped) > len(item.pages)
    kv.trim()
    assert len(memory.mapped) == len(item.pages)
    check_mapping(kv, memory)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize(
    "groups", [(FULL, WINDOW), (WINDOW,), (WINDOW, LayerGroup(80, window=9, read_block=4))]
)
def test_pages_for_is_never_less_than_what_is_held(groups, rows):
    kv, _ = make_groups(*groups)
    item = kv.open(600)
    for step, held in enumerate(run(kv, item, 0, 600, rows)):
        num_tokens = min(600, (step + 1) * rows)
        assert sum(held) <= kv.pages_for(num_tokens)
        if rows == 1:
            assert sum(held) <= kv.layout.pages_at(num_tokens)
    assert kv.pages_for(600) <= sum(held) + 2 * len(groups)


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (WINDOW,)])
def test_a_sequence_alone_needs_only_its_promised_pages(groups):
    roomy, _ = make_groups(*groups)
    kv, _ = make_groups(*groups, num_pages=roomy.pages_for(600))
    assert kv.can_fit(600)
    item = kv.open(600)
    assert not kv.can_fit(1)
    run(kv, item, 0, 600, rows=8)
    kv.check_integrity()


def test_windows_let_more_sequences_fit():
    def max_sequences(*groups: LayerGroup) -> int:
        kv, _ = make_groups(*groups, num_pages=300, num_ranges=64)
        count = 0
        while kv.can_fit(512):
            item = kv.open(512)
            run(kv, item, 0, 512, rows=8)
            count += 1
        return count

    # 5 of 6 layers have a window
    assert max_sequences(LayerGroup(96)) == 1
    assert max_sequences(LayerGroup(16), LayerGroup(80, window=32, read_block=8)) == 6
    assert max_sequences(LayerGroup(96, window=32, read_block=8)) == 19


def test_another_sequence_gets_the_pages_behind_the_window():
    kv, memory = make_groups(WINDOW, num_pages=8)
    first, second, gone_soon = kv.open(8), kv.open(8), kv.open(8)
    run(kv, gone_soon, 0, 8)
    for position in range(0, 96, 8):
        if position == 32:
            kv.close(gone_soon)  # its page is used by the others in turn
        run(kv, first, position, position + 8)
        run(kv, second, position, position + 8)
    stale = {page for page in kv.space.mapped(first.parts[0].index) if page >= 0}
    assert stale & set(second.pages), (
        "the first maps pages behind its window that the second writes"
    )
    assert not set(first.pages) & set(second.pages)
    check_mapping(kv, memory)
    kv.check_integrity()


# ---- the prefix cache


def keys_of(kv, tokens: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    PrefixHasher(kv.page_end, b"secret").extend(keys, tokens)
    return keys


def filled(kv, num_tokens: int, close: bool = True) -> list[bytes]:
    """Computes a sequence, closes it if `close`, and returns its page keys."""
    keys = keys_of(kv, list(range(num_tokens)))
    item = kv.open(num_tokens)
    for position in range(0, num_tokens, 8):
        end = min(num_tokens, position + 8)
        assert kv.grow(item, end, position)
        kv.commit()
        kv.insert_prefix(item, keys, end)
    if close:
        kv.close(item)
    return keys


def test_every_page_of_every_group_has_a_key_of_its_own():
    kv, _ = make_groups(FULL, WINDOW)
    keys = filled(kv, 96)
    assert len(set(keys)) == len(keys) == 96 // 4 + 96 // 8
    assert [kv.page_end(i) for i in range(6)] == [4, 8, 8, 12, 16, 16]
    pages = [kv.prefixes.index.page_of(key) for key in keys]
    assert len(set(pages)) == len(pages)


def test_a_hit_needs_only_the_pages_within_the_window():
    kv, _ = make_groups(FULL, WINDOW)
    keys = filled(kv, 96)
    hit = kv.match(keys, 95)
    assert hit.num_tokens == 95
    full, window = hit.parts
    assert (full.first, len(full.shared), len(full.copied)) == (0, 23, 1)
    assert (window.first, len(window.shared), len(window.copied)) == (10, 1, 1)
    item = kv.open(100, hit)
    kv.commit()
    assert kv.grow(item, 96, 95)
    kv.check_integrity()


def test_pages_behind_the_window_are_evicted_first_and_not_needed():
    kv, _ = make_groups(FULL, WINDOW, num_pages=40)
    keys = filled(kv, 96, close=False)  # 24 and 12 pages, of which the first 9 were released
    assert kv.num_cached == 9
    other = kv.open(32)
    for position in range(0, 32, 8):
        assert kv.grow(other, position + 8, position)
        kv.commit()
    assert kv.prefixes.stats.num_evicted == 7  # 12 page slots; 4 pages were free and 1 was its own
    kv.check_integrity()
    assert kv.match(keys, 95).num_tokens == 95
    assert kv.match(keys, 40) is None, "a page that its window needs is evicted"


@pytest.mark.parametrize("is_hit", [False, True])
def test_the_end_of_a_window_is_evicted_before_its_beginning(is_hit):
    """A prompt within the window needs its first page, whatever is cached of the others."""
    wide = LayerGroup(32, window=400, read_block=8)
    kv, _ = make_groups(wide, num_pages=20)
    keys = filled(kv, 96)
    if is_hit:
        assert kv.match(keys, 96).num_tokens == 96
    item = kv.open(88)
    run(kv, item, 0, 88, rows=8)
    assert kv.prefixes.stats.num_evicted == 3
    assert kv.match(keys, 96).num_tokens == 96 - 3 * 8


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (WINDOW,)])
def test_a_missing_page_shortens_a_hit(groups):
    """Any pages may be missing; the hit is the longest one whose pages are all cached."""
    rng = random.Random(1)
    kv, _ = make_groups(*groups, num_pages=60)
    keys = keys_of(kv, list(range(96)))
    shorter = 0
    for _ in range(300):
        cached = {key for key in keys if rng.random() < 0.9}
        num_hit = kv._finder.num_tokens(keys, 95, cached.__contains__)
        assert num_hit == max(n for n in range(96) if is_cached(kv, keys, n, cached))
        shorter += 0 < num_hit < 95
    assert shorter > 40


def is_cached(kv, keys, num_tokens: int, cached: set[bytes]) -> bool:
    """Whether all tokens that a row from num_tokens on reads are in cached pages, checked by
    position."""
    for group in kv.layout.groups:
        chain = group.keys_of(keys)
        window = num_tokens + 1 if group.window is None else group.window
        first = max(0, num_tokens + 1 - window) // group.read_block * group.read_block
        for position in range(first, num_tokens):
            slot = position * group.token_bytes // kv.page_bytes
            if slot >= len(chain) or chain[slot] not in cached:
                return False
    return True


def test_layers_are_grouped_by_their_window():
    def layer(window: int | None) -> AttentionLayer:
        return AttentionLayer(1, 1, 16, 1.0, window)

    layers = [layer(w) for w in (8, None, 32, 8, 100)]
    assert group_layers(layers, 64) == [(None, [1, 4]), (32, [2]), (8, [0, 3])]
    assert group_layers([layer(8)] * 2, 64) == [(8, [0, 1])]
    assert group_layers([layer(None)] * 2, 64) == [(None, [0, 1])]


# ---- kernels

LENGTH, NUM_HEADS, DIM = 700, 2, 16


class Sequence:
    """K/V of one sequence in one window layer, and attention over it."""

    def __init__(self, kind: str, window: int) -> None:
        layer = AttentionLayer(2 * NUM_HEADS, NUM_HEADS, DIM, 0.25, window)
        name, _, dtype = kind.partition("/")
        is_tiled = dtype in TILED_TYPES
        layout = make_layout([layer], dtype, 16)
        size = -(-LENGTH // 16) * 16 * layout.token_bytes
        self._memory = ctypes.create_string_buffer(size)
        self._address = ctypes.addressof(self._memory)
        backend = get_backend("cpu" if is_tiled else name)
        self._attention = local_attention(layout, self._address, size, backend)
        self._dtype = torch.float32 if is_tiled else getattr(torch, dtype)
        self.pages = GroupPages(
            LayerGroup(layout.token_bytes, layout.tile_tokens, window), layout.token_bytes * 16, 1
        )
        self.q, self.k, self.v = (
            torch.randn(LENGTH, heads, DIM).to(self._dtype)
            for heads in (2 * NUM_HEADS, NUM_HEADS, NUM_HEADS)
        )

    def compute(self, start: int, end: int, is_decode: bool = False) -> torch.Tensor:
        plan = self._attention.plan(AttentionStep(int(is_decode), [0], [end - start], [end]))
        ticket = plan.begin(0, self.q[start:end])
        return plan.finish(ticket, self.k[start:end], self.v[start:end], None).wait()

    def spoil(self, num_computed: int) -> int:
        """Fills the page slots that would be released and returns their number."""
        slot = self.pages.first_slot(num_computed)
        ctypes.memset(self._address, 0xFF, slot * self.pages.page_bytes)
        return slot


KINDS = ["cpu/float32", "cpu/bfloat16", "reference/float32"]
KINDS += ["cpu/int8", "cpu/int4"] if native_library.is_available() else []


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 40, 128, 200])
def test_no_kernel_reads_behind_the_window(kind, window):
    """Before each row, released K/V becomes NaN (in tiles: scales that are NaN), and the bits stay
    the same."""
    kept, spoiled = Sequence(kind, window), Sequence(kind, window)
    spoiled.q, spoiled.k, spoiled.v = kept.q, kept.k, kept.v
    num_spoiled, position = 0, 0
    rng = random.Random(window)
    while position < LENGTH:
        rows = rng.choice([1, 1, 7, 64, 150])
        end = min(LENGTH, position + rows)
        is_decode = end == position + 1 and rng.random() < 0.7
        num_spoiled = max(num_spoiled, spoiled.spoil(position))
        expected = kept.compute(position, end, is_decode)
        assert torch.isfinite(expected).all()
        assert torch.equal(spoiled.compute(position, end, is_decode), expected), position
        position = end
    assert num_spoiled >= (LENGTH - 150 - window - 128) // 16


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("cpu")])
def test_a_row_has_the_same_bits_in_any_chunk(kind):
    if native_library.instruction_set() == "portable":
        pytest.skip("torch's prefill attention has other sums")
    kept = Sequence(kind, 40)
    whole = kept.compute(0, LENGTH)
    for rows in (7, 64, 129):
        again = Sequence(kind, 40)
        again.q, again.k, again.v = kept.q, kept.k, kept.v
        for start in range(0, LENGTH, rows):
            again.spoil(start)
            end = min(LENGTH, start + rows)
            assert torch.equal(again.compute(start, end), whole[start:end]), (rows, start)
