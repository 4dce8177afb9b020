"""Single cases of the scheduler, then 10,000 random steps that keep the invariants."""

from __future__ import annotations

import random

import pytest

from serve.request import FinishReason
from serve.scheduler.sequence import SequenceStatus
from tests.support.engine.fakes import check_mapping, make_kv, make_scheduler, make_seq


def step(scheduler, token=7):
    """Schedules and updates a step; returns the plan and the finished sequences."""
    plan = scheduler.schedule(0.0)
    if plan is None:
        return None, []
    scheduler.kv.commit()
    tokens = [token] * sum(plan.samples)
    return plan, scheduler.update(plan, tokens)


def rows(plan):
    return [(s.request.request_id, n) for s, n in zip(plan.sequences, plan.num_rows, strict=True)]


def test_a_prompt_is_one_step_when_it_fits():
    scheduler = make_scheduler(make_kv()[0])
    scheduler.add(make_seq(5, request_id="a"))
    plan, _ = step(scheduler)
    assert rows(plan) == [("a", 5)]
    assert plan.samples == [True]
    plan, _ = step(scheduler)
    assert rows(plan) == [("a", 1)]
    assert plan.num_decodes == 1


def test_decode_rows_come_first_and_prefill_fills_the_rest():
    scheduler = make_scheduler(make_kv()[0], budget=8)
    scheduler.add(make_seq(3, request_id="a"))
    scheduler.add(make_seq(12, request_id="b"))
    plan, _ = step(scheduler)
    assert rows(plan) == [("a", 3), ("b", 5)]
    assert plan.samples == [True, False]
    plan, _ = step(scheduler)
    assert rows(plan) == [("a", 1), ("b", 7)]
    assert (plan.num_decodes, plan.samples) == (1, [True, True])


@pytest.mark.parametrize(("chunk", "steps"), [(1, 9), (4, 3), (9, 1), (32, 1)])
def test_chunks(chunk, steps):
    scheduler = make_scheduler(make_kv()[0], chunk=chunk)
    sequence = make_seq(9)
    scheduler.add(sequence)
    seen = 0
    while sequence.num_output_tokens == 0:
        plan, _ = step(scheduler)
        assert max(plan.num_rows) <= chunk
        seen += 1
    assert seen == steps


def test_first_come_first_served_and_max_num_seqs():
    scheduler = make_scheduler(make_kv()[0], max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_seq(2, request_id=name, num_tokens=2))
    plan, _ = step(scheduler)
    assert rows(plan) == [("a", 2), ("b", 2)]
    _, finished = step(scheduler)
    assert [s.request.request_id for s in finished] == ["a", "b"]
    plan, _ = step(scheduler)
    assert rows(plan) == [("c", 2)]


def test_a_request_that_does_not_fit_waits_and_is_not_overtaken():
    kv, _ = make_kv(num_pages=10, num_ranges=4)
    scheduler = make_scheduler(kv, budget=64)
    scheduler.add(make_seq(30, request_id="a", num_tokens=2))
    scheduler.add(make_seq(20, request_id="b"))
    scheduler.add(make_seq(1, request_id="c"))
    plan, _ = step(scheduler)
    assert rows(plan) == [("a", 30)]
    step(scheduler)
    plan, _ = step(scheduler)
    assert rows(plan) == [("c", 1), ("b", 20)]


