"""Parts for load_engine that replace some mechanisms with what classic servers do.

No setting of the server selects them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import Any

from serve.engine.core import EngineCore
from serve.engine.loader import Parts
from serve.engine.output_processor import OutputProcessor
from serve.engine.pools import OutputThread
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import StepPlan


class InLoop(Executor):
    """Tokenizes in the loop's thread, before the next step."""

    def __init__(self) -> None:
        self.core: EngineCore | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert self.core is not None
        self.core.run_in_loop(partial(fn, *args, **kwargs))
        return Future()  # no caller waits for this future


class InLoopOutput(OutputThread):
    """Detokenizes and delivers in the loop's thread, after the step; its own thread is idle."""

    def __init__(self, processor: OutputProcessor) -> None:
        super().__init__(processor)
        self.add = processor.process


def serial_core(**parts: Any) -> EngineCore:
    """Returns a core that tokenizes, computes and detokenizes in one thread."""
    pool = InLoop()
    core = EngineCore(tokenize=pool, make_output=InLoopOutput, **parts)
    pool.core = core
    return core


class _AnyToken(frozenset[int]):
    """Holds every token as `in` sees it, and none for the sampler to forbid."""

    def __contains__(self, token: object) -> bool:
        return True


def with_scripted_ends(parts: Parts, lengths: Mapping[tuple[int, ...], int]) -> Parts:
    """Returns parts whose answers end after lengths[prompt] tokens, whatever the tokens are, as if
    the model had ended them: the engine does not know the length."""

    def make_scheduler(*args: Any, **kwargs: Any) -> Scheduler:
        scheduler = parts.scheduler(*args, **kwargs)
        add = scheduler.add

        def add_scripted(sequence: Sequence) -> None:
            length = lengths[tuple(sequence.token_ids)]
            sequence.stop_ids = _AnyToken()
            sequence.min_tokens_total = sequence.num_prompt_tokens + length - 1
            add(sequence)

        scheduler.add = add_scripted  # type: ignore[method-assign]
        return scheduler

    return Parts(core=parts.core, scheduler=make_scheduler)


def _decodes(sequence: Sequence) -> bool:
    """Returns whether the sequence decodes: all its tokens are computed except the last sampled."""
    is_behind_by_one = sequence.num_computed_tokens + 1 == sequence.num_tokens
    return is_behind_by_one and sequence.num_output_tokens > 0


class PrefillFirst(Scheduler):
    """Schedules steps of prompt rows or of decode rows; no sequence decodes while there are prompt
    rows."""

    def schedule(self, now_s: float) -> StepPlan | None:
        limits = self.limits
        # decode rows, which are removed below, must not take rows from the prompts
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
    """Admits no request to a batch that has begun to decode until all of its sequences finish."""

    _has_begun = False  # the batch has begun to decode

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
