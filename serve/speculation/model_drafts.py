"""Decides which sequences a draft model or a head drafts for, and how long the drafts are.

A draft's token costs a row of the target's step, and a share of a step of the draft model, which
computes one token of all drafts together. The tokens are added by depth: the j-th of all drafts
that go on costs D(m) + T(n + m) - T(n) seconds for m sequences and gives the sum of their p^j
tokens, where T and D are the learned times of the two models. A depth is added as long as it raises
the tokens per second, with a margin. A prompt that the draft model has not computed is worth its
time only if the rest of the answer is long enough; it is computed in chunks that delay no step by
more than a part of its time.
"""

from __future__ import annotations

import collections.abc as abc
from typing import NamedTuple

from serve.scheduler.sequence import Sequence
from serve.scheduler.step_time import StepTimeModel, StepWork
from serve.speculation.acceptance import Acceptance, Trials
from serve.speculation.drafter import MOST_MISSING, DraftSource

MARGIN = 1.1
_GUESS = 0.6
_LONGEST_PAUSE = 8  # steps in which drafts are not considered, after none was worth its time
_CHUNK_SHARE = 0.5  # of the target's step, for chunks of prompts
_FIRST_CHUNK = 16  # rows at least, and as long as nothing is known of their time
_FIRST_DEPTH = 2  # of drafts, as long as nothing is known of their time
# The rest of an answer is taken to be as long as it is now, and at least so many tokens.
_LEAST_REST = 64


class Candidate(NamedTuple):
    """A sequence that may have a draft. number: of it in the step. most: tokens of its draft. rate:
    the probability that one agrees if those before did."""

    number: int
    sequence: Sequence
    trials: Trials
    most: int
    rate: float


class Choice(NamedTuple):
    """depths: the tokens of each draft. saved_s: what a token of the target takes less with it."""

    depths: list[int]
    saved_s: float


