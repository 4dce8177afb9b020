"""The scheduler of an engine whose sequences drop K/V. Integers and floats only.

When a sequence has computed as many tokens as its schedule says (memory/policies/drop_schedule.py),
tokens are dropped at the step boundary. No step has rows on both sides of such a place, also where
a preempted sequence is computed again: there its K/V is the same again, token for token.

Pages of a prompt are in the prefix cache, whole, for others and for itself. What has dropped
tokens is in no other sequence's prefix, so later pages are not cached. Rows that give scores are
always computed, so a hit ends before them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from memory.evicting_kv import EvictingKV, Mover
from memory.kv_memory import KVMemory
from memory.policies.drop_schedule import NEVER, DropSchedule
from memory.policies.setting import OFF, KVPolicy, policy_of_request
from memory.prefix.index import PrefixHasher
from serve.request import FinishReason, Request
from serve.scheduler.memory_policy import MemoryPolicy
from serve.scheduler.prefix_lookup import PrefixLookup
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence, SequenceStatus
from serve.scheduler.step_plan import SchedulerLimits, StepPlan
from serve.scheduler.waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)


class Choice(Mover, Protocol):
    """The tokens of a sequence that stay: so many in each layer group; `dropped` are dropped in
    all."""

    counts: list[int]
    dropped: int

    def settle(self) -> None:
        """Takes note that the others are gone."""


class Eviction(Protocol):
    """Chooses what stays. `start` is where a sequence's range begins."""

    def schedule(self, num_prompt: int, setting: KVPolicy | None = None) -> DropSchedule:
        """setting: the sequence's own policy; None: the engine's."""

    def first_scored(self, schedule: DropSchedule, num_answer: int) -> int:
        """Returns the first position whose row has to be computed for its scores, or NEVER."""

    def open(self, start: int, schedule: DropSchedule, num_answer: int, seed: int) -> None: ...

    def forget(self, start: int) -> None: ...

    def choose(self, start: int, num_tokens: int) -> Choice: ...


class EvictingScheduler(Scheduler):
    """A Scheduler over an EvictingKV."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVMemory,
        policy: MemoryPolicy | None = None,
        hasher: PrefixHasher | None = None,
        queue: WaitingQueue | None = None,
        *,
        eviction: Eviction,
    ) -> None:
        super().__init__(limits, kv, policy, hasher, queue)
        assert isinstance(kv, EvictingKV), "ranges that shrink"
        self._evicting_kv = kv
        self._eviction = eviction
        seconds = self.chunks.model.prefill_seconds
        self.prefixes = _UnscoredPrefixes(kv, hasher, seconds, eviction)
        kv.on_close = lambda target: eviction.forget(target.start)

    def add(self, sequence: Sequence) -> None:
        sequence.drops = _schedule_of(sequence.request, self._eviction)
        super().add(sequence)

    def _admit_sequence(self, sequence: Sequence, hit: object, now_s: float) -> None:
        super()._admit_sequence(sequence, hit, now_s)  # type: ignore[arg-type]
        schedule = sequence.drops
        if schedule is None:
            return
        assert sequence.kv_range is not None and isinstance(schedule, DropSchedule)
        start = sequence.kv_range.start
        self._eviction.open(start, schedule, _num_answer(sequence), sequence.seed)
        sequence.drop_at = schedule.next_drop(0, 0)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        target = sequence.kv_range
        return super()._grow(sequence, num_tokens - (0 if target is None else target.dropped))

    def update(
        self, plan: StepPlan, tokens: list[int], counts: list[int] | None = None
    ) -> list[Sequence]:
        finished = super().update(plan, tokens, counts)
        due = [s for s in plan.sequences if s.num_computed_tokens >= s.drop_at]
        for sequence in due:
            if sequence.status is SequenceStatus.RUNNING:
                try:
                    self._drop(sequence)
                except Exception:
                    name = sequence.request.request_id
                    logger.exception("dropping K/V of %s failed", name)
                    sequence.error = "dropping K/V failed in the engine"
                    self.finish(sequence, FinishReason.ERROR)
                    finished.append(sequence)
        return finished

    def _drop(self, sequence: Sequence) -> None:
        """Drops tokens of a sequence that has computed as many as its schedule says."""
        target, drops = sequence.kv_range, sequence.drops
        assert target is not None and drops is not None, "it runs"
        num_tokens = sequence.num_computed_tokens
        assert num_tokens == sequence.drop_at, f"{num_tokens} computed, {sequence.drop_at} due"
        choice = self._eviction.choose(target.start, num_tokens)
        while not self._evicting_kv.can_shrink(target, choice.counts):
            victim = self.waiting.victim([s for s in self.running if s.kv_range is not None])
            self._preempt(victim)
            self.policy.stopped(victim)
            if victim is sequence:
                return
        self._evicting_kv.shrink(target, choice.counts, choice.dropped, choice)
        choice.settle()
        sequence.drop_at = drops.next_drop(num_tokens, choice.dropped)
        sequence.recheck_at, sequence.next_cacheable_at = 0, NEVER


class _UnscoredPrefixes(PrefixLookup):
    """A PrefixLookup that finds no more of a sequence than what comes before rows with scores and
    what was computed before tokens were dropped."""

    def __init__(
        self,
        kv: EvictingKV,
        hasher: PrefixHasher | None,
        prefill_seconds: Callable[[int, int], float],
        eviction: Eviction,
    ) -> None:
        super().__init__(kv, hasher, prefill_seconds)
        self._evicting_kv = kv
        self._eviction = eviction

    def most_shared(self, sequence: Sequence) -> int:
        schedule = sequence.drops
        if schedule is None:
            return super().most_shared(sequence)
        assert isinstance(schedule, DropSchedule)
        return self._most_shared(sequence.num_tokens, schedule, _num_answer(sequence))

    def _most_shared(self, num_tokens: int, schedule: DropSchedule, num_answer: int) -> int:
        first = self._eviction.first_scored(schedule, num_answer)
        # the row before tokens are dropped is computed, at whose end that is done
        return min(num_tokens - 1, first, schedule.next_drop(0, 0) - 1)

    def num_missing_rows(self, request: Request, page_keys: list[bytes]) -> int:
        num_prompt = len(request.prompt_token_ids)
        if request.reads_prompt or not num_prompt:
            return num_prompt
        schedule = _schedule_of(request, self._eviction)
        if schedule is None:
            return super().num_missing_rows(request, page_keys)
        num_answer = request.params.most_tokens(self._evicting_kv.max_model_len - num_prompt)
        most = self._most_shared(num_prompt, schedule, num_answer)
        return num_prompt - self._evicting_kv.num_cached_tokens(page_keys, most)

    def is_fetching(self, sequence: Sequence, now_s: float) -> bool:
        # what is computed in any case is not loaded
        return self.most_shared(sequence) > 0 and super().is_fetching(sequence, now_s)

    def is_being_computed(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        if self.most_shared(sequence) <= 0:
            return False
        whole = [s for s in others if s.kv_range is None or not s.kv_range.dropped]
        return super().is_being_computed(sequence, whole)


def _schedule_of(request: Request, eviction: Eviction) -> DropSchedule | None:
    """Returns when the sequences of a request drop tokens, by its own policy if it names one; None:
    they are counted and computed as without a policy."""
    said = request.params.kv_policy
    if said == OFF:
        return None
    setting = None if said is None else policy_of_request(said)
    return eviction.schedule(len(request.prompt_token_ids), setting)


def _num_answer(sequence: Sequence) -> int:
    return sequence.max_tokens_total - sequence.num_prompt_tokens
