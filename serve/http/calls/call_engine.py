"""The engine as one call may use it: what the call's key allows is kept here, for every endpoint.

K/V is shared between requests of the same key only (unless the operator lets all share): which
prompts others have asked can otherwise be told from the time of the first token.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from serve.errors import RequestError
from serve.http.edge.keys import ApiKey
from serve.request import Prompt, RequestMetrics
from serve.sampling_params import SamplingParams
from serve.scheduler.prompt_outputs import PoolingParams

if TYPE_CHECKING:
    from serve.engine.engine import Engine, RequestStream
    from serve.models import ModelSpec
    from serve.text.chat_parser import ChatFormat
    from serve.text.tokenizer import Tokenizer


class CallEngine:
    """The engine's ways to submit, for one call; `streams` are those it submitted. arrived_s:
    when the call came, on the monotonic clock; its times begin there."""

    def __init__(
        self, engine: Engine, key: ApiKey | None, *, share_prefixes: bool, arrived_s: float
    ) -> None:
        self._engine = engine
        self._key = key
        self._share_prefixes = share_prefixes
        self._arrived_s = arrived_s
        self._expired: Exception | None = None
        self._num_sequences = 0
        self._last_allowed: tuple[SamplingParams, SamplingParams] | None = None
        self.streams: list[RequestStream] = []

    @property
    def model_name(self) -> str:
        return self._engine.model_name

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def spec(self) -> ModelSpec:
        return self._engine.spec

    @property
    def chat_format(self) -> ChatFormat:
        return self._engine.chat_format

    @property
    def generation_defaults(self) -> dict[str, object]:
        return self._engine.generation_defaults

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        client: str | None = None,
    ) -> RequestStream:
        """As Engine.submit. RequestError: the key does not allow it."""
        stream = self._engine.submit(
            prompt,
            self._allowed(params),
            request_id=request_id,
            client=self._client(client),
            arrived_s=self._arrived_s,
        )
        return self._submitted(stream, params.n)

    def submit_chat(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        client: str | None = None,
        **options: Any,
    ) -> RequestStream:
        """As Engine.submit_chat. RequestError: the key does not allow it."""
        stream = self._engine.submit_chat(
            messages,
            self._allowed(params),
            request_id=request_id,
            client=self._client(client),
            arrived_s=self._arrived_s,
            **options,
        )
        return self._submitted(stream, params.n)

    def submit_embedding(
        self,
        prompt: Prompt,
        params: PoolingParams,
        *,
        request_id: str | None = None,
        client: str | None = None,
    ) -> RequestStream:
        allowed = self._allowed(params.sampling())
        params = replace(params, cache_salt=allowed.cache_salt, priority=allowed.priority)
        stream = self._engine.submit_embedding(
            prompt,
            params,
            request_id=request_id,
            client=self._client(client),
            arrived_s=self._arrived_s,
        )
        return self._submitted(stream, 1)

    def expire(self, error: Exception) -> None:
        """The call's time is over: what it has submitted ends with the error, and so does what it
        still submits."""
        self._expired = error
        for stream in self.streams:
            stream.fail(error)
            stream.abort()
            stream.wake()

    @property
    def is_computing(self) -> bool:
        """The engine has still something to do for the call."""
        return any(len(m.finish_reasons) < self._num_sequences for m in self.usage())

    def usage(self) -> list[RequestMetrics]:
        """Of each stream, so far."""
        return [stream.metrics for stream in self.streams]

    def _submitted(self, stream: RequestStream, num_sequences: int) -> RequestStream:
        self._num_sequences = num_sequences  # the same for all streams of a call
        self.streams.append(stream)
        return stream

    def _client(self, name: str | None) -> str | None:
        if self._key is None:
            return name
        return f"{self._key.name}/{name}" if name else self._key.name

    def _allowed(self, params: SamplingParams) -> SamplingParams:
        """What becomes of it under the key; the prompts of a call share one."""
        if self._expired is not None:
            raise self._expired
        if params.structured is not None and not self.streams:  # a call's prompts share a grammar
            self._engine.check_grammar_queue(params)
        if self._key is None:
            return params
        if self._last_allowed is None or self._last_allowed[0] is not params:
            self._last_allowed = params, self._under_key(params, self._key)
        return self._last_allowed[1]

    def _under_key(self, params: SamplingParams, key: ApiKey) -> SamplingParams:
        changes: dict[str, Any] = {}
        if not self._share_prefixes:
            changes["cache_salt"] = salt_of(key.name, params.cache_salt)
        limit = key.limits.max_tokens
        if limit is not None:
            own = params.default_max_tokens
            changes["default_max_tokens"] = limit if own is None else own
            for name in ("max_tokens", "default_max_tokens", "min_tokens"):
                if (getattr(params, name) or 0) > limit:
                    raise RequestError(
                        f"{name} is above {limit}, the limit of this API key", param=name
                    )
        lowest = key.limits.min_priority
        if lowest is not None and params.priority < lowest:
            if params.priority:  # 0 asks for nothing
                raise RequestError(
                    f"priority is below {lowest}, the limit of this API key", param="priority"
                )
            changes["priority"] = lowest
        return params.changed(**changes) if changes else params


def salt_of(name: str, salt: str | None) -> str:
    """The same after a restart, so that K/V on a disk is found again."""
    own = b"" if salt is None else b"\0" + salt.encode()
    return "key-" + hashlib.blake2b(name.encode() + own, digest_size=16).hexdigest()
