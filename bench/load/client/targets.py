"""Targets of a load: an engine in this process, or a server with an OpenAI API."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import orjson

from bench.load.client.answer import Answer, CallError, Document, count
from bench.load.client.http_client import Address, HttpClient
from bench.load.client.record import Record, ServerSample, StepRow
from bench.load.client.redact import hider
from bench.load.client.server_metrics import read_metrics
from bench.load.workload.work import Work
from serve.errors import ConfigError

if TYPE_CHECKING:
    from serve import Engine
    from serve.engine.step_trace import TracedStep

PROMPT_TOKENS = range(32, 256)  # for servers that do not report the size of their vocabulary
OnChunk = Callable[[], None]
TakeSteps = Callable[[], tuple[list[StepRow], list[str]]]
GET_TIMEOUT_S = 10.0
WARM_UP_TIMEOUT_S = 120.0  # the server may load or compile its model

# Fields that some servers refuse. A refused max_tokens is sent under its newer name.
OFTEN_REFUSED = ("ignore_eos", "stream_options")
OPTIONAL_FIELDS = (*OFTEN_REFUSED, "temperature", "user", "max_tokens")


class Target(Protocol):
    """A target is used inside `async with`, and takes one schedule at a time."""

    name: str
    prompt_tokens: Sequence[int]
    max_model_len: int | None  # None if unknown
    count_tokens: Callable[[str], int] | None  # counts a text's tokens; None if unknown

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def check(self, work: Work) -> list[str]:
        """Prepares for a load of such work. Returns notes for the reader of the results. Raises the
        error that makes the load impossible."""

    async def warm_up(self, work: Work) -> None:
        """Sends a request whose times are discarded. Raises the request's error."""

    def prepare(self, work: Work) -> Any:
        """Does the work that is possible before the request is due."""

    async def send(self, prepared: Any, record: Record, on_chunk: OnChunk | None = None) -> None:
        """Sends a request and fills in the record's times, token counts and finish reason. Raises
        the request's error. Cancellation aborts the request."""

    async def sample(self) -> ServerSample | None:
        """Returns the target's figures, with at_s of time.perf_counter; None if unknown."""

    def trace_steps(self) -> TakeSteps:
        """Starts recording steps. The returned function stops it and returns the steps, and notes
        for the reader of the results."""

    @property
    def max_connections(self) -> int:
        """The highest number of connections that were open at once so far."""

    @property
    def num_resent(self) -> int:
        """The number of requests sent again so far (record.ProcessHealth)."""


class EngineTarget:
    """An engine in this process, without HTTP."""

    max_connections = 0
    num_resent = 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name = f"{engine.model_name} in this process"
        self.prompt_tokens: Sequence[int] = PROMPT_TOKENS
        self.max_model_len: int | None = None
        self.count_tokens: Callable[[str], int] | None = None

    async def __aenter__(self) -> Self:
        await self._engine.start()
        tokenizer = self._engine.tokenizer
        vocab_size = min(tokenizer.vocab_size, self._engine.spec.vocab_size)
        self.prompt_tokens = [i for i in range(vocab_size) if i not in tokenizer.special_ids]
        self.max_model_len = self._engine.max_model_len
        self.count_tokens = lambda text: len(tokenizer.encode(text))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.shutdown()

    async def check(self, work: Work) -> list[str]:
        return []

    async def warm_up(self, work: Work) -> None:
        await self.send(self.prepare(work), Record(-1, 0.0))

    def prepare(self, work: Work) -> Any:
        from serve.sampling_params import SamplingParams

        params = SamplingParams(
            max_tokens=work.max_tokens, temperature=0.0, ignore_eos=work.ignore_eos
        )
        return work, params

    async def send(self, prepared: Any, record: Record, on_chunk: OnChunk | None = None) -> None:
        from serve.errors import GenerationError
        from serve.request import FinishReason

        engine = self._engine
        work, params = prepared
        record.sent_s = time.perf_counter()
        if work.messages is not None:
            stream = engine.submit_chat(work.messages, params, client=work.client)
        else:
            stream = engine.submit(work.token_ids or work.prompt or "", params, client=work.client)
        try:
            record.prompt_tokens = len((await stream.accepted()).prompt_token_ids)
            async for delta in stream:
                if delta.token_ids:
                    record.chunks_s.append(time.perf_counter())
                    record.chunk_tokens.append(len(delta.token_ids))
                    if on_chunk is not None:
                        on_chunk()
                if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise GenerationError(delta.error or "the request was aborted")
                if delta.finish_reason is not None:
                    record.finish_reason = delta.finish_reason.value
            record.output_tokens = sum(record.chunk_tokens)
        finally:
            stream.abort()
            metrics = stream.metrics
            record.cached_tokens = metrics.num_cached_tokens
            if metrics.first_scheduled_s is not None:
                record.queue_s = metrics.first_scheduled_s - metrics.arrival_s

    async def sample(self) -> ServerSample | None:
        stats = self._engine.stats()
        kv_usage = stats.pages_in_use / stats.pages_total if stats.pages_total else None
        return ServerSample(time.perf_counter(), stats.num_running, stats.num_waiting, kv_usage)

    def trace_steps(self) -> TakeSteps:
        trace = self._engine.trace_steps()

        def take() -> tuple[list[StepRow], list[str]]:
            self._engine.trace_steps(0)
            notes = []
            if trace.num_lost:
                notes.append(
                    f"the first {trace.num_lost} steps are missing, as there were too many"
                )
            return [_row(step) for step in list(trace.steps)], notes

        return take


