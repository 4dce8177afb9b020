"""Responses that can be fetched and continued, in memory. Where there is no room, the least
recently used one goes, of the owner who has the most."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import orjson

from serve.http.responses.listing import kept_items

ENTRY_BYTES = 1024  # beside the texts: ids, objects, the place in the table
ITEM_BYTES = 256  # an id, and its place in a table


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """owner: who made it, and alone may see it. body: the response, as JSON. history: lists of
    items as JSON, in order: all that the model was given, without the instructions. Continued
    conversations share the lists of their beginning. item_ids: of the output."""

    owner: str
    body: bytes
    history: tuple[bytes, ...]
    item_ids: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        items = ITEM_BYTES * len(self.item_ids)
        return len(self.body) + sum(map(len, self.history)) + items + ENTRY_BYTES

    def output(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = orjson.loads(self.body)["output"]
        return items

    def input_items(self) -> list[dict[str, Any]]:
        return [item for items in self.history for item in orjson.loads(items)]

    def continued(self) -> tuple[bytes, ...]:
        """What comes before the input of a response that follows this one."""
        return (*self.history, orjson.dumps(list(kept_items(self.output()))))


@dataclass(slots=True)
class _Share:
    """Of one owner. ids: of what it has, the least recently used first."""

    ids: OrderedDict[str, None] = field(default_factory=OrderedDict)
    size_bytes: int = 0


class ResponseStore:
    """At most max_entries, and max_bytes of JSON. For one thread."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: dict[str, StoredResponse] = {}
        self._shares: dict[str, _Share] = {}  # by owner
        self._responses: dict[str, str] = {}  # their ids, by the ids of their items
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """One that is too large for the store is not kept."""
        if stored.size_bytes > self._max_bytes:
            return
        self._entries[response_id] = stored
        share = self._shares.setdefault(stored.owner, _Share())
        share.ids[response_id] = None
        share.size_bytes += stored.size_bytes
        self._responses.update(dict.fromkeys(stored.item_ids, response_id))
        self.size_bytes += stored.size_bytes
        while self.size_bytes > self._max_bytes or len(self._entries) > self._max_entries:
            largest = max(self._shares.values(), key=self._part)
            self._drop(next(iter(largest.ids)))

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        stored = self._entries.get(response_id)
        if stored is None or stored.owner != owner:
            return None
        self._shares[owner].ids.move_to_end(response_id)
        return stored

    def of_item(self, item_id: str, owner: str) -> StoredResponse | None:
        """The response in whose output it is."""
        return self.get(self._responses.get(item_id, ""), owner)

    def delete(self, response_id: str, owner: str) -> bool:
        if self.get(response_id, owner) is None:
            return False
        self._drop(response_id)
        return True

    def _part(self, share: _Share) -> float:
        """Of the store that an owner has."""
        in_bytes = share.size_bytes / max(1, self._max_bytes)
        return max(in_bytes, len(share.ids) / max(1, self._max_entries))

    def _drop(self, response_id: str) -> None:
        stored = self._entries.pop(response_id)
        self.size_bytes -= stored.size_bytes
        share = self._shares[stored.owner]
        del share.ids[response_id]
        share.size_bytes -= stored.size_bytes
        if not share.ids:
            del self._shares[stored.owner]
        for item_id in stored.item_ids:
            del self._responses[item_id]
