"""What stays on a device, and what the start says of it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product
from math import inf

import pytest

from bench.plan.beyond_memory import device_needs
from bench.plan.shapes import Precision, load_shape
from serve.errors import ConfigError
from serve.loading.host_weights import placement
from serve.loading.host_weights.placement import (
    ROOM_SHARE,
    DeviceNeeds,
    HostPlacement,
    LayerNeeds,
    LinkSpeeds,
    expected_step_s,
    least_bytes,
    place,
    with_room,
)

DENSE = LayerNeeds(100)
SPARSE = LayerNeeds(100, 1000, 0.25)
MIXTURE = DeviceNeeds(50, (DENSE, SPARSE, SPARSE, SPARSE))
LAYERS = DeviceNeeds(50, (DENSE,) * 8)
SPEEDS = LinkSpeeds(host=1000.0, device=10000.0, link=100.0)
AMPLE = 1 << 60
LONG = pytest.mark.exhaustive


def place_with(needs: DeviceNeeds, budget: int) -> HostPlacement:
    """Places beside a host that can take everything."""
    return place(needs, budget, AMPLE, SPEEDS)


def test_everything_stays_if_it_fits():
    found = place_with(MIXTURE, MIXTURE.total)
    assert found.is_whole and not found.on_cpu and not found.ring_layers
    assert found.device_bytes == MIXTURE.total == 3450


@pytest.mark.parametrize(
    ("budget", "layers"), [(3449, {3}), (2450, {3}), (2449, {2, 3}), (450, {1, 2, 3})]
)
def test_experts_leave_from_the_last_layer_on(budget, layers):
    found = place_with(MIXTURE, budget)
    assert found.on_cpu == layers and not found.ring_layers
    assert found.device_bytes <= budget
    assert found.host_bytes == 1000 * len(layers)


@pytest.mark.parametrize("budget", range(250, 850, 50))
def test_layers_of_the_ring_are_spread(budget):
    found = place_with(LAYERS, budget)
    assert found.device_bytes <= budget
    ring = found.ring_layers
    assert found.buffers in (2, 3) and len(ring) >= found.buffers
    assert found.host_bytes == 100 * len(ring)
    resident = [number for number in range(8) if number not in ring]
    gaps = [after - before for before, after in pairwise(resident)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert len(resident) == (budget - 50) // 100 - found.buffers


def test_a_ring_beside_experts_on_the_cpu():
    found = place_with(MIXTURE, 349)
    assert found.on_cpu == {1, 2, 3} and found.buffers == 2
    assert found.ring_layers == [0, 1, 2, 3]
    assert found.device_bytes == 250 and found.host_bytes == 3400


def test_a_layer_without_products_is_no_part_of_the_ring():
    found = place_with(DeviceNeeds(0, (DENSE, LayerNeeds(0), DENSE, DENSE, DENSE)), 350)
    assert 1 not in found.ring_layers and found.ring_layers


def test_too_little_is_refused():
    assert least_bytes(LAYERS) == 250
    with pytest.raises(ConfigError, match=r"weight_memory_bytes 249 bytes .* 250 bytes"):
        place_with(LAYERS, 249)


def test_expected_times():
    """The CPU and the device take turns; the ring's copies are beside both."""
    whole = place_with(MIXTURE, MIXTURE.total)
    assert expected_step_s(MIXTURE, whole, SPEEDS) == pytest.approx((450 + 750) / 10000)
    on_cpu = place_with(MIXTURE, 450)
    assert expected_step_s(MIXTURE, on_cpu, SPEEDS) == pytest.approx(750 / 1000 + 450 / 10000)
    many = expected_step_s(MIXTURE, on_cpu, SPEEDS, rows=100)
    assert many == pytest.approx(3000 / 1000 + 450 / 10000)
    ring = place_with(LAYERS, 250)
    assert expected_step_s(LAYERS, ring, SPEEDS) == pytest.approx(800 / 100)


# -- three places


def brute_force(needs: DeviceNeeds, budget: int, host: int, speeds: LinkSpeeds) -> float:
    """Returns the seconds of the fastest choice of a place for each layer's products (device, host,
    disk) and experts (device, host), with any amount of the latter on the disk, and two buffers."""
    best, layers = inf, needs.layers
    kinds = [product("DHF", "DH" if layer.experts else "D") for layer in layers]
    for choice in product(*map(list, kinds)):
        ring = [n for n, (where, _) in enumerate(choice) if where != "D"]
        disk = [n for n in ring if choice[n][0] == "F"]
        on_cpu = [n for n, (_, where) in enumerate(choice) if where == "H"]
        buffers, staging = (
            min(2, len(each)) * max((layers[n].products for n in each), default=0)
            for each in (ring, disk)
        )
        experts = sum(layers[n].experts for n in on_cpu)
        used = needs.total - experts - sum(layers[n].products for n in ring) + buffers
        held = sum(layers[n].products for n in ring if n not in disk) + staging
        least = max((2 * layers[n].used_share * layers[n].experts for n in on_cpu), default=0)
        slots = min(experts, host - held)
        if used > budget or slots < least:
            continue
        placed = HostPlacement(
            frozenset(on_cpu),
            tuple(n not in ring for n in range(len(layers))),
            2,
            used,
            held + int(slots),
            frozenset(disk),
            2,
            int(slots) if slots < experts else None,
        )
        best = min(best, chosen_by(needs, placed, speeds))
    return best


