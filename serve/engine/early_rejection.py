"""Early rejection: a request whose first token would come too late is refused on its arrival.

Mooncake (FAST'25): the time to the first token is predicted from what waits before the request
and its own prompt; where that is beyond the objective, a refusal now is worth more to the client
than an answer later, and costs the others nothing. The prediction knows prompts, and slots where
the memory policy predicts lengths; waiting for K/V memory is not in it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from serve.errors import OverloadedError
from serve.request import Request
from serve.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from serve.scheduler.scheduler import Scheduler


class EarlyRejection:
    """May be asked from any thread, while another one runs the scheduler: what it reads there
    may be a step old."""

    def __init__(self, scheduler: Scheduler, slo_s: float) -> None:
        self._scheduler = scheduler
        self._slo_s = slo_s
        self._lock = threading.Lock()
        # of prompts that are accepted, and not yet in the scheduler's queue
        self._num_coming, self._coming_s = 0, 0.0
        self.num_refused = 0
        self.predicted_s: float | None = None

    def admit(self, request: Request, num_rows: int) -> float:
        """num_rows: of its prompt, those that the prefix cache does not know. OverloadedError:
        refused. Otherwise `mark_queued` must follow, with what this returns."""
        scheduler = self._scheduler
        num_tokens = len(request.prompt_token_ids)
        own_s = scheduler.chunks.model.prefill_seconds(num_tokens, num_tokens - num_rows)
        with self._lock:
            is_idle = not (self._num_coming or scheduler.has_work())
            predicted_s = predicted_ttft_s(
                scheduler, request, num_rows, self._coming_s, self._num_coming
            )
            self.predicted_s = predicted_s
            if num_rows and predicted_s > self._slo_s and not is_idle:
                self.num_refused += 1
                raise OverloadedError(
                    f"the first token would come in about {predicted_s:.1f} s, later than the"
                    f" {self._slo_s:g} s that are promised",
                    retry_after_s=min(predicted_s - own_s, predicted_s - self._slo_s),
                    code="overloaded",
                )
            self._num_coming += 1
            self._coming_s += own_s
        return own_s

    def mark_queued(self, seconds: float) -> None:
        """A request that was admitted is in the scheduler's queue now, or was aborted."""
        with self._lock:
            self._num_coming -= 1
            self._coming_s = self._coming_s - seconds if self._num_coming else 0.0


def predicted_ttft_s(
    scheduler: Scheduler, request: Request, num_rows: int, seconds_before: float, num_before: int
) -> float:
    """Of a request that arrives now with num_rows to compute, and with num_before prompts on the
    way that take seconds_before. From any thread: what is read may be a step old."""
    model = scheduler.chunks.model
    num_tokens = len(request.prompt_token_ids)
    own_s = model.prefill_seconds(num_tokens, num_tokens - num_rows)
    seconds = seconds_before + scheduler.waiting.seconds_before(request, num_rows)
    decodes: list[Sequence] = []
    for sequence in list(scheduler.running):
        num_computed = sequence.num_computed_tokens
        if sequence.num_tokens - num_computed > 1:
            seconds += model.prefill_seconds(sequence.num_tokens, num_computed)
        else:
            decodes.append(sequence)
    rest_s = model.last_step_s if scheduler.running else 0.0
    slowdown = scheduler.chunks.slowdown(decodes)
    num_before += scheduler.waiting.num_before(request, num_rows)
    slot_s = model.last_step_s * _steps_to_slot(scheduler, num_before)
    return rest_s + max(seconds * slowdown, slot_s) + own_s * slowdown


def _steps_to_slot(scheduler: Scheduler, num_before: int) -> float:
    """Until so many others and one more have had a slot, as far as lengths are predicted."""
    number = len(scheduler.running) + num_before + 1 - scheduler.limits.max_num_seqs
    left = scheduler.policy.steps_left(scheduler.num_steps)
    if number <= 0 or not left:
        return 0.0
    rounds, place = divmod(number - 1, len(left))
    # those who come next take as long as these take in all
    return left[place] + rounds * scheduler.policy.mean_steps()
