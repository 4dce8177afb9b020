"""How much memory the server keeps between requests: tables and caches, by name.

Sizes of Python objects are estimated from a sample of their entries. The estimate is made when a
client reads /metrics; serving a completion or a chat does not pay for it.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import NamedTuple

_SAMPLED = 32  # entries of a container
_MOST_OBJECTS = 1024  # of an entry
_TRIES = 4
# Objects that an entry shares with the rest of the program.
_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_LEAVES = (str, bytes, bytearray, int, float, complex, type(None))


class Kept(NamedTuple):
    """The size of something kept. num_bytes: an estimate for Python objects."""

    entries: int
    num_bytes: int


def size_of(*containers: Collection[object]) -> Kept:
    """Returns the entries of the first container and the bytes of all of them, with what their
    entries hold. Other threads may change the containers meanwhile."""
    entries = len(containers[0]) if containers else 0
    return Kept(entries, sum(map(_container_bytes, containers)))


def _container_bytes(container: Collection[object]) -> int:
    """Returns the container's own size and that of its entries, from the first ones of them. An
    object that several of them share counts once."""
    total = sys.getsizeof(container)
    entries = [_objects_of(entry) for entry in _first(container)]
    sharing = Counter(each for entry in entries for each in entry)
    shared = {each: size for entry in entries for each, size in entry.items() if sharing[each] > 1}
    own = sum(size for entry in entries for each, size in entry.items() if sharing[each] == 1)
    return total + sum(shared.values()) + own * len(container) // max(1, len(entries))


def _first(container: Collection[object]) -> list[object]:
    for _ in range(_TRIES):
        try:
            entries: Iterable[object] = container
            if isinstance(container, Mapping):
                entries = container.items()
            return list(islice(entries, _SAMPLED))
        except RuntimeError:  # another thread has changed it
            continue
    return []


def _objects_of(entry: object) -> dict[int, int]:
    """Returns the sizes of the objects of an entry by their addresses. The (key, value) pair of a
    table is not an object of it."""
    found: dict[int, int] = {}
    waiting = list(entry) if isinstance(entry, tuple) else [entry]
    while waiting and len(found) < _MOST_OBJECTS:
        item = waiting.pop()
        if id(item) in found or isinstance(item, _SHARED):
            continue
        found[id(item)] = sys.getsizeof(item)
        if not isinstance(item, _LEAVES):
            waiting += _held(item)
    return found


def _held(item: object) -> list[object]:
    """Returns the objects that an object refers to."""
    try:
        if isinstance(item, dict | OrderedDict):
            return [*item.keys(), *item.values()]
        if isinstance(item, list | tuple | set | frozenset | deque):
            return list(item)
    except RuntimeError:
        return []
    held = list(vars(item).values()) if hasattr(item, "__dict__") else []
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        held += [getattr(item, name) for name in names if hasattr(item, name)]
    return held
