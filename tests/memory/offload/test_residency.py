"""K/V that is read is there, with the bytes that were written, in no more memory than allowed."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from memory.offload import scratch_file
from tests.support.memory.offloaded_units import BLOCK, units


@pytest.mark.covering(1)
@pytest.mark.parametrize("io", ["auto", "threads"])
@pytest.mark.parametrize("seed", range(3))
def test_random_steps_against_a_model(tmp_path, monkeypatch, seed, io):
    if io == "threads":
        monkeypatch.setattr(scratch_file, "choose_io", lambda directory: "threads")
    dice = random.Random(seed)
    with units(tmp_path) as kv:
        for _ in range(60):
            a_step(kv, dice)
            kv.residency.end()
            assert kv.memory_bytes() <= kv.max_bytes
            event = dice.random()
            if event < 0.1:
                kv.release(dice.randrange(16))
            elif event < 0.2:
                kv.copy(*dice.sample(range(16), 2))
        counts = kv.residency.counts()
        assert counts.fetched_bytes > 0 and counts.written_bytes > 0
        assert 0 < counts.units_held < counts.units_read


def a_step(kv, dice):
    """Visits all layers. Each reads some tiles, writes to a few, and may expect some later."""
    num_layers = len(kv.sizes)
    written = dice.sample(range(kv.num_tiles), dice.randrange(1, 5))
    for layer in range(num_layers):
        known = [tile for tile in range(kv.num_tiles) if (layer, tile) in kv.model]
        read = dice.sample(known, dice.randrange(len(known) + 1))
        if dice.random() < 0.5:
            tiles = dice.sample(range(kv.num_tiles), dice.randrange(1, kv.num_tiles))
            kv.residency.fetch_ahead((layer + 1) % num_layers, np.array(tiles))
        kv.visit(layer, read + read[:3], written)
        assert kv.memory_bytes() <= kv.max_bytes


def test_a_layer_that_does_not_fit_fails_and_a_smaller_one_goes_on(tmp_path):
    with units(tmp_path, sizes=[BLOCK] * 4, max_bytes=8 * BLOCK) as kv:
        with pytest.raises(OSError, match="no K/V can leave memory"):
            kv.begin(0, [], range(9))
        for layer in (0, 1, 0):
            kv.visit(layer, [], range(8))


def test_what_fits_is_never_written(tmp_path):
    with units(tmp_path, max_bytes=2**30) as kv:
        for _ in range(3):
            kv.write_all()
        time.sleep(0.05)
        counts = kv.residency.counts()
        assert counts.written_bytes == counts.fetched_bytes == 0


def test_a_circle_larger_than_memory_finds_what_fits(tmp_path):
    """Memory for half of all units: half are found at each step, where the oldest first would find
    none."""
    with units(tmp_path, sizes=[BLOCK] * 16, max_bytes=8 * 32 * BLOCK) as kv:
        kv.write_all()
        for _ in range(4):
            before = kv.residency.counts()
            for layer in range(16):
                kv.visit(layer, range(kv.num_tiles))
            kv.residency.end()
            after = kv.residency.counts()
        read = after.units_read - before.units_read
        held = after.units_held - before.units_held
        assert after.resident_bytes == kv.max_bytes
        assert read == 16 * kv.num_tiles
        assert held >= 0.4 * read


def test_what_is_read_often_stays(tmp_path):
    """A quarter of the tiles is read at each step, some others once; there is memory for half."""
    dice = random.Random(1)
    with units(tmp_path, sizes=[BLOCK] * 16, max_bytes=8 * 32 * BLOCK) as kv:
        kv.write_all()
        often = range(0, kv.num_tiles, 4)
        for step in range(20):
            before = kv.residency.counts()
            for layer in range(16):
                once = dice.sample([t for t in range(kv.num_tiles) if t % 4], 4)
                begin = kv.residency.counts().units_held
                kv.begin(layer, often)
                if step > 5:
                    assert kv.residency.counts().units_held - begin == len(often)
                kv.visit(layer, [*often, *once])
            kv.residency.end()
        assert kv.residency.counts().fetched_bytes > before.fetched_bytes  # others come and go


def test_the_next_layer_is_fetched_while_one_computes(tmp_path):
    with units(tmp_path, sizes=[BLOCK] * 16, max_bytes=4 * 32 * BLOCK) as kv:
        kv.write_all()
        for layer in (*range(16), *range(4)):  # nothing is left that must be written
            kv.visit(layer, range(kv.num_tiles))
        kv.residency.fetch_ahead(4, np.arange(kv.num_tiles))
        wait_until(lambda: kv.residency.counts().ahead_bytes == kv.num_tiles * BLOCK)
        before = kv.residency.counts()
        kv.compare(3, range(kv.num_tiles))  # it has stayed
        kv.visit(4, range(kv.num_tiles))
        after = kv.residency.counts()
        assert after.fetched_bytes == before.fetched_bytes
        assert after.units_held - before.units_held == kv.num_tiles


def wait_until(is_true, seconds=5.0):
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_new_kv_is_written_before_its_memory_is_needed(tmp_path):
    with units(tmp_path, sizes=[BLOCK] * 4, max_bytes=3 * 32 * BLOCK) as kv:
        for layer in range(3):  # fills memory
            kv.visit(layer, [], range(kv.num_tiles))
        for layer in range(3):  # tiles 0 and 1 are still written to
            kv.visit(layer, [], [0, 1])
        kv.residency.end()
        kv.visit(2, [], [0, 1])
        kv.residency.end()
        expected = 3 * (kv.num_tiles - 2) * BLOCK
        wait_until(lambda: kv.residency.counts().written_bytes >= expected)
        assert kv.residency.counts().written_bytes == expected


def test_forgotten_pages_are_begun_anew(tmp_path):
    with units(tmp_path) as kv:
        kv.write_all()
        used = kv.residency.counts().resident_bytes
        for page in range(8):
            kv.release(page)
        assert kv.residency.counts().resident_bytes < used
        assert kv.memory_bytes() <= kv.residency.counts().resident_bytes
        with pytest.raises(OSError, match="was never written"):
            kv.begin(0, [3])
        kv.visit(0, [], [3])
        kv.visit(0, [3, 20])


def test_a_page_that_is_begun_again_without_being_forgotten(tmp_path):
    """Its old content is not read, wherever it is."""
    with units(tmp_path) as kv:
        kv.write_all()
        before = kv.residency.counts().fetched_bytes
        for layer in range(4):
            for tile in range(8):
                del kv.model[layer, tile]
            kv.visit(layer, [], range(8))
        assert kv.residency.counts().fetched_bytes == before
        for layer in range(4):
            kv.visit(layer, range(kv.num_tiles))


def test_a_page_is_copied_wherever_its_units_are(tmp_path):
    with units(tmp_path, bounds_page_bytes=BLOCK) as kv:
        kv.write_all()
        for layer in (1, 2):  # the first page's units of these are in memory, others are not
            kv.visit(layer, [0, 1])
        kv.residency.end()
        for source, target in ((0, 5), (0, 6), (5, 7), (9, 0)):
            kv.copy(source, target)
            assert kv.memory_bytes() <= kv.max_bytes
        for _ in range(2):
            for layer in range(4):
                kv.visit(layer, range(kv.num_tiles))


def test_a_part_of_a_page_is_copied(tmp_path):
    with units(tmp_path) as kv:
        for layer in range(4):
            kv.visit(layer, [], [0])
        kv.copy(0, 3)
        for layer in range(4):
            kv.visit(layer, [6], [0])
        with pytest.raises(OSError, match="was never written"):
            kv.begin(0, [7])


def test_fetching_ahead_races_with_layers(tmp_path):
    """Another thread expects random tiles all the time."""
    dice, is_over = random.Random(5), threading.Event()
    with units(tmp_path) as kv:
        kv.write_all()

        def expect():
            while not is_over.is_set():
                tiles = dice.sample(range(kv.num_tiles), 12)
                kv.residency.fetch_ahead(dice.randrange(4), np.array(tiles))

        thread = threading.Thread(target=expect)
        thread.start()
        try:
            for step in range(150):
                layer = step % 4
                kv.visit(layer, range(kv.num_tiles), [step % kv.num_tiles])
                assert kv.memory_bytes() <= kv.max_bytes
                if step % 10 == 9:
                    kv.residency.end()
                    kv.copy(step % 16, (step + 3) % 16)
        finally:
            is_over.set()
            thread.join()