def _row(step: TracedStep) -> StepRow:
    return StepRow(
        step.began_s,
        step.ended_s,
        step.work.num_decodes,
        step.work.num_rows - step.work.num_decodes,
        step.work.num_chunks,
        step.work.num_context,
        step.work.num_pairs,
        step.num_running,
        step.num_waiting,
        step.pages_in_use,
    )


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The address of a server and the form of its requests. Raises ConfigError for a wrong timeout.

    url is the server's root, with or without paths of the API. model is by default the first that
    the server lists, and api_key by default OPENAI_API_KEY of the environment. timeout_s limits
    each request from its sending; with None only requests beside the load have a limit. extra has
    additional fields for every request's body. left_out are the fields that the server refuses,
    which ServerTarget.check finds."""

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, not {self.timeout_s}")


class ServerTarget:
    """A server with an OpenAI API, whose `usage` gives the token counts."""

    def __init__(self, settings: ServerSettings) -> None:
        key = settings.api_key or os.environ.get("OPENAI_API_KEY")
        headers = dict(settings.headers)
        if key and not any(name.lower() == "authorization" for name in headers):
            headers["Authorization"] = f"Bearer {key}"
        self._hide = hider([key or "", *_secrets(headers)])
        self.settings = settings
        self._address = Address.of(settings.url, headers)
        self.name = self._address.root
        self.prompt_tokens: Sequence[int] = PROMPT_TOKENS
        self.max_model_len: int | None = None
        self.count_tokens: Callable[[str], int] | None = None
        self._has_metrics = True

    async def __aenter__(self) -> Self:
        self._client = HttpClient(self._address)
        self._side = HttpClient(self._address)  # sends the requests that are not part of the load
        if self.settings.model is None:
            try:
                await self._choose_model()
            except BaseException:
                await self.__aexit__()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.close()
        self._side.close()

    @property
    def max_connections(self) -> int:
        return self._client.max_connections

    @property
    def num_resent(self) -> int:
        return self._client.num_resent

    async def _choose_model(self) -> None:
        document = await self._get("/v1/models")
        if (error := document.error) is not None:
            if error.status == 404:
                message = (
                    f"{self.name}/v1/models does not exist; name the model with --server-model"
                )
                raise CallError(404, error.code, message) from error
            raise error
        try:
            model = orjson.loads(document.body_bytes)["data"][0]
            vocab_size = count(model.get("vocab_size")) or PROMPT_TOKENS.stop
            self.max_model_len = count(model.get("max_model_len")) or None
            self.settings = replace(self.settings, model=str(model["id"]))
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            message = f"{self.name}/v1/models does not answer as an OpenAI API does"
            raise CallError(200, "no_openai_api", message) from exc
        self.prompt_tokens = range(32, min(vocab_size, 1 << 16))

    async def _get(self, path: str) -> Document:
        document = Document(self._hide)
        timeout_s = self.settings.timeout_s or GET_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                await self._side.exchange(self._side.render("GET", path), document)
        except TimeoutError as exc:
            message = f"{self.name}{path} did not answer within {timeout_s:g} s"
            raise CallError(0, "timeout", message) from exc
        return document

    async def check(self, work: Work) -> list[str]:
        """Sends a short request of the same kind. Later requests leave out the fields that the
        server refuses. Raises CallError."""
        short = replace(
            work,
            messages=work.messages and [{"role": "user", "content": "Hi"}],
            prompt=work.prompt and "Hi",
            token_ids=work.token_ids and work.token_ids[:4],
            max_tokens=None if work.max_tokens is None else 1,
        )
        notes: list[str] = []
        while True:
            try:
                await self.warm_up(short)
                return notes
            except CallError as exc:
                name = self._refused_field(exc, orjson.loads(self._body(short)))
                if name is None:
                    raise
                left_out = (*self.settings.left_out, name)
                self.settings = replace(self.settings, left_out=left_out)
                notes.append(f"the server refuses {name!r}, which is left out ({exc})")

    async def warm_up(self, work: Work) -> None:
        timeout_s = self.settings.timeout_s or WARM_UP_TIMEOUT_S
        try:
            await self._exchange(
                self.prepare(work), Answer(Record(-1, 0.0), None, self._hide), timeout_s
            )
        except TimeoutError as exc:
            message = f"{self.name}{_path(work)} gave no whole answer within {timeout_s:g} s"
            raise CallError(0, "timeout", message) from exc

    @staticmethod
    def _refused_field(error: CallError, body: dict[str, Any]) -> str | None:
        if error.status not in (400, 422):
            return None
        sent = [name for name in OPTIONAL_FIELDS if name in body]
        named = [name for name in sent if re.search(rf"\b{name}\b", str(error))]
        unsure = [name for name in sent if name in OFTEN_REFUSED]  # the error names no field
        return next(iter(named or unsure), None)

    def prepare(self, work: Work) -> bytes:
        return self._client.render("POST", _path(work), self._body(work))

    def _body(self, work: Work) -> bytes:
        settings = self.settings
        body: dict[str, Any] = {
            "model": settings.model,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if work.messages is None:
            body["prompt"] = work.token_ids or work.prompt
        else:
            body["messages"] = work.messages
        if work.max_tokens is not None:
            body["max_tokens"] = work.max_tokens
        if work.ignore_eos:
            body["ignore_eos"] = True
        if work.client is not None:
            body["user"] = work.client
        for name in settings.left_out:
            value = body.pop(name, None)
            if name == "max_tokens" and value is not None:
                body["max_completion_tokens"] = value
        body.update(settings.extra)
        return orjson.dumps(body)

    async def send(self, prepared: Any, record: Record, on_chunk: OnChunk | None = None) -> None:
        timeout_s = self.settings.timeout_s
        try:
            await self._exchange(prepared, Answer(record, on_chunk, self._hide), timeout_s)
        except TimeoutError as exc:
            raise CallError(0, "timeout", f"no whole answer within {timeout_s:g} s") from exc

    async def _exchange(self, prepared: Any, answer: Answer, timeout_s: float | None) -> None:
        """Sends a request and fills its record. Raises CallError and TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._client.exchange(prepared, answer)
        if answer.error is not None:
            raise answer.error

    async def sample(self) -> ServerSample | None:
        if not self._has_metrics:
            return None
        try:
            document = await self._get("/metrics")
        except CallError:
            return None
        if document.error is not None and document.error.status == 0:
            return None
        figures = read_metrics(bytes(document.body_bytes), time.perf_counter())
        self._has_metrics = document.error is None and figures is not None
        return figures

    def trace_steps(self) -> TakeSteps:
        return lambda: ([], [])


def _path(work: Work) -> str:
    return "/v1/completions" if work.messages is None else "/v1/chat/completions"


def _secrets(headers: Mapping[str, str]) -> Iterator[str]:
    """Yields the headers' values, and the part of each after a scheme such as `Bearer`."""
    for value in headers.values():
        yield value
        yield value.partition(" ")[2]
