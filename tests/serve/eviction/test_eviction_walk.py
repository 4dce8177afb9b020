"""Sequences that drop K/V end, steps stop where tokens are dropped, and memory is freed, under
random settings, arrivals, aborts and preemptions: the accounting alone, on no device."""

from __future__ import annotations

import dataclasses
import random

import pytest

from memory.evicting_kv import EvictingKV
from memory.pages.layer_groups import LayerGroup
from memory.policies.drop_schedule import DropSchedule, layer_budgets
from memory.policies.setting import parse_kv_policy
from memory.prefix.index import PrefixHasher
from serve.config import MEMORY_POLICIES, QUEUE_POLICIES
from serve.eviction.scheduler import EvictingScheduler
from serve.request import FinishReason
from serve.scheduler.admission import make_policy
from serve.scheduler.memory_forecast import entry_of
from serve.scheduler.sequence import SequenceStatus
from serve.scheduler.step_plan import SchedulerLimits
from serve.scheduler.waiting_queue import make_queue
from tests.serve.scheduler.test_scheduler_walk import Walk
from tests.support.engine.fakes import make_kv, make_seq

MAX_LEN = 256
GROUPS = (LayerGroup(32), LayerGroup(32), LayerGroup(64))
"""Of pyramid's layers: one, one and two of four."""
SETTINGS = (
    "window:budget=12,least=1",
    "h2o:budget=40%,least=1",
    "snapkv:budget=25%,least=1",
    "pyramid:budget=16,least=1",
)


@dataclasses.dataclass
class Choice:
    counts: list[int]
    dropped: int

    def move(self):
        """Nothing is stored."""

    def take(self):
        return None

    def put(self, taken):
        """Nothing is stored."""

    def settle(self):
        """Nothing is counted."""


class FakeEviction:
    """Keeps as many tokens as the sequence's budget says."""

    def __init__(self, setting):
        self.setting = setting
        self.firsts = (0, 1, 2) if setting.shrinks else (0,)
        self.open_at: dict[int, list] = {}  # by start: schedule and number of dropped tokens

    def schedule(self, num_prompt, setting=None):
        return DropSchedule(setting or self.setting, num_prompt, 4, self.firsts)

    def first_scored(self, schedule, num_answer):
        return max(0, schedule.num_prompt - 3)

    def open(self, start, schedule, num_answer, seed):
        assert start not in self.open_at
        self.open_at[start] = [schedule, 0]

    def forget(self, start):
        self.open_at.pop(start, None)  # a sequence that keeps everything is not there

    def choose(self, start, num_tokens):
        schedule, dropped = self.open_at[start]
        assert num_tokens == schedule.next_drop(num_tokens - 1, dropped)
        budget = schedule.policy.budget(num_tokens)
        assert budget < num_tokens - dropped
        budgets = layer_budgets(schedule.policy, budget, 4)
        counts = [min(num_tokens, budgets[first]) for first in self.firsts]
        self.open_at[start][1] = num_tokens - max(counts)
        return Choice(counts, num_tokens - max(counts))


