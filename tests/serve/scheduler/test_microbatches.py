"""Dealing a step's rows to two batches, and learning when that pays."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from serve.scheduler.microbatches import LearnedMicrobatches, split_in_two
from serve.scheduler.step_plan import StepPlan
from tests.support.engine.fakes import make_seq


def make_plan(decodes: list[int], chunks: list[tuple[int, int]] = ()) -> StepPlan:  # type: ignore[assignment]
    """decodes: computed tokens of each; chunks: (rows, computed tokens)."""
    sequences = []
    for computed in [*decodes, *(computed for _, computed in chunks)]:
        sequences.append(make_seq(3, request_id=str(len(sequences))))
        sequences[-1].num_computed_tokens = computed
    num_rows = [1] * len(decodes) + [rows for rows, _ in chunks]
    samples = [number % 3 != 2 for number in range(len(sequences))]
    return StepPlan(sequences, num_rows, len(decodes), samples, sum(num_rows))


def loads(plan: StepPlan, places: list[int]) -> list[int]:
    return [plan.num_rows[p] * (1 + plan.sequences[p].num_computed_tokens) for p in places]


def test_one_sequence_is_not_halved() -> None:
    assert split_in_two(make_plan([7])) is None
    assert split_in_two(make_plan([], [(64, 0)])) is None


@pytest.mark.parametrize("seed", range(20))
def test_halves_are_balanced_and_whole(seed: int) -> None:
    rng = random.Random(seed)
    plan = make_plan(
        [rng.randrange(3000) for _ in range(rng.randrange(2, 40))],
        [(rng.randrange(2, 200), rng.choice([0, 500])) for _ in range(rng.randrange(3))],
    )
    halves = split_in_two(plan)
    assert halves is not None and all(halves)
    assert sorted([*halves[0], *halves[1]]) == list(range(len(plan.sequences)))
    one, other = (loads(plan, places) for places in halves)
    assert abs(sum(one) - sum(other)) <= max(one + other)
    for places in halves:
        part = plan.subset(places)
        assert places == sorted(places)
        assert part.sequences == [plan.sequences[p] for p in places]
        assert part.samples == [plan.samples[p] for p in places]
        assert all(rows == 1 for rows in part.num_rows[: part.num_decodes])
        assert part.num_decodes == len([p for p in places if p < plan.num_decodes])
        assert part.num_total_rows == sum(part.num_rows)


def test_many_small_ones_stand_against_a_large_one() -> None:
    halves = split_in_two(make_plan([10] * 30 + [320]))
    assert halves == ([30], list(range(30)))
    assert split_in_two(make_plan([10] * 8, [(64, 900)])) == ([8], list(range(8)))


def steps_split(
    choice: LearnedMicrobatches,
    seconds: Callable[[bool], float],
    num_steps: int,
    num_decodes: int = 16,
) -> list[bool]:
    ways = []
    for _ in range(num_steps):
        ways.append(choice.splits(num_decodes, 0))
        choice.learn(num_decodes, 0, ways[-1], seconds(ways[-1]))
    return ways


@pytest.mark.parametrize("is_better", [False, True])
def test_the_faster_way_is_found_and_kept(is_better: bool) -> None:
    rng = random.Random(3)
    choice = LearnedMicrobatches()

    def seconds(is_split: bool) -> float:
        stall = 5.0 if rng.random() < 0.05 else 1.0
        return rng.uniform(0.95, 1.05) * stall * (1.0 if is_split == is_better else 1.4)

    ways = steps_split(choice, seconds, 1000)
    assert ways[:5] == [False] * 5 and ways[5:10] == [True] * 5
    assert ways[10:].count(not is_better) <= 40, "tried now and then"
    assert ways[200:].count(not is_better) > 0


def test_equal_ways_are_left_as_they_are() -> None:
    rng = random.Random(4)
    ways = steps_split(LearnedMicrobatches(), lambda is_split: rng.uniform(0.995, 1.005), 1000)
    assert ways.count(True) <= 40


def test_it_learns_again() -> None:
    """Contexts grow, and attention takes as long as the products; then it is quick again."""
    choice = LearnedMicrobatches()
    quick = steps_split(choice, lambda is_split: 1.1 if is_split else 1.0, 1500)
    assert quick[-50:].count(True) <= 5
    slow = steps_split(choice, lambda is_split: 1.2 if is_split else 2.0, 600)
    assert slow[-50:].count(True) >= 45
    again = steps_split(choice, lambda is_split: 1.1 if is_split else 1.0, 600)
    assert again[-50:].count(True) <= 5


def test_times_that_grow_slowly_do_not_mislead() -> None:
    """A step gets slower with every token: ways are compared with their neighbours in time."""
    choice, growth = LearnedMicrobatches(), 1.0

    def seconds(is_split: bool) -> float:
        nonlocal growth
        growth *= 1.001
        return growth * (1.0 if is_split else 1.3)

    assert steps_split(choice, seconds, 2000)[100:].count(False) <= 60


def test_sizes_are_learned_apart() -> None:
    """Few rows wait for the weights, many do not."""
    choice = LearnedMicrobatches()
    for _ in range(300):
        few = steps_split(choice, lambda is_split: 2.0 if is_split else 1.0, 1, num_decodes=4)
        many = steps_split(choice, lambda is_split: 1.0 if is_split else 1.7, 1, num_decodes=64)
    assert (few, many) == ([False], [True])
    assert choice.splits(num_decodes=64, num_prompt_rows=0)
    assert not choice.splits(num_decodes=64, num_prompt_rows=512), "has not been seen"
