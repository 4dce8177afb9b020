"""Chooses how many rows of which prompts a step has, by time and slack. No torch, no asyncio.

Time: while sequences decode, a step takes as many prompt rows as keep its predicted time within a
limit (Mnemosyne's adaptive chunking): the inter-token SLO, or without one a multiple of what the
decode rows alone would take. The multiple is larger while many prompts wait, because then a stream
that stalls costs less than the prompts behind it. Without decode rows, only the row budget bounds a
step. In a pipeline the model's time is that of the slowest stage. A token takes a pass through all
stages; a full pipeline launches a step whenever one ends, so the pass lasts as long as num_stages
steps, and each of them may take that part of the SLO.

Slack: prompts are sorted by (time until the deadline - time to compute) / time to compute, smallest
first (LARS). A long prompt comes after the short ones and has a reserved share of the step, which
is at most a half and grows as its slack shrinks. In steps with short prompts it gets no more time
than that share, counted over such steps (deficit round robin). So a short prompt is computed at no
less than half its speed, and many short prompts cannot stop a long one.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import SchedulerLimits, StepPlan
from serve.scheduler.step_time import GRANULARITY, StepTimeModel, StepWork

# A prompt is long if it takes more than _LONG_STEPS steps. Up to _MOST_LONGS of them may run, so
# that the second one does not delay the short ones behind it.
_LONG_STEPS = 4
_MOST_LONGS = 4
# The deadline of a prompt: the larger of a multiple of the time it takes alone, and some seconds.
_DEADLINE_FACTOR = 1.5
_LEAST_DEADLINE_S = 0.5
_LEAST_SHARE, _MOST_SHARE = 0.1, 0.5
# Once the model has learned decode-only steps, it learns from one in _LEARN_EVERY of them.
_LEARN_EVERY = 4
# The rows that a step has for the first short and for the first long prompt in spite of the limit.
_LEAST_ROWS = GRANULARITY
# The factor is for up to _FEW_PROMPTS prompts at once; each _PROMPTS_PER_FACTOR more add it again.
_FEW_PROMPTS = 6
_PROMPTS_PER_FACTOR = 8


class StepBudget:
    """The prompt rows of one step, and the prompts in their order.

    shorts come first, then longs, then the rest. After the shorts, release() frees what is
    reserved for the longs. limit_s is the most time of the step, or inf if only rows count.
    owed_s is the time that is still due to the first long prompt from its share of the steps with
    short ones.
    """

    __slots__ = (
        "_is_full",
        "_is_shared",
        "_least",
        "_limit_s",
        "_model",
        "_reserved_rows",
        "_reserved_s",
        "_rows",
        "_rows_for_one",
        "_share",
        "_work",
        "level",
        "longs",
        "owed_s",
        "rest",
        "shorts",
    )

    def __init__(
        self,
        model: StepTimeModel,
        decodes: StepWork,
        rows: int,
        limit_s: float,
        owed_s: float = 0.0,
        level: int = 0,
    ) -> None:
        """decodes is the step's work without prompts."""
        self.level = level
        self.shorts: list[Sequence] = []
        self.longs: list[Sequence] = []
        self.rest: list[Sequence] = []
        self.owed_s = owed_s
        self._model = model
        self._rows = rows
        self._limit_s = limit_s
        self._share = 0.0
        self._reserved_rows = 0
        self._reserved_s = 0.0
        self._least = _LEAST_ROWS
        self._is_full = False
        self._is_shared = False
        self._work = decodes
        self._rows_for_one: int | None = None

    def rows_for_one(self) -> int:
        """Returns the rows of a prompt that starts now and has the step to itself. They are
        computed at the first call, which must come before rows are taken; a step in which nothing
        can be admitted does without."""
        if self._rows_for_one is None:
            self._rows_for_one = self.rows_for(0, self._rows)
        return self._rows_for_one

    @property
    def has_room(self) -> bool:
        return not self._is_full and self._rows > self._reserved_rows

    @property
    def has_rows_for_one(self) -> bool:
        return self._rows_for_one is not None

    def reserve(self, share: float) -> None:
        """Reserves a share of the remaining budget for the long prompts."""
        self._share = share
        self._reserved_rows = int(share * self._rows)
        if self._limit_s < math.inf:
            self._reserved_s = share * max(0.0, self._limit_s - self._model.predict(self._work))

    def release(self) -> None:
        """Frees the reserved budget for the long prompts, after the short ones have their rows."""
        self._reserved_rows = 0
        self._reserved_s = 0.0
        self._is_full = False
        self._is_shared = bool(self.longs) and self._work.num_chunks > 0
        if not self._is_shared:
            self.owed_s = 0.0
            self._least = _LEAST_ROWS
            return
        step_s = self._model.predict(self._work)
        self.owed_s += step_s * self._share / (1.0 - self._share)
        context, limit_s = self.longs[0].num_computed_tokens, step_s + self.owed_s
        self._least = self._model.most_rows(self._work, context, _LEAST_ROWS, limit_s)
        self._limit_s = min(limit_s, self._limit_s)

    def rows_for(self, context: int, missing: int) -> int:
        """Returns the rows for a prompt with `missing` tokens to compute after `context` tokens."""
        rows = max(0, min(missing, self._rows - self._reserved_rows))
        if self._limit_s == math.inf:
            return rows
        most = self._model.most_rows(self._work, context, rows, self._limit_s - self._reserved_s)
        return max(most, min(rows, self._least))

    def take(self, rows: int, context: int) -> None:
        """Spends rows that rows_for returned, or fewer."""
        self.rows_for_one()
        self._rows -= rows
        self._is_full = not rows
        self._least = 0
        if rows:
            before_s = self._model.predict(self._work) if self._is_shared else 0.0
            self._work.add(rows, context)
            if self._is_shared:
                self.owed_s -= self._model.predict(self._work) - before_s

    def give_back(self, rows: int, context: int) -> None:
        """Returns the rows of a sequence that leaves the step."""
        self._rows += rows
        self._is_full = False
        self._work.remove(rows, context)
        if not self._work.num_chunks:
            self._least = _LEAST_ROWS


