"""A stored response's input items: their ids, and pages of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve.errors import RequestError
from serve.http.errors import quoted

MAX_LIMIT = 100
DEFAULT_LIMIT = 20


def item_list(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """items: in order. query: limit, order and after, as the URL has them. RequestError."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"order must be asc or desc, not {quoted(order)}", param="order")
    limit = _limit(query.get("limit", str(DEFAULT_LIMIT)))
    listed = items if order == "asc" else items[::-1]
    after = query.get("after")
    if after is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise RequestError(f"after is no item of this response: {quoted(after)}", param="after")
        listed = listed[places[0] + 1 :]
    page = listed[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(listed) > len(page),
    }


def named_items(items: list[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """An id for each that has none."""
    name = response_id.removeprefix("resp_")
    return [{"id": f"in_{name}{position:02x}", **item} for position, item in enumerate(items)]


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_LIMIT):
        raise RequestError(f"limit must be between 1 and {MAX_LIMIT}", param="limit")
    return int(text)