def test_the_youngest_is_preempted_and_comes_back_first():
    kv, _ = make_kv(num_pages=5, num_ranges=4)
    scheduler = make_scheduler(kv)
    for name in "ab":
        scheduler.add(make_seq(8, request_id=name, num_tokens=11))
    scheduler.add(make_seq(12, request_id="c", num_tokens=4))
    names = []
    while scheduler.has_work():
        plan, _ = step(scheduler)
        names.append(rows(plan))
        kv.check_integrity()
    assert names[0] == [("a", 8), ("b", 8)]
    assert scheduler.num_preemptions > 0
    recomputed = [n for plan in names for n in plan if n[0] == "b" and n[1] > 1]
    assert len(recomputed) > 1, "b was recomputed from the start"
    order = [plan[-1][0] for plan in names]
    assert order.index("c") > max(i for i, name in enumerate(order) if name == "b")


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "length"),
    [
        ({"num_tokens": 3}, [7, 7, 7], FinishReason.LENGTH, 3),
        ({}, [7, 1], FinishReason.STOP, 2),
        ({"ignore_eos": True, "num_tokens": 3}, [1, 1, 1], FinishReason.LENGTH, 3),
        ({"stop_token_ids": (9,)}, [7, 9], FinishReason.STOP, 2),
        ({"stop_token_ids": (9,), "ignore_eos": True}, [1, 9], FinishReason.STOP, 2),
        ({"min_tokens": 3, "num_tokens": 6}, [1, 1, 1, 1], FinishReason.STOP, 4),
    ],
)
def test_how_a_sequence_ends(params, tokens, reason, length):
    scheduler = make_scheduler(make_kv()[0])
    sequence = make_seq(4, eos=frozenset({1}), **params)
    scheduler.add(sequence)
    for token in tokens:
        step(scheduler, token)
    assert sequence.finish_reason is reason
    assert sequence.num_output_tokens == length
    assert scheduler.kv.num_in_use == 0
    assert not scheduler.has_work()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_at_each_status(steps):
    scheduler = make_scheduler(make_kv()[0], chunk=4)
    sequence = make_seq(9)
    scheduler.add(sequence)
    for _ in range(steps):
        step(scheduler)
    assert scheduler.finish(sequence, FinishReason.ABORT)
    assert not scheduler.finish(sequence, FinishReason.ABORT)
    assert sequence.is_finished
    assert not scheduler.has_work()
    assert scheduler.kv.num_in_use == 0
    assert scheduler.schedule(0.0) is None


def check_invariants(scheduler, plan, max_rows, max_chunk):
    kv = scheduler.kv
    kv.check_integrity()
    open_ranges = {item.start for item in kv.ranges if item.is_open}
    assert open_ranges == {s.kv_range.start for s in scheduler.running}
    for sequence in scheduler.waiting:
        assert sequence.kv_range is None
        assert sequence.num_computed_tokens == 0
    assert sum(plan.num_rows) == plan.num_total_rows <= max_rows
    assert len({id(s) for s in plan.sequences}) == len(plan.sequences)
    assert all(n == 1 for n in plan.num_rows[: plan.num_decodes])
    assert all(1 < n <= max_chunk for n in plan.num_rows[plan.num_decodes :])
    for sequence, n, samples in zip(plan.sequences, plan.num_rows, plan.samples, strict=True):
        assert sequence.status is SequenceStatus.RUNNING
        after = sequence.num_computed_tokens + n
        assert after <= sequence.num_tokens
        assert samples == (after == sequence.num_tokens)
        assert sequence.kv_range.capacity >= after


@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_random_steps(seed):
    """2,500 planned steps each: arrivals, ends, aborts and preemptions; all returns to zero."""
    rng = random.Random(seed)
    kv, memory = make_kv(num_pages=rng.choice([32, 60, 200]), num_ranges=12)
    budget, chunk = rng.choice([(16, 16), (64, 7), (40, 1)])
    scheduler = make_scheduler(kv, max_num_seqs=rng.choice([3, 12]), budget=budget, chunk=chunk)
    live, total, ended, last_progress = [], 0, 0, 0
    number = 0
    while number < 2500:
        if rng.random() < 0.3 and len(live) < 40:
            prompt = rng.randint(1, 60)
            sequence = make_seq(
                prompt,
                eos=frozenset({1}),
                request_id=str(total),
                num_tokens=rng.randint(1, 60),
                min_tokens=0,
            )
            scheduler.add(sequence)
            live.append(sequence)
            total += 1
        if live and rng.random() < 0.03:
            assert scheduler.finish(live.pop(rng.randrange(len(live))), FinishReason.ABORT)
            ended += 1
        plan = scheduler.schedule(float(number))
        if plan is None:
            assert not scheduler.has_work()
            continue
        number += 1
        check_invariants(scheduler, plan, budget, chunk)
        kv.commit()
        if number % 50 == 0:
            check_mapping(kv, memory)
        tokens = [rng.choice([1, 7, 8, 9, 9, 9, 9, 9]) for _ in range(sum(plan.samples))]
        for sequence in scheduler.update(plan, tokens):
            live.remove(sequence)
            ended += 1
            last_progress = number
        assert number - last_progress < 600 or not live, "no sequence ends"
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        check_invariants(scheduler, plan, budget, chunk)
        ended += len(scheduler.update(plan, [9] * sum(plan.samples)))
    assert ended == total > 100
    assert kv.num_in_use == 0
    kv.trim()
    assert kv.num_mapped == 0
    assert not memory.mapped
