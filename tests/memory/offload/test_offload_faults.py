"""A disk that fails or lies makes a layer fail, and never gives it wrong K/V; what is lost is one
step."""

from __future__ import annotations

import errno
import random
import threading
import time

import numpy as np
import pytest

from tests.support.memory.offloaded_units import BLOCK, units

ALL = range(32)


class Faults:
    """A plan that can be changed: `now` is what happens to the next transfers of a kind."""

    def __init__(self) -> None:
        self.now: dict[str, int | str] = {}
        self.seen = {"read": 0, "write": 0}

    def __call__(self, kind: str, number: int) -> int | str | None:
        self.seen[kind] += 1
        return self.now.get(kind)


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def kv(tmp_path, faults):
    max_bytes = 2 * 64 * BLOCK + 8 * BLOCK  # two layers and four units
    with units(tmp_path, sizes=[2 * BLOCK] * 4, max_bytes=max_bytes, plan=faults) as made:
        made.write_all()
        yield made


@pytest.mark.parametrize("fault", [errno.EIO, "short", "torn"])
def test_a_read_that_fails(kv, faults, fault):
    layer, _ = kv.away()
    faults.now["read"] = fault
    with pytest.raises(OSError, match="Errno 5") as caught:
        kv.begin(layer, ALL)
    assert ("is damaged on disk" in str(caught.value)) == (fault == "torn")
    assert kv.memory_bytes() <= kv.residency.counts().resident_bytes <= kv.max_bytes
    faults.now.clear()
    for layer in range(4):
        kv.visit(layer, ALL)


def test_a_byte_that_has_changed(kv, faults):
    for layer in (0, 1, 2, 3, 0, 1, 2, 3):
        kv.visit(layer, ALL)
    layer, tile = kv.away()
    kv.flip_byte(layer, tile)
    for _ in range(2):
        with pytest.raises(OSError, match=f"layer {layer}, tile {tile} is damaged on disk"):
            kv.begin(layer, ALL)
    kv.visit(layer, [other for other in ALL if other != tile])
    kv.release(tile // 2)  # the sequence has failed, and others use its pages
    kv.visit(layer, [], kv.tiles_of(tile // 2))
    kv.visit((layer + 1) % 4, [other for other in ALL if other // 2 != tile // 2])
    kv.visit(layer, ALL)


def test_a_write_that_fails_loses_nothing(kv, faults):
    kv.visit(3, [], ALL)
    kv.visit(2, [], ALL)
    faults.now["write"] = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        kv.begin(0, ALL)  # needs memory of units that are only there
    faults.now.clear()
    for _ in range(2):
        for layer in range(4):
            kv.visit(layer, ALL)


def test_a_write_in_the_background_is_repeated(tmp_path, faults, monkeypatch):
    monkeypatch.setattr("memory.offload.residency._RETRY_S", 0.01)
    with units(tmp_path, sizes=[BLOCK] * 4, max_bytes=3 * 32 * BLOCK, plan=faults) as kv:
        faults.now["write"] = errno.EIO
        for layer in (0, 1, 2, 0, 1, 2):
            kv.visit(layer, [], [0, 1] if (layer, 31) in kv.model else ALL)
        kv.residency.end()
        wait_until(lambda: faults.seen["write"] > 100)
        assert kv.residency.counts().written_bytes == 0
        faults.now.clear()
        wait_until(lambda: kv.residency.counts().written_bytes > 0)
        for layer in range(3):
            kv.visit(layer, ALL)


def wait_until(is_true, seconds=5.0):
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_fetching_ahead_fails_and_the_layer_tries_itself(kv, faults):
    layer = held_ahead(kv, faults, errno.EIO)
    kv.visit(layer, ALL)


def test_what_is_written_to_while_it_is_being_written(tmp_path, faults):
    """The transfer has the old content, or half of the new one: it counts for nothing."""
    with units(tmp_path, sizes=[BLOCK] * 4, max_bytes=3 * 32 * BLOCK, plan=faults) as kv:
        faults.now["write"] = "hold"
        for layer in (0, 1, 2, 0, 1, 2):
            kv.visit(layer, [], [0, 1] if (layer, 31) in kv.model else ALL)
        kv.residency.end()
        wait_until(lambda: faults.seen["write"] >= 30)
        faults.now.clear()
        for layer in range(3):  # now all of these are being written
            kv.visit(layer, ALL, ALL)
        kv.residency.end()
        kv.residency._file.file.release()
        wait_until(lambda: kv.residency.counts().written_bytes > 0)
        for _ in range(2):
            for layer in (3, 0, 1, 2):
                kv.visit(layer, ALL if layer < 3 else [], ALL if layer == 3 else [])


def held_ahead(kv, faults, fault="hold"):
    """Lets reads ahead of a layer begin that do not end, or fail. Returns the layer."""
    for layer in (0, 1, 2, 3, 0, 1, 2, 3):
        kv.visit(layer, ALL)
    kv.residency.end()
    faults.now["read"] = fault
    before = faults.seen["read"]
    layer, _ = kv.away()
    kv.residency.fetch_ahead(layer, np.arange(32))
    wait_until(lambda: faults.seen["read"] > before)
    faults.now.clear()
    return layer


def begun(work, *args):
    thread = threading.Thread(target=work, args=args)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    return thread


def test_a_layer_waits_for_what_is_on_its_way(kv, faults):
    layer = held_ahead(kv, faults)
    reads = faults.seen["read"]
    thread = begun(kv.visit, layer, ALL)
    kv.residency._file.file.release()
    thread.join(5)
    assert not thread.is_alive()
    assert faults.seen["read"] - reads < 32
    kv.compare(layer, ALL)


def test_forgetting_waits_for_transfers(kv, faults):
    held_ahead(kv, faults)

    def forget():
        for page in range(16):
            kv.release(page)

    thread = begun(forget)
    kv.residency._file.file.release()
    thread.join(5)
    assert not thread.is_alive()
    assert kv.memory_bytes() == kv.residency.counts().resident_bytes == 0


def test_closing_waits_for_transfers(tmp_path, faults):
    with units(tmp_path, sizes=[2 * BLOCK] * 4, max_bytes=136 * BLOCK, plan=faults) as kv:
        kv.write_all()
        held_ahead(kv, faults)
        thread = begun(kv.residency.close)
        kv.residency._file.file.release()
        thread.join(5)
        assert not thread.is_alive()
        kv.residency.close()  # does nothing


@pytest.mark.parametrize("seed", range(2))
def test_random_faults_leave_memory_and_content_as_they_should_be(tmp_path, seed):
    dice = random.Random(seed)

    def plan(kind, number):
        faults = (errno.EIO, "short", "torn") if kind == "read" else (errno.EIO, "short")
        return dice.choice(faults) if dice.random() < 0.1 else None

    num_failed = 0
    with units(tmp_path, plan=plan) as kv:
        for step in range(300):
            layer = step % 4
            known = [tile for tile in ALL if (layer, tile) in kv.model]
            read = dice.sample(known, len(known) * 2 // 3)
            try:
                kv.visit(layer, read, dice.sample(ALL, 3))
            except OSError:
                num_failed += 1
                for tile in ALL:  # what a failed layer has begun to write is not known
                    if (layer, tile) in kv.model and dice.random() < 0.01:
                        del kv.model[layer, tile]
            assert kv.memory_bytes() <= kv.max_bytes
    assert 5 < num_failed < 295
