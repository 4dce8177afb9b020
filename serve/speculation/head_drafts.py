"""Computes drafts with a head beside the model, which reads the model's hidden states.

The head's K/V is a further layer of the model's, in the same pages: it is shared, kept and freed
with them. Row i needs the model's state at position i, which a step has computed, and the token at
i + 1. So the states of each step are kept here, until the head has computed its rows: those of
prompts after each step, and those of a sequence that has no drafts at present when there are enough
to be computed together. What it drafts beyond them is overwritten by the rows of the tokens that
come.

All this takes time, a layer's share of each row. So where no draft has been worth its time for
_IDLE_STEPS steps, nothing is kept for a while; then the head begins again with the next rows of
each sequence, and sees those only. The while grows as long as drafts are not worth it.

Draft tokens never change an answer, so nothing here has to be exact: rows that were lost when a
sequence was preempted, or that a shared prefix lacks, only make drafts worse.
"""

from __future__ import annotations

import collections.abc as abc
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memory.attention.seam import AttentionStep, PlannedAttention
from memory.kv_memory import KVMemory
from ops.cpu.sampling import SamplingInputs
from serve.models.layers.draft_head import DraftHead
from serve.scheduler.sequence import PENDING_TOKEN, Sequence, SequenceStatus
from serve.scheduler.step_plan import StepPlan
from serve.scheduler.step_time import StepTimeModel
from serve.speculation.drafted_rows import draft_in_steps, drafting_inputs, draw, work_of

# So many states of a sequence are computed together if it has no drafts.
_MOST_PENDING = 32
# Steps that decode without a draft until the head pauses, and for how many steps it does.
_IDLE_STEPS = 16
_FIRST_PAUSE, _LONGEST_PAUSE = 256, 4096
# The head can begin at multiples of this, where a tile of K/V begins.
_BEGIN = 16
# Pages that are left to sequences when drafts ask for one.
_SPARE_PAGES = 2


@dataclass(slots=True)
class _Text:
    """What the head has of one sequence: its K/V from position `begin` to `end`, and what the
    model's states of the positions that follow are read from, in pieces [rows, any].
    num_preemptions: the sequence's when it began; later ones have changed its range."""

    inputs: SamplingInputs
    num_preemptions: int
    begin: int
    end: int
    pieces: list[Tensor] = field(default_factory=list)
    num_pending: int = 0

    def cut_to(self, position: int) -> None:
        """Keeps nothing from a position on. If something is missing before it, that is lost."""
        kept = position - self.end
        if not 0 < kept <= self.num_pending:
            self.end, self.pieces, self.num_pending = position, [], 0
            return
        while self.num_pending > kept:
            last = self.pieces.pop()
            over = self.num_pending - kept
            self.num_pending -= len(last)
            if len(last) > over:
                self.pieces.append(last[: len(last) - over])
                self.num_pending += len(last) - over

    def add(self, states: Tensor) -> None:
        self.pieces.append(states)
        self.num_pending += len(states)

    def take(self) -> Tensor:
        """Returns the states, whose rows are about to be computed."""
        pieces, self.pieces, self.num_pending = self.pieces, [], 0
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@dataclass(slots=True)
class _Part:
    """A DraftPart. states: what the head reads in the next step, [rows, hidden], for the positions
    from text.end on; next_ids: the tokens after them. draft_rows: of its draft so far."""

    sequence: Sequence
    text: _Text
    states: Tensor
    next_ids: list[int]
    draft: list[int] = field(default_factory=list)
    depth: int = 0
    draft_rows: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.next_ids)

    @property
    def num_computed(self) -> int:
        return self.text.end + self.draft_rows

    @property
    def inputs(self) -> SamplingInputs:
        return self.text.inputs


