"""Applies the permissions of an API key to each request of one call.

Requests share cached K/V only with requests of the same key, unless the operator lets all keys
share it: the time to the first token would otherwise reveal which prompts other keys have sent.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from serve.errors import RequestError
from serve.http.calls.continuation import Continuation, Journal
from serve.http.edge.keys import ApiKey
from serve.pooling import PoolingParams
from serve.request import RequestMetrics
from serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from serve.engine.request_stream import RequestStream


class KeyPolicy:
    """The engine's CallPolicy of one HTTP call, and the call's streams.

    key: None where the server asks for no key. share_prefixes: keys share cached prompts.
    arrived_s: when the call arrived, in seconds of the monotonic clock.
    """

    def __init__(
        self, key: ApiKey | None = None, *, share_prefixes: bool = False, arrived_s: float = 0.0
    ) -> None:
        self.key = key
        self.arrived_s = arrived_s
        self.streams: list[RequestStream] = []
        self.journal: Journal | None = None  # set where another server may have to go on
        self.continuation: Continuation | None = None  # of an answer that another server has begun
        self.is_of_hop = False  # which sends no other calls than those that another one has counted
        self.is_prompt_counted = False  # by the server that computes it, says the hop
        self._share_prefixes = share_prefixes
        self._expired: Exception | None = None
        self._num_sequences = 0
        self._last_allowed: tuple[SamplingParams, SamplingParams] | None = None

    def allowed(self, params: SamplingParams | PoolingParams) -> SamplingParams | PoolingParams:
        """Returns the parameters with the key's limits and salt; the prompts of a call that share
        `params` share the result. Raises RequestError where the key does not allow them."""
        if self._expired is not None:
            raise self._expired
        self._num_sequences = params.n  # the same for all requests of a call
        if isinstance(params, PoolingParams):
            if self.key is None:
                return params
            under_key = self._under_key(params.sampling(), self.key)
            return replace(params, cache_salt=under_key.cache_salt, priority=under_key.priority)
        limited = self._limited(params)
        if self.continuation is not None:
            return self.continuation.apply(limited, len(self.streams))
        return limited

    def _limited(self, params: SamplingParams) -> SamplingParams:
        if self.key is None:
            return params
        if self._last_allowed is None or self._last_allowed[0] is not params:
            self._last_allowed = params, self._under_key(params, self.key)
        return self._last_allowed[1]

    def client(self, name: str | None) -> str | None:
        if self.key is None:
            return name
        return f"{self.key.name}/{name}" if name else self.key.name

    def submitted(self, stream: RequestStream) -> None:
        self.streams.append(stream)

    def hand_over(self) -> None:
        """Ends the call, with what another server needs to go on with it, if there is one to."""
        journal = self.journal
        if journal is not None and journal.has_comments and not journal.is_handed_over:
            self.expire(journal.hand_over())

    def expire(self, error: Exception) -> None:
        """Ends all streams of the call with the error; later requests of the call raise it."""
        self._expired = error
        for stream in self.streams:
            stream.fail(error)
            stream.abort()
            stream.wake()

    @property
    def is_computing(self) -> bool:
        """Whether the engine still computes something for the call."""
        return any(len(m.finish_reasons) < self._num_sequences for m in self.usage())

    def usage(self) -> list[RequestMetrics]:
        """Returns the metrics of each stream up to now."""
        return [stream.metrics for stream in self.streams]

    @property
    def num_charged(self) -> int:
        """The tokens that count towards the key's quota. Where an answer goes on that another
        server has begun, that one has counted the prompt and the tokens so far; where another one
        has computed the prompt, it has counted what need not be computed here. Anyone can send such
        calls, so only those with the hop's secret count less than others."""
        usage, begun = self.usage(), self.continuation
        tokens = sum(m.num_prompt_tokens + m.num_output_tokens for m in usage)
        if begun is not None and self.is_of_hop:
            num_before = sum(m.num_prompt_tokens for m in usage)
            num_before += sum(len(answer.token_ids) for answer in begun.answers)
            return max(0, tokens - num_before)
        if self.is_prompt_counted:
            tokens -= sum(m.num_cached_tokens for m in usage)
        return tokens

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
            if params.priority:  # 0 is the default and is raised to the limit
                raise RequestError(
                    f"priority is below {lowest}, the limit of this API key", param="priority"
                )
            changes["priority"] = lowest
        return params.changed(**changes) if changes else params


def salt_of(name: str, salt: str | None) -> str:
    """Returns a key's cache salt. It is the same after a restart, so that K/V on disk stays
    usable."""
    own = b"" if salt is None else b"\0" + salt.encode()
    return "key-" + hashlib.blake2b(name.encode() + own, digest_size=16).hexdigest()
