"""Stores responses in memory, to be fetched and continued. A full store evicts the least recently
used response of the owner with the largest entries."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import orjson

from serve.http.responses.listing import kept_items

ENTRY_BYTES = 1024  # beside the texts: ids, objects, table entries
PARSED_BYTES = 1 << 18
ITEM_BYTES = 256  # an id and its table entry


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response and the conversation up to it.

    owner: the client that may see it. body: the response as JSON. history: lists of items as JSON,
    in order, which are the model's whole input without the instructions; continued conversations
    share the lists of their beginning. item_ids: the ids of the output's items. kept: the output as
    the history of a response that continues this one; None for a small body, from which it is made.
    """

    owner: str
    body: bytes
    history: tuple[bytes, ...]
    item_ids: tuple[str, ...] = ()
    kept: bytes | None = None

    @classmethod
    def of(cls, owner: str, response: dict[str, Any], history: tuple[bytes, ...]) -> StoredResponse:
        output = response["output"]
        body = orjson.dumps(response)
        # parsing a large one, which has log-probabilities, would hold the interpreter for long
        kept = orjson.dumps(list(kept_items(output))) if len(body) > PARSED_BYTES else None
        return cls(owner, body, history, tuple(item["id"] for item in output), kept)

    @property
    def size_bytes(self) -> int:
        items = ITEM_BYTES * len(self.item_ids)
        texts = sum(map(len, (self.body, self.kept or b"", *self.history)))
        return texts + items + ENTRY_BYTES

    @property
    def continued_bytes(self) -> int:
        """The size of what a response that continues this one is made of."""
        return sum(map(len, (self.kept or self.body, *self.history)))

    def output(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = orjson.loads(self.body)["output"]
        return items

    def input_items(self) -> list[dict[str, Any]]:
        return [item for items in self.history for item in orjson.loads(items)]

    def continued(self) -> tuple[bytes, ...]:
        """Returns the history that precedes the input of a response that continues this one."""
        own = self.kept
        if own is None:
            own = orjson.dumps(list(kept_items(self.output())))
        return (*self.history, own)


@dataclass(slots=True)
class _OwnerEntries:
    """The stored responses of one owner. ids: the least recently used first."""

    ids: OrderedDict[str, None] = field(default_factory=OrderedDict)
    size_bytes: int = 0


class ResponseStore:
    """Keeps at most max_entries responses and max_bytes of JSON. It is not thread-safe."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: dict[str, StoredResponse] = {}
        self._owners: dict[str, _OwnerEntries] = {}  # by owner
        self._responses: dict[str, str] = {}  # response ids by item id
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Stores a response, unless it alone is larger than the store. One of the same id and owner
        is replaced, another owner's stays: an answer that another server began brings its id."""
        before = self._entries.get(response_id)
        if stored.size_bytes > self._max_bytes or (before and before.owner != stored.owner):
            return
        if before is not None:
            self._drop(response_id)
        self._entries[response_id] = stored
        entries = self._owners.setdefault(stored.owner, _OwnerEntries())
        entries.ids[response_id] = None
        entries.size_bytes += stored.size_bytes
        self._responses.update(dict.fromkeys(stored.item_ids, response_id))
        self.size_bytes += stored.size_bytes
        while self.size_bytes > self._max_bytes or len(self._entries) > self._max_entries:
            largest = max(self._owners.values(), key=self._share)
            self._drop(next(iter(largest.ids)))

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        stored = self._entries.get(response_id)
        if stored is None or stored.owner != owner:
            return None
        self._owners[owner].ids.move_to_end(response_id)
        return stored

    def of_item(self, item_id: str, owner: str) -> StoredResponse | None:
        """Returns the response whose output has the item."""
        return self.get(self._responses.get(item_id, ""), owner)

    def delete(self, response_id: str, owner: str) -> bool:
        if self.get(response_id, owner) is None:
            return False
        self._drop(response_id)
        return True

    def _share(self, entries: _OwnerEntries) -> float:
        """Returns the share of the store that an owner uses."""
        in_bytes = entries.size_bytes / max(1, self._max_bytes)
        return max(in_bytes, len(entries.ids) / max(1, self._max_entries))

    def _drop(self, response_id: str) -> None:
        stored = self._entries.pop(response_id)
        self.size_bytes -= stored.size_bytes
        entries = self._owners[stored.owner]
        del entries.ids[response_id]
        entries.size_bytes -= stored.size_bytes
        if not entries.ids:
            del self._owners[stored.owner]
        for item_id in stored.item_ids:
            del self._responses[item_id]