@dataclass(slots=True)
class StepDraft:
    """A step while it is planned. budget has the remaining prompt rows, decodes the sequences with
    one row, and chunks the other sequences with their numbers of rows."""

    budget: StepBudget
    decodes: list[Sequence]
    chunks: list[tuple[Sequence, int]]

    def add(self, sequence: Sequence, rows: int) -> None:
        """Adds the sequence's next rows."""
        self.budget.take(rows, sequence.num_computed_tokens)
        if rows == 1:
            self.decodes.append(sequence)
        elif rows:
            self.chunks.append((sequence, rows))

    def remove(self, sequence: Sequence) -> None:
        """Takes back the sequence's rows."""
        context = sequence.num_computed_tokens
        chunks = [(i, rows) for i, (other, rows) in enumerate(self.chunks) if other is sequence]
        for i, rows in chunks:
            del self.chunks[i]
            self.budget.give_back(rows, context)
        if sequence in self.decodes:
            self.decodes.remove(sequence)
            self.budget.give_back(1, context)


class ChunkPolicy:
    """Shares steps among prompts; its model learns from every step that ran.

    Without inter_token_slo_s, inter_token_factor says how many times as long as its decode rows
    alone a step may take; infinity means no limit.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.inter_token_slo_s = limits.inter_token_slo_s
        self.inter_token_factor = limits.inter_token_factor
        self._max_rows = min(limits.max_num_batched_tokens, limits.max_chunk_tokens)
        self.model = StepTimeModel(self._max_rows)
        self.limit: int | None = None  # the prompt rows for which the last step had room
        self.limit_s = math.inf  # the longest predicted time of the last step with prompts
        self.num_stages = 1
        self.prompt_s = 0.0  # what steps have taken for prompt rows since the start
        self._num_observed = 0
        self._now_s = 0.0
        self._owed_s = 0.0

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
        """Begins a step with `rows` left beside the decodes.

        prompts are (priority level, sequence) of the running sequences whose prompt is not
        computed yet. The lowest level is the most urgent and comes first; slack decides within
        a level. `level` is the one whose requests may be admitted. Only long prompts of this
        level make room for other prompts, and less urgent prompts come after them.
        num_ready: the waiting sequences for which there are slots and perhaps memory. beside:
        sequences that bound the step's time, too, although it has no rows of them. num_drafts: the
        rows of drafts that the decodes may get, in the same limits."""
        work = _decode_work(decodes)
        bound = _decode_work([*decodes, *beside]) if beside else work
        self.limit_s = limit_s = self._limit_s(bound, len(prompts) + num_ready)
        work.num_decodes += num_drafts
        work.num_rows += num_drafts
        budget = StepBudget(self.model, work, rows - num_drafts, limit_s, self._owed_s, level)
        self._now_s = now_s
        if len(prompts) > 1:
            prompts = sorted(prompts, key=lambda item: (item[0], self._slack_at_start(item[1])))
        for prompt_level, sequence in prompts:
            if budget.longs and prompt_level > level:
                budget.rest.append(sequence)
            elif prompt_level != level or not self.defer(sequence, budget):
                budget.shorts.append(sequence)
        return budget

    def observe(
        self, plan: StepPlan, seconds: float, num_steps: int, work: StepWork | None
    ) -> None:
        """Learns from a step that took `seconds`. num_steps: the number of steps so far."""
        self.model.last_step_s = seconds
        if self.num_stages > 1:
            # a step of a pipeline may end whenever num_steps has the same remainder
            self._num_observed += 1
            num_steps = self._num_observed
        is_usual = plan.num_decodes == len(plan.sequences) and not plan.num_drafted
        if is_usual and self.model.knows_decoding and num_steps % _LEARN_EVERY:
            return  # the next step is much like this one, and learning takes time between steps
        if work is None:
            work = StepWork.of(plan)
        self.model.learn(work, seconds)
        if work.num_chunks:
            decodes = StepWork(work.num_decodes, work.num_context, work.num_decodes, samples=True)
            decode_s = self.model.decode_seconds(decodes) if work.num_decodes else 0.0
            self.prompt_s += max(0.0, seconds - decode_s)

    @property
    def last_pass_s(self) -> float:
        """The seconds in which a sequence now gets a token: those of a step in every stage."""
        return self.model.last_step_s * self.num_stages

    def slowdown(self, decodes: list[Sequence], num_prompts: int = 1) -> float:
        """Returns how much longer prompts take beside these decodes than alone while num_prompts
        of them are computed or wait; at least 1."""
        share = -(-len(decodes) // self.num_stages)
        return self.slowdown_beside(_decode_work(decodes[:share]), num_prompts)

    def slowdown_beside(self, work: StepWork, num_prompts: int = 1) -> float:
        """Returns the same beside the decode rows of one step."""
        model = self.model
        most = max(1, self._max_rows - work.num_decodes)
        limit_s = self._limit_s(work, num_prompts)
        rows = max(min(most, _LEAST_ROWS), model.most_rows(work, 0, most, limit_s))
        alone_s = model.prefill_seconds(self._max_rows) * rows / self._max_rows
        beside = StepWork(work.num_decodes, work.num_context, work.num_rows, samples=work.samples)
        beside.add(rows, 0)
        return max(1.0, model.predict(beside) / alone_s) if alone_s else 1.0

    def _limit_s(self, decodes: StepWork, num_prompts: int) -> float:
        """Returns the longest predicted time of a step with these decode rows and prompt rows."""
        limit_s = math.inf
        if not decodes.num_decodes:
            return limit_s
        if self.inter_token_slo_s is not None:
            limit_s = self.inter_token_slo_s / self.num_stages
        elif self.inter_token_factor < math.inf:
            times = 1.0 + max(0, num_prompts - _FEW_PROMPTS) / _PROMPTS_PER_FACTOR
            alone_s = self.model.decode_seconds(decodes)
            # before the first step, nothing limits the next one
            limit_s = times * self.inter_token_factor * alone_s or math.inf
        return limit_s / (1.0 + self.model.margin)

    def end(self, budget: StepBudget) -> None:
        """Ends the planning of the step, and keeps the long prompt's due time."""
        self._owed_s = budget.owed_s
        if budget.has_rows_for_one:
            self.limit = budget.rows_for_one()

    def must_wait(self, sequence: Sequence, budget: StepBudget) -> bool:
        """Returns whether the sequence is a long prompt and enough of them run. One that is much
        shorter than all of those need not wait."""
        if len(budget.longs) < _MOST_LONGS or not self._is_long(sequence, budget):
            return False
        return _LONG_STEPS * _rows(sequence) > min([_rows(other) for other in budget.longs])

    def _is_long(self, sequence: Sequence, budget: StepBudget) -> bool:
        step_rows = min(budget.rows_for_one(), self._max_rows)
        return _rows(sequence) > _LONG_STEPS * max(step_rows, _LEAST_ROWS)

    def defer(self, sequence: Sequence, budget: StepBudget) -> bool:
        """Moves a long prompt to the budget's longs; returns whether it is long."""
        if not self._is_long(sequence, budget):
            return False
        if not budget.longs:
            slack = self._slack(sequence, sequence.num_computed_tokens)
            budget.reserve(min(_MOST_SHARE, max(_LEAST_SHARE, _MOST_SHARE - slack)))
        budget.longs.append(sequence)
        return True

    def _slack(self, sequence: Sequence, num_computed: int) -> float:
        """Returns the time to spare until the deadline, relative to what the whole prompt takes."""
        whole_s = self.model.prefill_seconds(sequence.num_tokens, sequence.num_cached_tokens)
        rest_s = self.model.prefill_seconds(sequence.num_tokens, num_computed)
        deadline_s = sequence.request.arrival_s + max(_DEADLINE_FACTOR * whole_s, _LEAST_DEADLINE_S)
        return (deadline_s - self._now_s - rest_s) / max(whole_s, 1e-6)

    def _slack_at_start(self, sequence: Sequence) -> float:
        """Returns the slack as if nothing had been computed yet. If computed tokens counted as
        slack, equal prompts would overtake each other in turn instead of being first come, first
        served."""
        return self._slack(sequence, sequence.num_cached_tokens)


def _decode_work(decodes: list[Sequence]) -> StepWork:
    """Returns the work of a step of these decode rows alone."""
    context = sum([s.num_computed_tokens for s in decodes])
    return StepWork(len(decodes), context, len(decodes), samples=bool(decodes))


def _rows(sequence: Sequence) -> int:
    """Returns the rows of the whole prompt, except those that were cached when it arrived."""
    return sequence.num_tokens - sequence.num_cached_tokens
