"""A replica: a `serve run` of this machine, what it tells, and the calls that pass through."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypedDict

import aiohttp
from yarl import URL

from serve.cluster.rank_process import RankProcess, RankSpec
from serve.cluster.ray_serve.choice import BLOCK_TOKENS, ReplicaStats
from serve.cluster.ray_serve.policy import QUEUE
from serve.errors import ConfigError, MergestepError, RequestError

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_END_S = 30.0  # for the server to end its requests
_ASK_S = 5.0
_MAX_FAILURES = 3  # of /health, one after the other
_ASKED_TOKENS = 512  # or fewer, for a shorter context
_NO_ANSWER_S = 3600.0  # the wait at a server that tells none: longer than at any that does
_OVERLOADED = 429
_CHUNK_BYTES = 64 << 10
_KEYS, _KEY_NAME = "MERGESTEP_API_KEYS", "mergestep-ray"
_KEY_FILE = "MERGESTEP_API_KEY_FILE"
_OF_A_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers"),
    *("transfer-encoding", "upgrade", "content-length", "host", "date", "server"),
}


class CallSent(TypedDict):
    """An HTTP call. names: of its prompt's blocks, for the router. call: the same for all attempts
    of a call that can go on at another replica; "" for others."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    names: list[bytes]
    call: str


class StatusError(MergestepError):
    """The server has answered a question with another status than 200."""

    def __init__(self, path: str, status: int) -> None:
        super().__init__(f"{path}: {status}")
        self.status = status


