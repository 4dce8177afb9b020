"""Serializes large answers to JSON without blocking the event loop.

A thread alone is not enough: one call of orjson, or freeing a million objects at once, holds the
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

INLINE_VALUES = 2048  # answers with more numbers and texts are made in a thread
CHARS_PER_VALUE = 16  # a long text counts as one value per so many characters
PIECE = 64

T = TypeVar("T")


def json_list(items: Iterable[Any], piece: int = PIECE) -> orjson.Fragment:
    """Returns a list as JSON, for use inside a larger object."""
    return orjson.Fragment(json_bytes(items, piece))


def json_bytes(items: Iterable[Any], piece: int = PIECE) -> bytes:
    """Returns a list as JSON. Each call of orjson serializes `piece` items."""
    iterator = iter(items)
    parts = []
    while some := list(islice(iterator, piece)):
        parts.append(orjson.dumps(some, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1])
    return b"[" + b",".join(parts) + b"]"


def drained(items: list[T]) -> Iterator[T]:
    """Yields the items and removes each from the list, so that it is freed after use."""
    items.reverse()
    while items:
        yield items.pop()


async def large_response(
    make: Callable[[], object], num_values: int, request_id: str
) -> web.Response:
    """Answers with what `make` returns. A thread makes and serializes it if it has many values."""

    def body() -> bytes:
        return orjson.dumps(make())

    data = body() if num_values <= INLINE_VALUES else await asyncio.to_thread(body)
    return body_response(data, request_id)
