"""The recurrence of stages against a simulation by events, and prompts against their estimate."""

from __future__ import annotations

import heapq
import random
from collections import deque

import pytest

from bench.plan.efficiency import expected
from bench.plan.grid import Grid, GridCost, chunk_work
from bench.plan.hardware import load_devices
from bench.plan.pipeline import (
    StagePipeline,
    adapted_chunks,
    chunks_of,
    estimated_prefill_s,
    fixed_chunks,
    prefill,
)
from bench.plan.shapes import Precision, load_shape

PRECISION = Precision("bfloat16", "bfloat16")


def make_cost(*grid: int) -> GridCost:
    device = load_devices()["h100-sxm"]
    shape = load_shape("llama-3.1-8b")
    return GridCost(shape, PRECISION, device, Grid(*grid), expected("gpu", PRECISION))


def by_events(steps: list[tuple[list[float], float]]) -> list[float]:
    """Returns the ends of steps (seconds of each stage, hop): workers with queues, one event after
    another."""
    num_stages = len(steps[0][0])
    queues: list[deque[int]] = [deque() for _ in range(num_stages)]
    is_busy = [False] * num_stages
    ends = [0.0] * len(steps)
    events: list[tuple[float, int, str, int, int]] = []
    for step in range(len(steps)):
        heapq.heappush(events, (0.0, step, "arrives", 0, step))
    order = len(steps)
    while events:
        now, _, kind, stage, step = heapq.heappop(events)
        if kind == "arrives":
            queues[stage].append(step)
        else:
            is_busy[stage] = False
            if stage + 1 < num_stages:
                hop = now + steps[step][1]
                heapq.heappush(events, (hop, order, "arrives", stage + 1, step))
            else:
                ends[step] = now
        order += 1
        if queues[stage] and not is_busy[stage]:
            is_busy[stage] = True
            first = queues[stage].popleft()
            end = now + steps[first][0][stage]
            heapq.heappush(events, (end, order, "ends", stage, first))
            order += 1
    return ends


@pytest.mark.parametrize("seed", range(20))
def test_the_recurrence_is_what_workers_with_queues_do(seed: int) -> None:
    drawn = random.Random(seed)
    num_stages, hop = drawn.randint(1, 5), drawn.uniform(0.0, 1.0)
    steps = [
        ([drawn.uniform(0.1, 2.0) for _ in range(num_stages)], hop)
        for _ in range(drawn.randint(1, 12))
    ]
    pipeline = StagePipeline(num_stages)
    assert [pipeline.run(*step) for step in steps] == pytest.approx(by_events(steps))
    assert pipeline.busy_s == pytest.approx(
        [sum(s[i] for s, _ in steps) for i in range(num_stages)]
    )


def test_two_steps_on_two_stages_by_hand() -> None:
    """The second step waits for the first stage until 2, for its hop until 3.5 and for the second
    stage until 5.5."""
    pipeline = StagePipeline(2)
    assert pipeline.run([2.0, 3.0], hop_s=0.5) == 5.5
    assert pipeline.run([1.0, 1.0], hop_s=0.5) == 6.5
    assert pipeline.run([1.0, 1.0], hop_s=0.5, earliest_s=10.0) == 12.5
    assert pipeline.free_s == [11.0, 12.5] and pipeline.busy_s == [4.0, 5.0]


def test_dense_chunks_overlap_and_others_do_not() -> None:
    cost = make_cost(8, 4)
    dense = prefill(cost, 64_000, fixed_chunks(1000))
    waiting = prefill(cost, 64_000, fixed_chunks(1000), is_dense=False)
    one = prefill(make_cost(8, 1), 64_000, fixed_chunks(1000))
    assert dense.num_chunks == waiting.num_chunks == 64
    assert one.seconds / 4 < dense.seconds < 0.3 * one.seconds
    assert waiting.seconds > one.seconds and waiting.busy_share == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("grid", [(8, 16, 1), (8, 3, 1), (1, 1, 1), (2, 4, 4)])
def test_the_estimate_is_near_the_recurrence(grid: tuple[int, int, int]) -> None:
    cost = make_cost(*grid)
    cost.segment_tokens = 60_000
    for chunker in (fixed_chunks(2048), adapted_chunks(cost, 0.05, 4096)):
        exact = prefill(cost, 200_000, chunker).seconds
        assert estimated_prefill_s(cost, 200_000, chunker) == pytest.approx(exact, rel=0.02)


def test_chunks_are_the_largest_within_the_limit() -> None:
    cost = make_cost(8, 4)
    rows = adapted_chunks(cost, 30e-3, 4096, decodes=(1000,) * 8)
    found = [rows(context) for context in (0, 100_000, 400_000, 1_000_000)]
    assert found == sorted(found, reverse=True) and found[0] > found[-1] > 16
    for context, chunk in zip((100_000, 400_000), found[1:3], strict=True):
        assert chunk % 16 == 0
        works = [chunk_work(chunk + more, context, (1000,) * 8) for more in (0, 16)]
        within, beyond = map(cost.pass_seconds, works)
        assert within <= 30e-3 < beyond
    assert adapted_chunks(cost, 1e-6, 4096, least=64)(0) == 64


def test_the_last_chunk_has_what_is_left() -> None:
    assert list(chunks_of(70, fixed_chunks(32))) == [(32, 0), (32, 32), (6, 64)]
