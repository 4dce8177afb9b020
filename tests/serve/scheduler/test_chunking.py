"""Chunks are sized by predicted step time and prompts ordered by slack, on a simulated clock."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import pytest

from serve.engine.core import EngineCore
from serve.engine.early_rejection import predicted_ttft_s
from serve.engine.pools import ComputeThread
from serve.request import FinishReason, Request
from serve.sampling_params import SamplingParams
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import make_sequences
from serve.scheduler.step_plan import SchedulerLimits
from serve.scheduler.waiting_queue import make_queue
from serve.text.tokenizer import Tokenizer
from tests.serve.scheduler.test_step_time import make_work
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.fakes import ScriptedRunner, make_kv
from tests.support.engine.step_simulation import SLO_S, Simulation


@pytest.mark.parametrize("slo_s", [0.08, 0.1, 0.2])
def test_streams_keep_the_slo_beside_a_long_prompt(slo_s):
    """The step-time model has seen prompts and streams only separately before."""
    simulation = Simulation(slo_s, noise=0.03)
    simulation.warm_up()
    simulation.start_streams(8)
    simulation.add("long", 8000)
    simulation.run_until(lambda: "long" in simulation.ttft_s)
    times = sorted(seconds for seconds, _ in simulation.steps)
    assert times[int(0.99 * len(times))] <= slo_s
    mixed = [seconds for seconds, names in simulation.steps[20:-1] if names]
    assert sum(mixed) / len(mixed) > 0.6 * slo_s, "most of the allowed time is used"
    assert simulation.scheduler.chunks.model.median_error() < 0.05
    rows = [names["long"] for _, names in simulation.steps if "long" in names]
    assert rows[10] >= rows[-2], "a chunk becomes smaller as the context grows"


def test_a_prompt_without_streams_gets_the_whole_budget():
    simulation = Simulation(0.001)
    simulation.warm_up()
    simulation.add("alone", 1000)
    simulation.run_until(lambda: "alone" in simulation.ttft_s)
    assert [names["alone"] for _, names in simulation.steps] == [256, 256, 256, 232]


def test_a_prompt_without_an_slo_gets_the_whole_budget():
    simulation = Simulation(None)
    simulation.start_streams(4)
    simulation.add("prompt", 1000)
    simulation.run_until(lambda: "prompt" in simulation.ttft_s)
    assert [names["prompt"] for _, names in simulation.steps] == [252, 252, 252, 244]
    assert simulation.scheduler.chunks.limit == 252


def test_an_slo_that_cannot_be_kept_stops_no_prompt():
    """Both prompts advance by at least 16 rows a step, although decoding alone exceeds the SLO."""
    simulation = Simulation(0.01)
    simulation.start_streams(4)
    simulation.add("long", 4000)
    simulation.step()
    simulation.add("short", 64)
    simulation.run_until(lambda: "short" in simulation.ttft_s)
    assert [names.get("short") for _, names in simulation.steps[1:]] == [16] * 4
    assert {names.get("long", 16) for _, names in simulation.steps} == {16}
    simulation.run_until(lambda: "long" in simulation.ttft_s)


@pytest.mark.parametrize("slo_s", [SLO_S, None])
def test_a_short_prompt_beside_a_long_one(slo_s):
    """Its time to first token is at most twice that without the long prompt, plus a step."""

    def ttft(with_long):
        simulation = Simulation(slo_s)
        simulation.warm_up()
        simulation.start_streams(8)
        if with_long:
            simulation.add("long", 20_000)
            for _ in range(40):
                simulation.step()
        name = f"short {with_long}"
        simulation.add(name, 150)
        simulation.run_until(lambda: name in simulation.ttft_s)
        assert ("long" in simulation.ttft_s) is False
        return simulation.ttft_s[name], max(seconds for seconds, _ in simulation.steps)

    alone_s, _ = ttft(False)
    beside_s, step_s = ttft(True)
    assert beside_s <= 2 * alone_s + step_s


@pytest.mark.parametrize("slo_s", [SLO_S, None])
def test_many_short_prompts_beside_a_long_one(slo_s):
    """The long prompt keeps its share when more short prompts arrive than can be served."""
    simulation = Simulation(slo_s)
    simulation.warm_up()
    simulation.start_streams(4)
    simulation.add("long", 3000)
    number = 0
    while "long" not in simulation.ttft_s:
        while len(simulation.scheduler.waiting) < 20:
            simulation.add(f"short {number}", 60)
            number += 1
        simulation.step()
        assert simulation.now_s < 100
    rows = [names.get("long", 0) for _, names in simulation.steps]
    longest_pause = max(map(len, "".join("x" if n else " " for n in rows).split("x")))
    assert longest_pause <= 3
    short_rows = sum(sum(names.values()) for _, names in simulation.steps) - sum(rows)
    assert 0.3 < sum(rows) / short_rows < 2.0
    assert len(simulation.ttft_s) > 40, "short prompts are served beside the long one"


@pytest.mark.parametrize("slo_s", [SLO_S, None])
@pytest.mark.parametrize("length", [500, 3000])
def test_equal_prompts_are_first_come_first_served(slo_s, length):
    simulation = Simulation(slo_s, noise=0.05)
    simulation.warm_up()
    simulation.start_streams(2)
    for number in range(6):
        simulation.add(f"{number}", length)
        simulation.step()
    simulation.run_until(lambda: "5" in simulation.ttft_s)
    assert [name for name in simulation.ttft_s if len(name) == 1] == list("012345")


def test_a_second_long_prompt_does_not_delay_a_short_one():
    simulation = Simulation()
    simulation.warm_up()
    simulation.start_streams(4)
    simulation.add("long 0", 6000)
    simulation.add("long 1", 6000)
    simulation.add("short", 60)
    simulation.run_until(lambda: "short" in simulation.ttft_s)
    assert simulation.ttft_s["short"] < 3 * SLO_S
    both = [names for _, names in simulation.steps if {"long 0", "long 1"} <= set(names)]
    assert not both, "one long prompt at a time"
    simulation.run_until(lambda: "long 1" in simulation.ttft_s)
    assert simulation.ttft_s["long 0"] < simulation.ttft_s["long 1"]


def test_at_most_four_long_prompts_are_admitted():
    """A fifth long prompt waits for one of the four, a short prompt does not."""
    simulation = Simulation()
    simulation.warm_up()
    simulation.start_streams(4)
    longs = [simulation.add(f"long {number}", 6000) for number in range(4)]
    simulation.step()
    simulation.add("short", 60)
    simulation.run_until(lambda: "short" in simulation.ttft_s)
    assert simulation.ttft_s["short"] < 3 * SLO_S
    assert all(sequence.kv_range is not None for sequence in longs)
    fifth = simulation.add("long 4", 6000)
    simulation.add("behind the fifth", 60)
    medium = simulation.add("medium", 1000)
    simulation.run_until(lambda: "behind the fifth" in simulation.ttft_s)
    assert simulation.ttft_s["behind the fifth"] < 3 * SLO_S
    assert fifth.kv_range is None and medium.kv_range is not None
    simulation.run_until(lambda: "medium" in simulation.ttft_s)
    assert simulation.ttft_s["medium"] < simulation.now_s / 3, "less than a quarter as long"
    simulation.run_until(lambda: "long 4" in simulation.ttft_s)


def test_equal_long_prompts_are_computed_once():
    """The second prompt waits although the first has no rows yet when it is examined."""
    simulation = Simulation(cache=True)
    simulation.warm_up()
    simulation.start_streams(4)
    first, second = (simulation.add(name, 6000) for name in ("long 0", "long 1"))
    simulation.run_until(lambda: "long 1" in simulation.ttft_s)
    assert first.num_cached_tokens < 2000, "only what the warm-up has cached"
    assert second.num_cached_tokens > 5900


@pytest.mark.parametrize("policy", ["fcfs", "priority", "mlfq", "fair"])
@pytest.mark.parametrize("slo_s", [SLO_S, None])
def test_a_short_prompt_does_not_wait_for_a_long_one_of_its_priority(policy, slo_s):
    simulation = Simulation(slo_s, queue=make_queue(policy))
    simulation.warm_up()
    simulation.start_streams(4)
    simulation.add("long", 20_000)
    for _ in range(20):
        simulation.step()
    simulation.add("short", 60)
    simulation.run_until(lambda: "short" in simulation.ttft_s)
    assert simulation.ttft_s["short"] < 1.0 and "long" not in simulation.ttft_s
    simulation.run_until(lambda: "long" in simulation.ttft_s)


def test_a_lower_priority_comes_after_a_long_prompt():
    """Two prompts of priority 0, one of them long, leave no rows for the one of priority 1."""
    simulation = Simulation(None, queue=make_queue("priority"))
    simulation.warm_up()
    simulation.start_streams(2)
    simulation.add("behind", 3000, priority=1)
    simulation.step()
    simulation.add("long", 5000)
    simulation.step()
    simulation.add("short", 300)
    simulation.steps.clear()
    simulation.run_until(lambda: "short" in simulation.ttft_s)
    steps = [names for _, names in simulation.steps]
    assert sum(names.get("long", 0) for names in steps) > 0
    assert sum(names.get("behind", 0) for names in steps) == 0
    simulation.run_until(lambda: "behind" in simulation.ttft_s)
    assert simulation.ttft_s["behind"] > simulation.ttft_s["long"]


@pytest.mark.parametrize("policy", ["priority", "mlfq", "fair"])
def test_other_queue_policies_keep_the_slo(policy):
    """This holds where a prompt gives its rows to another, as under priority and mlfq."""
    simulation = Simulation(queue=make_queue(policy))
    simulation.warm_up()
    simulation.start_streams(8)
    simulation.add("late", 4000, priority=1)
    for _ in range(30):
        simulation.step()
    simulation.steps.clear()
    simulation.add("urgent", 400)
    simulation.run_until(lambda: "urgent" in simulation.ttft_s)
    assert max(seconds for seconds, _ in simulation.steps) <= SLO_S
    if simulation.scheduler.waiting.preempts:
        first = next(names for _, names in simulation.steps if "urgent" in names)
        assert first["urgent"] > first.get("late", 0)
    simulation.run_until(lambda: "late" in simulation.ttft_s)


def test_returned_rows_can_be_taken_again():
    simulation = Simulation()
    simulation.warm_up()
    simulation.start_streams(8)
    chunks, decodes = simulation.scheduler.chunks, simulation.scheduler.running
    budget = chunks.begin([], decodes, 200, simulation.now_s)
    rows = budget.rows_for(0, 200)
    assert 16 < rows < 200
    budget.take(rows, 0)
    assert budget.rows_for(0, 200) == 0
    budget.take(0, 0)
    assert not budget.has_room
    budget.give_back(rows, 0)
    assert budget.has_room and budget.rows_for(0, 200) == rows
    deep = budget.rows_for(9000, 200)
    budget.take(deep, 9000)
    budget.give_back(deep, 9000)
    assert budget.rows_for(0, 200) == rows, "the deep prompt leaves no trace"


def test_the_minimum_of_rows_can_be_returned_and_taken_again():
    """An SLO that cannot be kept gives 16 rows to the first prompt, whichever is left."""
    simulation = Simulation(0.001)
    simulation.start_streams(4)
    budget = simulation.scheduler.chunks.begin([], simulation.scheduler.running, 200, 0.0)
    assert budget.rows_for(0, 100) == 16
    budget.take(16, 0)
    assert budget.rows_for(0, 100) == 0
    budget.give_back(16, 0)
    assert budget.rows_for(0, 100) == 16


def test_prompts_take_longer_beside_streams():
    simulation = Simulation()
    assert simulation.scheduler.chunks.slowdown([]) == 1.0, "nothing has been measured"
    simulation.warm_up()
    assert simulation.scheduler.chunks.slowdown([]) == pytest.approx(1.0, abs=0.1)
    simulation.start_streams(8)
    scheduler = simulation.scheduler
    slowdown = scheduler.chunks.slowdown(scheduler.running)
    request = SimpleNamespace(prompt_token_ids=range(2000))
    predicted_s = predicted_ttft_s(scheduler, request, 2000, 0.0, 0)
    simulation.add("prompt", 2000)
    simulation.run_until(lambda: "prompt" in simulation.ttft_s)
    assert slowdown > 1.2
    assert simulation.ttft_s["prompt"] == pytest.approx(predicted_s, rel=0.2)


def test_the_prompt_with_the_least_slack_comes_first():
    """A prompt of 900 tokens has waited for its own prefill time; one of 800 has just arrived."""
    simulation = Simulation(slo_s=None, budget=256)
    simulation.warm_up()
    chunks = simulation.scheduler.chunks
    late = simulation.add("late", 900)
    simulation.now_s += 5.0
    fresh = simulation.add("fresh", 800)
    budget = chunks.begin([(0, fresh), (0, late)], [], 256, simulation.now_s)
    assert budget.shorts == [late, fresh]
    small = simulation.add("small", 10)  # has much slack for its size
    budget = chunks.begin([(0, small), (0, fresh), (0, late)], [], 256, simulation.now_s)
    assert budget.shorts == [late, fresh, small]


class Bench:
    """A core that a test steps by hand; each reading of the clock advances it by a second."""

    def __init__(self):
        kv, _ = make_kv()
        self.scheduler = Scheduler(SchedulerLimits(8, 32, 32), kv)
        self.model = self.scheduler.chunks.model
        self.bad = []
        self.compute = ComputeThread()
        self.now_s = itertools.count(0.0)
        self.core = EngineCore(
            runner=ScriptedRunner(kv, fails=lambda sequence: sequence in self.bad),
            scheduler=self.scheduler,
            kv=kv,
            tokenizer=Tokenizer.load(checkpoint("llama")),
            eos_token_ids=frozenset(),
            limits=SimpleNamespace(
                ttft_slo_s=None, vocab_size=320, bounded_json=True, reasoning=None
            ),
            compute=self.compute,
            clock=functools.partial(next, self.now_s),
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.compute.stop()

    def add(self, *names):
        params = SamplingParams(max_tokens=8, temperature=0.0, seed=0)
        for name in names:
            request = Request(name, None, (5, 6, 7), params, 0.0)
            self.scheduler.add(make_sequences(request, frozenset())[0])


def test_the_model_does_not_learn_from_a_failed_step():
    """It does not learn from the parts that run again either."""
    with Bench() as bench:
        bench.add("a", "b")
        core, model = bench.core, bench.model
        core._step()
        assert model.predict(make_work(0, 0, 6)) == pytest.approx(1.0), "the clock's second"
        bench.bad.append(bench.scheduler.running[0])
        core._step()
        assert model.median_error() is None and len(bench.scheduler.running) == 1
        assert core.stats().num_steps == 2, "the other sequence ran"
        core._step()
        # from the end of the last part that succeeded; other steps read the clock twice
        assert model.predict(make_work(1, 4)) == pytest.approx(3.0)
        core._step()
        assert core.stats().step_time_error is not None
        assert core.stats().chunk_limit_rows == 32


def test_idle_time_belongs_to_no_step():
    with Bench() as bench:
        bench.add("a")
        bench.core._step()
        bench.core._step()
        assert bench.model.last_step_s == 2.0, "from the end of the previous step"
        bench.scheduler.finish(bench.scheduler.running[0], FinishReason.ABORT)
        bench.core._inbox.put(None)
        assert not bench.core._handle_messages()
        for _ in range(100):
            next(bench.now_s)
        bench.add("b")
        bench.core._step()
        assert bench.model.last_step_s == 1.0


def test_the_model_learns_less_often_from_decode_steps_once_it_knows_them():
    simulation = Simulation()
    simulation.start_streams(4, num_tokens=1000)
    model, learned = simulation.scheduler.chunks.model, []
    model.learn = lambda work, seconds: learned.append(work.num_chunks)
    assert not model.knows_decoding
    for _ in range(8):
        simulation.step()
    assert learned == [0] * 8
    del model.learn
    for _ in range(64):
        simulation.step()
    assert model.knows_decoding
    model.learn = lambda work, seconds: learned.append(work.num_chunks)
    learned.clear()
    for _ in range(8):
        simulation.step()
    simulation.add("prompt", 64)
    simulation.step()
    assert learned == [0, 0, 1]