class ModelDrafts:
    """Drafts of a small model for the sequences of a step."""

    def __init__(self, model: DraftSource, target: StepTimeModel) -> None:
        self.model = model
        self.acceptance = Acceptance((_GUESS,))
        self._target = target
        self._pause = self._last_pause = 0
        self.has_caught_up = False  # with prompts, in the last step

    def rests(self) -> bool:
        """Begins a step; returns whether it is one in which no draft is considered."""
        self.has_caught_up = False
        self._pause -= 1
        return self._pause >= 0

    def rate(self, trials: Trials) -> float:
        return self.acceptance.rate(0, trials)

    def learn(self, trials: Trials, num_drafted: int, num_accepted: int) -> None:
        self.acceptance.learn(0, trials, num_drafted, num_accepted)

    def propose(
        self, candidates: list[Candidate], num_decodes: int, context: int, num_rows: int
    ) -> dict[int, list[int]]:
        """Returns the drafts by the candidates' numbers. context: tokens of all num_decodes
        sequences of the step, which may have num_rows more rows."""
        base = StepWork(num_decodes, context, num_decodes, samples=True)
        seconds = _rows_seconds(self._target, num_decodes, base)
        if not seconds or not candidates:
            return {}
        missing = [self.model.num_missing(each.sequence) for each in candidates]
        choice = self._choose(candidates, missing, base, num_rows)
        if any(choice.depths):
            self._last_pause = 0
        else:
            self._pause = self._last_pause = min(2 * self._last_pause + 1, _LONGEST_PAUSE)
        behind = [
            (each, count)
            for each, count, depth in zip(candidates, missing, choice.depths, strict=True)
            if depth and count > MOST_MISSING
        ]
        if behind:
            self._catch_up(behind, choice.saved_s, seconds)
            ready = [i for i, count in enumerate(missing) if count <= MOST_MISSING]
            candidates, missing = [candidates[i] for i in ready], [missing[i] for i in ready]
            choice = self._choose(candidates, missing, base, num_rows)
        pairs = list(zip(candidates, choice.depths, strict=True))
        idle = [each.trials for each, depth in pairs if not depth]
        for _ in range(1 + max(0, self._pause) if idle else 0):  # for the steps of the pause too
            self.acceptance.rest(idle)
        drafted = [(each, depth) for each, depth in pairs if depth]
        if not drafted:
            return {}
        drafts = self.model.draft([each.sequence for each, _ in drafted], [n for _, n in drafted])
        return {each.number: draft for (each, _), draft in zip(drafted, drafts, strict=True)}

    def _choose(
        self, candidates: list[Candidate], missing: list[int], base: StepWork, num_rows: int
    ) -> Choice:
        """Returns how many tokens of each candidate are worth their time. missing: its tokens that
        the draft model has not computed. base: the step without drafts."""
        depths = [0] * len(candidates)
        tokens, start_s = float(base.num_rows), _rows_seconds(self._target, base.num_rows, base)
        seconds, rows, depth = start_s, base.num_rows, 0
        live = sorted(range(len(candidates)), key=lambda i: -candidates[i].rate)
        gains = [each.rate for each in candidates]
        while live := [i for i in live if candidates[i].most > depth][:num_rows]:
            counts = [1 if depth or missing[i] > MOST_MISSING else missing[i] for i in live]
            own_s, row_s = self._depth_seconds(rows, counts, base)
            if not own_s and depth >= _FIRST_DEPTH:
                break  # nothing is known of the draft model yet
            if own_s:
                live = [i for i in live if gains[i] * seconds >= MARGIN * tokens * row_s]
            gain, cost_s = sum([gains[i] for i in live]), own_s + row_s * len(live)
            if not live or gain * seconds < MARGIN * tokens * cost_s:
                break
            depth, num_rows, rows = depth + 1, num_rows - len(live), rows + len(live)
            tokens, seconds = tokens + gain, seconds + cost_s
            for i in live:
                depths[i] = depth
                gains[i] *= candidates[i].rate
        return Choice(depths, start_s / base.num_rows - seconds / tokens)

    def _depth_seconds(self, rows: int, counts: list[int], base: StepWork) -> tuple[float, float]:
        """Returns what another token of each of these drafts takes: a part for all, 0 if it is not
        known, and one for each. counts: rows of each in the draft model's step."""
        most, count, time = sum(counts), len(counts), self.model.time
        all_s, one_s = (_rows_seconds(time, many, base) for many in (most, most // count))
        added_s = (all_s - one_s) / (count - 1) if count > 1 else 0.0
        more_s = _rows_seconds(self._target, rows + count, base)
        more_s -= _rows_seconds(self._target, rows, base)
        return all_s - added_s * count, added_s + more_s / count

    def _catch_up(
        self, behind: abc.Sequence[tuple[Candidate, int]], saved_s: float, step_s: float
    ) -> None:
        """Computes a chunk of prompts, if drafts save more time than that takes."""
        time = self.model.time
        chunks: list[tuple[Sequence, int]] = []
        left_s, left = _CHUNK_SHARE * step_s, time.rows_per_step
        for each, count in behind:
            sequence = each.sequence
            rest = sequence.max_tokens_total - len(sequence.token_ids)
            rest = min(rest, max(_LEAST_REST, sequence.num_output_tokens))
            if time.prefill_seconds(count) > saved_s * rest and time.prefill_seconds(count):
                continue
            context = len(sequence.token_ids) - count
            rows = min(_FIRST_CHUNK, count, left)
            if time.prefill_seconds(rows):
                work = StepWork()
                rows = min(max(rows, time.most_rows(work, context, min(count, left), left_s)), left)
            if rows < 1:
                break
            chunks.append((sequence, rows))
            left -= rows
            left_s -= time.prefill_seconds(rows)
            if left_s <= 0:
                break
        if chunks:
            self.model.catch_up(chunks)
            self.has_caught_up = True


def _rows_seconds(model: StepTimeModel, rows: int, base: StepWork) -> float:
    """Returns the time of so many rows that decode, with the context of `base`."""
    return model.predict(StepWork(rows, base.num_context, rows, samples=True))