class ServerReplica:
    """Starts the server, and is made when it is ready. Ray Serve calls the methods."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """settings: those of `serve run` by name. MergestepError with the server's last lines if it
        does not start. ConfigError if this machine's environment has keys."""
        check_environment(os.environ, settings)
        self._key = secrets.token_hex(16) if settings.get("api_key_file") else ""
        keys = {_KEYS: f"{_KEY_NAME}:{self._key}"} if self._key else {}
        self._process = RankProcess(
            RankSpec(1, 0, 1, "", as_toml(settings), secrets.token_hex(16), keys, os.getcwd())
        )
        lines: list[str] = []
        while not self._process.url:
            lines = (lines + self._told())[-5:]
            if self._process.status() is not None:
                raise MergestepError("the server did not start: " + "\n".join(lines))
            time.sleep(_POLL_S)
        self._told()
        self._session: aiohttp.ClientSession | None = None
        self._failures = 0
        self._number = 0
        self._asked_tokens = _ASKED_TOKENS
        self._metrics = ""

    def _told(self) -> list[str]:
        """Hands on what the server has logged."""
        lines = self._process.take_lines()
        for line in lines:
            logger.info("%s", line)
        return lines

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                timeout=timeout, connector=connector, auto_decompress=False
            )
        return self._session

    async def call(self, sent: CallSent) -> AsyncIterator[Any]:
        """Yields status and headers of the server's answer, and then its bytes as they come."""
        headers = kept_headers(sent["headers"])
        async with self._client().request(
            sent["method"],
            url_at(self._process.url, sent["path"]),
            headers=headers,
            data=sent["body"] or None,
            allow_redirects=False,
            skip_auto_headers=("User-Agent", "Content-Type", "Accept", "Accept-Encoding"),
        ) as answer:
            yield answer.status, kept_headers(answer.headers.items())
            async for content in answer.content.iter_any():
                yield content

    async def check_health(self) -> None:
        """Raises MergestepError if Ray Serve has to replace this replica."""
        self._told()
        status = self._process.status()
        if status is not None:
            raise MergestepError(f"the server has ended with status {status}")
        try:
            await self._ask("GET", "/health")
            self._failures = 0
        except (aiohttp.ClientError, OSError, TimeoutError, MergestepError) as error:
            self._failures += 1
            if self._failures >= _MAX_FAILURES:
                raise MergestepError(f"the server does not answer: {error!r}") from error

    async def record_routing_stats(self) -> dict[str, Any]:
        """Returns what the router chooses by, as ReplicaStats has it. A server that tells nothing
        is one to avoid: with its last report it would draw the calls that it refuses."""
        try:
            stats = await self._stats()
        except (aiohttp.ClientError, OSError, TimeoutError, MergestepError) as error:
            logger.debug("the server tells no load: %r", error)
            stats = ReplicaStats(self._number, _NO_ANSWER_S)
        return stats.to_json()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the wait. Raises what the server's answer is if it tells none, and Ray Serve
        then counts no wait of it; but an overloaded one needs another replica beside it."""
        try:
            return {QUEUE: (await self._stats()).queue_s}
        except StatusError as error:
            if error.status != _OVERLOADED:
                raise
            return {QUEUE: _NO_ANSWER_S}

    async def _stats(self) -> ReplicaStats:
        self._number += 1
        number = self._number
        tokens, load = await self._load()
        try:
            self._metrics = (await self._ask("GET", "/metrics")).decode()
        except StatusError as error:  # at a port of their own, perhaps; what pulls cost is older
            logger.debug("%s", error)
        return stats_of(number, load, tokens, self._metrics)

    async def _load(self) -> tuple[int, dict[str, Any]]:
        """Returns for how many tokens the server was asked, as many as its context has room for,
        and its answer."""
        tokens = self._asked_tokens
        while True:
            body = json.dumps({"prompt_tokens": tokens}).encode()
            try:
                found = json.loads(await self._ask("POST", "/internal/load", body))
            except StatusError as error:
                if error.status != 400 or tokens == 1:
                    raise
                tokens //= 2
            else:
                self._asked_tokens = tokens
                return tokens, found

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Returns an answer of the server. StatusError if it is none."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        timeout = aiohttp.ClientTimeout(total=_ASK_S)
        async with self._client().request(
            method, url_at(self._process.url, path), data=body, headers=headers, timeout=timeout
        ) as answer:
            content = await answer.read()
            if answer.status != 200:
                raise StatusError(path, answer.status)
            return content

    def __del__(self) -> None:
        """Ends the server. Ray Serve calls it when the replica has no calls any more."""
        process: RankProcess | None = getattr(self, "_process", None)
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        end_s = time.monotonic() + _END_S
        while process.status() is None and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        process.kill()


def check_environment(environment: Mapping[str, str], settings: Mapping[str, Any]) -> None:
    """Raises ConfigError if the environment has keys. The servers do not inherit them, and would
    answer everybody."""
    ignored = [_KEYS, "MERGESTEP_API_KEY"]
    if not settings.get("api_key_file"):
        ignored.append(_KEY_FILE)
    for name in ignored:
        if environment.get(name):
            raise ConfigError(
                f"{name} of the environment does not reach the servers of Ray Serve: write the keys"
                " to a file, name it as the argument api_key_file, and unset the variable"
            )


def url_at(server: str, path: str) -> URL:
    """Returns the address of a path and query, as they are, at a server. RequestError if they would
    lead elsewhere."""
    check_path(path)
    # joined as text: resolving `path` against the server would also take its host from it
    url, own = URL(server + path, encoded=True), URL(server)
    if (url.scheme, url.host, url.port) != (own.scheme, own.host, own.port):
        raise RequestError("the path of a call must not name a host", code="invalid_path")
    return url


def check_path(path: str) -> None:
    """Raises RequestError if a call's path does not begin with exactly one slash: `//host/x` is an
    address of another host."""
    if not path.startswith("/") or path.startswith("//"):
        raise RequestError("the path of a call must begin with exactly one /", code="invalid_path")


def stats_of(number: int, load: Mapping[str, Any], tokens: int, metrics: str) -> ReplicaStats:
    """Returns what a server's answer of /internal/load for so many tokens and its metrics say."""
    queue_s, ttft_s = load["predicted_queue_seconds"], load["predicted_ttft_seconds"]
    computed_s = max(0.0, ttft_s - queue_s)
    block_s = computed_s / tokens * BLOCK_TOKENS if computed_s else None
    seconds = pages = page_tokens = 0.0
    for line in metrics.splitlines():
        if line.startswith("mergestep:kv_peer_pull_seconds_total"):
            seconds += float(line.rpartition(" ")[2])
        elif line.startswith("mergestep:kv_peer_pulled_pages_total"):
            pages += float(line.rpartition(" ")[2])
        elif line.startswith("vllm:cache_config_info{"):
            page_tokens = float(line.partition('block_size="')[2].partition('"')[0] or 0)
    pull_s = seconds / (pages * page_tokens) * BLOCK_TOKENS if pages and page_tokens else None
    return ReplicaStats(number, queue_s, block_s, pull_s)


def kept_headers(headers: Any) -> list[tuple[str, str]]:
    """Returns the headers that are not of one connection."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_A_HOP]


def as_toml(settings: Mapping[str, Any]) -> str:
    """Returns settings as `serve run --config` reads them, at a free port of this machine."""
    fixed = {"host": "127.0.0.1", "port": 0, "quiet": True}
    lines = [f"{name} = {json.dumps(value)}" for name, value in {**settings, **fixed}.items()]
    return "\n".join(lines) + "\n"
