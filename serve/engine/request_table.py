"""The requests inside the engine: a state for each of them, and the table of all of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from serve.engine.output_processor import RequestTimes, Sink
from serve.engine.request_limits import RequestLimits
from serve.errors import EngineStoppedError, OverloadedError, RequestError
from serve.request import Request, RequestMetrics
from serve.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)


class RequestState:
    """One request inside the engine: what the client asked, the scheduler's sequences, and the
    sink and the times of the output.

    `request` has no token ids until pool 1 has tokenized it; `sequences` is empty until the loop
    has queued it. No sequence refers back to the state: reference cycles would leave thousands of
    requests to the garbage collector, which stops every thread.
    """

    __slots__ = ("is_aborted", "request", "sequences", "sink", "times")

    def __init__(self, request: Request, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.times = RequestTimes()
        self.sequences: list[Sequence] = []
        self.is_aborted = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def metrics(self) -> RequestMetrics:
        """Times and counts. Any thread may call this; while the request runs, the counts may be
        one step old."""
        sequences, times = self.sequences, self.times
        return RequestMetrics(
            self.request.arrival_s,
            times.first_scheduled_s,
            times.first_token_s,
            times.finished_s,
            times.num_preemptions,
            times.num_cached_tokens,
            num_prompt_tokens=sequences[0].num_prompt_tokens if sequences else 0,
            num_output_tokens=sum(s.num_output_tokens for s in sequences),
            finish_reasons=tuple(s.finish_reason.value for s in sequences if s.finish_reason),
        )

    def notify_sink(self, call: Callable[[], None]) -> None:
        """Runs a call of the sink's and wakes it. An error in the sink is logged and affects no
        other request."""
        try:
            call()
            self.sink.wake()
        except Exception:
            logger.exception("the consumer of %s cannot be notified", self.request_id)


class RequestTable:
    """Unfinished requests by request id. Any thread may use it."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._states: dict[str, RequestState] = {}
        self._num_sequences = 0
        self._is_closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._states)

    def add(self, state: RequestState, submit: Callable[[], object]) -> None:
        """Adds a request and calls `submit` under the same lock, so that a shutdown sees either
        both or neither. Raises OverloadedError when there are too many sequences,
        EngineStoppedError when the table is closed, and RequestError when the id is in use."""
        num_sequences = state.request.params.n
        with self._lock:
            if self._is_closed:
                raise EngineStoppedError("the engine has stopped")
            limit = self._limits.max_num_waiting + self._limits.max_num_seqs
            if self._num_sequences and self._num_sequences + num_sequences > limit:
                raise OverloadedError(
                    f"the queue is full: {self._num_sequences} sequences are running or waiting"
                )
            if state.request_id in self._states:
                raise RequestError("a request with this id is running", param="request_id")
            self._states[state.request_id] = state
            self._num_sequences += num_sequences
            submit()

    def get(self, request_id: str) -> RequestState | None:
        return self._states.get(request_id)

    def remove(self, state: RequestState) -> None:
        """Removes a request; does nothing when it is not in the table."""
        with self._lock:
            if self._states.pop(state.request_id, None) is not None:
                self._num_sequences -= state.request.params.n

    def states(self) -> list[RequestState]:
        with self._lock:
            return list(self._states.values())

    def close(self) -> None:
        """Makes `add` refuse every request from now on."""
        with self._lock:
            self._is_closed = True
