"""The requests inside the engine: one state for each, and the table of all of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from serve.engine.output_processor import RequestTimes, Sink
from serve.engine.request_limits import RequestLimits
from serve.errors import EngineStoppedError, OverloadedError, RequestError
from serve.pooling import PoolingParams
from serve.request import RequestMetrics
from serve.sampling_params import SamplingParams
from serve.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)


class RequestState:
    """One submitted request inside the core. `sequences` is filled once it is tokenized."""

    __slots__ = (
        "client",
        "is_aborted",
        "params",
        "pooling",
        "prompt",
        "request_id",
        "sequences",
        "sink",
        "times",
    )

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        sink: Sink,
        now_s: float,
        client: str | None = None,
        pooling: PoolingParams | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.client = client
        self.params = params
        self.pooling = pooling
        self.sink = sink
        self.times = RequestTimes(now_s)
        self.sequences: list[Sequence] = []
        self.is_aborted = False

    def metrics(self) -> RequestMetrics:
        """From any thread: while it runs, the counts may be a step old."""
        sequences = self.sequences
        return replace(
            self.times.metrics(),
            num_prompt_tokens=sequences[0].num_prompt_tokens if sequences else 0,
            num_output_tokens=sum(s.num_output_tokens for s in sequences),
            finish_reasons=tuple(s.finish_reason.value for s in sequences if s.finish_reason),
        )

    def notify_sink(self, act: Callable[[], None]) -> None:
        """A consumer's own fault is logged and harms nobody else."""
        try:
            act()
            self.sink.wake()
        except Exception:
            logger.exception("the consumer of %s cannot be told", self.request_id)


class RequestTable:
    """By request id. Any thread."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._states: dict[str, RequestState] = {}
        self._num_sequences = 0
        self._is_closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._states)

    def add(self, state: RequestState, queue: Callable[[], object]) -> None:
        """Take it in and call queue() before anybody can look. OverloadedError: there are too
        many; EngineStoppedError: the table is closed; RequestError: its id is there already."""
        num_sequences = state.params.n
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
            queue()

    def get(self, request_id: str) -> RequestState | None:
        return self._states.get(request_id)

    def remove(self, state: RequestState) -> None:
        """Does nothing when it has gone."""
        with self._lock:
            if self._states.pop(state.request_id, None) is not None:
                self._num_sequences -= state.params.n

    def states(self) -> list[RequestState]:
        with self._lock:
            return list(self._states.values())

    def close(self) -> None:
        """Nothing comes in any more."""
        with self._lock:
            self._is_closed = True
