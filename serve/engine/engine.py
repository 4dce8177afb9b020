"""The asyncio interface of the engine: submit, stream, abort, drain.

All heavy work runs in the core's threads. Deltas reach the event loop with at most one wake-up
call per step, and those that a slow consumer has not taken are joined (request_stream.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Unpack

from memory.prefix.sequence_names import Copied
from serve.config import EngineConfig, EngineSettings
from serve.engine.chat_prompt import encode_chat, make_chat_format, num_chars
from serve.engine.core_view import any_request
from serve.engine.early_rejection import TtftForecast
from serve.engine.loader import LoadedEngine, load_engine
from serve.engine.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    RequestOutput,
    decode_prompt_logprobs,
    embedding_output,
)
from serve.engine.preprocessor import Encode
from serve.engine.request_stream import CallPolicy, Hub, RequestStream
from serve.engine.stats import EngineStats, WeightStats
from serve.engine.step_trace import StepTrace
from serve.errors import EngineStoppedError, RequestError
from serve.kept import Kept
from serve.loading.model_source import wait_for_packed_weights
from serve.models import ModelSpec
from serve.pooling import PoolingParams
from serve.request import Prompt, Request, TokenDelta
from serve.sampling_params import SamplingParams
from serve.single_file.config import with_directory
from serve.text.chat_parser import ChatFormat
from serve.text.tokenizer import Tokenizer

_DRAIN_POLL_S = 0.01


class Loader(Protocol):
    def __call__(self, config: EngineConfig, *, progress: bool) -> LoadedEngine: ...


class Engine:
    """An LLM engine in this process: `async with Engine(path) as engine: ...`

    model: a Hugging Face directory or a GGUF file; None takes the embedded model. settings: the
    fields of EngineConfig. progress: shows a bar while weights load. load: builds the core from the
    configuration (tests and benchmarks put a scripted runner in).
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        progress: bool = False,
        load: Loader = load_engine,
        **settings: Unpack[EngineSettings],
    ) -> None:
        self.config = with_directory(EngineConfig.from_settings(model, **settings))
        self._progress = progress
        self._load = load
        self._loaded: LoadedEngine | None = None
        self._hub: Hub | None = None
        self._chat_format = ChatFormat()
        self._is_draining = False

    async def start(self) -> None:
        """Loads the model and starts the pools. Raises ModelLoadError and ConfigError."""
        loop = asyncio.get_running_loop()
        loading = asyncio.ensure_future(
            asyncio.to_thread(self._load, self.config, progress=self._progress)
        )
        try:
            loaded = await asyncio.shield(loading)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: what it loads is freed when it is there.
            loading.add_done_callback(_give_back)
            raise
        try:
            self._chat_format = make_chat_format(loaded.tokenizer, self.config)
        except BaseException:
            loaded.close()
            raise
        self._hub = Hub(loop)
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

    def stall_reason(self) -> str | None:
        """Returns the reason why the engine has stalled, as text; None if it has not."""
        if self._loaded is None or self._is_draining:
            return None
        core = self._loaded.core
        return "the engine has failed" if core.has_failed else core.watchdog.stall_reason()

    @property
    def has_memory(self) -> bool:
        """Whether there is memory for K/V; with memory nodes there may be none for a while."""
        return self._loaded is not None and self._loaded.core.kv.num_pages > 0

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
        """The format of the model's reasoning and tool calls."""
        return self._chat_format

    def use_peer(self, url: str) -> None:
        """Pulls cached K/V from the engine at this address, too, if kv_peers allows it."""
        if self.loaded.use_peer is not None:
            self.loaded.use_peer(url)

    def stats(self) -> EngineStats:
        return self.loaded.core.stats()

    def weight_stats(self) -> WeightStats | None:
        """Returns what weights have travelled; None without weights_from and weights_listen."""
        peers = self.loaded.weight_peers
        if peers is None:
            return None
        served = peers.stats()
        return WeightStats(*peers.pulled, served.served_bytes, served.peers, served.refused)

    def trace_steps(self, max_steps: int = 1 << 20) -> StepTrace:
        """Starts a trace of all steps from now on, of which the last max_steps are kept. 0 ends
        the trace."""
        return self.loaded.core.view.traces.measure(max_steps)

    def check_grammar_queue(self, params: SamplingParams) -> None:
        """Raises OverloadedError if too many requests wait for their grammars."""
        self.loaded.core.check_grammar_queue(params)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        client: str | None = None,
        policy: CallPolicy | None = None,
    ) -> RequestStream:
        """Queues a prompt. Raises OverloadedError or EngineStoppedError at once; the stream raises
        errors of the prompt itself. client: a name for the user or the application; lengths of
        answers are predicted per client. policy: the limits of the API call that the request
        belongs to."""
        return self._submit(prompt, params, request_id, client, policy)

    def submit_chat(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        client: str | None = None,
        policy: CallPolicy | None = None,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> RequestStream:
        """Queues a conversation, which pool 1 renders with the model's chat template. tools:
        OpenAI's function tools. template_kwargs: further variables of the template."""
        template, style = self.loaded.template, self._chat_format
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

        size = num_chars(messages) + num_chars(tools)
        return self._submit(encode, params, request_id, client, policy, size)

    def _submit(
        self,
        prompt: Prompt | Encode,
        params: SamplingParams | PoolingParams,
        request_id: str | None,
        client: str | None,
        policy: CallPolicy | None,
        size: int = 0,
    ) -> RequestStream:
        loaded, hub = self.loaded, self._hub
        assert hub is not None
        if self._is_draining:
            raise EngineStoppedError("the engine is shutting down")
        arrived_s = None
        if policy is not None:
            params, client = policy.allowed(params), policy.client(client)
            arrived_s = policy.arrived_s
        stream = RequestStream(hub, params.n)
        core = loaded.core
        state = core.submit(prompt, params, stream.sink, request_id, client, arrived_s, size)
        stream.attach(core, state)
        if policy is not None:
            policy.submitted(stream)
        return stream

    async def stream(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[TokenDelta]:
        """Submits a prompt and yields its deltas. Leaving the loop early aborts the request."""
        stream = self.submit(prompt, params)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.abort()

    async def generate(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """Runs one request to its end."""
        return await self.collect(self.submit(prompt, params))

    async def embed(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        client: str | None = None,
    ) -> EmbeddingOutput:
        """Returns a prompt's embedding. Raises what `submit` and its stream raise, and
        GenerationError. Cancelling aborts the request."""
        stream = self.submit_embedding(prompt, params, request_id=request_id, client=client)
        try:
            request = await stream.accepted()
            last = None
            async for delta in stream:
                last = delta
        finally:
            stream.abort()
        return embedding_output(request, last, stream.metrics)

    def submit_embedding(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        client: str | None = None,
        policy: CallPolicy | None = None,
    ) -> RequestStream:
        """Queues a prompt as `submit` does; the stream's one delta has the embedding."""
        return self._submit(prompt, params or PoolingParams(), request_id, client, policy)

    async def collect(self, stream: RequestStream) -> RequestOutput:
        """Collects all deltas of a stream. Cancelling aborts the request."""
        token_text = self.tokenizer.token_text
        of_prompt = None
        try:
            request = await stream.accepted()
            outputs = [CompletionOutput(index) for index in range(request.params.n)]
            async for delta in stream:
                outputs[delta.index].extend(delta, token_text)
                of_prompt = of_prompt or delta.prompt_logprobs
        finally:
            stream.abort()
        return RequestOutput(
            request.request_id,
            request.prompt,
            list(request.prompt_token_ids),
            outputs,
            True,
            stream.metrics,
            None if of_prompt is None else decode_prompt_logprobs(of_prompt, token_text),
        )

    def forecast(self, request: Request | int, num_cached: int) -> TtftForecast:
        """Predicts the time to the first token of a request that arrives now. request: a tokenized
        one, or the number of its tokens. num_cached: how many of these the prefix cache has. Any
        thread may call it."""
        asked = any_request(request) if isinstance(request, int) else request
        return self.loaded.core.view.forecast(asked, num_cached)

    def load_report(self) -> dict[str, Any] | None:
        """Returns what a hop must know to part prompts from decoding: the forecast of the load,
        whether K/V can be pulled from here, and the ids of the engines from which it can be pulled
        to here. None if it cannot. Anybody may read it, so it has nothing that
        follows from a key. Any thread may call it."""
        peers, view = self.stats().kv_peers, self.loaded.core.view
        if peers is None or not view.has_prefix_cache:
            return None
        pulls, ids = peers.pulls.values(), self.loaded.peer_ids
        page_s = sum(p.seconds for p in pulls) / max(1, sum(p.pulled for p in pulls))
        forecast = view.forecast_load()
        prompts = [(tokens, s, pages * page_s) for tokens, s, pages in forecast.prompts]
        return forecast._asdict() | {
            "prompt_s": round(forecast.prompt_s, 1),
            "prompts": prompts,
            "engine": peers.engine_id,
            "listens": peers.url is not None,
            "pulls_from": [ids[url] for url in list(ids) if peers.pulls[url].is_connected],
        }

    def copied(self, request_id: str) -> Copied | None:
        """Returns which peer copies the K/V of a running request, and of how many tokens. Any
        thread may call it."""
        return self.loaded.core.view.copied(request_id)

    def num_cached_tokens(self, request: Request) -> int:
        """Returns how many tokens of a request's prompt the prefix cache has. Any thread may call
        it."""
        return self.loaded.core.view.num_cached_tokens(request)

    def kept(self) -> dict[str, Kept]:
        """Returns what the engine keeps between requests, by name. Any thread may call it."""
        kept, events = self.loaded.core.view.kept(), self.loaded.events
        return kept if events is None else kept | {"kv_events": events.kept()}

    def worker_bytes(self) -> dict[str, int]:
        """Returns the resident memory of the child processes by name. Any thread may call it."""
        template = self.loaded.template
        return {
            "tokenizer": self.loaded.tokenizer.worker_bytes(),
            "chat_template": 0 if template is None else template.worker_bytes(),
            "grammar": self.loaded.core.view.grammar_worker_bytes(),
        }

    async def shutdown(self, *, drain_s: float = 0.0) -> None:
        """Refuses new requests, lets running ones go on for drain_s seconds, ends the rest and
        frees all memory."""
        self._is_draining = True
        loaded = self._loaded
        if loaded is None:
            return
        deadline = asyncio.get_running_loop().time() + drain_s
        while loaded.core.num_unfinished() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        await asyncio.to_thread(loaded.close)

    async def unload(self, *, drain_s: float = 0.0) -> None:
        """Shuts down, and can be started again: neither weights nor K/V are kept. Packed weights
        are on the disk when it returns."""
        await self.shutdown(drain_s=drain_s)
        self._loaded = self._hub = None
        await asyncio.to_thread(wait_for_packed_weights)
        self._is_draining = False


def _give_back(loading: asyncio.Future[LoadedEngine]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close()
