"""Early rejection: refuses a request on arrival if its first token would come too late.

As in Mooncake (FAST'25), the time to the first token is predicted from the requests that wait and
from the request's own prompt. If it exceeds the objective, a refusal now is worth more to the
client than a late answer, and it costs other requests nothing. The prediction covers prompts, and
slots where the memory policy predicts lengths; it does not cover the wait for K/V memory.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from serve.errors import OverloadedError
from serve.request import Request
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_time import StepWork

if TYPE_CHECKING:
    from serve.scheduler.scheduler import Scheduler

# the sizes for which a load is told
_LOAD_LENGTHS = (64, 256, 1024, 4096, 16_384, 65_536)
_LOAD_STREAMS = (1, 4, 16, 64, 256)
_USUAL_CONTEXT = 512  # while nothing runs


class EarlyRejection:
    """Decides about arriving requests. Any thread may call it while the loop runs the scheduler;
    what it reads there may be one step old."""

    def __init__(self, scheduler: Scheduler, slo_s: float) -> None:
        self._scheduler = scheduler
        self._slo_s = slo_s
        self._lock = threading.Lock()
        # accepted prompts that are not in the scheduler's queue yet, and their seconds
        self._num_coming, self._coming_s = 0, 0.0
        self.num_refused = 0
        self.predicted_s: float | None = None

    @classmethod
    def of(cls, scheduler: Scheduler, slo_s: float | None) -> EarlyRejection | None:
        return None if slo_s is None else cls(scheduler, slo_s)

    def admit(self, request: Request, num_rows: int) -> float:
        """Returns the predicted seconds of the request's prefill, which `mark_queued` must get
        later; raises OverloadedError to refuse. num_rows: prompt tokens that the prefix cache does
        not have."""
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

    @property
    def coming(self) -> tuple[float, int]:
        """The prefill seconds and the number of accepted prompts that are not queued yet."""
        with self._lock:
            return self._coming_s, self._num_coming

    def mark_queued(self, seconds: float) -> None:
        """Ends the accounting of an admitted request that has reached the scheduler's queue or was
        aborted. seconds: the result of its `admit`."""
        with self._lock:
            self._num_coming -= 1
            self._coming_s = self._coming_s - seconds if self._num_coming else 0.0


class TtftForecast(NamedTuple):
    """The predicted time to the first token of a request that arrives now: what it waits, then the
    prefill of its own rows beside what else runs. Zeros before the first step was learned."""

    queue_s: float
    prefill_s: float

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.prefill_s


class LoadForecast(NamedTuple):
    """What a hop that chooses among servers learns of this one; times are 0 until they are learned.

    queue_s: the wait of a short request. num_streams: the sequences that decode. slowdown and
    next_slowdown: how much longer prompts take beside them, and beside one more. prompt_s: what all
    steps have taken for prompt rows since the start. steps: (streams, seconds of their step alone).
    prompts: (tokens, seconds to compute them alone, their pages)."""

    queue_s: float
    num_streams: int
    slowdown: float
    next_slowdown: float
    prompt_s: float
    steps: tuple[tuple[int, float], ...]
    prompts: tuple[tuple[int, float, int], ...]


def forecast_load(scheduler: Scheduler, queue_s: float) -> LoadForecast:
    """Returns what the step times and the running sequences say. Any thread may call it; what it
    reads may be one step old."""
    chunks, kv, most = scheduler.chunks, scheduler.kv, scheduler.limits.max_num_seqs
    contexts = [
        sequence.num_computed_tokens
        for sequence in list(scheduler.running)
        if sequence.num_tokens - sequence.num_computed_tokens <= 1
    ]
    num_streams = len(contexts)
    usual = sum(contexts) // num_streams if num_streams else min(kv.max_model_len, _USUAL_CONTEXT)
    model = chunks.model
    return LoadForecast(
        queue_s,
        num_streams,
        chunks.slowdown_beside(_decoding(num_streams, usual)),
        chunks.slowdown_beside(_decoding(num_streams + 1, usual)),
        chunks.prompt_s,
        tuple((n, model.decode_seconds(_decoding(n, usual))) for n in _LOAD_STREAMS if n <= most),
        tuple(
            (tokens, model.prefill_seconds(tokens), kv.pages_for(tokens))
            for tokens in _LOAD_LENGTHS
            if tokens < kv.max_model_len
        ),
    )


def _decoding(num_streams: int, context: int) -> StepWork:
    return StepWork(num_streams, num_streams * context, num_streams, samples=num_streams > 0)


def forecast_ttft(
    scheduler: Scheduler, request: Request, num_rows: int, rejection: EarlyRejection | None
) -> TtftForecast:
    """Returns the forecast for a request with num_rows rows to compute."""
    seconds_before, num_before = (0.0, 0) if rejection is None else rejection.coming
    return _forecast(scheduler, request, num_rows, seconds_before, num_before)


def predicted_ttft_s(
    scheduler: Scheduler, request: Request, num_rows: int, seconds_before: float, num_before: int
) -> float:
    """Returns the predicted seconds to the first token of a request that arrives now and has
    num_rows rows to compute.

    seconds_before, num_before: prefill seconds and number of the prompts that are accepted but not
    queued yet. Any thread may call it; what it reads may be one step old.
    """
    return _forecast(scheduler, request, num_rows, seconds_before, num_before).ttft_s


def _forecast(
    scheduler: Scheduler, request: Request, num_rows: int, seconds_before: float, num_before: int
) -> TtftForecast:
    model = scheduler.chunks.model
    num_tokens = len(request.prompt_token_ids)
    own_s = model.prefill_seconds(num_tokens, num_tokens - num_rows)
    seconds = seconds_before + scheduler.waiting.seconds_before(request, num_rows)
    num_before += scheduler.waiting.num_before(request, num_rows)
    num_prompts = num_before + 1
    decodes: list[Sequence] = []
    for sequence in list(scheduler.running):
        num_computed = sequence.num_computed_tokens
        if sequence.num_tokens - num_computed > 1:
            seconds += model.prefill_seconds(sequence.num_tokens, num_computed)
            num_prompts += 1
        else:
            decodes.append(sequence)
    rest_s = scheduler.chunks.last_pass_s if scheduler.running else 0.0
    slowdown = scheduler.chunks.slowdown(decodes, num_prompts)
    slot_s = scheduler.chunks.last_pass_s * _passes_to_slot(scheduler, num_before)
    return TtftForecast(rest_s + max(seconds * slowdown, slot_s), own_s * slowdown)


def _passes_to_slot(scheduler: Scheduler, num_before: int) -> float:
    """Returns the passes until num_before requests and one more have had a slot, by the predicted
    lengths."""
    number = len(scheduler.running) + num_before + 1 - scheduler.limits.max_num_seqs
    left = scheduler.policy.steps_left(scheduler.num_passes)
    if number <= 0 or not left:
        return 0.0
    rounds, place = divmod(number - 1, len(left))
    # each further round of requests is expected to take a mean length
    return left[place] + rounds * scheduler.policy.mean_steps()
