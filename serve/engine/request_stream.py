"""One request's deltas, from pool 3 to a consumer in the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from serve.engine.core import EngineCore
from serve.engine.request_table import RequestState
from serve.errors import MergestepError, drop_frames
from serve.request import Request, RequestMetrics, TokenDelta

if TYPE_CHECKING:
    from serve.pooling import PoolingParams
    from serve.sampling_params import SamplingParams


class Mailbox:
    """The Sink of a stream: holds what the core's threads have for it. The core refers to this and
    not to the stream, so that there is no reference cycle; collecting the cycles of a thousand
    requests would stop every thread."""

    def __init__(self, hub: Hub) -> None:
        self.pending: deque[TokenDelta] = deque()  # filled by pool 3, emptied in the loop
        self.request: Request | None = None
        self.error: Exception | None = None
        self._hub = hub
        self._waiter: asyncio.Future[None] | None = None
        # Sink.push, called from pool 3 for every token: a deque's append needs no lock.
        self.push: Callable[[TokenDelta], None] = self.pending.append

    def accept(self, request: Request) -> None:
        self.request = request

    def fail(self, error: Exception) -> None:
        if isinstance(error, MergestepError):  # any other is logged with its frames
            drop_frames(error)
        self.error = error

    def wake(self) -> None:
        self._hub.notify(self)

    # ---- in the event loop

    async def wait(self) -> None:
        """Returns when wake() is called."""
        self._waiter = self._hub.loop.create_future()
        await self._waiter

    def wake_consumer(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():  # its consumer may have been cancelled
                waiter.set_result(None)


class RequestStream:
    """One request's deltas: an async iterator that ends when all n sequences have ended.

    It serves one consumer. Dropping it does not end the request; abort() does.
    """

    def __init__(self, hub: Hub, num_sequences: int) -> None:
        self.sink = Mailbox(hub)
        self._num_left = num_sequences
        self._core: EngineCore | None = None
        self._state: RequestState | None = None
        self._is_over = False

    def attach(self, core: EngineCore, state: RequestState) -> None:
        self._core, self._state = core, state

    def fail(self, error: Exception) -> None:
        self.sink.fail(error)

    def wake(self) -> None:
        self.sink.wake()

    @property
    def request_id(self) -> str:
        assert self._state is not None
        return self._state.request_id

    @property
    def metrics(self) -> RequestMetrics:
        assert self._state is not None
        return self._state.metrics()

    async def accepted(self) -> Request:
        """Waits for the tokenized request. Raises the error with which it was refused."""
        sink = self.sink
        while sink.request is None:
            if sink.error is not None:
                self._is_over = True
                raise sink.error
            await sink.wait()
        return sink.request

    def abort(self) -> None:
        """Ends the request now; a consumer still gets finish_reason "abort"."""
        if self._core is not None and self._state is not None and self._num_left:
            self._core.abort(self._state)

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        sink = self.sink
        while sink.error is not None or not sink.pending:
            if self._num_left == 0 or self._is_over:
                raise StopAsyncIteration
            if sink.error is not None:
                self._is_over = True
                raise sink.error
            await sink.wait()
        delta = self._take()
        if delta.finish_reason is not None:
            self._num_left -= 1
        return delta

    def _take(self) -> TokenDelta:
        """Returns the next delta, joined with those that follow it for the same sequence."""
        pending = self.sink.pending
        first = pending.popleft()
        if first.is_replayed or first.finish_reason is not None:
            return first
        if not pending or pending[0].index != first.index:
            return first
        joined = [first]
        while pending and pending[0].index == first.index:
            joined.append(pending.popleft())
            if joined[-1].finish_reason is not None:
                break
        return _join(joined)


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
    """Carries wake-ups into the event loop, with one call for all that have gathered."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._woken: deque[Mailbox] = deque()
        self._is_scheduled = False

    def notify(self, mailbox: Mailbox) -> None:
        self._woken.append(mailbox)
        if not self._is_scheduled:
            self._is_scheduled = True
            # A loop that has been closed has no consumers left to wake.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        # Cleared first, so that a mailbox appended after the last pop schedules a new call.
        self._is_scheduled = False
        woken = self._woken
        while woken:
            woken.popleft().wake_consumer()


class CallPolicy(Protocol):
    """Limits what a call may ask and keeps the streams of its requests. Each `submit` of the
    engine applies it."""

    @property
    def arrived_s(self) -> float:
        """The arrival of the call in seconds of the monotonic clock; latencies count from it."""

    def allowed(self, params: SamplingParams | PoolingParams) -> SamplingParams | PoolingParams:
        """Returns the parameters with the call's limits. Raises what refuses the request."""

    def client(self, name: str | None) -> str | None:
        """Returns the client under which the lengths of answers are predicted."""

    def submitted(self, stream: RequestStream) -> None:
        """Keeps the stream of a request that the engine has accepted."""
