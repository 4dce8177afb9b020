"""An engine without some of its mechanisms: what classic servers do in their place.

Given to load_engine; nothing of it can be had by a setting.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import Any

from serve.engine.core import EngineCore
from serve.engine.output_processor import OutputProcessor
from serve.engine.threads import OutputThread
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import StepPlan


class InLoop(Executor):
    """Tokenizing takes its turn in the loop's thread, before the next step."""

    def __init__(self) -> None:
        self.core: EngineCore | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert self.core is not None
        self.core.run_in_loop(partial(fn, *args, **kwargs))
        return Future()  # nobody waits for it


class InLoopOutput(OutputThread):
    """Detokenizing and delivery take their turn in the loop's thread, after the step. Its own
    thread gets nothing to do."""

    def __init__(self, processor: OutputProcessor) -> None:
        super().__init__(processor)
        self.add = processor.process


def serial_core(**parts: Any) -> EngineCore:
    """One thread: tokenize, compute, detokenize, one after the other."""
    pool = InLoop()
    core = EngineCore(tokenize=pool, make_output=InLoopOutput, **parts)
    pool.core = core
    return core


def _decodes(sequence: Sequence) -> bool:
    """Whether all that is missing is the token sampled last."""
    is_behind_by_one = sequence.num_computed_tokens + 1 == sequence.num_tokens
    return is_behind_by_one and sequence.num_output_tokens > 0


class PrefillFirst(Scheduler):
    """A step has prompt rows or decode rows; while there are prompts, nobody decodes."""

    def schedule(self, now_s: float) -> StepPlan | None:
        limits = self.limits
        # those that will not be computed take no rows from the prompts
        num_decoding = sum(_decodes(sequence) for sequence in self.running)
        most = limits.max_num_batched_tokens + num_decoding
        self.limits = replace(limits, max_num_batched_tokens=most)
        plan = super().schedule(now_s)
        self.limits = limits
        if plan is None:
            return None
        prompts = [i for i, sequence in enumerate(plan.sequences) if not _decodes(sequence)]
        return plan.subset(prompts) if prompts else plan


class StaticBatches(PrefillFirst):
    """Nobody enters a batch that has begun to decode, until all of it have their answers."""

    _has_begun = False

    def schedule(self, now_s: float) -> StepPlan | None:
        limits = self.limits
        self._has_begun = self._has_begun and bool(self.running)
        if self._has_begun:
            self.limits = replace(limits, max_num_seqs=len(self.running))
        plan = super().schedule(now_s)
        self.limits = limits
        if plan is not None and all(_decodes(sequence) for sequence in plan.sequences):
            self._has_begun = True
        return plan
