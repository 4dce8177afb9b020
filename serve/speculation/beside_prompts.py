"""Decides how long drafts are in a step that has prompt rows as well.

A row that advances a prompt is progress as much as a token is. A step of n decode rows and m prompt
rows takes T seconds and makes n + m of progress. A draft's j-th token takes T(rows + 1) - T(rows)
seconds more, in which (n + m) / T of progress a second would have been made elsewhere, and yields
p^j of it. The difference is what the token costs the sum of both: nothing, as long as the rows wait
for the weights; 1 - p^j of a row, where every row takes as long as another.

Tokens that cost the sum nothing are drafted if there is room. So are others, the most probable
first, as long as each yields at least what it costs and all together cost at most _GIVEN of the
sum: for as little, the streams may go on twice as fast. They are at most one for _ROWS_PER_DRAFT
prompt rows, which bounds how much longer a prompt takes.

Where none is worth it, one token of one draft is tried now and then: streams beside prompts that
never pause have no other way to show what they agree with.

Room is what the chunks leave of the step's rows and of the time that they were sized for. Chunks
take all they get, so those of the next step are made smaller by as many rows as were worth it in
this one.
"""

from __future__ import annotations

import collections.abc as abc
import heapq
from typing import NamedTuple

from serve.scheduler.step_plan import StepPlan
from serve.scheduler.step_time import StepTimeModel, StepWork

_GIVEN = 0.02
_ROWS_PER_DRAFT = 8
_LONGEST_PAUSE = 64  # steps between trials of a single token


class Room(NamedTuple):
    """What a step may have more: rows, and all in all so many seconds."""

    num_rows: int
    limit_s: float


class Offer(NamedTuple):
    """A draft of so many tokens, each of which agrees with the probability `rate` if those before
    it did."""

    num_tokens: int
    rate: float


class DraftsBesidePrompts:
    """The choice in the steps of one engine."""

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model
        self._num_wanted = 0  # in the last step with prompts, had there been room
        self._pause = self._last_pause = 0  # steps until the next trial

    def reserve(self, num_rows: int) -> int:
        """Returns for how many draft rows the chunks of a step leave room, which has num_rows rows
        left beside its decodes."""
        return min(self._num_wanted, num_rows // _ROWS_PER_DRAFT)

    def lengths(self, plan: StepPlan, offers: abc.Sequence[Offer], room: Room) -> list[int]:
        """Returns how many tokens of each draft are worth their rows. The plan has prompt rows and
        no drafts yet."""
        wanted, num_fitting = self._wanted(plan, offers, room)
        self._num_wanted = len(wanted)
        if wanted:
            self._pause = self._last_pause = 0
        elif offers:
            wanted = self._trial(offers)
            self._num_wanted = num_fitting = len(wanted)
            if wanted and not self._fits_one(plan, room):
                num_fitting = 0
            elif wanted:
                self._pause = self._last_pause = min(2 * self._last_pause + 8, _LONGEST_PAUSE)
        lengths = [0] * len(offers)
        for n in wanted[:num_fitting]:
            lengths[n] += 1
        return lengths

    def _trial(self, offers: abc.Sequence[Offer]) -> list[int]:
        """Returns the draft that is tried, or none."""
        self._pause -= 1
        if self._pause >= 0:
            return []
        return [max(range(len(offers)), key=lambda n: offers[n].rate)]

    def _fits_one(self, plan: StepPlan, room: Room) -> bool:
        work = StepWork.of(plan)
        work.num_decodes += 1
        work.num_rows += 1
        return room.num_rows > 0 and self._model.predict(work) <= room.limit_s

    def _wanted(
        self, plan: StepPlan, offers: abc.Sequence[Offer], room: Room
    ) -> tuple[list[int], int]:
        """Returns the draft of each token that is worth its row, the most probable first, and for
        how many of them there is room."""
        model, work, wanted, num_fitting = self._model, StepWork.of(plan), list[int](), 0
        step_s = before_s = model.predict(work)
        if not step_s:  # nothing is known of a step's time yet
            return wanted, 0
        progress, most = plan.num_total_rows, plan.num_prompt_rows // _ROWS_PER_DRAFT
        left, depths = _GIVEN * progress, [0] * len(offers)
        queue = [(-offer.rate, n) for n, offer in enumerate(offers)]
        heapq.heapify(queue)
        while queue:
            gain, n = -queue[0][0], queue[0][1]
            work.num_decodes += 1
            work.num_rows += 1
            after_s = model.predict(work)
            cost = (after_s - before_s) * progress / step_s - gain
            if cost > 0.0 and (cost > left or gain < cost or len(wanted) >= most):
                break
            left -= max(0.0, cost)
            wanted.append(n)
            depths[n] += 1
            before_s = after_s
            if after_s <= room.limit_s and len(wanted) <= room.num_rows:
                num_fitting = len(wanted)
            if depths[n] < offers[n].num_tokens:
                heapq.heapreplace(queue, (-gain * offers[n].rate, n))
            else:
                heapq.heappop(queue)
        return wanted, num_fitting
