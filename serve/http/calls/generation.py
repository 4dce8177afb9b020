"""The engine requests of one API call: how they are submitted and how their deltas arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from serve.engine.node_recovery import generation_error
from serve.errors import RequestError
from serve.http.calls.continuation import NAMES
from serve.http.edge import limits
from serve.http.edge.errors import draining
from serve.http.edge.memory_budget import LOGPROB_BYTES, Charge
from serve.parameter_checks import parameters_named
from serve.request import FinishReason, Prompt, Request, TokenDelta
from serve.structured.token_mask import REQUEST_FAULTS

if TYPE_CHECKING:
    from serve.engine.request_stream import RequestStream
    from serve.http.calls.key_policy import KeyPolicy

CHOICES_IN_FLIGHT = 4
# of an answer; the log-probabilities of longer ones are charged as they come
EXPECTED_TOKENS = 1024
CHARGED_AT_ONCE = 1 << 16
SUBMITTED_AT_ONCE = 2  # each takes some tenths of a millisecond


class Generation:
    """The engine requests of one API call. Choice `p * n + i` is sequence i of prompt p. charge and
    policy: those of the call.

    Use it in a `with` block, whose end aborts the requests that still run.
    """

    def __init__(
        self, streams: Sequence[RequestStream], n: int, charge: Charge, policy: KeyPolicy
    ) -> None:
        self._streams = streams
        self.charge = charge
        self._journal = policy.journal
        self._continuation = policy.continuation
        self._num_left = 0  # log-probabilities that are charged and have not come
        self._is_counting = False
        self._n = n
        self.requests: list[Request] = []
        self.prompt_tokens = 0

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.abort()

    @property
    def cached_tokens(self) -> int:
        """The prompt tokens found in the prefix cache; valid once the first tokens have arrived."""
        return sum(stream.metrics.num_cached_tokens for stream in self._streams)

    @property
    def num_choices(self) -> int:
        return len(self._streams) * self._n

    async def accepted(self) -> None:
        """Waits until every prompt is tokenized and checked. Raises the error of a refused one."""
        for stream in self._streams:
            with parameters_named(NAMES):
                request = await stream.accepted()
            self.requests.append(request)
            self.prompt_tokens += len(request.prompt_token_ids)
        if self._journal is not None:
            state = self._journal.begin(self.requests, self.num_choices)
            if self._continuation is not None:
                self._continuation.check(state)

    def charge_logprobs(self, param: str) -> None:
        """Charges the log-probabilities that the answer is expected to have; `deltas` charges more
        as they come. Raises RequestError if the answer may have too many. Call it after `accepted`,
        which fixes how many tokens may come."""
        size = expected = 0
        for request in self.requests:
            if request.params.logprobs is not None:
                num_tokens = request.params.max_tokens or 0
                of_token = request.params.n * (1 + request.params.logprobs)
                size += num_tokens * of_token
                expected += min(num_tokens, EXPECTED_TOKENS) * of_token
        if size > limits.LOGPROBS:
            raise RequestError(
                f"the answer may have {size} log-probabilities, which is more than "
                f"{limits.LOGPROBS}: request fewer tokens or a stream",
                param=param,
            )
        self.charge.add(LOGPROB_BYTES * expected, param)
        self._num_left = expected
        self._is_counting = expected < size

    def _checked(self, choice: int, delta: TokenDelta) -> TokenDelta:
        if self._journal is not None:
            self._journal.note(choice, checked(delta))
        if self._is_counting and delta.logprobs:
            self._num_left -= sum(1 + len(item.top) for item in delta.logprobs)
            if self._num_left < 0:
                self.charge.grow(LOGPROB_BYTES * CHARGED_AT_ONCE)
                self._num_left += CHARGED_AT_ONCE
        return checked(delta)

    async def deltas(self) -> AsyncGenerator[tuple[int, TokenDelta], None]:
        """Yields (choice, delta) in order of arrival. Raises for sequences that have failed."""
        if len(self._streams) == 1:
            async for delta in self._streams[0]:
                yield delta.index, self._checked(delta.index, delta)
                if delta.is_replayed:  # there may be one for each token from before, all at once
                    await asyncio.sleep(0)
            return
        queue: asyncio.Queue[tuple[int, TokenDelta] | Exception | None] = asyncio.Queue(
            CHOICES_IN_FLIGHT * len(self._streams)
        )
        pumps = [
            asyncio.create_task(_pump(stream, position * self._n, queue))
            for position, stream in enumerate(self._streams)
        ]
        running = len(pumps)
        try:
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item[0], self._checked(*item)
        finally:
            for pump in pumps:
                pump.cancel()


async def _pump(
    stream: RequestStream,
    first_choice: int,
    queue: asyncio.Queue[tuple[int, TokenDelta] | Exception | None],
) -> None:
    try:
        async for delta in stream:
            await queue.put((first_choice + delta.index, delta))
    except Exception as exc:  # the consumer raises it again
        await queue.put(exc)
    else:
        await queue.put(None)


def checked(delta: TokenDelta) -> TokenDelta:
    """Returns the delta. Raises the error of a sequence that has failed or that the server has
    aborted."""
    if delta.finish_reason is FinishReason.ERROR:
        if delta.error in REQUEST_FAULTS:
            raise RequestError(delta.error, code="invalid_schema")
        raise generation_error(delta.error or "the engine failed")
    if delta.finish_reason is FinishReason.ABORT:
        raise draining()
    return delta


async def submit_each(
    prompts: Sequence[Prompt], request_id: str, submit: Callable[[Prompt, str], RequestStream]
) -> list[RequestStream]:
    """Submits one engine request per prompt, each with its own request id. If one fails or the
    client leaves, all are aborted. The event loop runs other tasks after every SUBMITTED_AT_ONCE
    requests."""
    streams: list[RequestStream] = []
    try:
        for position, prompt in enumerate(prompts):
            if position and position % SUBMITTED_AT_ONCE == 0:
                await asyncio.sleep(0)
            name = request_id if position == 0 else f"{request_id}-{position}"
            streams.append(submit(prompt, name))
    except BaseException:
        for stream in streams:
            stream.abort()
        raise
    return streams
