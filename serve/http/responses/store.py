"""Responses that can be fetched and continued, in memory: the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import orjson

ENTRY_BYTES = 1024  # beside the texts: ids, objects, the place in the table


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """owner: who made it, and alone may see it. body: the response, as JSON. history: lists of
    items as JSON, in order: all that the model was given, without the instructions. Continued
    conversations share the lists of their beginning."""

    owner: str
    body: bytes
    history: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        return len(self.body) + sum(map(len, self.history)) + ENTRY_BYTES

    def input_items(self) -> list[dict[str, Any]]:
        return [item for items in self.history for item in orjson.loads(items)]

    def continued(self) -> tuple[bytes, ...]:
        """What comes before the input of a response that follows this one."""
        return (*self.history, orjson.dumps(orjson.loads(self.body)["output"]))


class ResponseStore:
    """At most max_entries, and max_bytes of JSON. For one thread."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """One that is too large for the store is not kept."""
        if stored.size_bytes > self._max_bytes:
            return
        self._entries[response_id] = stored
        self.size_bytes += stored.size_bytes
        while self.size_bytes > self._max_bytes or len(self._entries) > self._max_entries:
            _, dropped = self._entries.popitem(last=False)
            self.size_bytes -= dropped.size_bytes

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        stored = self._entries.get(response_id)
        if stored is None or stored.owner != owner:
            return None
        self._entries.move_to_end(response_id)
        return stored

    def delete(self, response_id: str, owner: str) -> bool:
        stored = self.get(response_id, owner)
        if stored is None:
            return False
        del self._entries[response_id]
        self.size_bytes -= stored.size_bytes
        return True
