"""Quotas of clients: requests and tokens per minute, and concurrent calls.

A client may use a minute's quota in one burst; it refills at a steady rate. Tokens are counted when
a call has ended, so a bucket may become negative, and the client waits until it has refilled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from serve.http.edge.errors import RATE_LIMIT_ERROR, ApiError, retry_after
from serve.http.edge.keys import ApiKey, KeyLimits

_BUSY_RETRY_S = 1.0


class Bucket:
    """A token bucket: it holds at most per_minute units and refills as many each minute."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def take(self, amount: float, now_s: float) -> None:
        """Takes the amount, even if the bucket has less."""
        back = (now_s - self._at_s) * self.per_minute / 60
        self._level = min(float(self.per_minute), self._level + back) - amount
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Returns the seconds until the bucket has one unit."""
        self.take(0, now_s)
        return max(0.0, (1.0 - self._level) * 60 / self.per_minute)


@dataclass(slots=True)
class Client:
    """The usage of the keys of one name. num_requests and num_tokens: since the start."""

    limits: KeyLimits
    requests: Bucket | None = None
    tokens: Bucket | None = None
    num_running: int = 0
    num_requests: int = 0
    num_tokens: int = 0


class Quotas:
    """The clients by the names of their keys. New limits start with full buckets."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clients: dict[str, Client] = {}
        self._clock = clock

    def enter(self, key: ApiKey, *, goes_on: bool = False) -> None:
        """Begins a call, which `leave` must end. Raises ApiError 429 if a quota is used up.
        goes_on: with an answer whose call another server has counted, which is not refused."""
        now_s = self._clock()
        client = self._client(key, now_s)
        if goes_on:
            client.num_running += 1
            return
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

    def keep(self, names: Collection[str]) -> None:
        """Forgets the idle clients whose keys are gone."""
        for name, client in list(self.clients.items()):
            if name not in names and not client.num_running:
                del self.clients[name]

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
