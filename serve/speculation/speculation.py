"""Decides in each step which sequences get drafts, and how long they are.

A step of n decode rows takes T(n) seconds by the step-time model and yields, without drafts, a
token for each sequence. A draft's j-th token adds a row, and a token with the probability p^j,
where p is the learned rate of agreement. Rows are added in the order of this probability, as long
as the step's tokens per second grow by it: p^j / (T(n + 1) - T(n)) must exceed the present tokens
over T(n), with a margin for what the model does not know. (The same aim as the goodput of Liu et
al., TurboSpec, arXiv 2406.14066.) So one sequence is drafted far ahead, and many sequences, whose
rows are dear, hardly or not at all.

Beside prompts, the same choice counts their rows as progress, too (beside_prompts.py).

Two drafters may be combined: lookup costs nothing, so its drafts come first; a draft model
(model_drafts.py) drafts where its tokens agree more often. What it took counts in the comparison.
Whether all this pays is measured as well (draft_ledger.py).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from memory.kv_memory import KVMemory
from serve.scheduler.sequence import PENDING_TOKEN, Sequence
from serve.scheduler.step_plan import StepPlan
from serve.scheduler.step_time import StepTimeModel, StepWork
from serve.speculation.acceptance import Acceptance, Trials
from serve.speculation.beside_prompts import DraftsBesidePrompts, Offer, Room
from serve.speculation.draft_ledger import DraftLedger
from serve.speculation.drafter import Draft, Drafter, DraftSource
from serve.speculation.model_drafts import MARGIN, Candidate, ModelDrafts
from serve.speculation.tokens_per_step import TokensPerStep

_OF_MODEL = -1  # the kind of a draft model's drafts
# As long as nothing is known of a step's time, so many rows are taken to cost nothing.
_FREE_ROWS = 8
# A step has at most so many rows more than any before: the model does not know what they cost.
_MORE_ROWS = 2
# Masks that take longer are not made for drafts as well.
_DEAR_MASK_S = 0.5e-3
# How many steps a device launches ahead between two trials of drafts.
_FEWEST_AHEAD, _MOST_AHEAD = 8, 64


@dataclass(slots=True)
class _Drafting:
    """What is kept with a sequence. trials: of lookup's drafts. num_accepted: the tokens of its
    answer that came from drafts. The rest is of its last draft."""

    trials: Trials = field(default_factory=Trials)
    model_trials: Trials = field(default_factory=Trials)
    num_accepted: int = 0
    kind: int = 0
    is_predicted: bool = False


class Speculation:
    """Implements Drafting (serve/scheduler/step_results.py) with one drafter, or with two."""

    def __init__(
        self,
        drafter: Drafter,
        model: StepTimeModel,
        kv: KVMemory,
        most_tokens: int,
        device_rows: int | None = None,
        draft_model: DraftSource | None = None,
        ledger: DraftLedger | None = None,
    ) -> None:
        """most_tokens: of one draft. device_rows: the most rows that are sampled in a step, where a
        device keeps the tokens and launches steps ahead; None elsewhere. draft_model: a model or a
        head that drafts what the drafter does not. ledger: measures steps that follow each other
        and do not overlap."""
        self.drafter = drafter
        self._by_model = None if draft_model is None else ModelDrafts(draft_model, model)
        self._model = model
        self._kv = kv
        self._most = most_tokens
        self._interval = kv.state_interval
        self._acceptance = Acceptance(drafter.first_guesses)
        self._most_rows = 0  # of any step with drafts and no prompt
        self._beside = DraftsBesidePrompts(model)
        self._speeds = TokensPerStep()
        self._device_rows = device_rows
        self._ledger = ledger
        self._num_ahead = 0  # steps that are still launched ahead before drafts are tried again
        self._next_ahead = _FEWEST_AHEAD

    def reserve(self, num_rows: int) -> int:
        return self._beside.reserve(num_rows)

    def extend(
        self, plan: StepPlan, num_certain: int, num_rows: int, limit_s: float = math.inf
    ) -> None:
        ledger = self._ledger
        may_draft = ledger is None or ledger.begin()
        if self._by_model is not None:
            plan.draft_s = self._by_model.model.follow()
            if plan.draft_s and ledger is not None:
                ledger.invested()
                may_draft = ledger.begin()
        sequences = plan.sequences[:num_certain]
        for sequence in sequences:
            if sequence.draft_ids:
                sequence.draft_ids = []
        has_prompts = plan.num_prompt_rows > 0
        if not sequences or not (may_draft or (ledger is not None and ledger.measures_rest)):
            return
        if has_prompts and not self._drafts_beside_prompts:
            return
        if self._device_rows is not None:
            num_rows = min(num_rows, self._device_rows - plan.num_total_rows)
            if any(s.token_ids[-1] == PENDING_TOKEN for s in sequences):
                return
        if ledger is not None and not has_prompts:
            context = sum([s.num_computed_tokens for s in sequences])
            work = StepWork(plan.num_decodes, context, plan.num_decodes, samples=True)
            steady_s = self._model.steady_seconds(work)
            may_draft = ledger.count(plan.num_decodes, steady_s) and may_draft
        if not may_draft:
            return
        self._draft(plan, sequences, num_rows, limit_s)
        if ledger is not None:
            if self._by_model is not None and self._by_model.has_caught_up:
                ledger.invested()
            else:
                ledger.found(plan.num_drafted)

    def _draft(
        self, plan: StepPlan, sequences: list[Sequence], num_rows: int, limit_s: float
    ) -> None:
        has_prompts = plan.num_prompt_rows > 0
        drafts = self.drafter.propose(sequences, self._most)
        if self._by_model is not None and not has_prompts and not self._by_model.rests():
            self._draft_by_model(self._by_model, plan, sequences, drafts, num_rows)
        offers = [
            (i, draft)
            for i, draft in enumerate(drafts)
            if draft is not None and self._cut(sequences[i], draft)
        ]
        if not offers:
            return
        room = Room(num_rows, limit_s)
        lengths = self._lengths(plan, sequences, offers, room)
        for (i, draft), length in zip(offers, lengths, strict=True):
            sequence = sequences[i]
            if not (length and self._has_room(sequence, length, len(plan.sequences))):
                continue
            state = _state_of(sequence)
            state.kind, state.is_predicted = draft.kind, draft.is_predicted
            sequence.draft_ids = draft.token_ids[:length]
            plan.num_rows[i] += length
            plan.num_total_rows += length
            plan.num_drafted += length
        if plan.num_drafted:
            if not has_prompts:
                self._most_rows = max(self._most_rows, plan.num_total_rows)
            _sort(plan)

    @property
    def _drafts_beside_prompts(self) -> bool:
        """A device launches steps with prompts ahead, before the tokens are known that drafts
        follow."""
        return self._device_rows is None

    def _draft_by_model(
        self,
        models: ModelDrafts,
        plan: StepPlan,
        sequences: list[Sequence],
        drafts: list[Draft | None],
        num_rows: int,
    ) -> None:
        """Puts drafts of the draft model where it agrees more often than what is there."""
        candidates: list[Candidate] = []
        for i, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            most = min(self._most, self._most_left(sequence))
            most = min(most, models.model.most_drafted(sequence))
            if most < 1 or not self._may_draft(sequence):
                continue
            state = _state_of(sequence)
            rate = models.rate(state.model_trials)
            if draft is None or self._acceptance.rate(draft.kind, state.trials) < rate:
                candidates.append(Candidate(i, sequence, state.model_trials, most, rate))
        began_s = models.model.clock()
        context = sum([s.num_computed_tokens for s in sequences])
        num_rows = self._most_added(plan, num_rows)
        found = models.propose(candidates, len(sequences), context, num_rows)
        for i, tokens in found.items():
            if tokens:
                drafts[i] = Draft(tokens, _OF_MODEL)
        plan.draft_s += models.model.clock() - began_s

    def _most_added(self, plan: StepPlan, num_rows: int) -> int:
        """Returns how many of num_rows rows the step may have more."""
        return min(num_rows, max(self._most_rows - plan.num_total_rows, 0) + _MORE_ROWS)

    def wants_tokens(self, plan: StepPlan) -> bool:
        """A step with drafts cannot be launched ahead, nor another one behind it. So steps are
        launched ahead as long as no draft is worth its rows; then one waits, now and then, for the
        tokens before it, to see whether any is."""
        if plan.num_drafted or plan.num_prompt_rows:
            self._num_ahead, self._next_ahead = 0, _FEWEST_AHEAD
            return plan.num_drafted > 0
        if not self._num_ahead:
            self._num_ahead = self._next_ahead
            self._next_ahead = min(2 * self._next_ahead, _MOST_AHEAD)
            return True
        self._num_ahead -= 1
        return False

    def _cut(self, sequence: Sequence, draft: Draft) -> bool:
        """Cuts a draft before the sequence's last possible token; returns whether any is left."""
        if not self._may_draft(sequence):
            return False
        del draft.token_ids[max(0, self._most_left(sequence)) :]
        return bool(draft.token_ids)

    def _most_left(self, sequence: Sequence) -> int:
        """Returns the longest draft before the sequence's last possible token and, in a model with
        states, before the end of the record."""
        most = sequence.max_tokens_total - len(sequence.token_ids) - 1
        if self._interval is None:
            return most
        return min(most, self._interval - 2 - sequence.num_computed_tokens % self._interval)

    def _may_draft(self, sequence: Sequence) -> bool:
        """Returns False where the mask is late and was begun without a draft, or takes so long that
        those of a draft would be late. A device has one mask and one row of counts for a
        sequence."""
        mask = sequence.mask
        if self._device_rows is not None:
            return mask is None and not sequence.request.params.has_penalties
        return mask is None or (mask.job is None and mask.cost_s < _DEAR_MASK_S)

    def _has_room(self, sequence: Sequence, length: int, num_sequences: int) -> bool:
        """Returns whether there are pages for a draft and for each of num_sequences."""
        target = sequence.kv_range
        assert target is not None
        need = len(sequence.token_ids) + length
        if need <= target.capacity:
            return True
        is_plentiful = self._kv.num_available > num_sequences + 1
        return is_plentiful and self._kv.grow(target, need, sequence.num_computed_tokens)

    def _lengths(
        self,
        plan: StepPlan,
        sequences: list[Sequence],
        offers: list[tuple[int, Draft]],
        room: Room,
    ) -> list[int]:
        """Returns how many tokens of each offer are worth their rows, and rests the others."""
        states = [_state_of(sequences[i]) for i, _ in offers]
        rates = [
            self._rate(draft.kind, state) for (_, draft), state in zip(offers, states, strict=True)
        ]
        if plan.num_prompt_rows:
            pairs = zip(offers, rates, strict=True)
            made = [Offer(len(draft.token_ids), rate) for (_, draft), rate in pairs]
            lengths = self._beside.lengths(plan, made, room)
        else:
            context = sum([s.num_computed_tokens for s in sequences])
            lengths = self._lengths_alone(plan, context, offers, rates, room.num_rows)
        idle = [
            state.trials
            for (_, draft), state, length in zip(offers, states, lengths, strict=True)
            if not length and draft.kind != _OF_MODEL
        ]
        if idle:
            self._acceptance.rest(idle)
        return lengths

    def _lengths_alone(
        self,
        plan: StepPlan,
        context: int,
        offers: list[tuple[int, Draft]],
        rates: list[float],
        num_rows: int,
    ) -> list[int]:
        """Returns the lengths in a step without prompts, whose sequences have `context` tokens."""
        rows = plan.num_total_rows
        num_rows = self._most_added(plan, num_rows)
        # what the drafts took belongs to the step, however many of their tokens it computes
        draft_s, known_s = plan.draft_s, self._seconds(rows, context)
        tokens, seconds = float(rows), known_s + draft_s
        queue = [(-rate, n) for n, rate in enumerate(rates)]
        heapq.heapify(queue)
        lengths = [0] * len(offers)
        while queue and num_rows > 0:
            negative, n = queue[0]
            after_s = self._seconds(rows + 1, context) + draft_s
            if -negative * seconds < MARGIN * tokens * (after_s - seconds):
                break
            rows, num_rows, seconds = rows + 1, num_rows - 1, after_s
            tokens -= negative
            lengths[n] += 1
            if lengths[n] < len(offers[n][1].token_ids):
                heapq.heapreplace(queue, (negative * rates[n], n))
            else:
                heapq.heappop(queue)
        return lengths

    def _rate(self, kind: int, state: _Drafting) -> float:
        if kind == _OF_MODEL and self._by_model is not None:
            return self._by_model.rate(state.model_trials)
        return self._acceptance.rate(kind, state.trials)

    def _seconds(self, rows: int, context: int) -> float:
        seconds = self._model.predict(StepWork(rows, context, rows, samples=True))
        return seconds or 1.0 + max(0, rows - _FREE_ROWS)

    def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        state = _state_of(sequence)
        state.num_accepted += num_accepted
        if self._ledger is not None:
            self._ledger.accepted(num_accepted)
        prediction = sequence.request.prediction
        if prediction is not None and state.is_predicted:
            prediction.count(num_drafted, num_accepted)
        if state.kind == _OF_MODEL and self._by_model is not None:
            self._by_model.learn(state.model_trials, num_drafted, num_accepted)
            return
        self._acceptance.learn(state.kind, state.trials, num_drafted, num_accepted)

    def tokens_per_step(self, sequence: Sequence) -> float:
        state = sequence.drafting
        num_accepted = state.num_accepted if isinstance(state, _Drafting) else 0
        return self._speeds.of(sequence.num_output_tokens, num_accepted)

    def ended(self, sequence: Sequence) -> None:
        if sequence.num_output_tokens:
            num_accepted = _state_of(sequence).num_accepted if sequence.drafting else 0
            self._speeds.learn(sequence.num_output_tokens, num_accepted)
        self.drafter.ended(sequence)
        if self._ledger is not None:
            self._ledger.disturbed()  # the next step may come later
        if self._by_model is not None:
            self._by_model.model.ended(sequence)
        sequence.drafting = None
        sequence.draft_ids = []

    def trim(self) -> None:
        if self._by_model is not None:
            self._by_model.model.trim()

    def close(self) -> None:
        if self._by_model is not None:
            self._by_model.model.close()

    @property
    def kept_bytes(self) -> tuple[int, int]:
        return self.drafter.kept_bytes

    @property
    def num_pages_in_use(self) -> int:
        return 0 if self._by_model is None else self._by_model.model.num_pages_in_use


def _state_of(sequence: Sequence) -> _Drafting:
    state = sequence.drafting
    if state is None:
        state = sequence.drafting = _Drafting()
    assert isinstance(state, _Drafting)
    return state


def _sort(plan: StepPlan) -> None:
    """Puts decoding sequences with one row first, as attention takes them."""
    order = sorted(range(plan.num_decodes), key=lambda i: plan.num_rows[i] > 1)
    order += range(plan.num_decodes, len(plan.sequences))
    plan.sequences = [plan.sequences[i] for i in order]
    plan.num_rows = [plan.num_rows[i] for i in order]
    plan.samples = [plan.samples[i] for i in order]
