"""Early rejection: a request whose first token would come too late is refused on its arrival.

Mooncake (FAST'25): the time to the first token is predicted from what waits before the request
and its own prompt; where that is beyond the objective, a refusal now is worth more to the client
than an answer later, and costs the others nothing. The prediction knows prompts and rows only:
waiting for a slot or for K/V memory is not in it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from serve.errors import OverloadedError
from serve.request import Request

if TYPE_CHECKING:
    from serve.scheduler import Scheduler

# Decode rows leave prompts at least that share of a step.
_MIN_SHARE = 0.1


class EarlyRejection:
    """May be asked from any thread, while another one runs the scheduler: what it reads there
    may be a step old."""

    def __init__(self, scheduler: Scheduler, slo_s: float) -> None:
        self._scheduler = scheduler
        self._slo_s = slo_s
        self._lock = threading.Lock()
        self._num_coming_rows = 0  # accepted, not yet in the scheduler's queue
        self.num_refused = 0
        self.predicted_s: float | None = None

    def admit(self, request: Request, num_rows: int) -> None:
        """num_rows: of its prompt, those that the prefix cache does not know. OverloadedError:
        refused. Otherwise `queued` must follow."""
        scheduler = self._scheduler
        throughput = scheduler.waiting.throughput
        with self._lock:
            before = self._num_coming_rows + scheduler.rows_before(request, num_rows)
            rest_s = throughput.last_step_s if scheduler.running else 0.0
            before_s = rest_s + throughput.seconds(before) / self._share()
            own_s = throughput.seconds(num_rows) / self._share()
            self.predicted_s = predicted_s = before_s + own_s
            is_idle = not (self._num_coming_rows or scheduler.has_work())
            if num_rows and predicted_s > self._slo_s and not is_idle:
                self.num_refused += 1
                raise OverloadedError(
                    f"the first token would come in about {predicted_s:.1f} s, later than the"
                    f" {self._slo_s:g} s that are promised",
                    retry_after_s=min(before_s, predicted_s - self._slo_s),
                )
            self._num_coming_rows += num_rows

    def queued(self, num_rows: int) -> None:
        """A request that was admitted is in the scheduler's queue now, or was aborted."""
        with self._lock:
            self._num_coming_rows -= num_rows

    def _share(self) -> float:
        """Of a step's rows, what decode rows leave for prompts."""
        rows = self._scheduler.limits.max_num_batched_tokens
        return max(_MIN_SHARE, 1.0 - len(self._scheduler.running) / rows)
