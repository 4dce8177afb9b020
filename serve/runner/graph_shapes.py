"""Chooses the step shapes that are captured in CUDA graphs, and the shape of each step."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from serve.scheduler.step_plan import StepPlan

_SMALL_DECODES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128)
_DECODE_UNIT = 64  # the distance of larger sizes
# A larger merged step computes longer than the host takes to launch it kernel by kernel.
_MOST_CAPTURED_ROWS = 512
_FEWEST_MERGED_ROWS = 16


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a step. rows and decodes are upper bounds; the rest is padding."""

    rows: int
    decodes: int
    has_prompts: bool
    is_captured: bool


class StepShapes:
    """The shapes of steps with at most max_rows rows and max_sampled sampled sequences."""

    def __init__(self, max_rows: int, max_seqs: int, *, captures: bool = True) -> None:
        self.max_rows = max_rows
        self.max_sampled = min(max_seqs, max_rows)
        self._decodes = _decode_sizes(self.max_sampled) if captures else []
        self._merged = _merged_sizes(min(max_rows, _MOST_CAPTURED_ROWS)) if captures else []

    @property
    def captured(self) -> list[StepShape]:
        """The shapes that are worth a graph, largest first, so that later ones reuse its memory."""
        merged = [self._of_merged(rows) for rows in reversed(self._merged)]
        return merged + [_of_decodes(rows) for rows in reversed(self._decodes)]

    @property
    def eager(self) -> list[StepShape]:
        """One shape for each power of two above the captured ones, because kernels are chosen by
        powers of two."""
        merged = self._merged[-1] if self._merged else 1
        sizes = [*_doubled(merged, self.max_rows), self.max_rows]
        return [StepShape(rows, min(rows, self.max_sampled), True, False) for rows in sizes]

    @property
    def sampled(self) -> list[int]:
        """The numbers of sampled rows for which the head and the sampler are warmed up."""
        return [*_doubled(1, self.max_sampled), self.max_sampled]

    def of(self, plan: StepPlan) -> StepShape:
        """Returns the smallest captured shape with room for the plan, or else its exact shape."""
        decodes = plan.num_decodes + plan.num_drafted
        return self.fitting(plan.num_total_rows, decodes, has_prompts=plan.num_prompt_rows > 0)

    def fitting(self, rows: int, decodes: int, *, has_prompts: bool) -> StepShape:
        """Returns the same for a step with so many rows, of which some decode."""
        sizes = self._merged if has_prompts else self._decodes
        index = bisect_left(sizes, rows)
        if index == len(sizes):
            return StepShape(rows, decodes, has_prompts, False)
        return self._of_merged(sizes[index]) if has_prompts else _of_decodes(sizes[index])

    def _of_merged(self, rows: int) -> StepShape:
        return StepShape(rows, min(rows, self.max_sampled), True, True)


def _of_decodes(rows: int) -> StepShape:
    return StepShape(rows, rows, False, True)


def _decode_sizes(most: int) -> list[int]:
    sizes = [size for size in _SMALL_DECODES if size < most]
    return [*sizes, *range(_SMALL_DECODES[-1] + _DECODE_UNIT, most, _DECODE_UNIT), most]


def _merged_sizes(most: int) -> list[int]:
    return [*_doubled(_FEWEST_MERGED_ROWS, most), most]


def _doubled(first: int, end: int) -> list[int]:
    """Returns first, 2 * first, 4 * first, ... below end."""
    sizes = []
    while first < end:
        sizes.append(first)
        first *= 2
    return sizes
