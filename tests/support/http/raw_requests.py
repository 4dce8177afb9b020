"""HTTP requests as bytes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.support.http.running_server import Served

CHAT = "/v1/chat/completions"

BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}

RAW_BODY = json.dumps(BODY).encode()

JSON_TYPE = "Content-Type: application/json"

CHUNKED: dict[str, Any] = {"length": None, "kind": JSON_TYPE}


def request(
    body: bytes = RAW_BODY,
    *lines: str,
    kind: str | None = JSON_TYPE,
    length: str | None = "",
    first: str = f"POST {CHAT} HTTP/1.1",
    host: str | None = "Host: localhost",
) -> bytes:
    """Returns a request. length: "" is the true length, None omits the header."""
    head = [first]
    head += [line for line in (host, kind) if line is not None]
    if length is not None:
        head.append(f"Content-Length: {length or len(body)}")
    return "\r\n".join([*head, *lines, "", ""]).encode("latin-1") + body


async def is_closed_after(served: Served, data: bytes) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(data)
    try:
        async with asyncio.timeout(2.5):
            await reader.read()
    except ConnectionResetError:
        return True
    finally:
        writer.close()
    return True
