"""One request's deltas on their way from pool 3 to a consumer in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from serve.core import EngineCore
from serve.request import Request, RequestMetrics, TokenDelta
from serve.state import RequestState


class RequestStream:
    """One request's deltas, as an async iterator that ends when all n sequences have.

    For one consumer. Dropping it does not end the request: call abort().
    """

    def __init__(self, hub: Hub, num_sequences: int) -> None:
        self._hub = hub
        self._pending: deque[TokenDelta] = deque()  # filled by pool 3, emptied in the loop
        self._waiter: asyncio.Future[None] | None = None
        self._num_left = num_sequences
        self._request: Request | None = None
        self._error: Exception | None = None
        self._core: EngineCore | None = None
        self._state: RequestState | None = None
        self._is_over = False
        # Sink.push, called from pool 3 for every token: a deque's append needs no lock.
        self.push: Callable[[TokenDelta], None] = self._pending.append

    def attach(self, core: EngineCore, state: RequestState) -> None:
        self._core, self._state = core, state

    # ---- Sink: called from the core's threads

    def accept(self, request: Request) -> None:
        self._request = request

    def fail(self, error: Exception) -> None:
        self._error = error

    def wake(self) -> None:
        self._hub.notify(self)

    # ---- the consumer, in the event loop

    @property
    def request_id(self) -> str:
        assert self._state is not None
        return self._state.request_id

    @property
    def metrics(self) -> RequestMetrics:
        assert self._state is not None
        return self._state.metrics()

    async def accepted(self) -> Request:
        """The tokenized request. Raises what it was refused with."""
        while self._request is None:
            if self._error is not None:
                self._is_over = True
                raise self._error
            self._waiter = self._hub.loop.create_future()
            await self._waiter
        return self._request

    def abort(self) -> None:
        """End the request now; a consumer still gets finish_reason "abort"."""
        if self._core is not None and self._state is not None and self._num_left:
            self._core.abort(self._state)

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        while self._error is not None or not self._pending:
            if self._num_left == 0 or self._is_over:
                raise StopAsyncIteration
            if self._error is not None:
                self._is_over = True
                raise self._error
            self._waiter = self._hub.loop.create_future()
            await self._waiter
        delta = self._take()
        if delta.finish_reason is not None:
            self._num_left -= 1
        return delta

    def _take(self) -> TokenDelta:
        """The next delta; what follows for the same sequence is joined to it."""
        pending = self._pending
        first = pending.popleft()
        if not pending or pending[0].index != first.index or first.finish_reason is not None:
            return first
        joined = [first]
        while pending and pending[0].index == first.index:
            joined.append(pending.popleft())
            if joined[-1].finish_reason is not None:
                break
        return _join(joined)

    def resolve_waiter(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():  # its consumer may have been cancelled
                waiter.set_result(None)


def _join(deltas: Sequence[TokenDelta]) -> TokenDelta:
    last = deltas[-1]
    logprobs = [item for delta in deltas for item in delta.logprobs or ()]
    return last._replace(
        text="".join([delta.text for delta in deltas]),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=logprobs or None,
        prompt_logprobs=deltas[0].prompt_logprobs,
        embedding=deltas[0].embedding,
    )


class Hub:
    """Carries wake-ups into the event loop, one call for however many have gathered."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._woken: deque[RequestStream] = deque()
        self._is_scheduled = False

    def notify(self, stream: RequestStream) -> None:
        self._woken.append(stream)
        if not self._is_scheduled:
            self._is_scheduled = True
            # A loop that has been closed has no consumers left to wake.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        # Cleared first: what is appended after the last pop schedules a new call.
        self._is_scheduled = False
        woken = self._woken
        while woken:
            woken.popleft().resolve_waiter()
