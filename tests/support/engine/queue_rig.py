"""Sequences by name, and a scheduler with a queue policy and a clock."""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

from memory.prefix.index import PrefixHasher
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import make_sequences
from serve.scheduler.step_plan import SchedulerLimits
from serve.scheduler.waiting_queue import make_queue
from tests.serve.scheduler.test_scheduler import check_invariants
from tests.support.engine.fakes import make_kv, make_partitioned_kv, make_request

NEVER = frozenset()


def make(name, num_prompt=4, num_tokens=4, *, client=None, arrival_s=0.0, tokens=None, **params):
    """Returns a request's sequences; prompts differ unless `tokens` is given."""
    request = make_request(num_prompt, name, num_tokens, **params)
    number = crc32(name.encode()) >> 1
    ids = tokens or (number, *range(10, 9 + num_prompt))
    request = replace(
        request, client=client, arrival_s=arrival_s, prompt_token_ids=ids[:num_prompt]
    )
    return make_sequences(request, NEVER)


def seq(*args, **kwargs):
    return make(*args, **kwargs)[0]


def name_of(sequence):
    return sequence.request.request_id


def names(sequences):
    return "".join(map(name_of, sequences))


def at_rate(queue, rows_per_s):
    queue.prefill_seconds = lambda num_tokens, num_cached: (num_tokens - num_cached) / rows_per_s
    return queue


def drained(queue):
    """Takes every sequence from the queue and returns their names in that order."""
    taken = []
    while queue:
        sequence = next(iter(queue))
        queue.take(sequence)
        taken.append(sequence)
    return names(taken)


class Rig:
    """A scheduler with a prefix cache and a clock. A step takes 1 ms plus 1 ms for each row."""

    def __init__(
        self,
        queue_policy,
        num_pages=64,
        max_num_seqs=4,
        budget=16,
        chunk=None,
        cache=True,
        num_memories=1,
    ):
        self.kv = make_kv(num_pages, max_num_seqs, 256)[0]
        if num_memories > 1:
            self.kv = make_partitioned_kv(num_memories, num_pages, max_num_seqs, 256)[0]
        hasher = PrefixHasher(self.kv.page_end) if cache else None
        limits = SchedulerLimits(max_num_seqs, budget, chunk or budget)
        self.queue = make_queue(queue_policy) if isinstance(queue_policy, str) else queue_policy
        self.scheduler = Scheduler(limits, self.kv, hasher=hasher, queue=self.queue)
        self.limits = limits
        self.now_s = 0.0
        self.first_s, self.finished_s = {}, {}
        self.num_rows = 0

    def add(self, *args, **kwargs):
        added = make(*args, arrival_s=self.now_s, **kwargs)
        for sequence in added:
            self.scheduler.add(sequence)
        return added[0]

    def step(self):
        plan = self.scheduler.schedule(self.now_s)
        if plan is None:
            return None
        check_invariants(
            self.scheduler, plan, self.limits.max_num_batched_tokens, self.limits.max_chunk_tokens
        )
        self.kv.commit()
        step_s = 1e-3 * (1 + plan.num_total_rows)
        self.now_s += step_s
        self.num_rows += plan.num_total_rows
        self.scheduler.observe(plan, step_s)
        for sequence, samples in zip(plan.sequences, plan.samples, strict=True):
            if samples and sequence.num_output_tokens == 0:
                self.first_s[name_of(sequence)] = self.now_s
        for sequence in self.scheduler.update(plan, [9] * sum(plan.samples)):
            self.finished_s[name_of(sequence)] = self.now_s
        return plan

    def run(self):
        while self.scheduler.has_work():
            assert self.step() is not None
        assert self.kv.num_in_use == 0
        return self
