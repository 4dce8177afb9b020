"""How much each client may ask: requests and tokens per minute, and calls at once.

A minute's worth may come in one burst; after that it comes back at a steady rate. Tokens are
counted when a call has ended, so a client may end in debt, and waits until it is paid.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from serve.http.edge.errors import RATE_LIMIT_ERROR, ApiError, retry_after
from serve.http.edge.keys import ApiKey, KeyLimits

_BUSY_RETRY_S = 1.0


class Bucket:
    """per_minute come back each minute, and no more than that lie in it."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def take(self, amount: float, now_s: float) -> None:
        """Even if there is less."""
        back = (now_s - self._at_s) * self.per_minute / 60
        self._level = min(float(self.per_minute), self._level + back) - amount
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Until there is one."""
        self.take(0, now_s)
        return max(0.0, (1.0 - self._level) * 60 / self.per_minute)


@dataclass(slots=True)
class Client:
    """What the keys of one name have used. num_requests and num_tokens: in all."""

    limits: KeyLimits
    requests: Bucket | None = None
    tokens: Bucket | None = None
    num_running: int = 0
    num_requests: int = 0
    num_tokens: int = 0


class Quotas:
    """By the names of keys. New limits begin with a full minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clients: dict[str, Client] = {}
        self._clock = clock

    def enter(self, key: ApiKey) -> None:
        """A call begins; `leave` must follow. ApiError 429: it may not."""
        now_s = self._clock()
        client = self._client(key, now_s)
        limits = key.limits
        if limits.max_concurrent is not None and client.num_running >= limits.max_concurrent:
            raise _refused(f"{limits.max_concurrent} requests at once", _BUSY_RETRY_S)
        for bucket, what in ((client.requests, "requests"), (client.tokens, "tokens")):
            wait_s = 0.0 if bucket is None else bucket.wait_s(now_s)
            if bucket is not None and wait_s:
                raise _refused(f"{bucket.per_minute} {what} per minute", wait_s)
        if client.requests is not None:
            client.requests.take(1, now_s)
        client.num_running += 1
        client.num_requests += 1

    def leave(self, key: ApiKey, num_tokens: int) -> None:
        client = self.clients[key.name]
        client.num_running -= 1
        client.num_tokens += num_tokens
        if client.tokens is not None:
            client.tokens.take(num_tokens, self._clock())

    def _client(self, key: ApiKey, now_s: float) -> Client:
        client = self.clients.get(key.name)
        if client is None:
            client = self.clients[key.name] = Client(KeyLimits())
        if client.limits != key.limits:
            client.limits = key.limits
            client.requests = _bucket(key.limits.requests_per_minute, now_s)
            client.tokens = _bucket(key.limits.tokens_per_minute, now_s)
        return client


def _bucket(per_minute: int | None, now_s: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now_s)


def _refused(limit: str, wait_s: float) -> ApiError:
    return ApiError(
        429,
        f"this API key has a limit of {limit}",
        kind=RATE_LIMIT_ERROR,
        code="rate_limit_exceeded",
        headers=retry_after(wait_s),
    )
