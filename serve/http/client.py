"""A small streaming client of the API, for `serve chat --url` and the load generator."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Self

import aiohttp
import orjson

from serve.errors import ConfigError, MergestepError, reason
from serve.server_url import server_root

READ_LIMIT = 1 << 20
CONNECT_TIMEOUT_S = 10.0


class ApiCallError(MergestepError):
    """The server answered with an error. status 0: the error came inside a stream."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class ApiClient:
    """A client of one server. url: see server_root. api_key: is sent with every request. Only
    connecting has a timeout."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self._root = server_root(url)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key has characters that HTTP cannot send")
        self._session = aiohttp.ClientSession(
            headers=None if api_key is None else {"Authorization": f"Bearer {api_key}"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=READ_LIMIT,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def models(self) -> list[dict[str, Any]]:
        with self._connection_errors():
            async with self._session.get(f"{self._root}/v1/models") as response:
                body = await response.read()
        if response.status != 200:
            raise _call_error(response.status, body)
        try:
            models: list[dict[str, Any]] = orjson.loads(body)["data"]
            str(models[0]["id"])
        except (ValueError, LookupError, TypeError) as exc:
            message = f"{self._root}/v1/models does not answer as an OpenAI API does"
            raise ApiCallError(200, "no_openai_api", message) from exc
        return models

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the chunks of a streaming call. Closing the iterator closes the connection."""
        with self._connection_errors():
            async with self._session.post(
                self._root + path,
                data=orjson.dumps({**body, "stream": True}),
                headers={"Content-Type": "application/json"},
            ) as response:
                if response.status != 200:
                    raise _call_error(response.status, await response.read())
                async for data in _events(response.content):
                    if data == b"[DONE]":
                        return
                    chunk = _chunk(data)
                    if "error" in chunk:
                        raise _call_error(0, data)
                    yield chunk
        raise ApiCallError(0, "stream_broken", "the stream ended without [DONE]")

    @contextmanager
    def _connection_errors(self) -> Iterator[None]:
        try:
            yield
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as exc:
            raise ConfigError(f"url {self._root} is not the address of a server") from exc
        except aiohttp.ClientConnectorError as exc:
            message = f"cannot reach {self._root}: {reason(exc.os_error)}"
            raise ApiCallError(0, "connection_failed", message) from exc
        except aiohttp.ClientError as exc:
            message = f"{self._root}: {str(exc) or 'the connection failed'}"
            raise ApiCallError(0, "connection_failed", message) from exc


def _chunk(data: bytes) -> dict[str, Any]:
    try:
        chunk = orjson.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise ApiCallError(
            200, "no_openai_api", "the stream holds something that is not a JSON object"
        )
    return chunk


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in content.iter_any():
        *blocks, rest = (rest + piece).split(b"\n\n")
        for block in blocks:
            if block.startswith(b"data: "):
                yield block[6:]


def _call_error(status: int, body: bytes) -> ApiCallError:
    try:
        error = orjson.loads(body)["error"]
        return ApiCallError(status, str(error["code"] or error["type"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return ApiCallError(status, f"http_{status}", "the answer is not an OpenAI error")
