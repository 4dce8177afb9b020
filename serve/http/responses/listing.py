"""Input items of stored responses: their ids, and listings of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from serve.errors import RequestError
from serve.http.edge.errors import quoted

MAX_LIMIT = 100
DEFAULT_LIMIT = 20


def item_list(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Lists items, which are in order. query: the URL's limit, order and after. Raises
    RequestError."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"order must be asc or desc, not {quoted(order)}", param="order")
    limit = _limit(query.get("limit", str(DEFAULT_LIMIT)))
    listed = items if order == "asc" else items[::-1]
    after = query.get("after")
    if after is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise RequestError(
                f"after {quoted(after)} is not an item of this response", param="after"
            )
        listed = listed[places[0] + 1 :]
    page = listed[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(listed) > len(page),
    }


def named_items(items: Iterable[dict[str, Any]], response_id: str) -> Iterator[dict[str, Any]]:
    """Yields the items with an id for each that has none."""
    name = response_id.removeprefix("resp_")
    for position, item in enumerate(items):
        yield {"id": f"in_{name}{position:02x}", **item}


def kept_items(items: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the items without the parts that no prompt is made of. The limit of a prompt's length
    thereby bounds the size of stored items. Empty message parts stay, since each is a line of the
    prompt; empty reasoning parts are dropped."""
    for item in items:
        kept = {name: value for name, value in item.items() if name != "encrypted_content"}
        is_thought = kept.get("type") == "reasoning"
        parts = kept.get("content")
        if isinstance(parts, list):
            kept["content"] = _thoughts(parts) if is_thought else [_plain(part) for part in parts]
        if is_thought:  # used only where there is no content
            kept["summary"] = [] if parts else _thoughts(kept.get("summary", []))
        yield kept


def _thoughts(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for part in parts if part["text"]]


def _plain(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "output_text":
        return part
    return {"type": "output_text", "text": part["text"], "annotations": []}


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_LIMIT):
        raise RequestError(f"limit must be between 1 and {MAX_LIMIT}", param="limit")
    return int(text)
