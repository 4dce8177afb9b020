"""Rows that read a part of their K/V: bounds of the stored keys, the choice of tiles, and
attention over these, on every instruction set.

Which tiles are right follows from the bounds that the kernels stored and from q as they round it.
Heads whose choice hangs on a rounding are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from ops.cpu import native_library
from ops.reference import round_kv, round_kv4
from quant.kv import TILE_TOKENS
from tests.support.memory.int8_kv import Cache, out_error, out_error4, rounded_query4, score_error
from tests.support.memory.selected_kv import (
    bounds_of,
    chosen_tiles,
    scores_of,
    selected_attention,
    topic_keys,
)

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]

CASES = [
    {"heads": 8, "kv_heads": 2, "dim": 64, "length": 700, "budget": 6},
    pytest.param(
        {"heads": 4, "kv_heads": 4, "dim": 128, "length": 1100, "budget": 40, "group": 32},
        marks=pytest.mark.exhaustive,
    ),
    {"heads": 4, "kv_heads": 1, "dim": 32, "length": 65, "budget": 2, "group": 16},
    {"heads": 6, "kv_heads": 2, "dim": 80, "length": 300, "budget": 5, "group": 16},
    {"heads": 2, "kv_heads": 2, "dim": 16, "length": 330, "budget": 1, "group": 8},
    pytest.param(
        {"heads": 24, "kv_heads": 2, "dim": 256, "length": 2300, "budget": 100},
        marks=pytest.mark.exhaustive,
    ),
    {"heads": 8, "kv_heads": 2, "dim": 64, "length": 900, "budget": 9, "soft_cap": 2.0},
    {
        "heads": 4,
        "kv_heads": 2,
        "dim": 64,
        "length": 600,
        "budget": 7,
        "sinks": [0.0, 3.0, -5.0, 9],
    },
]


def _stored(x: torch.Tensor, cache: Cache) -> torch.Tensor:
    return round_kv4(x, cache.group) if cache.op.bits == 4 else round_kv(x, cache.group)


@pytest.mark.covering(1)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()))
def test_rows_read_the_tiles_with_the_largest_bounds(isa, case, bits):
    case = dict(case)
    length, heads, kv_heads, dim, budget = (
        case.pop(x) for x in ("length", "heads", "kv_heads", "dim", "budget")
    )
    group = case.pop("group", 64)
    cache = Cache(
        heads=heads, kv_heads=kv_heads, dim=dim, group=group, tokens=length, bits=bits,
        has_bounds=True, **case,
    )  # fmt: skip
    k, v = topic_keys(length, kv_heads, dim), torch.randn(length, kv_heads, dim)
    cache.fill(k, v)
    stored_k, stored_v = _stored(k, cache), _stored(v, cache)
    num_clear = num_heads = 0
    for end in (length, length - 1, length // 16 * 16, length // 16 * 16 - 15):
        q = torch.randn(1, heads, dim)
        own = (end - 1) // TILE_TOKENS
        step = cache.step([0], [1], [end])
        step.select([1], [budget])
        found = cache.op.attend(step, q)[0]
        chosen, is_clear = chosen_tiles(scores_of(cache, q[0], own), budget - 1)
        read = torch.cat((chosen, torch.ones(kv_heads, 1, dtype=torch.bool)), 1)
        exact_q = rounded_query4(q[0]) if bits == 4 else q[0]
        expected = selected_attention(
            exact_q, stored_k[:end], stored_v[:end], read, dim**-0.5, **case
        )
        if bits == 4:
            bound = 2 * out_error4(stored_v)
        else:
            bound = out_error(score_error(q, stored_k, dim**-0.5), stored_v)
        error = (found - expected).abs().reshape(kv_heads, -1).amax(1)
        assert bool((error <= bound)[is_clear].all()), f"{end=}: {error} above {bound}"
        num_clear += int(is_clear.sum())
        num_heads += kv_heads
    assert num_clear >= 0.7 * num_heads, "the reference says too little"


@pytest.mark.parametrize("bits", [8, 4])
def test_bounds_hold_every_stored_key_and_are_close(isa, bits):
    cache = Cache(heads=4, kv_heads=2, dim=96, group=32, tokens=320, bits=bits, has_bounds=True)
    k = topic_keys(320, 2, 96)
    cache.fill(k, torch.randn(320, 2, 96), chunk=37)
    stored = _stored(k, cache).double()
    if bits == 4:
        stored = _transformed(stored)
    tiles = stored.reshape(20, TILE_TOKENS, 2, 96)
    most, least = bounds_of(cache, 20)
    top = tiles.abs().amax((1, 3))[..., None]
    slack = 1e-6 * top
    assert bool((most >= tiles.amax(1) - slack).all()), "a key is above its maximum"
    assert bool((least <= tiles.amin(1) + slack).all()), "a key is below its minimum"
    step = 1.01 * top / 127
    assert bool((most - tiles.amax(1) <= step).all()), "the maximum is more than a step too high"
    assert bool((tiles.amin(1) - least <= step).all()), "the minimum is more than a step too low"


def _transformed(x: torch.Tensor) -> torch.Tensor:
    from ops.reference import hadamard

    return hadamard(x)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_budget_of_everything_gives_the_bits_of_no_selection(isa, bits):
    """For every length across borders of tiles, of stretches and of splits."""
    shape = {"heads": 4, "kv_heads": 2, "dim": 32, "bits": bits, "tokens": 1100}
    plain, cache = Cache(**shape), Cache(**shape, has_bounds=True)
    k, v = topic_keys(1100, 2, 32), torch.randn(1100, 2, 32)
    plain.fill(k, v), cache.fill(k, v)
    lengths = [*range(1, 70), 511, 512, 513, 1023, 1024, 1025, 1100]
    for length in lengths:
        q = torch.randn(1, 4, 32)
        expected = plain.attend(q, length)
        for budget in (-(-length // TILE_TOKENS), 1000):
            step = cache.step([0], [1], [length])
            step.select([1], [budget])
            assert torch.equal(cache.op.attend(step, q), expected), f"{length} {budget}"


def test_all_tiles_but_one_of_no_weight_are_nearly_everything(isa):
    """The table is read in the order of the positions: as a shorter sequence."""
    cache = Cache(heads=2, kv_heads=1, dim=64, tokens=400, has_bounds=True)
    k, v = torch.randn(400, 1, 64), torch.randn(400, 1, 64)
    k[..., 0] = 0.0
    k[160:176, :, 0] = -1000.0
    q = torch.randn(1, 2, 64)
    q[..., 0] = 10.0
    cache.fill(k, v)
    others = [i for i in range(400) if not 160 <= i < 176]
    shorter = Cache(heads=2, kv_heads=1, dim=64, tokens=400)
    shorter.fill(k[others], v[others])
    step = cache.step([0], [1], [400])
    step.select([1], [24])
    assert torch.equal(cache.op.attend(step, q), shorter.attend(q, 384))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_has_the_bits_that_it_has_alone(isa, bits):
    """Among other rows: drafts of its own sequence, prompts, sequences that read everything; on any
    number of threads."""
    lengths = [5, 70, 700, 2100, 1300, 40, 900]
    rows = [1, 4, 5, 1, 1, 30, 1]
    selecting = [1, 4, 2, 1, 1, 0, 0]
    cache = Cache(heads=4, kv_heads=2, dim=32, bits=bits, tokens=2100, sequences=7, has_bounds=True)
    for i, length in enumerate(lengths):
        cache.fill(topic_keys(length, 2, 32), torch.randn(length, 2, 32), i)
    q = torch.randn(sum(rows), 4, 32)
    ends = [
        (i, end)
        for i, (n, length) in enumerate(zip(selecting, lengths, strict=True))
        for end in range(length - n + 1, length + 1)
    ]
    budgets = [2 + end // 160 for _, end in ends]
    step = cache.step(range(7), rows, lengths)
    step.select(selecting, budgets)
    together = cache.op.attend(step, q)
    threads = native_library.num_threads()
    for count in (1, 3):
        native_library.set_num_threads(count)
        assert torch.equal(cache.op.attend(step, q), together), f"{count} threads"
    native_library.set_num_threads(threads)
    firsts = [sum(rows[:i]) for i in range(7)]
    for (i, end), budget in zip(ends, budgets, strict=True):
        row = firsts[i] + end - lengths[i] + rows[i] - 1
        alone = cache.step([i], [1], [end])
        alone.select([1], [budget])
        assert torch.equal(cache.op.attend(alone, q[row : row + 1])[0], together[row]), f"row {row}"
    for i in (2, 5, 6):  # the rows before those that select
        part, end = slice(firsts[i], firsts[i] + rows[i] - selecting[i]), lengths[i] - selecting[i]
        assert torch.equal(cache.attend(q[part], end, i), together[part]), f"sequence {i}"


def test_bounds_do_not_depend_on_chunks_or_on_what_was_written_before(isa):
    k, v = topic_keys(200, 2, 48), torch.randn(200, 2, 48)
    caches = [Cache(heads=2, kv_heads=2, dim=48, tokens=200, has_bounds=True) for _ in range(4)]
    for cache, chunk in zip(caches[:3], (1000, 1, 7), strict=True):
        cache.fill(k, v, chunk=chunk)
    drafted = caches[3]
    for at in range(0, 200, 5):  # eight rows, of which five stay
        part = slice(at, min(at + 8, 200))
        wrong = k[part].clone()
        wrong[5:] *= 100
        step = drafted.step([0], [part.stop - at], [part.stop])
        drafted.op.append(step, wrong, v[part], None)
    drafted.op.append(drafted.step([0], [5], [200]), k[195:], v[195:], None)
    for cache in caches[1:]:
        assert torch.equal(cache.used(), caches[0].used())


def test_nothing_but_bounds_is_written_beside_k_and_v(isa):
    shape = {"heads": 2, "kv_heads": 2, "dim": 64, "tokens": 64}
    plain, cache = Cache(**shape), Cache(**shape, has_bounds=True)
    k, v = torch.randn(2, 40, 2, 64)
    plain.fill(k, v), cache.fill(k, v)
    ours = cache.used().reshape(4, -1)
    assert torch.equal(ours[:, : plain.tile_bytes], plain.used().reshape(4, -1))
    bounds = ours[:, plain.tile_bytes :]
    assert bool((bounds[2:] == 0x7F).all()), "bounds of a tile that is not complete"
    assert not bool((bounds[:2] == 0x7F).all(1).any()), "no bounds of a complete tile"


def test_values_that_are_not_finite_do_not_crash(isa):
    cache = Cache(heads=2, kv_heads=1, dim=32, tokens=300, has_bounds=True)
    k, v = torch.randn(2, 300, 1, 32)
    k[40], k[90, 0, 3], k[150, 0, 5] = torch.nan, torch.inf, -torch.inf
    cache.fill(k, v)
    for q in (torch.randn(1, 2, 32), torch.full((1, 2, 32), torch.nan), torch.zeros(1, 2, 32)):
        step = cache.step([0], [1], [300])
        step.select([1], [4])
        cache.op.attend(step, q)


def test_options_that_cannot_select_are_refused():
    shape = {"heads": 2, "kv_heads": 1, "dim": 32, "tokens": 64, "has_bounds": True}
    with pytest.raises(AssertionError, match="see all keys"):
        Cache(**shape, window=20)
    with pytest.raises(AssertionError, match="see all keys"):
        Cache(**shape, slopes=[0.5, 0.1])
    cache = Cache(**shape)
    with pytest.raises(AssertionError, match="each row that selects"):
        cache.step([0], [2], [40]).select([2], [3])
    with pytest.raises(AssertionError, match="num_selecting"):
        cache.step([0], [1], [40]).select([2], [3, 3])


_TWO_SHAPES = """
import torch
from ops.cpu import native_library
from tests.support.memory.int8_kv import Cache

native_library.set_num_threads(1)
for heads, dim in ((4, 256), (32, 16)):
    cache = Cache(heads=heads, kv_heads=heads, dim=dim, tokens=64, has_bounds=True)
    cache.fill(*torch.randn(2, 64, heads, dim))
    step = cache.step([0], [1], [64])
    step.select([1], [2])
    cache.op.attend(step, torch.randn(1, heads, dim))
"""


def test_layers_of_other_shapes_in_one_process_write_no_memory_beyond_their_own():
    """A layer of few wide heads, then one of many narrow heads, as large as the first. The process
    checks its heap, without a cache of freed pieces, when it ends."""
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    done = subprocess.run(
        [sys.executable, "-c", _TWO_SHAPES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
