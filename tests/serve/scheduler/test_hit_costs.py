"""A prefix hit is used only where loading and mapping it is cheaper than computing it."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from memory.prefix.index import PrefixHasher
from memory.prefix.load_times import LoadTimes
from serve.scheduler.admission import OraclePolicy, PromptOnlyPolicy, WorstCasePolicy
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import make_sequences
from serve.scheduler.step_plan import SchedulerLimits
from serve.scheduler.step_time import StepWork
from tests.support.engine.fakes import make_kv, make_request
from tests.support.memory.page_store import FakeStore

PROMPT = range(10, 70)


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def test_load_times_are_measured_by_batch_at_its_end():
    clock = Clock()
    times = LoadTimes(clock)
    assert times.seconds(100) == 0.0

    def batch(num_pages, seconds, observed_after_s):
        futures = [Future() for _ in range(num_pages)]
        times.begin(futures)
        clock.now_s += seconds
        for future in futures:
            future.set_result(True)
        clock.now_s += observed_after_s
        times.end()

    batch(10, 0.1, observed_after_s=5.0)
    assert times.seconds(100) == pytest.approx(1.0)
    batch(4, 0.08, observed_after_s=0.0)
    assert times.seconds(1) == pytest.approx(0.8 * 0.01 + 0.2 * 0.02)
    times.end()
    assert times.seconds(1) == pytest.approx(0.012), "no load was in progress"
    batch(1, 20.0, observed_after_s=0.0)
    assert times.seconds(1) == pytest.approx(0.012 * (0.8 + 0.2 * 4)), "at most four times"
    times.begin([Future()])
    times.end()
    assert times.seconds(1) == pytest.approx(0.0192), "its end has not been noted yet"


class Rig:
    """A scheduler with a prefix cache in memory and, on request, a page store."""

    def __init__(self, num_pages=64, with_store=False, policy=None, budget=256):
        self.kv, self.memory = make_kv(num_pages, 4, 128)
        hasher = PrefixHasher(self.kv.page_end)
        made = None if policy is None else policy(self.kv)
        limits = SchedulerLimits(4, budget, budget)
        self.scheduler = Scheduler(limits, self.kv, made, hasher)
        self.store = FakeStore(self.memory)
        if with_store:
            self.kv.prefixes.use_store(self.store, lambda page: page, lambda: None)

    def learn_row_time(self, row_s):
        self.scheduler.chunks.model.learn(StepWork(num_rows=100, num_chunks=1), 100 * row_s)

    def add(self, name, prompt=PROMPT, **params):
        request = make_request(request_id=name, prompt=prompt, **params)
        sequence = make_sequences(request, frozenset())[0]
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        plan = self.scheduler.schedule(0.0)
        if plan is not None:
            self.kv.commit()
            self.scheduler.update(plan, [9] * sum(plan.samples))
        return plan

    def run(self):
        while self.scheduler.has_work():
            self.step()

    def evict_all(self):
        """Evicts all cached pages, so that only the store has them."""
        while self.kv.prefixes.write_unwritten():
            pass
        while self.kv.num_cached:
            self.kv.prefixes.evict()


def test_a_prefix_that_is_faster_to_compute_than_to_load_is_computed():
    rig = Rig(with_store=True)
    rig.add("first", num_tokens=2)
    rig.run()
    rig.evict_all()
    times = rig.kv.prefixes.load_times
    times._page_s = 1e-3  # 15 pages: 15 ms
    rig.learn_row_time(row_s=2e-4)  # 59 rows: 12 ms
    slow = rig.add("slow disk", num_tokens=2)
    rig.run()
    stats = rig.kv.prefixes.stats
    assert (slow.num_cached_tokens, stats.num_loaded, stats.num_declined) == (0, 0, 1)
    assert times.seconds(1) == pytest.approx(0.95e-3), "loading is tried again"
    rig.evict_all()
    times._page_s = 1e-5
    quick = rig.add("quick disk", num_tokens=2)
    rig.run()
    assert quick.num_cached_tokens >= 56 and stats.num_loaded == 15
    assert times.seconds(1) > 0.0
    rig.kv.check_integrity()


def test_a_prefix_is_loaded_while_row_times_are_unknown():
    rig = Rig(with_store=True)
    rig.add("first", num_tokens=2)
    rig.run()
    rig.evict_all()
    rig.kv.prefixes.load_times._page_s = 1.0
    assert rig.add("second", num_tokens=2)
    rig.run()
    assert rig.kv.prefixes.stats.num_loaded == 15


def test_a_prefix_that_is_faster_to_compute_than_to_map_is_computed():
    rig = Rig()
    rig.add("first", num_tokens=2)
    rig.run()
    rig.learn_row_time(row_s=1e-6)
    mapping = rig.kv.space.stats
    mapping.num_calls, mapping.seconds = 10, 1.0
    expensive = rig.add("expensive", num_tokens=2)
    rig.run()
    assert expensive.num_cached_tokens == 0
    mapping.num_calls, mapping.seconds = 10, 1e-6
    cheap = rig.add("cheap", num_tokens=2)
    rig.run()
    assert cheap.num_cached_tokens >= 56


@pytest.mark.parametrize(
    "policy",
    [
        PromptOnlyPolicy,
        WorstCasePolicy,
        lambda kv: OraclePolicy(kv, lambda sequence: sequence.request.params.max_tokens, 256),
    ],
)
def test_shared_pages_count_once(policy):
    """A sequence needs 17 of the 24 pages; three with a common prefix need 17 + 3 + 3, and
    without one they do not fit together."""
    rig = Rig(num_pages=24, policy=policy)
    rig.add("a", num_tokens=8, ignore_eos=True)
    rig.step()
    for name in "bc":
        rig.add(name, num_tokens=8, ignore_eos=True)
    rig.step()
    assert len(rig.scheduler.running) == 3
    assert rig.kv.num_saved >= 2 * 13
    rig.run()
    assert rig.scheduler.num_preemptions == 0
    other = Rig(num_pages=24, policy=policy)
    for number, name in enumerate("abc"):
        other.add(name, prompt=range(100 * number, 100 * number + 60), num_tokens=8)
    other.step()
    other.step()
    assert len(other.scheduler.running) == 1
    other.run()
    for made in (rig, other):
        assert made.kv.num_in_use == 0
        made.kv.check_integrity()
