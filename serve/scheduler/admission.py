"""Admission by memory: integers only, no torch, no asyncio.

The scheduler calls `admits` for the next waiting sequence when others run; into an empty engine it
admits any sequence that fits memory alone. A policy that admits too much costs a preemption, never
an error.

    PromptOnlyPolicy   the present tokens fit, with a spare page for each running sequence
    WorstCasePolicy    every sequence could grow to max_tokens
    ForecastPolicy     the base of the next two: the peaks of its MemoryForecasts fit on average
    PredictedPolicy    the forecasts' output lengths are predicted
    OraclePolicy       they are the real ones: the bound that a simulation compares with
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from memory.kv_memory import KVMemory
from memory.pages.kv_range import PrefixHit
from serve.length_predictor import LengthPredictor
from serve.request import FinishReason
from serve.scheduler.length_predictor import (
    Coverage,
    GuardedPredictor,
    HistoryPredictor,
    SequencePredictor,
)
from serve.scheduler.memory_forecast import ForecastEntry, MemoryForecast, entry_of
from serve.scheduler.memory_policy import MemoryPolicy
from serve.scheduler.sequence import Sequence

_NUM_FORECASTS = 4
# Sequences in all forecasts together that a check looks at: many sequences average out in one.
_MAX_ENTRIES = 256
# An entry whose sequence has so many tokens more or fewer than it says is made anew.
_MOST_WRONG_TOKENS = 16
# A sequence that did not fit is rechecked at every 16th step, even if no memory was freed.
RECHECK_STEPS = 16


def _num_shared(kv: KVMemory, hit: PrefixHit | None) -> int:
    """Returns the pages that are counted for several sequences but exist once: those that running
    sequences share, and those of the hit that some of them hold.

    When a sharing sequence ends, its count ends with it, so the difference never harms the others.
    With sliding windows it would, because a page is shared only until the window has passed it, so
    there the result is 0.
    """
    if any(group.window is not None for group in kv.layout.groups):
        return 0
    return kv.num_saved + (kv.num_shared_pages(hit) if hit is not None else 0)


class PromptOnlyPolicy(MemoryPolicy):
    """Admits what fits now, and grows greedily."""

    def __init__(self, kv: KVMemory) -> None:
        self._kv = kv

    def admits(
        self,
        sequence: Sequence,
        running: list[Sequence],
        step: int,
        hit: PrefixHit | None = None,
    ) -> bool:
        # One spare page for each running sequence: a sequence admitted into the last page would
        # be preempted by the next token of another, again and again.
        spare_pages = len(running) * len(self._kv.layout.groups)
        return self._kv.can_fit(sequence.num_tokens, spare_pages, hit)


class WorstCasePolicy(MemoryPolicy):
    """Reserves prompt and max_tokens of every sequence, so that none is ever preempted."""

    def __init__(self, kv: KVMemory) -> None:
        self._kv = kv
        self._reserved = 0

    def _pages(self, sequence: Sequence) -> int:
        return sequence.most_pages(self._kv)

    def admits(
        self,
        sequence: Sequence,
        running: list[Sequence],
        step: int,
        hit: PrefixHit | None = None,
    ) -> bool:
        pages = self._reserved + self._pages(sequence)
        self.predicted_peak_pages = pages - _num_shared(self._kv, hit)
        return self.predicted_peak_pages <= self._kv.num_pages

    def started(self, sequence: Sequence, step: int) -> None:
        self._reserved += self._pages(sequence)

    def stopped(self, sequence: Sequence) -> None:
        self._reserved -= self._pages(sequence)


@dataclass(slots=True, eq=False)
class _RunningSequence:
    """A running sequence: its drawn output length and its entry in each forecast."""

    sequence: Sequence
    lengths: list[int]
    entries: list[ForecastEntry]


class ForecastPolicy(MemoryPolicy):
    """Admits a sequence if the mean peak of several forecasts fits the memory beside the reserve.

    draw(sequence, k): draws the number of output tokens in forecast k, more than it has now.
    rows: the row budget of a step, which prompts share one after the other.
    """

    def __init__(
        self, kv: KVMemory, draw: Callable[[Sequence, int], int], num_forecasts: int, rows: int
    ) -> None:
        self._kv = kv
        self._draw = draw
        self._rows = rows
        self._forecasts = [MemoryForecast() for _ in range(num_forecasts)]
        self._members: dict[int, _RunningSequence] = {}
        self._keys: dict[Sequence, int] = {}
        self._num_keys = 0
        self._prefilling: list[int] = []
        self._missing_rows = 0  # of those
        self._asked: tuple[Sequence, list[int]] | None = None
        self._refused: Sequence | None = None
        self._stale: set[int] = set()  # keys of running sequences that are predicted anew

    @property
    def capacity_pages(self) -> int:
        return self._kv.num_pages

    def admits(
        self,
        sequence: Sequence,
        running: list[Sequence],
        step: int,
        hit: PrefixHit | None = None,
    ) -> bool:
        if self.still_refuses(sequence, step):
            return False
        forecasts = self._forecasts[: max(1, _MAX_ENTRIES // (len(self._members) + 1))]
        self._settle(forecasts, step)
        # lengths are drawn once, so that a repeated call is not a new chance
        if self._asked is None or self._asked[0] is not sequence:
            self._asked = sequence, self._lengths(sequence)
        first = self._first_step(sequence, step)
        num_shared = _num_shared(self._kv, hit)
        capacity, total = self.capacity_pages + num_shared, 0
        for forecast, length in zip(forecasts, self._asked[1], strict=False):
            entry = entry_of(sequence, length, first, 0, slope := self._slope(sequence))
            forecast.add(entry, slope)
            total += forecast.peak_pages(self._kv, capacity)
            forecast.remove(entry)
        peak_pages = total // len(forecasts)
        self.predicted_peak_pages = peak_pages - num_shared
        is_admitted = peak_pages <= capacity
        self._refused = None if is_admitted else sequence
        return is_admitted

    def started(self, sequence: Sequence, step: int) -> None:
        asked = self._asked
        self._asked = None
        lengths = asked[1] if asked and asked[0] is sequence else self._lengths(sequence)
        self._num_keys += 1
        key = self._keys[sequence] = self._num_keys
        first = self._first_step(sequence, step)
        slope = self._slope(sequence)
        entries = [entry_of(sequence, length, first, key, slope) for length in lengths]
        self._members[key] = _RunningSequence(sequence, lengths, entries)
        for forecast, entry in zip(self._forecasts, entries, strict=True):
            forecast.add(entry, slope)
        self._prefilling.append(key)
        self._missing_rows += sequence.num_tokens - sequence.num_computed_tokens

    def stopped(self, sequence: Sequence) -> None:
        key = self._keys.pop(sequence)
        member = self._members.pop(key)
        for forecast, entry in zip(self._forecasts, member.entries, strict=True):
            forecast.remove(entry)
        self._refused = None
        if key in self._prefilling:
            self._prefilling.remove(key)
        if not self._members:
            self._missing_rows = 0

    def still_refuses(self, sequence: Sequence, step: int) -> bool:
        # no sequence has ended since the refusal: the others have only grown
        return self._refused is sequence and step % RECHECK_STEPS != 0

    def steps_left(self, step: int) -> list[int]:
        return [max(1, end - step) for end, _, _ in list(self._forecasts[0].entries)]

    def mean_steps(self) -> float:
        slope, members = self._slope, list(self._members.values())
        steps = [each.lengths[0] / (slope(each.sequence) or 1.0) for each in members]
        return sum(steps) / max(1, len(steps))

    def ended(self, sequence: Sequence) -> None:
        if self._asked is not None and self._asked[0] is sequence:
            self._asked = None
        if self._refused is sequence:
            self._refused = None

    def _redraw(self, sequence: Sequence) -> None:
        """Draws the lengths of a running sequence again before the next forecast."""
        key = self._keys.get(sequence)
        if key is not None:
            self._stale.add(key)

    def _lengths(self, sequence: Sequence) -> list[int]:
        return [self._draw(sequence, k) for k in range(len(self._forecasts))]

    def _slope(self, sequence: Sequence) -> float:
        """Returns the tokens a step gives: 1 where a window bounds them, 0 if K/V is dropped."""
        if sequence.drops is not None:
            return 0.0
        if self.tokens_per_step is None or self._kv.layout.is_bounded:
            return 1.0
        return max(1.0, self.tokens_per_step(sequence))

    def _first_step(self, sequence: Sequence, step: int) -> int:
        """Returns the step that computes its next output token, after the prompts before it."""
        missing = sequence.num_tokens - sequence.num_computed_tokens
        return step + (self._missing_rows + missing - 1) // self._rows_for_prompts()

    def _rows_for_prompts(self) -> int:
        return max(1, self._rows * self.num_stages - len(self._members))

    def _settle(self, forecasts: list[MemoryForecast], step: int) -> None:
        """Updates the forecasts: prompts that are not computed yet, and sequences that have grown
        beyond their drawn lengths."""
        self._missing_rows = 0
        still = []
        for key in self._prefilling:
            member = self._members.get(key)
            if member is None:
                continue
            first = self._first_step(member.sequence, step)
            for k in range(len(forecasts)):
                self._replace_entry(k, key, first)
            missing = member.sequence.num_tokens - member.sequence.num_computed_tokens
            if missing > 1:
                still.append(key)
                self._missing_rows += missing
        self._prefilling = still
        self._settle_stale(len(forecasts), step)
        if self.tokens_per_step is not None:
            self._settle_drafted(step)
        for k, forecast in enumerate(forecasts):
            for _, _, key in forecast.overdue(step):
                member = self._members[key]
                # a sequence that waited for rows is late without being longer
                if member.lengths[k] <= member.sequence.num_output_tokens:
                    member.lengths[k] = self._draw(member.sequence, k)
                self._replace_entry(k, key, step)

    def _settle_stale(self, num_forecasts: int, step: int) -> None:
        """Draws the lengths of sequences that are predicted anew. Their prompts are computed."""
        for key in self._stale:
            member = self._members.get(key)
            if member is not None:  # else it has stopped since
                for k in range(num_forecasts):
                    member.lengths[k] = self._draw(member.sequence, k)
                    self._replace_entry(k, key, step)
        self._stale.clear()

    def _settle_drafted(self, step: int) -> None:
        """Makes the entries of sequences anew to which drafts gave more tokens, or fewer, than
        their entries say."""
        slopes, waiting = self._forecasts[0].slopes, set(self._prefilling)
        for key, member in self._members.items():
            _, start, _ = member.entries[0]
            said = start + slopes.get(key, 1.0) * step
            if key not in waiting and abs(member.sequence.num_tokens - said) > _MOST_WRONG_TOKENS:
                for k in range(len(self._forecasts)):
                    if member.lengths[k] > member.sequence.num_output_tokens:
                        self._replace_entry(k, key, step)

    def _replace_entry(self, k: int, key: int, first: int) -> None:
        """Replaces the sequence's entry in forecast k: its next token comes in step `first`."""
        member = self._members[key]
        slope = self._slope(member.sequence)
        self._forecasts[k].remove(member.entries[k])
        member.entries[k] = entry_of(member.sequence, member.lengths[k], first, key, slope)
        self._forecasts[k].add(member.entries[k], slope)


