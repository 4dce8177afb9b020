"""Large answers as JSON, without keeping the event loop.

A thread beside it is not enough: one call of orjson, or of what frees a million objects, holds the
interpreter until it is done. So both go in pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import orjson
from aiohttp import web

from serve.http.edge.errors import body_response

INLINE_VALUES = 2048  # answers with more numbers and texts are made off the event loop
CHARS_PER_VALUE = 16  # of long texts
PIECE = 64

T = TypeVar("T")


def json_list(items: Iterable[Any], piece: int = PIECE) -> orjson.Fragment:
    """A part of something larger."""
    return orjson.Fragment(json_bytes(items, piece))


def json_bytes(items: Iterable[Any], piece: int = PIECE) -> bytes:
    """A list as JSON, so many items in each call of orjson."""
    iterator = iter(items)
    parts = []
    while some := list(islice(iterator, piece)):
        parts.append(orjson.dumps(some, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1])
    return b"[" + b",".join(parts) + b"]"


def drained(items: list[T]) -> Iterator[T]:
    """The items; each is let go when it has been used."""
    items.reverse()
    while items:
        yield items.pop()


async def large_response(
    make: Callable[[], object], num_values: int, request_id: str
) -> web.Response:
    """What `make` returns, made and put into JSON in a thread if it has many values."""

    def body() -> bytes:
        return orjson.dumps(make())

    data = body() if num_values <= INLINE_VALUES else await asyncio.to_thread(body)
    return body_response(data, request_id)
