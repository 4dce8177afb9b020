"""What stays on a device, and what the start says of it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from serve.errors import ConfigError
from serve.loading.host_weights.placement import (
    DeviceNeeds,
    LayerNeeds,
    LinkSpeeds,
    expected_step_s,
    least_bytes,
    place,
)

DENSE = LayerNeeds(100)
SPARSE = LayerNeeds(100, 1000, 0.25)
MIXTURE = DeviceNeeds(50, (DENSE, SPARSE, SPARSE, SPARSE))
LAYERS = DeviceNeeds(50, (DENSE,) * 8)
SPEEDS = LinkSpeeds(host=1000.0, device=10000.0, link=100.0)


def test_everything_stays_if_it_fits():
    found = place(MIXTURE, MIXTURE.total)
    assert found.is_whole and not found.on_cpu and not found.ring_layers
    assert found.device_bytes == MIXTURE.total == 3450


@pytest.mark.parametrize(
    ("budget", "layers"), [(3449, {3}), (2450, {3}), (2449, {2, 3}), (450, {1, 2, 3})]
)
def test_experts_leave_from_the_last_layer_on(budget, layers):
    found = place(MIXTURE, budget)
    assert found.on_cpu == layers and not found.ring_layers
    assert found.device_bytes <= budget
    assert found.host_bytes == 1000 * len(layers)


@pytest.mark.parametrize("budget", range(250, 850, 50))
def test_layers_of_the_ring_are_spread(budget):
    found = place(LAYERS, budget)
    assert found.device_bytes <= budget
    ring = found.ring_layers
    assert found.buffers in (2, 3) and len(ring) >= found.buffers
    assert found.host_bytes == 100 * len(ring)
    resident = [number for number in range(8) if number not in ring]
    gaps = [after - before for before, after in pairwise(resident)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert len(resident) == (budget - 50) // 100 - found.buffers


def test_a_ring_beside_experts_on_the_cpu():
    found = place(MIXTURE, 349)
    assert found.on_cpu == {1, 2, 3} and found.buffers == 2
    assert found.ring_layers == [0, 1, 2, 3]
    assert found.device_bytes == 250 and found.host_bytes == 3400


def test_a_layer_without_products_is_no_part_of_the_ring():
    found = place(DeviceNeeds(0, (DENSE, LayerNeeds(0), DENSE, DENSE, DENSE)), 350)
    assert 1 not in found.ring_layers and found.ring_layers


def test_too_little_is_refused():
    assert least_bytes(LAYERS) == 250
    with pytest.raises(ConfigError, match=r"weight_memory_bytes 249 bytes .* 250 bytes"):
        place(LAYERS, 249)


def test_expected_times():
    """The CPU and the device take turns; the ring's copies are beside both."""
    whole = place(MIXTURE, MIXTURE.total)
    assert expected_step_s(MIXTURE, whole, SPEEDS) == pytest.approx((450 + 750) / 10000)
    on_cpu = place(MIXTURE, 450)
    assert expected_step_s(MIXTURE, on_cpu, SPEEDS) == pytest.approx(750 / 1000 + 450 / 10000)
    many = expected_step_s(MIXTURE, on_cpu, SPEEDS, rows=100)
    assert many == pytest.approx(3000 / 1000 + 450 / 10000)
    ring = place(LAYERS, 250)
    assert expected_step_s(LAYERS, ring, SPEEDS) == pytest.approx(800 / 100)
