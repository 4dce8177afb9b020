"""Attention in two calls: the choice of the tiles that rows read, then attention over these. And
bounds in a store of their own, beside K/V."""

from __future__ import annotations

import threading

import pytest
import torch

from ops.cpu import native_library
from quant.kv import TILE_TOKENS
from tests.support.memory.int8_kv import Cache
from tests.support.memory.recent_kv import RecentCache
from tests.support.memory.selected_kv import chosen_tiles, scores_of, tiles_of, topic_keys

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]

POISON = 0x7F
SHAPE = {"heads": 4, "kv_heads": 2, "dim": 32}
# a row, drafts, less than a tile, drafts after other rows, a prompt, drafts that read everything
LENGTHS = [700, 330, 5, 200, 90, 300, 1300]
ROWS = [1, 4, 1, 3, 40, 2, 1]
SELECTING = [1, 4, 1, 2, 0, 2, 1]


def filled(lengths=LENGTHS, **options) -> Cache:
    cache = Cache(**SHAPE, tokens=max(lengths), sequences=len(lengths), **options)
    for i, length in enumerate(lengths):
        cache.fill(topic_keys(length, 2, 32), torch.randn(length, 2, 32), i)
    return cache


def budgets() -> list[int]:
    """Of the rows that select; those of the sixth sequence read everything."""
    ends = [
        (i, end)
        for i, (n, length) in enumerate(zip(SELECTING, LENGTHS, strict=True))
        for end in range(length - n + 1, length + 1)
    ]
    return [100 if i == 5 else 2 + end // 160 for i, end in ends]


def mixed_step(cache: Cache):
    step = cache.step(range(len(LENGTHS)), ROWS, LENGTHS)
    step.select(SELECTING, budgets())
    return step


def num_tiles(length: int) -> int:
    return -(-length // TILE_TOKENS)


def poison(cache: Cache, is_read: torch.Tensor, lengths=LENGTHS) -> None:
    """Overwrites K and V of all tiles that are not read, with NaN in their scales."""
    parts = is_read.split([num_tiles(length) for length in lengths])
    for i, part in enumerate(parts):
        kv = tiles_of(cache, len(part), i)
        kv[part == 0] = POISON


@pytest.mark.parametrize("bits", [8, 4])
def test_bounds_beside_k_and_v_are_those_in_their_tiles(isa, bits):
    torch.manual_seed(1)
    inside = filled(bits=bits, has_bounds=True)
    torch.manual_seed(1)
    beside = filled(bits=bits, has_bounds_beside=True)
    assert beside.bounds_offset == 0
    for i, length in enumerate(LENGTHS):
        count, size = num_tiles(length), beside.tile_bytes
        ours, theirs = tiles_of(beside, count, i), tiles_of(inside, count, i)
        assert torch.equal(ours, theirs[:, :size])
        first = beside.bounds_address - beside.bounds_memory.data_ptr()
        first += i * beside.bounds_range_bytes
        bounds = beside.bounds_memory[first : first + count * beside.bounds_tile_bytes]
        bounds = bounds.view(count, -1)
        complete = length // TILE_TOKENS
        assert torch.equal(bounds[:complete], theirs[:complete, size:])
        assert bool((bounds[complete:] == POISON).all()), "bounds of a tile that is not complete"
    q = torch.randn(sum(ROWS), 4, 32)
    expected = inside.op.attend(mixed_step(inside), q)
    assert torch.equal(beside.op.attend(mixed_step(beside), q), expected)
    assert bool(expected.isfinite().all())


@pytest.mark.parametrize("bits", [8, 4])
def test_attention_reads_the_chosen_tiles_alone_and_has_the_same_bits(isa, bits):
    cache = filled(bits=bits, has_bounds_beside=True)
    q = torch.randn(sum(ROWS), 4, 32)
    step = mixed_step(cache)
    expected_lse, lse = torch.empty(sum(ROWS), 4), torch.empty(sum(ROWS), 4)
    expected = cache.op.attend(step, q, expected_lse)
    kept = cache.memory.clone()
    cache.memory.fill_(POISON)  # choosing reads bounds alone
    is_read = cache.op.choose(step, q)
    cache.memory.copy_(kept)
    poison(cache, is_read)
    for _ in range(2):
        assert torch.equal(cache.op.attend_chosen(step, q, lse), expected)
        assert torch.equal(lse, expected_lse)
    assert 0.1 < float(is_read.float().mean()) < 0.7, "the step reads a part"


@pytest.mark.parametrize("threads", [1, 3])
def test_a_tile_is_chosen_if_any_row_and_head_reads_it(isa, threads):
    """As the scores say, slowly; heads whose choice hangs on a rounding may choose otherwise."""
    before = native_library.num_threads()
    native_library.set_num_threads(threads)
    try:
        cache = filled(has_bounds=True)
        q = torch.randn(sum(ROWS), 4, 32)
        found = cache.op.choose(mixed_step(cache), q)
    finally:
        native_library.set_num_threads(before)
    assert found.dtype == torch.uint8 and len(found) == sum(map(num_tiles, LENGTHS))
    left, first_row, num_equal = budgets(), 0, 0
    parts = found.split([num_tiles(length) for length in LENGTHS])
    for i, (length, rows, selecting) in enumerate(zip(LENGTHS, ROWS, SELECTING, strict=True)):
        expected, all_clear = torch.zeros(len(parts[i]), dtype=torch.bool), True
        if rows > selecting:  # the last row that reads everything
            expected[: num_tiles(length - selecting)] = True
        for row in range(rows - selecting, rows):
            end, budget = length - rows + row + 1, left.pop(0)
            own = (end - 1) // TILE_TOKENS
            expected[own] = True
            if budget > own:
                expected[:own] = True
                continue
            scores = scores_of(cache, q[first_row + row], own, i)
            chosen, is_clear = chosen_tiles(scores, budget - 1)
            expected[:own] |= chosen[is_clear].any(0)
            all_clear = all_clear and bool(is_clear.all())
        first_row += rows
        assert bool(parts[i][expected].all()), f"sequence {i} lacks tiles"
        assert not all_clear or torch.equal(parts[i] == 1, expected), f"sequence {i}"
        num_equal += all_clear
    assert not left and num_equal >= 5, "the reference says too little"


def test_rows_that_do_not_select_read_every_tile(isa):
    plain, selecting = Cache(**SHAPE, tokens=100), Cache(**SHAPE, tokens=100, has_bounds=True)
    k, v = torch.randn(2, 100, 2, 32)
    q = torch.randn(3, 4, 32)
    for cache in (plain, selecting):
        cache.fill(k, v)
        step = cache.step([0], [3], [100])
        if cache is plain:
            step.select([3], [1, 1, 1])  # of other layers
        assert cache.op.choose(step, q).tolist() == [1] * 7
        assert torch.equal(cache.op.attend_chosen(step, q), cache.attend(q, 100))


def test_a_recent_store_is_no_part_of_the_choice(isa):
    """Rows read their own block from it: none of the tiles of that block, unless another row of
    their sequence does, from the block after it."""
    lengths, rows = [700, 530, 100], [1, 20, 1]
    cache = RecentCache(**SHAPE, tokens=700, sequences=3, has_bounds_beside=True)
    for i, length in enumerate(lengths):
        cache.fill(topic_keys(length, 2, 32), torch.randn(length, 2, 32), i)
    step = cache.step(range(3), rows, lengths)
    step.select([1, 2, 1], [12, 12, 12, 1])
    q = torch.randn(22, 4, 32)
    expected = cache.op.attend(step, q)
    is_read = cache.op.choose(step, q)
    blocks = [part.tolist() for part in is_read.split([num_tiles(length) for length in lengths])]
    assert not any(blocks[0][640 // 16 :]) and 0 < sum(blocks[0]) < 640 // 16
    assert all(blocks[1][: 512 // 16]) and not any(blocks[1][512 // 16 :])
    assert not any(blocks[2])
    poison(cache, is_read, lengths)
    assert torch.equal(cache.op.attend_chosen(step, q), expected)


def test_rows_alone_choose_what_they_choose_together(isa):
    cache = filled(has_bounds_beside=True)
    q = torch.randn(sum(ROWS), 4, 32)
    parts = cache.op.choose(mixed_step(cache), q).split([num_tiles(n) for n in LENGTHS])
    for i, row in ((0, 0), (2, 5), (6, 51)):
        alone = cache.step([i], [1], [LENGTHS[i]])
        alone.select([1], [2 + LENGTHS[i] // 160])
        assert torch.equal(cache.op.choose(alone, q[row : row + 1]), parts[i])


def test_a_choice_of_another_step_layer_or_thread_is_refused():
    cache, other = filled(has_bounds=True), filled(has_bounds=True)
    q = torch.randn(sum(ROWS), 4, 32)
    step, next_step = mixed_step(cache), mixed_step(cache)
    expected = cache.op.attend(step, q)
    cache.op.choose(step, q)
    assert torch.equal(cache.op.attend_chosen(step, q), expected)
    with pytest.raises(RuntimeError, match="another step or layer"):
        cache.op.attend_chosen(next_step, q)
    with pytest.raises(RuntimeError, match="another step or layer"):
        other.op.attend_chosen(step, q)
    refused = []

    def attend() -> None:
        try:
            cache.op.attend_chosen(step, q)
        except RuntimeError as error:
            refused.append(error)

    thread = threading.Thread(target=attend)
    thread.start()
    thread.join()
    assert len(refused) == 1
    windowed = Cache(**SHAPE, tokens=100, window=20)
    with pytest.raises(AssertionError, match="see all keys"):
        windowed.op.choose(windowed.step([0], [1], [100]), q[:1])


def test_threads_that_choose_at_once_do_not_disturb_each_other(isa):
    caches = [filled(has_bounds_beside=True) for _ in range(3)]
    q = torch.randn(sum(ROWS), 4, 32)
    steps = [mixed_step(cache) for cache in caches]
    expected = [cache.op.attend(step, q) for cache, step in zip(caches, steps, strict=True)]
    found: list[list[torch.Tensor]] = [[] for _ in caches]
    barrier = threading.Barrier(len(caches))

    def run(i: int) -> None:
        for _ in range(20):
            caches[i].op.choose(steps[i], q)
            barrier.wait(timeout=60)
            found[i].append(caches[i].op.attend_chosen(steps[i], q))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(caches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, right in zip(found, expected, strict=True):
        assert len(ours) == 20 and all(torch.equal(each, right) for each in ours)
