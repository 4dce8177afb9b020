"""Hot experts in slots of the device beside cold ones, and experts that come for many rows."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ops.cpu import native_library
from serve.loading.host_weights.device_experts import (
    DeviceExperts,
    rows_worth_copying,
    share_room,
)
from serve.loading.host_weights.expert_ring import ExpertRing
from serve.loading.host_weights.hot_experts import HotExperts
from serve.loading.host_weights.link import Wait
from tests.support.cuda.late_link import LateLink
from tests.support.cuda.small_experts import (
    EXPERTS,
    SIZE,
    SmallLayer,
    join,
    memories,
    pack_int8,
    pack_plain,
    routing_of,
    small_layers,
)

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="needs the native kernels"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the device here is the interpreter's"),
    pytest.mark.usefixtures("seeded"),
]

COPIES = 4
LONG = pytest.mark.exhaustive
PACKS = [pack_plain, pack_int8]


def hot_layers(
    num_slots: int, count: int = 2, **how: object
) -> tuple[list[SmallLayer], DeviceExperts, HotExperts]:
    link = LateLink()
    layers = small_layers(count, link, **how)  # type: ignore[arg-type]
    hot = HotExperts(memories(layers), num_slots, COPIES, link)
    shared = DeviceExperts(hot, None, None, 0)
    join(layers, shared)
    return layers, shared, hot


def close(found: Tensor, want: Tensor) -> None:
    """The CPU's products are the same numbers, but for bf16 at other places."""
    torch.testing.assert_close(found, want, rtol=2**-6, atol=2**-6)


def step(layers: list[SmallLayer], shared: DeviceExperts, *experts: list[int]) -> None:
    """Computes the same experts in every layer, and compares with those on the device."""
    shared.begin_step()
    routing = routing_of(*experts)
    for layer in layers:
        x = torch.randn(len(experts), SIZE)
        close(layer.host(x, routing), layer.device(x, routing))


def use(shared: DeviceExperts, times: int, experts: list[int]) -> None:
    """Counts steps that use these experts in every layer, without computing them."""
    assert shared.hot is not None
    for _ in range(times):
        shared.begin_step()
        for layer in range(len(shared.hot.slot_of)):
            shared.hot.is_cold(layer, np.array([experts]))


@pytest.mark.parametrize(
    ("pack", "count"), [(pack_plain, 1), *(pytest.param(p, 2, marks=LONG) for p in PACKS)]
)
def test_what_is_used_most_gets_the_slots_and_has_the_bits_of_the_device(pack, count):
    layers, shared, hot = hot_layers(2 * count, count=count, pack=pack)
    use(shared, 3, [0, 3])
    assert hot.hits == 2 * count  # in the third step
    assert sorted(np.flatnonzero(hot.slot_of[0] >= 0)) == [0, 3]
    if count > 1:
        step(layers, shared, [3, 1])
    use(shared, 8, [1, 4])  # they become hotter, and take the places of the others
    assert torch.equal(hot._table, torch.from_numpy(hot.slot_of))
    for layer, row in zip(layers, hot.slot_of, strict=True):
        assert sorted(np.flatnonzero(row >= 0)) == [1, 4]
        x, routing, residual = torch.randn(1, SIZE), routing_of([4, 1]), torch.randn(1, SIZE)
        want = layer.device(x, routing, residual.clone())
        assert torch.equal(layer.host(x, routing, residual), want)


def test_an_expert_is_used_from_the_step_after_its_copy():
    layers, shared, hot = hot_layers(2, count=1)
    size = memories(layers)[0].memory[0].nbytes
    for hits, copied in ((0, 0), (0, 2), (2, 2)):  # counted, copied beside a step, there
        use(shared, 1, [2, 1])
        assert (hot.hits, hot.copied_bytes) == (hits, copied * size)


def test_few_experts_are_copied_beside_a_step_and_none_for_a_little_more_use():
    layers, shared, hot = hot_layers(2 * EXPERTS)
    size = memories(layers)[0].memory[0].nbytes
    use(shared, 1, list(range(EXPERTS)))
    shared.begin_step()
    assert hot.copied_bytes == COPIES * size
    for _ in range(3):
        shared.begin_step()
    assert hot.copied_bytes == 2 * EXPERTS * size
    layers, shared, hot = hot_layers(1, count=1)
    use(shared, 1, [0])
    use(shared, 1, [1])
    for _ in range(2):
        shared.begin_step()
    assert hot.slot_of[0].tolist() == [0, -1, -1, -1, -1]


