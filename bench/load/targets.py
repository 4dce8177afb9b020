"""What is measured: an engine in this process, or a server with an OpenAI API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Protocol, Self

from bench.load.record import Record
from bench.load.work import Work
from serve import Engine, FinishReason, SamplingParams
from serve.errors import GenerationError
from serve.http.client import ApiClient

PROMPT_TOKENS = range(32, 256)  # for servers that do not say how large their vocabulary is


class Target(Protocol):
    """What is measured. Used inside `async with`."""

    name: str
    prompt_tokens: Sequence[int]

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def send(self, work: Work, record: Record) -> None:
        """Fills in chunk times and token counts; raises what went wrong."""


class EngineTarget:
    """An engine in this process; no HTTP."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name = f"{engine.model_name} in this process"
        self.prompt_tokens: Sequence[int] = PROMPT_TOKENS

    async def __aenter__(self) -> Self:
        await self._engine.start()
        tokenizer = self._engine.tokenizer
        vocab_size = min(tokenizer.vocab_size, self._engine.spec.vocab_size)
        self.prompt_tokens = [i for i in range(vocab_size) if i not in tokenizer.special_ids]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.shutdown()

    async def send(self, work: Work, record: Record) -> None:
        engine = self._engine
        params = SamplingParams(
            max_tokens=work.max_tokens, temperature=0.0, ignore_eos=work.ignore_eos
        )
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
                if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise GenerationError(delta.error or "the request was aborted")
            record.output_tokens = sum(record.chunk_tokens)
        finally:
            stream.abort()


class ServerTarget:
    """A server with an OpenAI API; token counts are those of its `usage`."""

    def __init__(self, url: str) -> None:
        self.name = url
        self.prompt_tokens: Sequence[int] = PROMPT_TOKENS
        self._url = url
        self._model = ""

    async def __aenter__(self) -> Self:
        self._client = ApiClient(self._url)
        try:
            model = (await self._client.models())[0]
        except BaseException:
            await self._client.close()
            raise
        self._model = model["id"]
        self.prompt_tokens = range(32, min(int(model.get("vocab_size", 256)), 1 << 16))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def send(self, work: Work, record: Record) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": 0.0,
            "stream_options": {"include_usage": True},
        }
        if work.max_tokens is not None:
            body["max_tokens"] = work.max_tokens
        if work.ignore_eos:
            body["ignore_eos"] = True
        path = "/v1/chat/completions"
        if work.messages is None:
            path = "/v1/completions"
            body["prompt"] = work.token_ids or work.prompt
        else:
            body["messages"] = work.messages
        async with aclosing(self._client.stream(path, body)) as chunks:
            async for chunk in chunks:
                now_s = time.perf_counter()
                if any(_has_text(choice) for choice in chunk["choices"]):
                    record.chunks_s.append(now_s)
                if usage := chunk.get("usage"):
                    record.prompt_tokens = usage["prompt_tokens"]
                    record.output_tokens = usage["completion_tokens"]


def _has_text(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text") or choice.get("delta", {}).get("content"))
