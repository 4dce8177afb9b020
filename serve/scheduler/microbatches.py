"""Splits a step into two micro-batches, and learns when that is faster. Integers and floats.

While memory nodes compute attention for one micro-batch, this machine computes the products of the
other (staggered pipelining, Lamina, arXiv 2405.01814). This pays if the products of half the rows
take half the time; if they wait for the weights, they take as long as those of all rows. So both
modes are timed, and the faster one is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from serve.scheduler.step_plan import StepPlan

_TRIAL = 5  # steps of each mode that are compared
_PERIOD = 32  # steps between trials; doubled after each trial that changed nothing
_MOST_PERIOD = 256
_GAIN = 0.02  # the relative gain that a change of mode must bring


def split_in_two(plan: StepPlan) -> tuple[list[int], list[int]] | None:
    """Returns the indices of each micro-batch's sequences, rising; None for one sequence.

    Sequences are not split. Each goes to the micro-batch with less attention so far, the largest
    first, so that the two differ by at most one sequence's attention (Graham's LPT).
    """
    if len(plan.sequences) < 2:
        return None
    loads = [
        rows * (1 + sequence.num_computed_tokens)
        for sequence, rows in zip(plan.sequences, plan.num_rows, strict=True)
    ]
    one: list[int] = []
    other: list[int] = []
    difference = 0  # load of the first micro-batch minus that of the second
    for index in sorted(range(len(loads)), key=loads.__getitem__, reverse=True):
        if difference <= 0:
            one.append(index)
            difference += loads[index]
        else:
            other.append(index)
            difference -= loads[index]
    return sorted(one), sorted(other)


class MicrobatchPolicy(Protocol):
    """Decides whether to split a step, and learns from its time."""

    def splits(self, num_decodes: int, num_prompt_rows: int) -> bool: ...

    def learn(
        self, num_decodes: int, num_prompt_rows: int, is_split: bool, seconds: float
    ) -> None: ...


class LearnedMicrobatches:
    """Learns from the times of similar steps, by the powers of two of decode and prompt rows.

    The mode that is not in use is tried for a few steps in a row now and then, and compared with
    the steps just before: contexts and machines change, but not within a few steps.
    """

    def __init__(self) -> None:
        self._classes: dict[tuple[int, int], StepClass] = {}

    def splits(self, num_decodes: int, num_prompt_rows: int) -> bool:
        return self._class_of(num_decodes, num_prompt_rows).next_mode

    def learn(self, num_decodes: int, num_prompt_rows: int, is_split: bool, seconds: float) -> None:
        self._class_of(num_decodes, num_prompt_rows).learn(is_split, seconds)

    def _class_of(self, num_decodes: int, num_prompt_rows: int) -> StepClass:
        key = (num_decodes.bit_length(), num_prompt_rows.bit_length())
        return self._classes.setdefault(key, StepClass())


@dataclass(slots=True)
class StepClass:
    """A class of similar steps. kept: whether they are split; steps_left: until the next trial."""

    kept: bool = False
    steps_left: int = _TRIAL
    period: int = _PERIOD
    recent: list[float] = field(default_factory=list)  # times of the last steps in the kept mode
    tried: list[float] = field(default_factory=list)

    @property
    def next_mode(self) -> bool:
        return self.kept if self.steps_left else not self.kept

    def learn(self, is_split: bool, seconds: float) -> None:
        if is_split == self.kept:
            self.recent = [*self.recent[1 - _TRIAL :], seconds]
            self.steps_left = max(0, self.steps_left - 1)
            return
        self.tried.append(seconds)
        if len(self.tried) < _TRIAL:
            return
        if median(self.tried) < (1 - _GAIN) * median(self.recent):
            self.kept, self.recent, self.period = is_split, self.tried, _PERIOD
        else:
            self.period = min(2 * self.period, _MOST_PERIOD)
        self.steps_left, self.tried = self.period, []