class HeadDrafts:
    """A head and what it has of each sequence. Only the compute thread calls it. time: predicts its
    steps, which clock times."""

    def __init__(
        self,
        head: DraftHead,
        attention: PlannedAttention,
        kv: KVMemory,
        vocab_size: int,
        rows_per_step: int,
        *,
        use_pages: abc.Callable[[], bool] = lambda: True,
        clock: abc.Callable[[], float] = time.perf_counter,
    ) -> None:
        """attention, kv: the model's. rows_per_step: the most of a step. use_pages: makes pages
        usable that kv has given and committed, if it can."""
        self.time = StepTimeModel(rows_per_step)
        self.clock = clock
        self._head, self._attention, self._kv = head, attention, kv
        self._use_pages = use_pages
        self._device, self._most_rows = head.device, rows_per_step
        self._vocab_size = vocab_size
        self._texts: dict[Sequence, _Text] = {}
        self._num_idle = 0  # steps since the last draft
        self._pause = self._last_pause = 0  # steps in which nothing is kept

    num_pages_in_use = 0
    """The head has no memory of its own."""

    def keep(self, plan: StepPlan, hidden: Tensor) -> None:
        """Keeps the states of a step. hidden: [T, hidden], the model's result, in the plan's
        order."""
        if not self._pauses(plan):
            self._keep(plan, self._head.take(hidden), 4)

    def keep_taken(self, plan: StepPlan, states: Tensor) -> None:
        """Does so where a device computes. states: what DraftHead.take gave, [at least T, any],
        which the next step overwrites; the step may still be computed."""
        if not self._pauses(plan):
            self._keep(plan, states, 0)

    def _keep(self, plan: StepPlan, states: Tensor, share: int) -> None:
        """share: pieces with less than this part of all rows are copied; 0: all are."""
        row = 0
        for sequence, rows in zip(plan.sequences, plan.num_rows, strict=True):
            first, text = sequence.num_computed_tokens, self._text_of(sequence)
            piece = states[row + max(0, text.begin - first) : row + rows]
            row += rows
            if len(piece):
                text.cut_to(max(text.begin, first))
                # a view would keep all rows of the step
                is_view = share and share * rows >= len(states)
                text.add(piece if is_view else piece.clone())

    def _pauses(self, plan: StepPlan) -> bool:
        """Counts the steps; returns whether nothing is kept of this one."""
        if self._pause:
            self._pause -= 1
            return True
        if plan.num_decodes:
            self._num_idle += 1
        if self._num_idle <= _IDLE_STEPS:
            return False
        self._texts.clear()
        self._num_idle = 0
        self._pause = self._last_pause = min(2 * self._last_pause or _FIRST_PAUSE, _LONGEST_PAUSE)
        return True

    def _text_of(self, sequence: Sequence) -> _Text:
        """Returns what there is of a sequence, or begins with it: after a prefix that was found, or
        behind what was computed during a pause."""
        first, text = sequence.num_computed_tokens, self._texts.get(sequence)
        if text is None or text.num_preemptions != sequence.num_preemptions:
            is_start = first == sequence.num_cached_tokens
            begin = 0 if is_start else -(-first // _BEGIN) * _BEGIN
            inputs = drafting_inputs(sequence, self._vocab_size)
            text = self._texts[sequence] = _Text(
                inputs, sequence.num_preemptions, begin, max(begin, first)
            )
        return text

    @torch.inference_mode()
    def follow(self) -> float:
        """Computes the rows of sequences with many states. Returns the seconds."""
        many = [
            (sequence, text)
            for sequence, text in self._texts.items()
            if text.num_pending >= _MOST_PENDING and self._settle(sequence, text)
        ]
        if not many or not self._use_pages():
            return 0.0
        parts = [self._missing(sequence, text) for sequence, text in many]
        began_s = self.clock()
        self._compute_all(parts)
        return self.clock() - began_s

    def most_drafted(self, sequence: Sequence) -> int:
        """Returns how many tokens can be drafted for a sequence; 0 if states are missing."""
        text = self._texts.get(sequence)
        if text is None or not self._settle(sequence, text):
            return 0
        known = len(sequence.token_ids)
        if text.end + text.num_pending != known - 1:
            return 0
        return max(0, self._kv.max_model_len - known)

    def num_missing(self, sequence: Sequence) -> int:
        """Returns how many rows of a sequence are computed before its draft."""
        return self._texts[sequence].num_pending

    @torch.inference_mode()
    def catch_up(self, chunks: abc.Sequence[tuple[Sequence, int]]) -> None:
        """Computes rows of sequences that have more than a draft begins with, all of them."""
        if not self._use_pages():
            return
        parts = [self._missing(sequence, self._texts[sequence]) for sequence, _ in chunks]
        work, began_s = work_of(parts), self.clock()
        self._compute_all(parts)
        self.time.learn(work, self.clock() - began_s)

    @torch.inference_mode()
    def draft(
        self, sequences: abc.Sequence[Sequence], depths: abc.Sequence[int]
    ) -> list[list[int]]:
        """Returns what may follow each sequence, at most depths[i] > 0 tokens."""
        drafts: list[list[int]] = [[] for _ in sequences]
        parts: list[_Part] = []
        self._num_idle = self._last_pause = 0
        left = self._most_rows
        for sequence, depth, draft in zip(sequences, depths, drafts, strict=True):
            text = self._texts[sequence]
            if not 0 < text.num_pending <= left:
                continue
            if self._has_room(sequence, len(sequence.token_ids) + depth):
                left -= text.num_pending
                part = self._missing(sequence, text)
                part.draft, part.depth = draft, depth
                text.inputs.forget_after(len(sequence.token_ids))
                parts.append(part)
        if not parts:
            return drafts
        # with all copies that are due, before a page that they read may be written
        self._kv.commit()
        if not self._use_pages():
            return drafts
        draft_in_steps(parts, self._extend, self._vocab_size, self.time, self.clock)
        return drafts

    def _settle(self, sequence: Sequence, text: _Text) -> bool:
        """Drops the states of rejected rows; returns whether any are left that can be computed,
        because the tokens after them are known, and to the host, too."""
        is_new = text.num_preemptions != sequence.num_preemptions  # its pages may not be mapped yet
        if is_new or sequence.status is not SequenceStatus.RUNNING or sequence.kv_range is None:
            text.pieces, text.num_pending = [], 0
            return False
        if sequence.token_ids[-1] == PENDING_TOKEN:
            return False
        last = min(sequence.num_computed_tokens, len(sequence.token_ids) - 1)
        if text.end + text.num_pending > last:
            text.cut_to(max(text.begin, last))
        return text.num_pending > 0

    def _missing(self, sequence: Sequence, text: _Text) -> _Part:
        """Returns the rows whose states are there."""
        first = text.end + 1
        next_ids = sequence.token_ids[first : first + text.num_pending]
        return _Part(sequence, text, self._head.read(text.take()), next_ids)

    def _has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        target = sequence.kv_range
        if target is None:
            return False
        if num_tokens <= target.capacity:
            return True
        is_plentiful = self._kv.num_available > _SPARE_PAGES + len(self._texts)
        return is_plentiful and self._kv.grow(target, num_tokens, sequence.num_computed_tokens)

    def _extend(self, parts: list[_Part]) -> None:
        """Computes the parts' rows, and gives each draft the token that follows."""
        states, ends = self._compute(parts)
        last = states if len(ends) == len(states) else states[ends]
        for i, token in enumerate(draw(self._head.logits(last).cpu(), parts)):
            part = parts[i]
            part.draft.append(token)
            part.draft_rows += bool(part.draft[1:])
            part.states, part.next_ids = last[i : i + 1], [token]

    def _compute_all(self, parts: list[_Part]) -> None:
        """Computes the rows of parts, in as many steps as they need, and waits for them."""
        most = self._most_rows
        batch: list[_Part] = []
        for part in parts:
            text, states, next_ids = part.text, part.states, part.next_ids
            for first in range(0, len(next_ids), most):
                end = first + most
                piece = _Part(part.sequence, text, states[first:end], next_ids[first:end])
                if sum([each.num_rows for each in batch]) + piece.num_rows > most:
                    self._compute(batch)
                    batch = []
                batch.append(piece)
        states, _ = self._compute(batch)
        states[:1].cpu()  # a device has computed when it has given something back

    def _compute(self, parts: list[_Part]) -> tuple[Tensor, list[int]]:
        """Computes the parts' rows. Returns the head's states, and the last row of each part."""
        order = sorted(range(len(parts)), key=lambda i: parts[i].num_rows > 1)
        next_ids: list[int] = []
        positions: list[int] = []
        starts: list[int] = []
        lengths: list[int] = []
        ends = [0] * len(parts)
        for i in order:
            part = parts[i]
            target = part.sequence.kv_range
            assert target is not None
            first = part.num_computed
            end = first + part.num_rows
            next_ids += part.next_ids
            positions += range(first, end)
            starts.append(target.start + part.text.begin)
            lengths.append(end - part.text.begin)
            ends[i] = len(next_ids) - 1
            if not part.draft:  # these are rows of the sequence's own tokens
                part.text.end = end
        num_rows = [parts[i].num_rows for i in order]
        step = AttentionStep(num_rows.count(1), starts, num_rows, lengths)
        read = [parts[i].states for i in order]
        states = self._head.forward(
            torch.tensor(next_ids, device=self._device),
            torch.tensor(positions, device=self._device),
            read[0] if len(read) == 1 else torch.cat(read),
            self._attention.plan(step),
        )
        return states, ends

    def ended(self, sequence: Sequence) -> None:
        """Drops what there is of a sequence."""
        self._texts.pop(sequence, None)

    def trim(self) -> None:
        """There is nothing to return."""

    def close(self) -> None:
        """The model's memory holds the head's."""
