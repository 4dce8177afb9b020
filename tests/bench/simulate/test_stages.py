"""The simulated pipeline: by hand, against the recurrence, and as one stage against one machine."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from bench.load.client.record import Outcome
from bench.load.workload.work import Call
from bench.plan.grid import GridWork
from bench.plan.pipeline import StagePipeline
from bench.simulate.engine import make_sequence
from bench.simulate.load import simulate
from bench.simulate.settings import SimulationSettings
from bench.simulate.stages import PipelinedEngine
from memory.pages.layer_groups import LayerGroup
from serve.config import EngineConfig
from serve.request import Request
from serve.sampling_params import SamplingParams


class Stages:
    """Each stage takes its seconds and a hundredth for each row; a hop takes hop_s."""

    def __init__(self, *seconds: float, hop_s: float = 0.0) -> None:
        self.seconds, self.hop_s = seconds, hop_s

    @property
    def num_stages(self) -> int:
        return len(self.seconds)

    def stage_seconds(self, work: GridWork) -> list[float]:
        return [each + 0.01 * work.num_rows for each in self.seconds]

    def hop_seconds(self, rows: int) -> float:
        return self.hop_s


class Law:
    def seconds(self, work):
        return 1.0 + 0.01 * work.num_rows


def settings(*, pages=4096, page_tokens=4, **engine):
    engine = {"max_model_len": 1024, "max_num_seqs": 16, "inter_token_factor": math.inf} | engine
    config = EngineConfig(
        kv_cache_bytes=1024 * pages * page_tokens, kv_page_bytes=1024 * page_tokens, **engine
    )
    return SimulationSettings(config, (LayerGroup(1024),))


def times(result, number=0):
    return pytest.approx(result.records[number].chunks_s)


def test_chunks_of_a_prompt_follow_each_other() -> None:
    """Three chunks of 100 rows take 2 s on each of two stages: the third one ends on the first
    stage at 6 and on the second one at 8.5, after a hop. The second token is a step of its own."""
    result = simulate(
        [Call(300, 2)], [0.0], Stages(1.0, 1.0, hop_s=0.5), settings(max_num_batched_tokens=100)
    )
    # the third chunk is launched when the first one has ended, at 4.5
    assert times(result) == [4.5 + 2.0 + 0.5 + 2.0, 9.0 + 1.01 + 0.5 + 1.01]
    assert [step.num_prefill_rows for step in result.steps] == [100, 100, 100, 0]


def test_a_sequence_decodes_once_in_a_pass_and_two_share_the_stages() -> None:
    """Alone, a token takes 2.02 s through both stages. Two sequences are each in a step of their
    own, so both get a token in that time."""
    alone = simulate([Call(10, 6)], [0.0], Stages(1.0, 1.0), settings())
    gaps = [b - a for a, b in pairwise(alone.records[0].chunks_s)]
    assert gaps == pytest.approx([2.02] * 5)
    both = simulate([Call(10, 30), Call(10, 30)], [0.0, 0.5], Stages(1.0, 1.0), settings())
    for record in both.records:
        last = record.chunks_s[-10:]
        assert (last[-1] - last[0]) / 9 == pytest.approx(2.02, rel=0.01)
    assert {step.num_decodes for step in both.steps[6:-6]} == {1}


@pytest.mark.parametrize("seed", range(3))
def test_one_stage_is_a_machine(seed: int) -> None:
    """A pipeline of one stage gives the same times as the plain engine, with preemptions too."""
    drawn = random.Random(seed)
    calls = [Call(drawn.randint(1, 60), drawn.randint(1, 40)) for _ in range(30)]
    arrivals = sorted(drawn.uniform(0, 60) for _ in calls)
    tight = settings(pages=60, max_model_len=128, memory_policy="prompt_only", max_num_seqs=8)
    one, other = (simulate(calls, arrivals, cost, tight) for cost in (Law(), Stages(1.0)))
    for a, b in zip(one.records, other.records, strict=True):
        assert a.chunks_s == pytest.approx(b.chunks_s)
    assert "0 preemptions" not in one.notes[0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_stages", [2, 4])
def test_every_request_ends_with_all_its_tokens(num_stages: int, seed: int) -> None:
    drawn = random.Random(seed)
    calls = [Call(drawn.randint(1, 90), drawn.randint(1, 30)) for _ in range(40)]
    arrivals = sorted(drawn.uniform(0, 40) for _ in calls)
    stages = Stages(*[drawn.uniform(0.2, 1.0) for _ in range(num_stages)], hop_s=0.05)
    tight = settings(
        pages=60, max_model_len=128, memory_policy="prompt_only", max_num_batched_tokens=32
    )
    result = simulate(calls, arrivals, stages, tight)
    least_s = sum(stages.seconds) + 0.05 * (num_stages - 1)
    for call, record in zip(calls, result.records, strict=True):
        assert record.outcome is Outcome.OK
        assert record.output_tokens == call.num_output == len(record.chunks_s)
        gaps = [b - a for a, b in pairwise(record.chunks_s)]
        assert all(gap >= least_s - 1e-9 for gap in gaps)
        assert record.chunks_s[0] - record.sent_s >= least_s


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_steps_begin_when_the_recurrence_says(num_stages: int) -> None:
    """A long prompt: step i is launched when step i - depth has ended, and its stages follow."""
    stages = Stages(*[1.0 + 0.1 * i for i in range(num_stages)], hop_s=0.2)
    result = simulate([Call(1000, 1)], [0.0], stages, settings(max_num_batched_tokens=50))
    pipeline, ends = StagePipeline(num_stages), []
    for index in range(20):
        launched_s = ends[index - num_stages] if index >= num_stages else 0.0
        ends.append(pipeline.run([s + 0.5 for s in stages.seconds], 0.2, launched_s))
    assert [step.end_s for step in result.steps] == pytest.approx(ends)
    assert times(result) == [ends[-1]]


def test_another_step_in_flight_hides_the_hops() -> None:
    """With as many steps as stages, the first stage waits for the way of a token back through all
    hops; with one more it never waits."""
    seconds = []
    for depth in (4, 5):
        scheduler = settings(max_num_batched_tokens=50).make_scheduler(has_prefixes=False)
        engine = PipelinedEngine(scheduler, Stages(1.0, 1.0, 1.0, 1.0, hop_s=0.2), depth)
        request = Request("0", None, (7,) * 1000, SamplingParams(max_tokens=1, seed=0), 0.0)
        engine.add(make_sequence(request), 1)
        while scheduler.has_work():
            assert engine.step() is not None
        seconds.append(engine.now_s)
        assert engine.step() is None
    assert seconds[1] == pytest.approx(20 * 1.5 + 3 * (1.5 + 0.2))
    assert seconds[0] == pytest.approx(seconds[1] + 4 * 0.6)
