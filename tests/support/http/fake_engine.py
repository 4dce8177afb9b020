"""An engine with scripted answers and the interface of the real engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from serve.config import EngineConfig
from serve.engine.request_stream import CallPolicy
from serve.errors import ContextLengthError, EngineStoppedError, OverloadedError, RequestError
from serve.request import FinishReason, Prompt, Request, RequestMetrics, TokenDelta, TokenLogprobs
from serve.sampling_params import SamplingParams
from serve.text.chat_parser import ChatFormat


class FakeTokenizer:
    """One token per character; its id is the code point."""

    pieces: list[bytes] | None = None
    special_ids: frozenset[int] = frozenset()
    strips_leading_space = False
    max_growth = 1.0
    chat_template: str | None = None

    def growth(self, text: str) -> float:
        return 1.0

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))


@dataclass
class FakeEngine:
    """An engine whose sequences all answer `reply`, one delta per character, `step_s` apart.

    slots: the number of requests that run at once. fail_at: the number of characters after which
    a sequence ends in the error fail_error. prompt_end: the end of the chat template. chats: the
    arguments of submit_chat. stuck: the stall reason.
    """

    reply: str = "Hello there"
    step_s: float = 0.0
    slots: int = 1000
    max_waiting: int = 1000
    max_model_len: int = 2000
    load_s: float = 0.0
    fail_at: int | None = None
    fail_error: str = "a bad step"
    model_name: str = "fake"
    repeat: int = 1
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    spec: Any = field(default_factory=lambda: SimpleNamespace(vocab_size=256))
    config: EngineConfig = field(default_factory=EngineConfig)
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    prompt_end: str = ""
    chats: list[dict[str, Any]] = field(default_factory=list)
    submitted: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    is_ready: bool = False
    has_memory: bool = True
    is_stopped: bool = False
    stuck: str | None = None

    def __post_init__(self) -> None:
        self.running: set[FakeStream] = set()
        self.waiting: list[FakeStream] = []

    def stall_reason(self) -> str | None:
        return self.stuck

    async def start(self) -> None:
        await asyncio.sleep(self.load_s)
        self.is_ready = True

    async def shutdown(self, *, drain_s: float = 0.0) -> None:
        self.is_stopped = True
        for stream in [*self.running, *self.waiting]:
            stream.stop()

    def check_grammar_queue(self, params: SamplingParams) -> None:
        """The scripted engine has no limit."""

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        client: str | None = None,
        policy: CallPolicy | None = None,
    ) -> FakeStream:
        inner: Any = prompt
        if isinstance(prompt, dict):
            inner = prompt.get("prompt_token_ids", prompt.get("prompt"))
        tokens = [ord(char) for char in inner] if isinstance(inner, str) else list(inner)
        return self._submit(prompt, tokens, params, request_id, policy)

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
    ) -> FakeStream:
        """The prompt is the contents of the messages and prompt_end."""
        self.chats.append(
            {
                "messages": messages,
                "tools": tools,
                "template_kwargs": dict(template_kwargs or {}),
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
            }
        )
        text = "".join(str(message["content"]) for message in messages) + self.prompt_end
        tokens = [ord(char) for char in text]
        return self._submit(messages, tokens, params, request_id, policy)

    def _submit(
        self,
        prompt: Any,
        tokens: list[int],
        params: SamplingParams,
        request_id: str | None,
        policy: CallPolicy | None,
    ) -> FakeStream:
        arrived_s = None
        if policy is not None:
            params, arrived_s = policy.allowed(params), policy.arrived_s  # type: ignore[assignment]
        if self.is_stopped:
            raise EngineStoppedError("stopped")
        if len(self.waiting) >= self.max_waiting:
            raise OverloadedError("the queue is full", retry_after_s=1.5)
        self.submitted.append((prompt, params))
        stream = FakeStream(self, tokens, params, request_id or "", arrived_s)
        self.waiting.append(stream)
        self.admit()
        if policy is not None:
            policy.submitted(stream)  # type: ignore[arg-type]
        return stream

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            stream = self.waiting.pop(0)
            self.running.add(stream)
            stream.admitted.set()


class FakeStream:
    """A scripted stream. deltas_at_once: the stream has one delta with the whole text."""

    deltas_at_once = False

    def __init__(
        self,
        engine: FakeEngine,
        tokens: list[int],
        params: SamplingParams,
        request_id: str,
        arrived_s: float | None,
    ) -> None:
        self.engine = engine
        self.tokens = tokens
        self.params = params
        self.request_id = request_id
        self.admitted = asyncio.Event()
        self.is_done = False
        self._stopped = False
        self._error: Exception | None = None
        self._arrived_s = time.monotonic() if arrived_s is None else arrived_s
        self._first_s: float | None = None
        self._num_output = 0
        self._reasons: list[str] = []

    async def accepted(self) -> Request:
        if not self.tokens:
            self._release()
            raise RequestError("empty prompt", param="prompt", code="invalid_prompt")
        if any(token >= self.engine.spec.vocab_size for token in (self.params.logit_bias or {})):
            self._release()
            raise RequestError("no such token", param="logit_bias")
        if len(self.tokens) + (self.params.max_tokens or 0) > self.engine.max_model_len:
            self._release()
            raise ContextLengthError("too long for the context", param="prompt")
        return Request(self.request_id, None, tuple(self.tokens), self.params, 0.0)

    @property
    def metrics(self) -> RequestMetrics:
        return RequestMetrics(
            self._arrived_s,
            first_token_s=self._first_s,
            num_prompt_tokens=len(self.tokens),
            num_output_tokens=self._num_output,
            finish_reasons=tuple(self._reasons),
        )

    def fail(self, error: Exception) -> None:
        self._error = error

    def wake(self) -> None:
        self.admitted.set()

    def abort(self) -> None:
        if not self.is_done:
            self.engine.aborted.append(self.request_id)
            self._reasons.append("abort")
            self._release()

    def stop(self) -> None:
        self._stopped = True
        self.admitted.set()
        self._release()

    def _release(self) -> None:
        self.is_done = True
        self.engine.running.discard(self)
        if self in self.engine.waiting:
            self.engine.waiting.remove(self)
        self.engine.admit()

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self._with_metrics()

    async def _with_metrics(self) -> AsyncIterator[TokenDelta]:
        async for delta in self._deltas():
            if self._error is not None:
                raise self._error
            self._first_s = self._first_s or time.monotonic()
            self._num_output += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._reasons.append(delta.finish_reason.value)
            yield delta

    async def _deltas(self) -> AsyncIterator[TokenDelta]:
        await self.admitted.wait()
        if self._error is not None:
            raise self._error
        text = self.engine.reply * self.engine.repeat
        limits = (self.params.max_tokens, self.params.default_max_tokens, len(text))
        limit = next(limit for limit in limits if limit is not None)
        reason = FinishReason.STOP if limit >= len(text) else FinishReason.LENGTH
        text = text[:limit]
        if self.deltas_at_once:
            self._release()
            for index in range(self.params.n):
                delta = TokenDelta(index, text, [ord(char) for char in text], None, reason)
                yield delta._replace(prompt_logprobs=self._prompt_logprobs())
            return
        for position, char in enumerate(text or " "):
            if self.engine.step_s:
                await asyncio.sleep(self.engine.step_s)
            elif position % 64 == 63:
                await asyncio.sleep(0)
            if self._stopped:
                for index in range(self.params.n):
                    yield TokenDelta(index, "", [], finish_reason=FinishReason.ABORT)
                return
            if self.engine.fail_at is not None and position >= self.engine.fail_at:
                self._release()
                error = self.engine.fail_error
                yield TokenDelta(0, "", [], finish_reason=FinishReason.ERROR, error=error)
                return
            is_last = position >= len(text) - 1
            if is_last:
                self._release()
            for index in range(self.params.n):
                delta = self._delta(index, char if text else "", reason if is_last else None)
                if position == 0:
                    delta = delta._replace(prompt_logprobs=self._prompt_logprobs())
                yield delta

    def _prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Log-probabilities that fall by 0.25 with each position; the first token has none."""
        count = self.params.prompt_logprobs
        if count is None:
            return None
        return [
            TokenLogprobs(
                token,
                -0.25 * position,
                tuple((token + i, -0.25 * position - i) for i in range(count)),
            )
            if position
            else None
            for position, token in enumerate(self.tokens)
        ]

    def _delta(self, index: int, char: str, reason: FinishReason | None) -> TokenDelta:
        logprobs = None
        if self.params.logprobs is not None and char:
            top = tuple((abs(ord(char) - i), -0.5 - i) for i in range(self.params.logprobs))
            logprobs = [TokenLogprobs(ord(char), -0.5, top)]
        return TokenDelta(index, char, [ord(char)] if char else [], logprobs, reason)
