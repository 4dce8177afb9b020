"""The real scheduler on a clock that advances by a known function of the step's work."""

from __future__ import annotations

import math
import random

from memory.prefix.index import PrefixHasher
from serve.request import Request
from serve.sampling_params import SamplingParams
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import make_sequences
from serve.scheduler.step_plan import SchedulerLimits
from serve.scheduler.step_time import StepWork
from tests.serve.scheduler.test_step_time import cpu
from tests.support.engine.fakes import make_kv

SLO_S = 0.1


class Simulation:
    """Runs requests on a simulated machine; steps train the step time model, as in the engine."""

    def __init__(
        self,
        slo_s=SLO_S,
        budget=256,
        step_seconds=cpu,
        max_num_seqs=32,
        noise=0.0,
        queue=None,
        cache=False,
        factor=math.inf,
        num_pages=4096,
    ):
        kv, _ = make_kv(num_pages, max_num_seqs, max_model_len=32_768, tokens_per_page=64)
        limits = SchedulerLimits(max_num_seqs, budget, budget, slo_s, factor)
        hasher = PrefixHasher(kv.page_end) if cache else None
        self.scheduler = Scheduler(limits, kv, hasher=hasher, queue=queue)
        self.step_seconds = step_seconds
        self.noise = noise
        self.random = random.Random(0)
        self.now_s = 0.0
        self.steps = []  # (seconds, prompt rows by name) of each step
        self.ttft_s = {}
        self.waiting_first = {}

    def add(self, name, num_prompt, num_tokens=1, priority=0):
        params = SamplingParams(
            max_tokens=num_tokens, temperature=0.0, seed=0, ignore_eos=True, priority=priority
        )
        request = Request(name, None, (7,) * num_prompt, params, self.now_s)
        (sequence,) = make_sequences(request, frozenset())
        self.waiting_first[sequence] = name
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        scheduler = self.scheduler
        plan = scheduler.schedule(self.now_s)
        if plan is None:
            self.now_s += 0.01
            return
        scheduler.kv.commit()
        seconds = self.step_seconds(StepWork.of(plan)) * self.random.lognormvariate(0.0, self.noise)
        names = {
            sequence.request.request_id: rows
            for sequence, rows in zip(plan.sequences, plan.num_rows, strict=True)
            if sequence in self.waiting_first
        }
        self.now_s += seconds
        self.steps.append((seconds, names))
        scheduler.observe(plan, seconds)
        scheduler.update(plan, [9] * sum(plan.samples))
        for sequence in [s for s in self.waiting_first if s.num_output_tokens]:
            name = self.waiting_first.pop(sequence)
            self.ttft_s[name] = self.now_s - sequence.request.arrival_s

    def run_until(self, condition, limit_s=1000.0):
        end_s = self.now_s + limit_s
        while not condition():
            assert self.now_s < end_s, "the condition is not met in time"
            self.step()

    def start_streams(self, count, num_tokens=20_000):
        names = {f"stream {number}" for number in range(count)}
        for name in sorted(names):
            self.add(name, 64, num_tokens)
        self.run_until(lambda: names <= self.ttft_s.keys())
        for _ in range(30):
            self.step()
        self.steps.clear()

    def warm_up(self):
        """Runs prompts alone, which teach the model the most."""
        for number, length in enumerate((700, 300, 40, 1500)):
            self.add(f"warm-up {number}", length)
            self.run_until(lambda number=number: f"warm-up {number}" in self.ttft_s)
        self.steps.clear()
