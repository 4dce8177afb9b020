"""Counters of the pools: plain integers and floats, each with one writer and without a lock.

Any thread may read them; a value may be one token old. They are not objects of a metrics library:
those are made when the metrics are requested (serve/http/monitoring/exposition.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from serve.histogram import Histogram
from serve.request import FinishReason

# Upper bounds of buckets: seconds between tokens, to the first token, and of whole requests.
STEP_SECONDS = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03),
    *(0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
FIRST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
REQUEST_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0),
    *(15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
TOKENS = tuple(float(1 << i) for i in range(18))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class RequestCounters:
    """Counts requests; pool 3 writes it. Each of the n answers counts, the prompt counts once."""

    def __init__(self) -> None:
        self.ttft_s = Histogram(FIRST_SECONDS)
        self.inter_token_s = Histogram(STEP_SECONDS)
        self.per_token_s = Histogram(STEP_SECONDS)
        self.e2e_s = Histogram(REQUEST_SECONDS)
        self.queue_s = Histogram(REQUEST_SECONDS)
        self.prefill_s = Histogram(REQUEST_SECONDS)
        self.decode_s = Histogram(REQUEST_SECONDS)
        self.inference_s = Histogram(REQUEST_SECONDS)
        self.prompt_tokens = Histogram(TOKENS)
        self.generation_tokens = Histogram(TOKENS)
        self.max_tokens = Histogram(TOKENS)
        self.n = Histogram(CHOICES)
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_ended = dict.fromkeys(FinishReason, 0)

    def count_first_token(self, index: int, num_prompt_tokens: int, ttft_s: float | None) -> None:
        """Counts the first token of answer number `index` of a request, or the end of a prompt
        that gets none. ttft_s: None for an embedding."""
        if ttft_s is not None:
            self.ttft_s.observe(ttft_s)
        if index == 0:
            self.num_prompt_tokens += num_prompt_tokens

    def count_end(
        self,
        reason: FinishReason,
        num_tokens: int,
        times_s: tuple[float, float | None, float | None, float],
    ) -> None:
        """Counts an ended answer. times_s: its arrival, first step, first token and end; None
        where the answer did not get that far."""
        arrival_s, scheduled_s, first_s, end_s = times_s
        self.num_ended[reason] += 1
        self.generation_tokens.observe(num_tokens)
        self.e2e_s.observe(end_s - arrival_s)
        if scheduled_s is not None:
            self.queue_s.observe(scheduled_s - arrival_s)
            self.inference_s.observe(end_s - scheduled_s)
        if first_s is not None:
            if scheduled_s is not None:
                self.prefill_s.observe(first_s - scheduled_s)
            self.decode_s.observe(end_s - first_s)
            if num_tokens > 1:
                self.per_token_s.observe((end_s - first_s) / (num_tokens - 1))

    def count_request(self, num_prompt_tokens: int, max_tokens: int, n: int) -> None:
        """Counts what an ended request had asked for."""
        self.prompt_tokens.observe(num_prompt_tokens)
        self.max_tokens.observe(max_tokens)
        self.n.observe(n)


class PoolCounters:
    """The waiting jobs and the seconds of work of a pool of several threads."""

    def __init__(self, num_waiting: Callable[[], int] = lambda: 0) -> None:
        """num_waiting: returns the number of jobs that have not begun."""
        self._num_waiting = num_waiting
        self.busy_s = 0.0
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        return self._num_waiting()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Surrounds the work of one job."""
        began_s = monotonic()
        try:
            yield
        finally:
            with self._lock:
                self.busy_s += monotonic() - began_s
