"""The table of requests inside the engine: what may come in, who is still there."""

from __future__ import annotations

import threading
from collections.abc import Callable

from serve.engine.request_limits import RequestLimits
from serve.engine.request_table import RequestState
from serve.errors import EngineStoppedError, OverloadedError, RequestError


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
