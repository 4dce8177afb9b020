"""Cuts the rows of a step into segments, and decides which of them change the kept states.

A draft's rows must not change a state before they are accepted. So the state of a sequence with a
draft is kept after its certain row, and what its layers computed the other rows from is kept
beside it. The next step begins with those of them that were accepted: they are applied to the
state again, without being computed by the rest of the model. (K/V needs none of this: rejected
rows are overwritten.) A draft ends before the last position of its interval, so that a record is
complete as soon as its last row is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memory.attention.seam import AttentionStep
from ops.states import NO_RECORD, StateSegments


class Draft(NamedTuple):
    """The drafted rows of a sequence that its record keeps. begin: the position of the first."""

    begin: int
    num_rows: int


class Kept(NamedTuple):
    """Rows of a step beside rows of drafts that records keep.

    rows: [N] int64, of merged rows or of a step; records, slots: [N] int64, their places.
    """

    rows: Tensor
    records: Tensor
    slots: Tensor


class StepSegments(NamedTuple):
    """The segments of a step. accepted: the places of accepted rows among the merged rows; own:
    [T] int64, those of the step's; drafted: the rows of drafts that are to be kept. None if no
    sequence has a draft or had one."""

    segments: StateSegments
    accepted: Kept | None = None
    own: Tensor | None = None
    drafted: Kept | None = None


def segments_of(step: AttentionStep, interval: int) -> StateSegments:
    """Returns the segments of a step without drafts, whose ranges begin at multiples of the
    interval: rows are cut where an interval ends, whose record keeps the state there."""
    cutter = _Cutter(interval)
    for start, num_rows, length in zip(step.starts, step.num_rows, step.kv_lens, strict=True):
        cutter.add(start, length - num_rows, length)
    return cutter.segments()


def drafted_segments(step: AttentionStep, interval: int, drafts: dict[int, Draft]) -> StepSegments:
    """Does so for a step with drafts, or after one. drafts: by the start of their sequence's range;
    those of the step's sequences are replaced."""
    cutter = _Cutter(interval)
    accepted: list[tuple[int, int, int]] = []
    kept: list[tuple[int, int, int]] = []
    own: list[int] = []
    row = 0
    sequences = zip(step.starts, step.num_rows, step.kv_lens, strict=True)
    for index, (start, num_rows, length) in enumerate(sequences):
        first, num_drafted = length - num_rows, num_rows - 1 if index < step.num_decodes else 0
        last = drafts.pop(start, None)
        again = 0 if last is None else first - last.begin
        if last is None or not 0 < again <= last.num_rows:
            again = 0
        record = (start + first - again - 1) // interval
        accepted += [(cutter.num_rows + slot, record, slot) for slot in range(again)]
        own += range(cutter.num_rows + again, cutter.num_rows + again + num_rows)
        cutter.add(start, first - again, length - num_drafted)
        if num_drafted:
            record = (start + first) // interval
            kept += [(row + 1 + slot, record, slot) for slot in range(num_drafted)]
            cutter.add_draft(record, num_drafted)
            drafts[start] = Draft(first + 1, num_drafted)
        row += num_rows
    return StepSegments(
        cutter.segments(),
        _kept(accepted) if accepted else None,
        torch.tensor(own, dtype=torch.int64) if accepted else None,
        _kept(kept) if kept else None,
    )


def cuts(start: int, position: int, end: int, interval: int) -> Iterator[tuple[int, int, int]]:
    """Yields number of rows, source and target of each segment of a sequence's rows from
    `position` up to `end`. start: the token at which its range begins."""
    source = NO_RECORD if position == 0 else (start + position - 1) // interval
    while position < end:
        target = (start + position) // interval
        stop = min(end, (position // interval + 1) * interval)
        yield stop - position, source, target
        position, source = stop, target


class _Cutter:
    """Collects the segments of one sequence after the other."""

    def __init__(self, interval: int) -> None:
        self.num_rows = 0
        self._interval = interval
        self._firsts: list[int] = []
        self._sources: list[int] = []
        self._targets: list[int] = []
        self._sequences: list[int] = []

    def add(self, start: int, position: int, end: int) -> None:
        """Begins a sequence with its rows from `position` up to `end`."""
        self._sequences.append(len(self._firsts))
        for segment in cuts(start, position, end, self._interval):
            self._append(*segment)

    def add_draft(self, source: int, num_rows: int) -> None:
        """Adds rows of the same sequence whose state is not kept."""
        self._append(num_rows, source, NO_RECORD)

    def _append(self, num_rows: int, source: int, target: int) -> None:
        self._firsts.append(self.num_rows)
        self._sources.append(source)
        self._targets.append(target)
        self.num_rows += num_rows

    def segments(self) -> StateSegments:
        columns = (
            [*self._firsts, self.num_rows],
            self._sources,
            self._targets,
            [*self._sequences, len(self._sources)],
        )
        return StateSegments(*[torch.tensor(column, dtype=torch.int64) for column in columns])


def _kept(places: Sequence[tuple[int, int, int]]) -> Kept:
    return Kept(*torch.tensor(places, dtype=torch.int64).unbind(1))
