"""The scheduler: decides which tokens are computed in the next step.

A step has no prefill or decode phase. Each sequence gets min(num_tokens - num_computed_tokens,
what is left of the step's row budget) rows: running sequences first, then waiting ones in the
order of the queue policy (serve/scheduler/waiting_queue.py). The chunk policy
(serve/scheduler/chunking.py) decides how many prompt rows a step has and how prompts share them.

When K/V memory runs out, a running sequence is preempted: its pages are freed and it returns to the
queue. Its K/V is recomputed later, except for tokens still in the prefix cache. A queue policy with
priority levels also preempts a running sequence for a more urgent waiting one that cannot run
otherwise; the lowest level is the most urgent. Integers and floats only; the clock is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from memory.kv_memory import KVMemory
from memory.pages.kv_range import PrefixHit, Range
from memory.prefix.index import PrefixHasher
from serve.request import FinishReason
from serve.scheduler.admission import PromptOnlyPolicy
from serve.scheduler.chunking import ChunkPolicy, StepDraft
from serve.scheduler.held_back import Refusals, StarvedPrompts
from serve.scheduler.memory_policy import MemoryPolicy
from serve.scheduler.preempted_pages import PreemptedPages
from serve.scheduler.prefix_lookup import PrefixLookup
from serve.scheduler.sequence import PENDING_TOKEN, Sequence, SequenceStatus, finish_reason_after
from serve.scheduler.steady_decode import decode_rows, streams_beside
from serve.scheduler.step_plan import SchedulerLimits, StepPlan, make_plan
from serve.scheduler.step_results import Drafting, apply_tokens
from serve.scheduler.step_time import StepWork
from serve.scheduler.waiting_queue import WaitingQueue

# At most this many waiting sequences are skipped because another one is computing their prefix.
_MAX_PREFIX_WAITS = 16
_MAX_SCANNED = 256  # waiting sequences that one search for a candidate examines


class Scheduler:
    """Holds the waiting and running sequences. The loop calls schedule(), runs the plan, and calls
    update() with the sampled tokens. Where steps overlap, it calls apply_launch() in between."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVMemory,
        policy: MemoryPolicy | None = None,
        hasher: PrefixHasher | None = None,
        queue: WaitingQueue | None = None,
    ) -> None:
        """policy: admits sequences by memory; PromptOnlyPolicy by default. hasher: hashes pages for
        the prefix cache; None: there is no cache. queue: the waiting queue; FCFS by default."""
        self.limits = limits
        self.kv = kv
        self.policy = PromptOnlyPolicy(kv) if policy is None else policy
        self.waiting = WaitingQueue() if queue is None else queue
        self.chunks = ChunkPolicy(limits)
        self.waiting.prefill_seconds = prefill_seconds = self.chunks.model.prefill_seconds
        self.waiting.expected_length = self.policy.expected_length
        self.prefixes = PrefixLookup(kv, hasher, prefill_seconds)
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_priority_preemptions = 0  # those made for priority, not for lack of memory
        self.num_finished = self.num_steps = 0
        self.num_page_steps = 0  # pages in use, summed over all steps
        self._preempted = PreemptedPages(kv)
        self._starved = StarvedPrompts()
        self._is_short = False  # memory ran out while this step was made
        self.launched: deque[StepPlan] = deque()  # the steps in flight, the oldest first
        self.num_stages = 1
        self._refusals = Refusals()
        self.drafting: Drafting | None = None  # None: steps have no drafts

    def use_pipeline(self, num_stages: int) -> None:
        """Plans for a pipeline of so many stages, which samples in the last one."""
        self.num_stages = self.chunks.num_stages = self.policy.num_stages = num_stages

    @property
    def num_passes(self) -> int:
        """Steps in each of which a sequence gets a token: in a pipeline, passes through it."""
        return self.num_steps // self.num_stages

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        self.policy.arrived(sequence)
        num_cached = sequence.num_tokens - sequence.num_expected_rows
        sequence.expected_s = self.chunks.model.prefill_seconds(sequence.num_tokens, num_cached)
        self.waiting.add(sequence)
        self.prefixes.queued(sequence)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self, now_s: float) -> StepPlan | None:
        """Returns the plan of the next step, or None if nothing can run. It allocates pages in the
        accounting; the runner maps them (KVMemory.commit)."""
        self.waiting.tick(now_s)
        self.kv.prefixes.poll()
        rows = self.limits.max_num_batched_tokens
        decodes, prefilling = decode_rows(
            self.running, rows, self._grow, self.prefixes.is_on, self.num_stages
        )
        num_certain, num_preemptions = len(decodes), self.num_preemptions
        chunks: list[tuple[Sequence, int]] = []
        if prefilling or self.waiting:
            prompts = [(self._level_of(s), s) for s in prefilling]
            level = self._level_of_next(prompts)
            beside = streams_beside(self.running, decodes, self.num_stages)
            left, ready = rows - num_certain, self._num_ready()
            kept = self.drafting.reserve(left) if self.drafting and decodes else 0
            budget = self.chunks.begin(prompts, decodes, left, now_s, level, ready, beside, kept)
            self._fill(StepDraft(budget, decodes, chunks), now_s)
            self.chunks.end(budget)
        if self.waiting.preempts:
            self._starved.end_step(prefilling, chunks)
        self._is_short = False
        self.num_steps += 1
        self.num_page_steps += self.kv.num_in_use
        if self.num_preemptions > num_preemptions:
            num_certain = 0
        plan = make_plan(decodes, chunks, num_certain)
        if self.drafting is not None and plan is not None:
            self.drafting.extend(plan, num_certain, rows - plan.num_total_rows, self.chunks.limit_s)
        return plan

    def _num_ready(self) -> int:
        """Returns the waiting sequences that lack nothing but rows."""
        most = 0 if self._refusals.is_recent(self.num_steps) else len(self.waiting)
        return min(most, self.limits.max_num_seqs - len(self.running))

    def _fill(self, draft: StepDraft, now_s: float) -> None:
        """Gives rows to short prompts, then to new ones, to long ones, and to less urgent ones."""
        budget = draft.budget
        for sequence in budget.shorts:
            self._add_chunk(sequence, draft)
        if not self._is_short:
            self._admit(draft, now_s)
        budget.release()
        for sequence in (*budget.longs, *budget.rest):
            self._add_chunk(sequence, draft)

    def _add_chunk(self, sequence: Sequence, draft: StepDraft) -> None:
        """Gives rows to a prompt that is running or was just admitted."""
        if sequence.status is not SequenceStatus.RUNNING:
            return
        context = sequence.num_computed_tokens
        end = min(sequence.num_tokens, sequence.drop_at, context + self.limits.max_chunk_tokens)
        rows = draft.budget.rows_for(context, end - context)
        if not rows or self._grow(sequence, context + rows):
            draft.add(sequence, rows)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocates pages for num_tokens of the sequence, preempting others as needed; False
        if the sequence itself is preempted or must wait for its step in flight."""
        if sequence.kv_range is None:
            return False
        if num_tokens <= sequence.kv_range.capacity:
            return True
        # rows in flight may have to be computed again, so the pages they read are kept
        num_computed = sequence.num_computed_tokens - sequence.rows_in_flight
        while not self.kv.grow(sequence.kv_range, num_tokens, num_computed):
            self._is_short = True
            if sequence.rows_in_flight:
                return False  # completing that step may free enough pages
            shares, own = self.kv.shares_memory, sequence.kv_range
            sharers = [s for s in self.running if s.kv_range and shares(s.kv_range, own)]
            victim = self.waiting.victim(sharers)
            self._preempt(victim)
            self.policy.stopped(victim)
            if victim is sequence:
                return False
        return True

    def preempt_lost(self, is_lost: Callable[[Range], bool]) -> int:
        """Preempts the sequences whose K/V was lost with a memory node; returns their number."""
        lost = [s for s in self.running if s.kv_range is not None and is_lost(s.kv_range)]
        for sequence in reversed(lost):
            self._preempt(sequence)
            self.policy.stopped(sequence)
        return len(lost)

    def _preempt(self, sequence: Sequence) -> None:
        """Frees a running sequence's pages and queues it again."""
        assert sequence.kv_range is not None
        self.running.remove(sequence)
        self.kv.close(sequence.kv_range)
        sequence.kv_range = None
        sequence.num_computed_tokens = sequence.next_cacheable_at = sequence.recheck_at = 0
        sequence.is_fetch_requested = False
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self.waiting.put_back(sequence)
        self._preempted.add(sequence)
        self.num_preemptions += 1

    def _admit(self, draft: StepDraft, now_s: float) -> None:
        """Admits waiting sequences while rows, slots and memory last, and gives them rows."""
        budget = draft.budget
        paused: list[Sequence] = []
        while self.waiting:
            has_slot = len(self.running) < self.limits.max_num_seqs
            if not (self.waiting.preempts or (has_slot and budget.has_room)):
                break
            sequence = self._next_candidate(draft, now_s)
            if sequence is None:
                break
            is_refused = self._is_refused(sequence)
            if not is_refused and self.prefixes.is_fetching(sequence, now_s):
                break
            hit = self.prefixes.match(sequence) if has_slot and not is_refused else None
            if not self.running and not self.kv.can_fit(sequence.num_tokens, hit=hit):
                hit = None  # alone it always fits, but perhaps not with pages that a hit must copy
            if not (has_slot and not is_refused and self._fits(sequence, hit)):
                if has_slot and not is_refused:
                    self._refusals.add(sequence, self.kv.num_available, self.num_steps)
                victim = self._victim_for(sequence)
                if victim is None:
                    break
                draft.remove(victim)
                paused = [s for s in paused if s is not victim]  # it may be admitted again
                self._preempt(victim)
                self.num_priority_preemptions += 1
                self.policy.preempted_by_priority(victim)
                continue
            if not budget.has_room:
                self._take_rows_for(sequence, draft, paused)
            if not budget.has_room:
                break
            self._admit_sequence(sequence, hit, now_s)
            is_rival = self.waiting.level(sequence) == budget.level
            if not (is_rival and self.chunks.defer(sequence, budget)):
                self._add_chunk(sequence, draft)
        for sequence in reversed(paused):
            self._add_chunk(sequence, draft)

    def _is_refused(self, sequence: Sequence) -> bool:
        """Returns whether the sequence did not fit and no memory has been freed since then."""
        if not self.running:
            return False
        if self.policy.still_refuses(sequence, self.num_passes):
            return True
        return self._refusals.holds(sequence, self.kv.num_available, self.num_steps)

    def _level_of(self, sequence: Sequence) -> int:
        """Returns a running prompt's level; a starved prompt goes first."""
        return -1 if sequence in self._starved else self.waiting.level(sequence)

    def _level_of_next(self, prompts: list[tuple[int, Sequence]]) -> int:
        if self.waiting:
            return self.waiting.level(next(iter(self.waiting)))
        return min([level for level, _ in prompts])

    def _take_rows_for(self, sequence: Sequence, draft: StepDraft, paused: list[Sequence]) -> None:
        """Takes the rows of a running prompt, which gets what is left, for a more urgent one."""
        prompts = [s for s, _ in draft.chunks if s not in self._starved]
        victims = self.waiting.victims_for(sequence, prompts)
        if victims:
            paused.append(victims[-1])
            draft.remove(victims[-1])

    def _next_candidate(self, draft: StepDraft, now_s: float) -> Sequence | None:
        """Returns the waiting sequence to admit next, or None. Long prompts over the limit per step
        are skipped, but only for sequences of the same level. Sequences whose missing prefix
        another one is computing are also skipped, since computing it twice costs more."""
        budget = draft.budget
        prompts = [s for s, _ in draft.chunks] + budget.longs
        for plan in self.launched:
            prompts += [s for s in plan.sequences[plan.num_decodes :] if s.rows_in_flight]
        passed: int | None = None
        num_prefix_waits = 0
        for sequence in islice(self.waiting, _MAX_SCANNED):
            if sequence.rows_in_flight:
                return None  # just preempted: its next token is still in flight
            if not self.kv.fits_alone(sequence.num_tokens):
                continue  # a memory node was lost, and the rest is too small for it
            if self.prefixes.is_awaited(sequence, now_s):
                continue  # a peer computes its prompt
            level = self.waiting.level(sequence)
            if passed is not None and level > passed:
                return None
            if self.chunks.must_wait(sequence, budget):
                passed = level
            elif prompts and self.prefixes.is_being_computed(sequence, prompts):
                num_prefix_waits += 1
                if num_prefix_waits == _MAX_PREFIX_WAITS:
                    return None
            else:
                return sequence
        return None

    def _fits(self, sequence: Sequence, hit: PrefixHit | None) -> bool:
        if not self.kv.can_fit(sequence.num_tokens, hit=hit):
            return False
        return not self.running or self.policy.admits(sequence, self.running, self.num_passes, hit)

    def _victim_for(self, sequence: Sequence) -> Sequence | None:
        """Returns the sequence to preempt first for this more urgent one; None if none helps."""
        victims = self.waiting.victims_for(sequence, self.running)
        if victims and not self._preempted.stay_cached_with(sequence, self.prefixes.is_on):
            victims = [s for s in victims if self.waiting.is_worth_preempting(s)]
        ranges = [s.kv_range for s in victims if s.kv_range is not None]
        leaving = self.kv.ranges_to_close(sequence.num_tokens, ranges)
        if leaving:
            starts = {target.start for target in leaving}
            victims = [s for s in victims if s.kv_range is not None and s.kv_range.start in starts]
        return victims[-1] if victims and leaving is not None else None

    def _admit_sequence(self, sequence: Sequence, hit: PrefixHit | None, now_s: float) -> None:
        self.prefixes.open(sequence, hit)
        self.waiting.take(sequence)
        self._preempted.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now_s
        self.running.append(sequence)
        self.policy.started(sequence, self.num_passes)

    def observe(self, plan: StepPlan, seconds: float, work: StepWork | None = None) -> None:
        """Learns, before update(), from a step that took `seconds`, or those of stage_seconds()."""
        self.chunks.observe(plan, seconds - plan.draft_s, self.num_steps, work)

    def update(
        self, plan: StepPlan, tokens: list[int], counts: list[int] | None = None
    ) -> list[Sequence]:
        """Applies a step's result and returns the sequences that ended; their pages are free.
        tokens[j] belongs to the j-th sampled sequence, or counts[j] tokens in their order, of which
        fewer are left in counts[j] if the sequence ends before the last. The plan holds no finished
        sequence. If it was launched (in_flight.py), it is the oldest in flight, and its rows are
        counted."""
        finished: list[Sequence] = []
        is_usual = counts is None and plan.contexts is None and all(plan.samples)
        if not is_usual or plan.num_decodes < len(plan.sequences):
            apply_tokens(self, plan, tokens, counts, finished)
        else:
            for sequence, token in zip(plan.sequences, tokens, strict=True):
                sequence.num_computed_tokens = end = sequence.num_computed_tokens + 1
                sequence.token_ids.append(token)
                is_due = end >= sequence.recheck_at or token in sequence.stop_ids
                if is_due or sequence.mask is not None:
                    self.apply_token(sequence, end, token, finished)
        if finished:
            self.running = [s for s in self.running if s.status is SequenceStatus.RUNNING]
        return finished

    def apply_token(self, sequence: Sequence, end: int, token: int, ended: list[Sequence]) -> None:
        """Caches complete pages of the first `end` tokens, and finishes a sequence that ends with
        `token`, which is PENDING_TOKEN if none was sampled."""
        if end >= sequence.next_cacheable_at:
            self.prefixes.insert(sequence, end)
        if token != PENDING_TOKEN:
            reason = finish_reason_after(sequence, token, end + 1)
        else:  # a prompt-only sequence ends when its prompt is computed
            reason = FinishReason.LENGTH if end >= sequence.max_tokens_total else None
        if reason is not None:
            self._finish(sequence, reason)
            ended.append(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """Ends a sequence from outside a step (abort, error); False if it has already ended."""
        if sequence.status is SequenceStatus.FINISHED:
            return False
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        self._finish(sequence, reason)
        return True

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Keeps the first num_tokens tokens; the step that computed the others failed."""
        is_waiting = sequence.status is SequenceStatus.WAITING
        if is_waiting:
            self._preempted.remove(sequence)
        del sequence.token_ids[num_tokens:]
        if is_waiting:
            self._preempted.add(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence. The caller removes it from `running`."""
        if sequence.status is SequenceStatus.WAITING:  # it may have been preempted since its launch
            self.waiting.remove(sequence)
            self._preempted.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        if sequence.mask is not None:
            sequence.mask.job = None  # it refers to the sequence
        if sequence.rows_in_flight:
            while sequence.token_ids[-1] == PENDING_TOKEN:
                del sequence.token_ids[-1]
        self.num_finished += 1
        if sequence.kv_range is not None:
            self.kv.close(sequence.kv_range)
            sequence.kv_range = None
            self.policy.stopped(sequence)
        self.policy.ended(sequence)
        self.waiting.ended(sequence)
        self.prefixes.ended(sequence)
        if self.drafting is not None:
            self.drafting.ended(sequence)
