"""Steps of the real scheduler and runner over contexts that are filled in and not computed.

A prompt of a hundred thousand tokens would take minutes of attention. So its pages are mapped and
hold zeros, which are read as fast as other numbers; the steps after it are real.
"""

from __future__ import annotations

import statistics
import time

from serve.loading.runtime import Runtime
from serve.request import Request
from serve.runner.runner import ModelRunner
from serve.sampling_params import SamplingParams
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence, make_sequences
from serve.scheduler.step_plan import SchedulerLimits, StepPlan


class FilledRun:
    """Runs sequences through the real scheduler and runner."""

    def __init__(self, runtime: Runtime, limits: SchedulerLimits) -> None:
        self._kv = runtime.kv
        self._scheduler = Scheduler(limits, runtime.kv)
        self._runner = ModelRunner(runtime.model, runtime.kv, runtime.attention)
        self._num_added = 0

    def add(self, length: int, answer: int) -> Sequence:
        """Adds a prompt of `length` tokens with an answer of exactly so many."""
        params = SamplingParams(max_tokens=answer, temperature=0.0, seed=0, ignore_eos=True)
        prompt = tuple((7 * i) % 900 + 5 for i in range(length))
        request = Request(str(self._num_added), None, prompt, params, 0.0)
        self._num_added += 1
        [sequence] = make_sequences(request, frozenset())
        self._scheduler.add(sequence)
        return sequence

    def fill(self, sequence: Sequence, count: int) -> None:
        """Gives the first `count` tokens of a prompt pages that hold zeros; so do other sequences'
        tokens of these steps."""
        while sequence.num_computed_tokens < count:
            self._skip()

    def finish(self) -> None:
        """Ends all sequences without computing their tokens."""
        while self._scheduler.running:
            self._skip()

    def chunks(self, sequence: Sequence) -> list[tuple[int, float]]:
        """Computes the rest of a prompt; returns the context after each step, and its seconds."""
        found = []
        while len(sequence.token_ids) == sequence.num_prompt_tokens:
            seconds = self.step()
            found.append((sequence.num_computed_tokens, seconds))
        return found

    def decode(self, sequence: Sequence) -> float:
        """Generates to the end; returns the median seconds of a step."""
        times = []
        while sequence in self._scheduler.running:
            times.append(self.step())
        return statistics.median(times[len(times) // 4 :])

    def _skip(self) -> None:
        plan = self._plan()
        self._kv.commit()
        self._scheduler.update(plan, [0] * sum(plan.samples))

    def _plan(self) -> StepPlan:
        plan = self._scheduler.schedule(0.0)
        assert plan is not None, "there is memory for all"
        return plan

    def step(self) -> float:
        """Computes a step and returns its seconds."""
        began_s = time.perf_counter()
        plan = self._plan()
        result = self._runner.run(plan, lambda: None)
        self._scheduler.update(plan, result.tokens)
        return time.perf_counter() - began_s
