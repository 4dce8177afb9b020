"""What stays in memory: the best of all choices, within the budget, evenly spread."""

from __future__ import annotations

import itertools
import random

import pytest

from serve.errors import ConfigError
from serve.loading.streaming.placement import (
    Mixtures,
    Needs,
    Speeds,
    expected_step_s,
    least_bytes,
    place,
    share_slots,
    spread,
)

EXPERTS = Mixtures((8, 8, 8), 2, 100)


def needs(units: tuple[int, ...], mixtures: tuple[Mixtures, ...] = ()) -> Needs:
    return Needs(fixed_bytes=50, table_bytes=1000, row_bytes=10, units=units, mixtures=mixtures)


def best(sizes: tuple[int, ...], budget: int) -> int:
    """Returns the most bytes that can be resident, of all choices of units."""
    sums = (
        sum(chosen)
        for count in range(len(sizes) + 1)
        for chosen in itertools.combinations(sizes, count)
    )
    return max(total for total in sums if total <= budget)


@pytest.mark.parametrize("seed", range(40))
def test_of_equal_layers_as_many_stay_as_can(seed: int) -> None:
    """The greedy choice is the optimum of the program, but for the unit that it would cut."""
    draw = random.Random(seed)
    sizes = (draw.randint(1, 50),) * draw.randint(3, 12)
    budget = least_bytes(needs(sizes)) + draw.randint(0, sum(sizes))
    made = place(needs(sizes), budget)
    left = budget - 60 - made.buffers * made.buffer_bytes
    resident = sum(size for size, stays in zip(sizes, made.is_resident, strict=True) if stays)
    assert made.num_bytes <= budget
    assert resident == best(sizes, left)
    assert made.streamed_bytes == sum(sizes) - resident


@pytest.mark.parametrize("seed", range(40))
def test_of_unequal_layers_less_than_one_is_lost(seed: int) -> None:
    draw = random.Random(seed)
    sizes = tuple(draw.randint(20, 60) for _ in range(draw.randint(3, 10)))
    budget = draw.randint(0, sum(sizes))
    chosen = spread(sizes, budget)
    resident = sum(size for size, stays in zip(sizes, chosen, strict=True) if stays)
    assert resident <= budget
    assert sum(chosen) >= budget // max(sizes)


@pytest.mark.parametrize("number", [6, 7, 16, 33])
def test_resident_layers_are_spread(number: int) -> None:
    """So that the disk reads while they are computed."""
    for count in range(1, number):
        chosen = spread((10,) * number, 10 * count)
        places = [at for at, stays in enumerate(chosen) if stays]
        assert len(places) == count
        gaps = [b - a for a, b in itertools.pairwise([*places, places[0] + number])]
        assert max(gaps) - min(gaps) <= 1


def test_everything_stays_if_it_fits() -> None:
    every = needs((100, 200), (EXPERTS,))
    made = place(every, every.total)
    assert made.num_bytes == every.total and made.streamed_bytes == 0
    assert made.has_tables and made.slots == (24,) and all(made.is_resident)
    made = place(every, every.total - 1)
    assert (made.num_bytes < every.total and not made.has_tables) or made.slots < (24,)


def test_layers_come_before_experts_and_experts_before_tables() -> None:
    every = needs((100, 200, 100, 100), (EXPERTS,))
    full = 60 + 500
    made = place(every, full + 1000)
    assert all(made.is_resident) and made.slots == (10,) and not made.has_tables
    made = place(every, full + 2400 + 980)
    assert made.slots == (24,) and not made.has_tables
    made = place(every, full + 399)  # not even the least of the experts beside all layers
    assert not all(made.is_resident) and made.slots == (EXPERTS.min_slots,)


def test_what_cannot_be_computed_is_refused() -> None:
    every = needs((100, 200, 100), (EXPERTS,))
    least = least_bytes(every)
    assert least == 50 + 10 + 2 * 200 + 4 * 100
    assert place(every, least).num_bytes <= least
    with pytest.raises(ConfigError, match=r"weight_memory_bytes .* is too little"):
        place(every, least - 1)


def test_slots_of_several_groups_share_the_memory() -> None:
    groups = (EXPERTS, Mixtures((4,), 1, 1000))
    for budget in range(6000, 7000, 37):
        slots = share_slots(groups, budget - 600)
        used = sum(n * each.slot_bytes for n, each in zip(slots, groups, strict=True))
        assert used <= budget - 600
        assert all(each.min_slots <= n <= each.total for n, each in zip(slots, groups, strict=True))
    assert share_slots(groups, 1 << 20) == (24, 4)


def test_the_expected_time_is_that_of_the_slower_one() -> None:
    layers = needs((100, 100, 100, 100))
    made = place(layers, 60 + 300 + 50)
    assert made.streamed_bytes == 400
    assert expected_step_s(layers, made, Speeds(disk=100, memory=1e9)) == pytest.approx(4)
    assert expected_step_s(layers, made, Speeds(disk=1e9, memory=45)) == pytest.approx(10)
    experts = needs((100,), (EXPERTS,))
    made = place(experts, 60 + 100 + 1200)
    one = expected_step_s(experts, made, Speeds(disk=100, memory=1e9))
    assert one == pytest.approx(3 * 2 * 0.5)  # three mixtures, two experts each, half of them here
    many = expected_step_s(experts, made, Speeds(disk=100, memory=1e9), rows=1000)
    assert many == pytest.approx(3 * 8 * 0.5)
