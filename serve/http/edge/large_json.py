"""Serializes large answers to JSON without blocking the event loop.

A thread alone is not enough: one call of orjson, or freeing a million objects at once, holds the
interpreter until it is done. So both go in pieces. An answer that is much larger than what it is
made of is sent in pieces, too, and never exists as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import orjson
from aiohttp import web

from serve.http.edge.errors import JSON_TYPE, body_response, common_headers
from serve.http.edge.memory_budget import Charge

INLINE_VALUES = 2048  # answers with more numbers and texts are made in a thread
CHARS_PER_VALUE = 16  # a long text counts as one value per so many characters
PIECE = 64
SENT_PIECE = 4096  # items of a list, in a piece of an answer that is sent in pieces
SENT_CHARS = 32 << 10

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
    make: Callable[[], object], num_values: int, request_id: str, charge: Charge
) -> web.Response:
    """Answers with what `make` returns. A thread makes and serializes it if it has many values.
    charge: that of the call, which ends with that work at the earliest."""

    def body() -> bytes:
        return orjson.dumps(make())

    data = body() if num_values <= INLINE_VALUES else await charge.finish(body)
    return body_response(data, request_id)


class StreamedJson(web.StreamResponse):
    """An answer whose pieces are made while they are sent."""

    def __init__(self, pieces: Iterator[bytes], request_id: str) -> None:
        super().__init__(headers=common_headers(request_id))
        self.content_type = JSON_TYPE
        self.pieces = pieces


def list_pieces(items: Iterable[Any]) -> Iterator[bytes]:
    """Yields a list as JSON. No piece is empty."""
    iterator = iter(items)
    before = b"["
    while some := list(islice(iterator, SENT_PIECE)):
        yield before + orjson.dumps(some)[1:-1]
        before = b","
    yield b"]" if before == b"," else b"[]"


def text_pieces(text: str) -> Iterator[bytes]:
    """Yields a text as JSON."""
    yield b'"'
    for start in range(0, len(text), SENT_CHARS):
        yield orjson.dumps(text[start : start + SENT_CHARS])[1:-1]
    yield b'"'
