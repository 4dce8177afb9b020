"""A scheduler whose chunks beside streams have the engine's own size or a given one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from serve.scheduler.chunking import ChunkPolicy, StepBudget
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import SchedulerLimits
from serve.scheduler.step_time import StepWork


class SwitchedChunks(ChunkPolicy):
    """With static_rows, a step with decode rows has at most so many prompt rows, however long they
    take. None: the engine decides. The loop reads it at each step."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        self.static_rows: int | None = None

    def begin(
        self,
        prompts: list[tuple[int, Sequence]],
        decodes: list[Sequence],
        rows: int,
        now_s: float,
        level: int = 0,
        num_ready: int = 0,
        beside: Collection[Sequence] = (),
        num_drafts: int = 0,
    ) -> StepBudget:
        if self.static_rows is not None and (decodes or beside):
            rows = min(rows, self.static_rows + num_drafts)
        return super().begin(prompts, decodes, rows, now_s, level, num_ready, beside, num_drafts)

    def _limit_s(self, decodes: StepWork, num_prompts: int) -> float:
        if self.static_rows is not None:
            return math.inf
        return super()._limit_s(decodes, num_prompts)


def switch_chunks(scheduler: Scheduler) -> SwitchedChunks:
    """Gives a scheduler that has not run yet chunks that can be switched, and returns them."""
    chunks = SwitchedChunks(scheduler.limits)
    chunks.model = scheduler.chunks.model
    scheduler.chunks = chunks
    return chunks


def switched_scheduler(made: list[SwitchedChunks]) -> Callable[..., Scheduler]:
    """Returns a factory for serve.engine.loader.Parts; it appends its schedulers' chunks to
    `made`."""

    def make(*args: Any, **settings: Any) -> Scheduler:
        scheduler = Scheduler(*args, **settings)
        made.append(switch_chunks(scheduler))
        return scheduler

    return make