def chosen_by(needs: DeviceNeeds, placed: HostPlacement, speeds: LinkSpeeds) -> float:
    """Returns the seconds of a step in which the host reads in turn what it copies and computes."""
    layers = needs.layers
    copied = sum(layers[n].products for n in placed.ring_layers)
    experts = sum(layers[n].experts_of(1) for n in placed.on_cpu)
    device = needs.fixed_bytes + sum(each.products + each.experts_of(1) for each in layers)
    turns = (experts + copied) / speeds.host + (device - experts) / speeds.device
    return max(expected_step_s(needs, placed, speeds), turns)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=LONG) for n in range(4, 60))])
def test_no_choice_is_much_faster(seed, monkeypatch):
    """As fast as all choices allow, but for the 5 % that fewer copies may cost."""
    monkeypatch.setattr(placement, "BUFFERS", 2)  # a third one costs memory for what is not counted
    drawn = random.Random(seed)
    sparse = LayerNeeds(100, drawn.choice([200, 400, 1000]), drawn.choice([0.05, 0.25, 0.5]))
    layers = tuple(drawn.choice([DENSE, sparse]) for _ in range(4))
    needs = DeviceNeeds(50, layers)
    speeds = LinkSpeeds(1000.0, 10000.0, drawn.choice([100.0, 300.0]), drawn.choice([10.0, 80.0]))
    for _ in range(8):
        budget = drawn.randrange(250, needs.total)
        host = drawn.randrange(100, needs.total)
        best = brute_force(needs, budget, host, speeds)
        try:
            found = place(needs, budget, host, speeds)
        except ConfigError:
            assert best == inf
            continue
        assert found.device_bytes <= budget and found.host_bytes <= host
        assert chosen_by(needs, found, speeds) <= 1.05 * best * (1 + 1e-9)


def test_what_the_host_cannot_take_is_on_the_disk_experts_first():
    found = place(MIXTURE, 450, 2000, SPEEDS)
    assert found.on_cpu == {1, 2, 3} and not found.on_disk
    assert (found.slot_bytes, found.host_bytes, found.disk_bytes) == (2000, 2000, 3000)
    found = place(LAYERS, 250, 550, SPEEDS)
    assert found.staging == 3 and len(found.on_disk) == 6 and found.host_bytes == 500
    assert found.on_disk == {0, 1, 3, 4, 5, 7} and found.disk_bytes == 600


def test_a_disk_slows_a_step():
    slow = replace(SPEEDS, disk=1.0)
    layers = place(LAYERS, 250, 550, slow)
    assert expected_step_s(LAYERS, layers, slow) == pytest.approx(600)
    experts = place(MIXTURE, 450, 2000, slow)
    assert expected_step_s(MIXTURE, experts, slow) == pytest.approx(3000 * 0.25 / 3)


def test_too_little_of_the_host_is_refused():
    with pytest.raises(ConfigError, match=r"host_weight_bytes 199 bytes .* 200 bytes"):
        place(LAYERS, 250, 199, SPEEDS)
    with pytest.raises(ConfigError, match=r"host_weight_bytes 499 bytes .* 500 bytes"):
        place(MIXTURE, 450, 499, SPEEDS)


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss-20b", "olmoe-1b-7b"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_of_real_mixtures_experts_leave_alone(model, share):
    """As long as the host can take them, no layer comes through the ring."""
    shape = load_shape(model)
    needs = device_needs(shape, Precision("int8", "int8"))
    speeds = LinkSpeeds(host=6e10, device=1e12, link=2.5e10)
    found = place(needs, int(share * needs.total), 1 << 60, speeds)
    assert not found.ring_layers
    experts = needs.layers[-1].experts
    assert 0 <= int(share * needs.total) - found.device_bytes < experts


def test_a_further_mixture_leaves_the_device_if_its_room_is_needed():
    needs = DeviceNeeds(100, (LayerNeeds(1000, 1000, 0.1),) * 4)

    def both(budget, host=10**6):
        placed = place(needs, budget, host, SPEEDS)
        return placed, with_room(needs, budget, host, SPEEDS, placed)

    for budget in (needs.total - 10, needs.total - 1000):
        _, found = both(budget)
        assert budget - found.device_bytes >= ROOM_SHARE * 1000
    for budget in (needs.total - 100, least_bytes(needs), needs.total):  # roomy, the least, all
        placed, found = both(budget)
        assert found is placed
    full, found = both(needs.total - 1000, host=1000)
    assert not full.disk_bytes, "the host takes one mixture"
    assert found is full, "the host has no room for another one"
    from_disk, found = both(needs.total - 2500, host=2000)
    assert from_disk.disk_bytes and found is from_disk