class OraclePolicy(ForecastPolicy):
    """Knows the length of every answer. For simulation only."""

    def __init__(self, kv: KVMemory, length: Callable[[Sequence], int], rows: int) -> None:
        super().__init__(kv, lambda sequence, k: length(sequence), 1, rows)


class PredictedPolicy(ForecastPolicy):
    """Admits by the predicted peak of memory.

    For each forecast every sequence has a length drawn from the predictor's distribution,
    stratified over the forecasts. It keeps the length until it has grown beyond it; then a new one
    is drawn from the conditional distribution. So the forecasts are samples of what can happen
    given everything known (Past-Future), at the cost of a draw now and then instead of one a step.

    The reserve is learned: a preemption raises it by a hundredth of memory, and a sequence that
    ends without one lowers it, so that it is steady when a share TARGET is preempted.
    """

    TARGET = 0.004
    STEP = 0.01
    MAX_RESERVE = 0.3

    def __init__(
        self, kv: KVMemory, rows: int, predictor: LengthPredictor | SequencePredictor | None = None
    ) -> None:
        super().__init__(kv, self._draw_length, _NUM_FORECASTS, rows)
        predictor = HistoryPredictor() if predictor is None else predictor
        if not isinstance(predictor, SequencePredictor):
            predictor = SequencePredictor(predictor)
        self.lengths = predictor
        self.reserve = 0.05
        self.coverages = (Coverage(0.5), Coverage(0.9))
        self._random = random.Random(0)
        self._offset = 0.0
        self._arrivals: dict[Sequence, list[int]] = {}

    @property
    def capacity_pages(self) -> int:
        return int(self._kv.num_pages * (1.0 - self.reserve))

    def _draw_length(self, sequence: Sequence, k: int) -> int:
        if k == 0:
            self._offset = self._random.random()
        level = (self._offset + k / _NUM_FORECASTS) % 1.0
        return self.lengths.quantile(sequence, level)

    def arrived(self, sequence: Sequence) -> None:
        self.lengths.arrived(sequence)
        self._arrivals[sequence] = [
            self.lengths.quantile(sequence, coverage.level) for coverage in self.coverages
        ]
        sequence.predicted_length = self._arrivals[sequence][0]

    def expected_length(self, sequence: Sequence) -> int:
        return self.lengths.quantile(sequence, 0.5)

    def saw_state(self, sequence: Sequence, num_output: int, sketch: object) -> None:
        if sequence.is_finished:
            return
        self.lengths.saw_state(sequence, num_output, sketch)
        sequence.predicted_length = 0
        self._redraw(sequence)

    def stopped(self, sequence: Sequence) -> None:
        super().stopped(sequence)
        if not sequence.is_finished:
            self.reserve = min(self.MAX_RESERVE, self.reserve + self.STEP)

    def preempted_by_priority(self, sequence: Sequence) -> None:
        super().stopped(sequence)  # no prediction was wrong, so the reserve stays

    def ended(self, sequence: Sequence) -> None:
        super().ended(sequence)
        if sequence.first_scheduled_s is not None and not sequence.num_preemptions:
            self.reserve = max(0.0, self.reserve - self.STEP * self.TARGET)
        length = sequence.num_output_tokens
        predicted = self._arrivals.pop(sequence)
        self.lengths.ended(sequence, is_whole=sequence.finish_reason is FinishReason.STOP)
        longest = sequence.request.params.max_tokens
        if longest and sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            for coverage, quantile in zip(self.coverages, predicted, strict=True):
                if quantile != longest:
                    coverage.add(quantile, length)

    def coverage(self) -> tuple[float | None, float | None]:
        p50, p90 = (coverage.share for coverage in self.coverages)
        return p50, p90


def make_policy(
    name: str,
    kv: KVMemory,
    max_num_batched_tokens: int,
    predictor: LengthPredictor | SequencePredictor | None = None,
) -> MemoryPolicy:
    """Returns one of MEMORY_POLICIES. predictor: for "predicted", a user's own or that of
    serve/prediction; None predicts from past lengths."""
    if name == "worst_case":
        return WorstCasePolicy(kv)
    if name == "prompt_only":
        return PromptOnlyPolicy(kv)
    assert name == "predicted", name
    if predictor is not None and not isinstance(predictor, SequencePredictor):
        predictor = GuardedPredictor(predictor)
    return PredictedPolicy(kv, max_num_batched_tokens, predictor)