class EvictingWalk(Walk):
    def __init__(self, seed, queue, setting, own=()):
        """own: what requests say, each one of these."""
        super().__init__(seed, queue)
        self.own = own
        rng = random.Random(seed)
        limits: SchedulerLimits = self.limits
        self.policy = rng.choice(MEMORY_POLICIES)
        self.eviction = FakeEviction(parse_kv_policy(setting))
        sizes = {"groups": GROUPS} if self.eviction.setting.shrinks else {}
        longest = make_kv(1, 1, MAX_LEN, **sizes)[0].pages_for(MAX_LEN)
        pages = longest + rng.choice([0, 3, 20, 300])
        self.kv, _ = make_kv(pages, limits.max_num_seqs, MAX_LEN, manager=EvictingKV, **sizes)
        self.scheduler = EvictingScheduler(
            limits,
            self.kv,
            make_policy(self.policy, self.kv, limits.max_num_batched_tokens),
            PrefixHasher(self.kv.page_end) if rng.random() < 0.6 else None,
            make_queue(queue),
            eviction=self.eviction,
        )

    def more_params(self):
        return {"kv_policy": self.rng.choice(self.own)} if self.own else {}

    def step(self):
        scheduler, rng = self.scheduler, self.rng
        plan = scheduler.schedule(self.now_s)
        assert plan is not None
        for sequence, rows in zip(plan.sequences, plan.num_rows, strict=True):
            assert sequence.status is SequenceStatus.RUNNING and rows > 0
            before, target = sequence.num_computed_tokens, sequence.kv_range
            assert before < sequence.drop_at and before + rows <= sequence.drop_at
            assert target.capacity >= before + rows - target.dropped
            if sequence.drops is None:
                assert not target.dropped
                continue
            said = sequence.request.params.kv_policy
            policy = parse_kv_policy(said) if said else self.eviction.setting
            assert sequence.drops.policy == policy
            # a chunk has pages for all that it might have before it is cut
            end = before + max(rows, self.limits.max_chunk_tokens)
            prompt = self.kv.pages_for(min(end, sequence.num_prompt_tokens))
            behind = self.kv.layout.pages_of(sequence.drops.most_by_group(end))
            assert len(target.pages) <= max(prompt, behind)
        self.kv.commit()
        self.now_s += 0.01
        count = sum(plan.samples)
        ends = scheduler.update(plan, [5 if rng.random() < 0.03 else 9 for _ in range(count)])
        assert all(sequence.error is None for sequence in ends)
        if rng.random() < 0.03 and self.alive:
            scheduler.finish(rng.choice(self.alive), FinishReason.ABORT)
        self.kv.check_integrity()
        self.alive = [sequence for sequence in self.alive if not sequence.is_finished]
        dropping = [s for s in scheduler.running if s.drops is not None]
        assert set(self.eviction.open_at) == {s.kv_range.start for s in dropping}


@pytest.mark.covering(1)
@pytest.mark.parametrize("queue", QUEUE_POLICIES)
@pytest.mark.parametrize(
    ("setting", "own"),
    [
        *[(setting, ()) for setting in SETTINGS],
        *[(setting, (*SETTINGS, "off", None)) for setting in (SETTINGS[1], SETTINGS[3])],
    ],
)
@pytest.mark.parametrize(
    "seed", [0, *[pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 5)]]
)
def test_every_sequence_ends_and_all_memory_is_freed(queue, setting, own, seed):
    walk = EvictingWalk(seed, queue, setting, own)
    walk.run(40)
    scheduler = walk.scheduler
    assert walk.kv.num_in_use == 0 and scheduler._preempted.num_pages == 0
    assert not walk.eviction.open_at
    assert walk.kv.num_dropped_tokens > 0
    walk.kv.check_integrity()
    if walk.policy == "worst_case" and not scheduler.prefixes.is_on:
        # with a cache, what stays may have to be copied while all pages are in use
        assert scheduler.num_preemptions == scheduler.num_priority_preemptions, "lack of memory"


def test_forecasts_have_the_most_that_is_held():
    sequence = make_seq(num_prompt=100, num_tokens=300)
    assert entry_of(sequence, 200, 10, 1) == (209, 90, 1)
    for setting, held in (("snapkv:budget=20,least=1", 20 + 199), ("h2o:budget=20,least=1", 84)):
        sequence.drops = DropSchedule(parse_kv_policy(setting), 100, 2)
        assert entry_of(sequence, 200, 10, 1, 0.0) == (209, held, 1)


def test_the_most_pages_are_those_of_the_whole_prompt_or_of_what_is_held_behind_it():
    kv, _ = make_kv(100, 1, 400)  # pages of 4 tokens
    parted, _ = make_kv(400, 1, 400, groups=GROUPS, page_bytes=128)  # of 4, 4 and 2
    pyramid = DropSchedule(parse_kv_policy("pyramid:budget=20,least=1"), 100, 4, (0, 1, 2))
    for num_tokens, held in ((50, 100), (200, 20 + 200)):
        sequence = make_seq(num_prompt=100, num_tokens=num_tokens)
        total = sequence.max_tokens_total
        assert sequence.most_pages(kv) == kv.pages_for(total) == -(-total // 4)
        sequence.drops = DropSchedule(parse_kv_policy("snapkv:budget=20,least=1"), 100, 4)
        assert sequence.most_pages(kv) == held // 4
        sequence.drops = pyramid
        first, second, third = (kept + num_tokens for kept in (30, 23, 16))
        behind = -(-first // 4) + -(-second // 4) + -(-third // 2)
        assert sequence.most_pages(parted) == max(behind, 25 + 25 + 50)
