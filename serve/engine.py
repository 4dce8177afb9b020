"""The asyncio face of the engine: submit, stream, abort, drain.

Everything heavy happens in the core's threads; this file moves deltas from pool 3 into the
event loop, at most one wake-up call per step, and lets slow consumers coalesce theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from serve.chat_parser import ChatFormat
from serve.chat_template import ChatTemplate
from serve.config import EngineConfig
from serve.conversation import encode_chat, make_chat_format, make_chat_template
from serve.core import EngineCore
from serve.errors import EngineStoppedError, RequestError
from serve.loader import LoadedEngine, load_engine
from serve.models import ModelSpec
from serve.request import (
    CompletionOutput,
    Prompt,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenDelta,
)
from serve.state import RequestState
from serve.stats import EngineStats
from serve.step_trace import StepTrace
from serve.tokenizer import Tokenizer

_DRAIN_POLL_S = 0.01


class Loader(Protocol):
    def __call__(self, config: EngineConfig, *, progress: bool) -> LoadedEngine: ...


class RequestStream:
    """One request's deltas, as an async iterator that ends when all n sequences have.

    For one consumer. Dropping it does not end the request: call abort().
    """

    def __init__(self, hub: _Hub, num_sequences: int) -> None:
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
        return self._state.times.metrics()

    def arrived(self, at_s: float) -> None:
        """When its client's call came, on the monotonic clock, if that was before submit."""
        if self._state is not None:
            self._state.times.arrival_s = at_s

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
        while not self._pending:
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
    )


class _Hub:
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


class Engine:
    """An LLM engine in this process. `async with Engine(path) as engine: ...`

    model: a Hugging Face directory; None takes the embedded model. settings: EngineConfig's.
    progress: show a bar while weights load. load: how to build the core from the config
    (tests and benchmarks pass a fake runner).
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        progress: bool = False,
        load: Loader = load_engine,
        **settings: Any,
    ) -> None:
        self.config = EngineConfig.from_settings(model, **settings)
        self._progress = progress
        self._load = load
        self._loaded: LoadedEngine | None = None
        self._hub: _Hub | None = None
        self._template: ChatTemplate | None = None
        self._chat_format = ChatFormat()
        self._is_draining = False

    async def start(self) -> None:
        """Load the model and start the pools. ModelLoadError, ConfigError."""
        loop = asyncio.get_running_loop()
        loading = asyncio.ensure_future(
            asyncio.to_thread(self._load, self.config, progress=self._progress)
        )
        try:
            loaded = await asyncio.shield(loading)
        except asyncio.CancelledError:
            # a thread cannot be cancelled: what it loads is given back when it is there
            loading.add_done_callback(_give_back)
            raise
        try:
            self._template = make_chat_template(loaded.tokenizer)
            self._chat_format = make_chat_format(loaded.tokenizer, self.config)
        except BaseException:
            loaded.core.shutdown()
            raise
        self._hub = _Hub(loop)
        loaded.core.start()
        self._loaded = loaded

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    @property
    def loaded(self) -> LoadedEngine:
        if self._loaded is None:
            raise EngineStoppedError("the engine has not started")
        return self._loaded

    @property
    def is_ready(self) -> bool:
        return (
            self._loaded is not None and not self._is_draining and not self._loaded.core.has_failed
        )

    @property
    def has_memory(self) -> bool:
        """For K/V; memory nodes may be lost for a while."""
        return self._loaded is not None and self._loaded.core.has_memory

    @property
    def model_name(self) -> str:
        return self.config.model_name

    @property
    def max_model_len(self) -> int:
        return self.loaded.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    @property
    def spec(self) -> ModelSpec:
        return self.loaded.spec

    @property
    def generation_defaults(self) -> dict[str, object]:
        return self.loaded.generation_defaults

    @property
    def chat_format(self) -> ChatFormat:
        """How the model writes reasoning and calls of tools."""
        return self._chat_format

    def stats(self) -> EngineStats:
        return self.loaded.core.stats()

    def trace_steps(self, max_steps: int = 1 << 20) -> StepTrace:
        """What every step from now on computes; the last max_steps are kept. 0: ends the trace."""
        return self.loaded.core.trace_steps(max_steps)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        client: str | None = None,
    ) -> RequestStream:
        """Queue a prompt. Raises OverloadedError or EngineStoppedError at once; what is wrong
        with the prompt itself is raised by the stream. client: any name of who or which
        application asks; lengths of answers are predicted per client."""
        return self._submit(prompt, params, request_id, client)

    def submit_chat(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        client: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> RequestStream:
        """Queue a conversation, rendered with the model's chat template in pool 1. tools:
        OpenAI's function tools; template_kwargs: more variables of the template."""
        template, style = self._template, self._chat_format
        tokenizer, limits = self.tokenizer, self.loaded.limits
        if template is None:
            raise RequestError("this model has no chat template", param="messages")

        def encode() -> list[int]:
            return encode_chat(
                template,
                tokenizer,
                messages,
                limits,
                add_generation_prompt,
                style=style,
                tools=tools,
                template_kwargs=template_kwargs,
                continue_final_message=continue_final_message,
            )

        return self._submit(encode, params, request_id, client)

    def _submit(
        self, prompt: Any, params: SamplingParams, request_id: str | None, client: str | None
    ) -> RequestStream:
        loaded, hub = self.loaded, self._hub
        assert hub is not None
        if self._is_draining:
            raise EngineStoppedError("the engine is shutting down")
        stream = RequestStream(hub, params.n)
        stream.attach(loaded.core, loaded.core.submit(prompt, params, stream, request_id, client))
        return stream

    async def stream(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[TokenDelta]:
        """Deltas of one request; leaving the loop early aborts it."""
        stream = self.submit(prompt, params)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.abort()

    async def generate(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """One request from beginning to end."""
        return await self.collect(self.submit(prompt, params))

    async def collect(self, stream: RequestStream) -> RequestOutput:
        """Everything a stream has to give; cancelling aborts the request."""
        token_text = self.tokenizer.token_text
        try:
            request = await stream.accepted()
            outputs = [CompletionOutput(index) for index in range(request.params.n)]
            async for delta in stream:
                outputs[delta.index].extend(delta, token_text)
        finally:
            stream.abort()
        prompt_ids = list(request.prompt_token_ids)
        return RequestOutput(
            request.request_id, request.prompt, prompt_ids, outputs, True, stream.metrics
        )

    async def shutdown(self, *, drain_s: float = 0.0) -> None:
        """Refuse new requests, give running ones drain_s seconds, end the rest, free all."""
        self._is_draining = True
        loaded = self._loaded
        if loaded is None:
            return
        deadline = asyncio.get_running_loop().time() + drain_s
        while loaded.core.num_unfinished() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        await asyncio.to_thread(loaded.core.shutdown)
        if self._template is not None:
            self._template.close()


def _give_back(loading: asyncio.Future[LoadedEngine]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result().core.shutdown()
