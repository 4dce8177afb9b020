"""The sources of answers in `serve chat`: a model in this process, or a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol, Self

from serve.engine.engine import Engine
from serve.errors import ConfigError, GenerationError
from serve.http.client import ApiCallError, ApiClient
from serve.request import FinishReason
from serve.sampling_params import SamplingParams

Message = dict[str, Any]
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
SETTABLE: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}


class Piece(NamedTuple):
    """A piece of an answer. is_reasoning: it is shown but not sent back in later turns."""

    text: str
    is_reasoning: bool = False


class Speaker(Protocol):
    """Answers conversations; used inside `async with`, which sets `name`, the model's name.

    options: the parameters of SETTABLE that differ from the model's defaults. num_tokens: the
    length of the last answer, None where it is unknown.
    """

    name: str
    options: dict[str, Any]
    num_tokens: int | None

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    def reply(self, messages: list[Message]) -> AsyncGenerator[Piece, None]: ...


class EngineSpeaker:
    """Answers with a model in this process."""

    def __init__(self, engine: Engine, options: dict[str, Any]) -> None:
        self._engine = engine
        self.options = options
        self.num_tokens: int | None = None
        self.name = engine.model_name

    async def __aenter__(self) -> Self:
        await self._engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.shutdown()

    async def reply(self, messages: list[Message]) -> AsyncGenerator[Piece, None]:
        defaults = self._engine.generation_defaults
        values: dict[str, Any] = {
            name: defaults[name] for name in _DEFAULTS if defaults.get(name) is not None
        }
        stream = self._engine.submit_chat(messages, SamplingParams(**values | self.options))
        self.num_tokens = 0
        try:
            await stream.accepted()
            async for delta in stream:
                self.num_tokens += len(delta.token_ids)
                if delta.text:
                    yield Piece(delta.text)
                if delta.finish_reason is FinishReason.ERROR:
                    raise GenerationError(delta.error or "the engine failed")
        finally:
            stream.abort()


class ServerSpeaker:
    """Answers with a server of the OpenAI API. model: None takes the server's only model."""

    def __init__(
        self, url: str, options: dict[str, Any], *, model: str | None, api_key: str | None
    ) -> None:
        self._url = url
        self._api_key = api_key
        self.options = options
        self.num_tokens: int | None = None
        self.name = model or ""

    async def __aenter__(self) -> Self:
        self._client = ApiClient(self._url, api_key=self._api_key)
        try:
            self.name = self.name or _only([str(m["id"]) for m in await self._client.models()])
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def reply(self, messages: list[Message]) -> AsyncGenerator[Piece, None]:
        body = {
            "model": self.name,
            "messages": messages,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        self.num_tokens = None
        async with aclosing(self._client.stream("/v1/chat/completions", body)) as chunks:
            async for chunk in chunks:
                if isinstance(usage := chunk.get("usage"), dict):
                    self.num_tokens = usage.get("completion_tokens")
                for piece in _pieces(chunk):
                    yield piece


def _pieces(chunk: dict[str, Any]) -> list[Piece]:
    """Returns the pieces in a chunk of a stream; ApiCallError if the chunk is malformed."""
    pieces = []
    try:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if reasoning := delta.get("reasoning_content"):
                pieces.append(Piece(str(reasoning), is_reasoning=True))
            if text := delta.get("content"):
                pieces.append(Piece(str(text)))
    except (LookupError, TypeError, AttributeError) as error:
        message = "the server's stream does not follow the OpenAI API"
        raise ApiCallError(200, "no_openai_api", message) from error
    return pieces


def _only(models: list[str]) -> str:
    if len(models) == 1:
        return models[0]
    raise ConfigError(f"the server has several models; name one: {', '.join(models)}")