def test_a_step_that_fails_leaves_every_expert_in_one_place():
    layers, shared, hot = hot_layers(1, count=1)
    use(shared, 1, [2])

    def lost(target: Tensor, source: Tensor) -> Wait:
        raise RuntimeError("an illegal access")

    link = hot._link
    hot._link = type("Lost", (), {"fetch": staticmethod(lost)})()
    with pytest.raises(RuntimeError, match="illegal access"):
        shared.begin_step()
    hot._link = link
    use(shared, 2, [2])
    step(layers, shared, [2])
    assert hot.slot_of[0].tolist() == [-1, -1, 0, -1, -1]


@pytest.mark.parametrize("hot_expert", [0, 1, 2])
def test_a_row_is_summed_in_the_order_of_its_choice_wherever_experts_are(hot_expert):
    """Each expert gives a constant, so large that the order of the sum shows."""
    constants = [2.0**30, 1.0, -(2.0**30), 0.0, 0.0]
    layers, shared, hot = hot_layers(1, count=1, constants=constants)
    use(shared, 3, [hot_expert])
    assert hot.slot_of[0, hot_expert] == 0
    orders = [list(each) for each in permutations(range(3))]
    routing = routing_of(*orders)._replace(weights=torch.ones(6, 3))
    found = layers[0].host(torch.randn(6, SIZE), routing)[:, 0].tolist()
    assert found == [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]


def test_experts_that_scale_their_input():
    layers, shared, _ = hot_layers(1, count=1, scales_input=True)
    use(shared, 3, [2])
    step(layers, shared, [2, 0])


def test_rows_of_no_sequence_may_name_any_expert():
    layers, _, _ = hot_layers(1, count=1)
    x, routing = torch.full((1, SIZE), float("nan")), routing_of([-7, 1000])
    assert layers[0].host(x, routing).shape == x.shape


@pytest.mark.parametrize(
    ("at_once", "pack", "count"),
    [(2, pack_plain, 1), *(pytest.param(2, pack, 2, marks=LONG) for pack in PACKS)],
)
def test_experts_for_many_rows_have_the_bits_of_the_device(at_once, pack, count):
    link = LateLink()
    layers = small_layers(count, link, pack)
    ring = ExpertRing(memories(layers), at_once, link)
    join(layers, DeviceExperts(None, ring, 2, 0))
    for _ in range(2):
        for layer in layers:
            x, routing = torch.randn(2, SIZE), routing_of([0, 4], [3, 2])
            layer.host.begin(x, routing)
            assert torch.equal(layer.host(x, routing), layer.device(x, routing))
    assert [each.host.num_rows for each in layers] == [0] * count
    assert ring.copied_experts == 2 * count * EXPERTS
    x, routing = torch.randn(1, SIZE), routing_of([4, 1])
    close(layers[0].host(x, routing), layers[0].device(x, routing))
    assert layers[0].host.num_rows == 1


def test_the_device_takes_no_more_than_its_room():
    link = LateLink()
    layers = memories(small_layers(2, link))
    first = layers[0]
    slot = first.up.device_bytes + first.down.device_bytes
    assert share_room(layers, slot, link, 1) is None
    kinds = set()
    for room in range(slot, 40 * slot, slot):
        for min_rows in (None, 4):
            found = share_room(layers, room, link, min_rows)
            if found is None:
                continue
            used = 0
            if found.hot is not None:
                used += found.hot.num_slots * slot + found.hot._raw.nbytes
            if found.ring is not None:
                used += len(found.ring._ups.ops) * slot + found.ring.ring.buffer_bytes
            assert 0 < used <= found.num_bytes <= room
            assert found.min_rows == (min_rows if found.ring is not None else None)
            kinds.add((found.hot is not None, found.ring is not None))
    assert kinds == {(True, False), (False, True), (True, True)}
    assert found is not None and found.hot is not None and found.hot.num_slots == 2 * EXPERTS


def test_rows_are_copied_from_where_the_cpu_takes_longer():
    assert rows_worth_copying(1.0, lambda rows: rows / 100) == 128
    assert rows_worth_copying(1.0, lambda rows: 2.0) == 1
    assert rows_worth_copying(1.0, lambda rows: rows / 1e6) is None
