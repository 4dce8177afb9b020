"""A step's rows are split into two micro-batches, and when that pays is learned."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from serve.scheduler.microbatches import LearnedMicrobatches, split_in_two
from serve.scheduler.step_plan import StepPlan
from tests.support.engine.fakes import make_seq


def make_plan(decodes: list[int], chunks: list[tuple[int, int]] = ()) -> StepPlan:  # type: ignore[assignment]
    """Makes a plan. decodes: computed tokens of each; chunks: (rows, computed tokens)."""
    sequences = []
    for computed in [*decodes, *(computed for _, computed in chunks)]:
        sequences.append(make_seq(3, request_id=str(len(sequences))))
        sequences[-1].num_computed_tokens = computed
    num_rows = [1] * len(decodes) + [rows for rows, _ in chunks]
    samples = [number % 3 != 2 for number in range(len(sequences))]
    return StepPlan(sequences, num_rows, len(decodes), samples, sum(num_rows))


def loads(plan: StepPlan, indices: list[int]) -> list[int]:
    return [plan.num_rows[p] * (1 + plan.sequences[p].num_computed_tokens) for p in indices]


def test_a_single_sequence_is_not_split() -> None:
    assert split_in_two(make_plan([7])) is None
    assert split_in_two(make_plan([], [(64, 0)])) is None


@pytest.mark.parametrize("seed", range(20))
def test_microbatches_are_balanced_and_complete(seed: int) -> None:
    rng = random.Random(seed)
    plan = make_plan(
        [rng.randrange(3000) for _ in range(rng.randrange(2, 40))],
        [(rng.randrange(2, 200), rng.choice([0, 500])) for _ in range(rng.randrange(3))],
    )
    microbatches = split_in_two(plan)
    assert microbatches is not None and all(microbatches)
    assert sorted([*microbatches[0], *microbatches[1]]) == list(range(len(plan.sequences)))
    one, other = (loads(plan, indices) for indices in microbatches)
    assert abs(sum(one) - sum(other)) <= max(one + other)
    for indices in microbatches:
        part = plan.subset(indices)
        assert indices == sorted(indices)
        assert part.sequences == [plan.sequences[p] for p in indices]
        assert part.samples == [plan.samples[p] for p in indices]
        assert all(rows == 1 for rows in part.num_rows[: part.num_decodes])
        assert part.num_decodes == len([p for p in indices if p < plan.num_decodes])
        assert part.num_total_rows == sum(part.num_rows)


def test_many_small_sequences_balance_a_large_one() -> None:
    microbatches = split_in_two(make_plan([10] * 30 + [320]))
    assert microbatches == ([30], list(range(30)))
    assert split_in_two(make_plan([10] * 8, [(64, 900)])) == ([8], list(range(8)))


def steps_split(
    choice: LearnedMicrobatches,
    seconds: Callable[[bool], float],
    num_steps: int,
    num_decodes: int = 16,
) -> list[bool]:
    modes = []
    for _ in range(num_steps):
        modes.append(choice.splits(num_decodes, 0))
        choice.learn(num_decodes, 0, modes[-1], seconds(modes[-1]))
    return modes


@pytest.mark.parametrize("is_better", [False, True])
def test_the_faster_mode_is_found_and_kept(is_better: bool) -> None:
    rng = random.Random(3)
    choice = LearnedMicrobatches()

    def seconds(is_split: bool) -> float:
        stall = 5.0 if rng.random() < 0.05 else 1.0
        return rng.uniform(0.95, 1.05) * stall * (1.0 if is_split == is_better else 1.4)

    modes = steps_split(choice, seconds, 1000)
    assert modes[:5] == [False] * 5 and modes[5:10] == [True] * 5
    assert modes[10:].count(not is_better) <= 40, "the slower mode is tried now and then"
    assert modes[200:].count(not is_better) > 0


def test_equally_fast_modes_are_not_split() -> None:
    rng = random.Random(4)
    modes = steps_split(LearnedMicrobatches(), lambda is_split: rng.uniform(0.995, 1.005), 1000)
    assert modes.count(True) <= 40


def test_a_changed_preference_is_learned_again() -> None:
    """Attention becomes as slow as the products as contexts grow, and then fast again."""
    choice = LearnedMicrobatches()
    fast = steps_split(choice, lambda is_split: 1.1 if is_split else 1.0, 1500)
    assert fast[-50:].count(True) <= 5
    slow = steps_split(choice, lambda is_split: 1.2 if is_split else 2.0, 600)
    assert slow[-50:].count(True) >= 45
    again = steps_split(choice, lambda is_split: 1.1 if is_split else 1.0, 600)
    assert again[-50:].count(True) <= 5


def test_times_that_grow_slowly_do_not_mislead() -> None:
    """Steps slow down with every token, so modes are compared with steps near in time."""
    choice, growth = LearnedMicrobatches(), 1.0

    def seconds(is_split: bool) -> float:
        nonlocal growth
        growth *= 1.001
        return growth * (1.0 if is_split else 1.3)

    assert steps_split(choice, seconds, 2000)[100:].count(False) <= 60


def test_batch_sizes_are_learned_separately() -> None:
    """Steps of few rows are bound by reading the weights, larger ones are not."""
    choice = LearnedMicrobatches()
    for _ in range(300):
        few = steps_split(choice, lambda is_split: 2.0 if is_split else 1.0, 1, num_decodes=4)
        many = steps_split(choice, lambda is_split: 1.0 if is_split else 1.7, 1, num_decodes=64)
    assert (few, many) == ([False], [True])
    assert choice.splits(num_decodes=64, num_prompt_rows=0)
    assert not choice.splits(num_decodes=64, num_prompt_rows=512), "not measured yet"
