"""Sequences end, limits hold and memory is freed under random settings and arrivals."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from memory.pages.layer_groups import LayerGroup
from memory.prefix.index import PrefixHasher
from serve.config import MEMORY_POLICIES, QUEUE_POLICIES
from serve.request import FinishReason
from serve.scheduler.admission import make_policy
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import make_sequences
from serve.scheduler.step_plan import SchedulerLimits
from serve.scheduler.waiting_queue import make_queue
from tests.serve.scheduler.test_scheduler import check_invariants
from tests.support.engine.fakes import make_kv, make_partitioned_kv, make_request
from tests.support.profile import every_day

EOS, OTHER = 5, 9
MAX_LEN = 256
GROUPS = [
    (),
    (LayerGroup(64), LayerGroup(80, window=9, read_block=4)),
    (LayerGroup(80, window=20, read_block=4),),
]


class Walk:
    def __init__(self, seed, policy, num_memories=1):
        self.rng = rng = random.Random(seed)
        budget = rng.choice([2, 7, 16, 64, 200])
        slo_s = rng.choice([None, 1e-6, 0.01, 0.05, 1e9])
        max_num_seqs = rng.choice([1, 2, 4, 12])
        self.limits = SchedulerLimits(max_num_seqs, budget, rng.choice([1, budget]), slo_s)
        groups = rng.choice(GROUPS)
        settings = {"groups": groups, "page_bytes": 320} if groups else {}
        settings["max_rows"] = self.limits.max_chunk_tokens
        longest = make_kv(1, 1, MAX_LEN, **settings)[0].pages_for(MAX_LEN)
        pages = longest + rng.choice([0, 3, 20, 300])
        self.kv, _ = make_kv(pages, max_num_seqs, MAX_LEN, **settings)
        if num_memories > 1:
            self.kv, _ = make_partitioned_kv(num_memories, pages, max_num_seqs, MAX_LEN, **settings)
        self.policy = rng.choice(MEMORY_POLICIES)
        self.scheduler = Scheduler(
            self.limits,
            self.kv,
            make_policy(self.policy, self.kv, budget),
            PrefixHasher(self.kv.page_end) if rng.random() < 0.6 else None,
            make_queue(policy),
        )
        self.prefixes = [[rng.randrange(10, 1000) for _ in range(200)] for _ in range(3)]
        self.alive = []
        self.now_s = 0.0

    def arrive(self, number):
        rng = self.rng
        length = rng.choice([1, 2, 5, 17, 60, 150, 240])
        shared = rng.choice(self.prefixes)[: rng.randrange(200)]
        prompt = (shared + [rng.randrange(10, 1000) for _ in range(250)])[:length]
        request = make_request(
            prompt=prompt,
            request_id=str(number),
            num_tokens=max(1, min(rng.choice([1, 3, 20, 100]), MAX_LEN - length)),
            n=rng.choice([1, 1, 1, 3]),
            priority=rng.randrange(3),
            ignore_eos=rng.random() < 0.2,
            **self.more_params(),
        )
        client = rng.choice(["x", "y", None])
        for sequence in make_sequences(
            replace(request, arrival_s=self.now_s, client=client), frozenset({EOS})
        ):
            self.scheduler.add(sequence)
            self.alive.append(sequence)

    def more_params(self):
        return {}

    def step(self):
        scheduler, rng = self.scheduler, self.rng
        plan = scheduler.schedule(self.now_s)
        assert plan is not None, "there is work and no step in flight"
        check_invariants(
            scheduler, plan, self.limits.max_num_batched_tokens, self.limits.max_chunk_tokens
        )
        self.kv.commit()
        seconds = 0.002 + 0.001 * plan.num_total_rows
        if rng.random() < 0.02:  # a stall or a jump of the clock
            seconds *= rng.choice([0.01, 50])
        self.now_s += seconds
        scheduler.observe(plan, seconds)
        scheduler.update(
            plan, [EOS if rng.random() < 0.03 else OTHER for _ in range(sum(plan.samples))]
        )
        if rng.random() < 0.03 and self.alive:
            scheduler.finish(rng.choice(self.alive), FinishReason.ABORT)
        self.alive = [sequence for sequence in self.alive if not sequence.is_finished]

    def run(self, num_requests):
        num_arrived = 0
        for _ in range(100_000):
            if num_arrived < num_requests and (
                not self.scheduler.has_work() or self.rng.random() < 0.25
            ):
                self.arrive(num_arrived)
                num_arrived += 1
            elif self.scheduler.has_work():
                self.step()
            elif num_arrived == num_requests:
                return
        raise AssertionError("a sequence never ends")


@pytest.mark.covering(1)
@pytest.mark.parametrize("policy", QUEUE_POLICIES)
@pytest.mark.parametrize(
    ("seed", "num_memories"),
    every_day((0, 3, 7, 12, 13), [(seed, 1 if seed < 12 else 2 + seed % 2) for seed in range(20)]),
)
def test_every_sequence_ends_and_all_memory_is_freed(policy, seed, num_memories):
    """Sequences have several partitions to choose from in some of the cases."""
    walk = Walk(seed, policy, num_memories)
    walk.run(40)
    scheduler = walk.scheduler
    assert walk.kv.num_in_use == 0 and scheduler._preempted.num_pages == 0
    walk.kv.check_integrity()
    if walk.policy == "worst_case" and num_memories == 1:  # it counts all partitions as one memory
        assert scheduler.num_preemptions == scheduler.num_priority_preemptions, "lack of memory"
    if walk.policy == "predicted":
        assert not scheduler.policy.steps_left(0) and not scheduler.policy._prefilling
