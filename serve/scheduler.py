"""Which tokens run in the next step: integers only, clock passed in, no torch, no asyncio.

There is no prefill or decode phase. Each sequence gets min(num_tokens - num_computed_tokens,
what is left of the budget) rows, running ones first, then waiting ones in order of arrival; how
many prompt rows a step has and how prompts share them is the chunk policy's matter (chunking.py).
When memory runs out the youngest running sequence is preempted: it gives back its pages, goes
to the front of the waiting queue and is recomputed later, except for what the prefix cache
still knows of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from memory.kv_manager import KVManager, PrefixHit
from memory.prefix_index import PrefixHasher
from serve.chunking import ChunkPolicy, StepBudget
from serve.memory_policy import MemoryPolicy, PromptOnly
from serve.request import FinishReason
from serve.sequence import Sequence, SequenceStatus
from serve.step_time import StepWork


@dataclass(slots=True)
class StepPlan:
    """The rows of one step: sequences in row order, those with one row first.

    num_rows[i] rows of sequences[i]; num_decodes: how many have exactly one. samples[i]: the
    step brings the sequence up to date, so a token is sampled from its last row.
    """

    sequences: list[Sequence]
    num_rows: list[int]
    num_decodes: int
    samples: list[bool]
    num_total_rows: int


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_num_seqs run at once; a step has at most max_num_batched_tokens rows, of which one
    sequence gets at most max_chunk_tokens. While somebody decodes, prompt rows are as many as
    keep the step within inter_token_slo_s."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_tokens: int
    inter_token_slo_s: float | None = None


class Scheduler:
    """Waiting and running sequences. policy: whom memory lets in; PromptOnly by default."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        policy: MemoryPolicy | None = None,
        hasher: PrefixHasher | None = None,
    ) -> None:
        """hasher: names pages for the prefix cache; None: there is none."""
        self.limits = limits
        self.kv = kv
        self.policy = PromptOnly(kv) if policy is None else policy
        self.hasher = hasher
        self.chunks = ChunkPolicy(
            min(limits.max_num_batched_tokens, limits.max_chunk_tokens), limits.inter_token_slo_s
        )
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_finished = 0
        self.num_steps = 0
        self.num_page_steps = 0  # pages in use, summed over the steps
        self._preempted = False

    def add(self, sequence: Sequence) -> None:
        self.policy.arrived(sequence)
        self.waiting.append(sequence)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step, or None when nothing can run. Records page growth; does not commit."""
        self.kv.prefixes.poll()
        decodes: list[Sequence] = []
        chunks: list[tuple[Sequence, int]] = []
        rows = self.limits.max_num_batched_tokens
        prefilling: list[Sequence] = []
        index = 0
        # Sequences may leave the end of `running` inside this loop (preemption), never its front.
        while index < len(self.running):
            sequence = self.running[index]
            missing = len(sequence.token_ids) - sequence.num_computed_tokens
            index += 1
            if missing > 1:
                prefilling.append(sequence)
            elif rows and self._grow(sequence, sequence.num_computed_tokens + 1):
                decodes.append(sequence)
                rows -= 1
        if prefilling or self.waiting:
            budget = self.chunks.begin(prefilling, decodes, rows, now_s)
            for sequence in budget.shorts:
                self._add_chunk(sequence, budget, chunks, decodes)
            if not self._preempted:
                self._admit(budget, now_s, chunks, decodes)
            budget.release()
            for sequence in budget.longs:
                self._add_chunk(sequence, budget, chunks, decodes)
            self.chunks.end(budget)
        self._preempted = False
        self.num_steps += 1
        self.num_page_steps += self.kv.num_in_use
        return self._plan(decodes, chunks)

    def _add_chunk(
        self,
        sequence: Sequence,
        budget: StepBudget,
        chunks: list[tuple[Sequence, int]],
        decodes: list[Sequence],
    ) -> None:
        """Rows for a sequence that has more than one to compute (or is new)."""
        if sequence.status is not SequenceStatus.RUNNING:
            return
        context = sequence.num_computed_tokens
        missing = len(sequence.token_ids) - context
        rows = budget.rows_for(context, min(missing, self.limits.max_chunk_tokens))
        if rows and not self._grow(sequence, context + rows):
            return
        budget.take(rows, context)
        if rows == 1:
            decodes.append(sequence)
        elif rows:
            chunks.append((sequence, rows))

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Pages for the sequence's next rows, preempting younger ones; False if it had to go."""
        assert sequence.kv_range is not None
        if num_tokens <= sequence.kv_range.capacity:
            return True
        while not self.kv.grow(sequence.kv_range, num_tokens):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.kv_range is not None
        self.running.remove(sequence)
        self.kv.close(sequence.kv_range)
        sequence.kv_range = None
        sequence.num_computed_tokens = sequence.remember_at = 0
        sequence.has_fetched = False
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self.policy.stopped(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1
        self._preempted = True

    def _admit(
        self,
        budget: StepBudget,
        now_s: float,
        chunks: list[tuple[Sequence, int]],
        decodes: list[Sequence],
    ) -> None:
        while self.waiting and budget.has_room and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            if self.chunks.must_wait(sequence, budget) or self._is_fetching(sequence):
                break
            hit = self._match(sequence)
            if not self.kv.can_fit(sequence.num_tokens, hit=hit):
                break
            if self.running and not self.policy.admits(sequence, self.running, self.num_steps):
                break
            self.waiting.popleft()
            self._open(sequence, hit)
            sequence.status = SequenceStatus.RUNNING
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now_s
            self.running.append(sequence)
            self.policy.started(sequence, self.num_steps)
            if not self.chunks.defer(sequence, budget):
                self._add_chunk(sequence, budget, chunks, decodes)

    def _is_fetching(self, sequence: Sequence) -> bool:
        """Whether pages of the sequence are coming back from the store; asks for them once."""
        if self.hasher is not None and not sequence.has_fetched:
            sequence.has_fetched = True
            self.hasher.extend(
                sequence.page_keys, sequence.token_ids, sequence.request.params.cache_salt
            )
            self.kv.fetch(sequence.page_keys)
        return self.kv.prefixes.is_fetching

    def _match(self, sequence: Sequence) -> PrefixHit | None:
        if self.hasher is None:
            return None
        self.hasher.extend(
            sequence.page_keys, sequence.token_ids, sequence.request.params.cache_salt
        )
        return self.kv.match(sequence.page_keys, sequence.num_tokens - 1)

    def _open(self, sequence: Sequence, hit: PrefixHit | None) -> None:
        sequence.kv_range = self.kv.open(sequence.num_tokens, hit)
        sequence.num_computed_tokens = num_hit = hit.num_tokens if hit is not None else 0
        stats = self.kv.prefixes.stats
        stats.num_asked_tokens += sequence.num_tokens
        stats.num_hit_tokens += num_hit
        if sequence.first_scheduled_s is None:
            sequence.num_cached_tokens = num_hit

    def _remember(self, sequence: Sequence) -> None:
        """Offer the pages that are complete now to the prefix cache."""
        if self.hasher is None or sequence.kv_range is None:
            return
        keys = sequence.page_keys
        self.hasher.extend(keys, sequence.token_ids, sequence.request.params.cache_salt)
        self.kv.remember(sequence.kv_range, keys, sequence.num_computed_tokens)
        sequence.remember_at = self.kv.page_end(sequence.kv_range.num_known)

    def _plan(self, decodes: list[Sequence], chunks: list[tuple[Sequence, int]]) -> StepPlan | None:
        # A sequence planned early in the loop may have been preempted by a later one.
        running = SequenceStatus.RUNNING
        sequences = [s for s in decodes if s.status is running]
        num_decodes = len(sequences)
        num_rows = [1] * num_decodes
        for sequence, rows in chunks:
            if sequence.status is running:
                sequences.append(sequence)
                num_rows.append(rows)
        if not sequences:
            return None
        samples = [
            s.num_computed_tokens + rows == len(s.token_ids)
            for s, rows in zip(sequences, num_rows, strict=True)
        ]
        return StepPlan(sequences, num_rows, num_decodes, samples, sum(num_rows))

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step ran through in that time; call it before update()."""
        self.chunks.model.learn(StepWork.of(plan), seconds)

    def update(self, plan: StepPlan, tokens: list[int]) -> list[Sequence]:
        """Take in a step's result: tokens[j] is for the j-th sampling sequence of the plan.

        Returns the sequences that ended; their memory is free for the next schedule().
        """
        finished: list[Sequence] = []
        next_token = iter(tokens)
        for sequence, rows, sampled in zip(
            plan.sequences, plan.num_rows, plan.samples, strict=True
        ):
            sequence.num_computed_tokens += rows
            if sequence.num_computed_tokens >= sequence.remember_at:
                self._remember(sequence)
            if not sampled:
                continue
            token = next(next_token)
            token_ids = sequence.token_ids
            token_ids.append(token)
            length = len(token_ids)
            if token in sequence.stop_ids and length > sequence.min_tokens_total:
                sequence.stop_token = token
                self._finish(sequence, FinishReason.STOP)
                finished.append(sequence)
            elif length >= sequence.max_tokens_total:
                self._finish(sequence, FinishReason.LENGTH)
                finished.append(sequence)
        if finished:
            self.running = [s for s in self.running if s.status is SequenceStatus.RUNNING]
        return finished

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """End a sequence from outside (abort, stop string, error); False if it has ended."""
        if sequence.status is SequenceStatus.FINISHED:
            return False
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._finish(sequence, reason)
        return True

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        self.num_finished += 1
        if sequence.kv_range is not None:
            self.kv.close(sequence.kv_range)
            sequence.kv_range = None
            self.policy.stopped(sequence)
        self.policy.ended(sequence)
