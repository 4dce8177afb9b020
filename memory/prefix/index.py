"""The index of the prefix cache: which page holds the K/V of which tokens. Integers and bytes only.

A page's key stands for all tokens from the beginning of the sequence to the end of the page. It is
a keyed BLAKE2b chain, key(i) = H(key(i-1), tokens of page i), that starts from a salt. Keys have
128 bits and depend on a secret, so a client cannot construct two prompts that collide, and a hit
needs the same salt. The pages form a tree. The least recently used leaf is evicted first, and use
of a page is use of everything before it.
"""

from __future__ import annotations

import hashlib
import heapq
import secrets
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

KEY_BYTES = 16
_MINOR = -(1 << 62)  # is added to the times of minor nodes, which are before all others


class PrefixHasher:
    """Computes the page keys of a token sequence."""

    def __init__(self, page_end: Callable[[int], int], secret: bytes | None = None) -> None:
        """page_end(i): the tokens that must be computed for page i to be complete."""
        self._page_end = page_end
        self._secret = secrets.token_bytes(32) if secret is None else secret

    def extend(
        self,
        keys: list[bytes],
        token_ids: Sequence[int],
        salt: str | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """Appends the keys of the pages that token_ids fill and `keys` lacks.

        num_tokens: only so many of the first token_ids count; None: all."""
        num_tokens = len(token_ids) if num_tokens is None else num_tokens
        key = keys[-1] if keys else self._hash(b"", (salt or "").encode())
        start = self._page_end(len(keys) - 1) if keys else 0
        while (end := self._page_end(len(keys))) <= num_tokens:
            key = self._hash(key, array("i", token_ids[start:end]).tobytes())
            keys.append(key)
            start = end

    def _hash(self, previous: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(previous + data, digest_size=KEY_BYTES, key=self._secret).digest()


@dataclass(slots=True)
class _Node:
    page: int
    parent: bytes | None
    used: int = 0  # the time of the last use, also by children that were evicted since
    is_hit: bool = False  # it was used after it was inserted
    children: set[bytes] = field(default_factory=set)


class IndexListener(Protocol):
    """Is told which keys enter and leave an index; a key that gets another page does neither."""

    def inserted(self, key: bytes, parent: bytes | None) -> None: ...

    def removed(self, key: bytes) -> None: ...


class PrefixIndex:
    """Maps keys to pages and knows the order of eviction. Operations take O(log n) per page."""

    def __init__(self) -> None:
        self.listener: IndexListener | None = None
        self._nodes: dict[bytes, _Node] = {}
        self._keys: dict[int, bytes] = {}
        self._clock = 0
        # A heap of (used, key) of leaves. Entries that are out of date are skipped.
        self._leaves: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def tables(self) -> tuple[Collection[object], ...]:
        """The containers of the index, to estimate its memory. Any thread may ask."""
        return self._nodes, self._keys, self._leaves

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def has(self, key: bytes, page: int) -> bool:
        """Returns whether this key has this page."""
        return self._keys.get(page) == key

    @property
    def pages(self) -> list[int]:
        return list(self._keys)

    def has_key(self, key: bytes) -> bool:
        return key in self._nodes

    def page_of(self, key: bytes) -> int:
        """Returns the page of a key in the index."""
        return self._nodes[key].page

    def key_of(self, page: int) -> bytes:
        """Returns the key of a page in the index."""
        return self._keys[page]

    def seen(self, key: bytes) -> tuple[int, object] | None:
        """Returns the page of a key, and what `is_still` takes to tell whether the page has been in
        the index ever since. Any thread may call both."""
        node = self._nodes.get(key)
        return None if node is None else (node.page, node)

    def is_still(self, key: bytes, node: object) -> bool:
        return self._nodes.get(key) is node

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the pages of the longest prefix of a chain that is in the index."""
        found: list[int] = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            found.append(node.page)
        return found

    def chain(self, keys: Iterable[bytes]) -> list[bytes]:
        """Returns these keys and all their ancestors, each once, children before parents."""
        found: dict[bytes, None] = {}
        for key in keys:
            ancestor: bytes | None = key
            while ancestor is not None and ancestor not in found and ancestor in self._nodes:
                found[ancestor] = None
                ancestor = self._nodes[ancestor].parent
        return list(found)

    def insert(
        self, key: bytes, parent: bytes | None, page: int, *, is_minor: bool = False
    ) -> bool:
        """Inserts a page below its parent's key (None for a first page). Returns False if the key
        is in the index already or the parent is not. is_minor: as long as it is not touched, the
        page, which gets no children, is evicted before others."""
        if key in self._nodes or (parent is not None and parent not in self._nodes):
            return False
        assert page not in self._keys, f"page {page} is in the index"
        self._nodes[key] = _Node(page, parent)
        self._keys[page] = key
        if parent is not None:
            self._nodes[parent].children.add(key)
        self._touch(key, is_minor=is_minor)
        if self.listener is not None:
            self.listener.inserted(key, parent)
        return True

    def replace(self, key: bytes, page: int) -> None:
        """Gives a key in the index this page in place of the one it had."""
        assert page not in self._keys, f"page {page} is in the index"
        old = self._nodes[key]
        del self._keys[old.page]
        # a new node, so that `is_still` notices
        self._nodes[key] = _Node(page, old.parent, old.used, old.is_hit, old.children)
        self._keys[page] = key
        self._touch(key, is_minor=self.is_minor(key))

    def is_minor(self, key: bytes) -> bool:
        """Returns whether a key in the index is evicted before others."""
        return self._nodes[key].used < 0

    def touch(self, key: bytes) -> None:
        """Marks the chain that ends with `key` as just used."""
        self._touch(key, is_minor=False)
        self._nodes[key].is_hit = True

    def demote(self, key: bytes) -> bool:
        """Makes a key in the index minor, unless it was used since it was inserted. Returns whether
        it did."""
        if self._nodes[key].is_hit:
            return False
        self._touch(key, is_minor=True)
        return True

    def _touch(self, key: bytes, *, is_minor: bool) -> None:
        self._clock += 1
        node = self._nodes[key]
        node.used = self._clock + (_MINOR if is_minor else 0)
        if not node.children:
            heapq.heappush(self._leaves, (node.used, key))
        if len(self._leaves) > 2 * len(self._nodes) + 64:
            self._leaves = [
                (node.used, key) for key, node in self._nodes.items() if not node.children
            ]
            heapq.heapify(self._leaves)

    def evict_oldest(self, may_evict: Callable[[int], bool]) -> tuple[bytes, int] | None:
        """Removes the least recently used leaf whose page may be evicted. Returns its key and page,
        or None. Leaves whose page may not be evicted are in use, so they count as just used."""
        for _ in range(len(self._leaves)):
            used, key = heapq.heappop(self._leaves)
            node = self._nodes.get(key)
            if node is None or node.children or node.used != used:
                continue
            if may_evict(node.page):
                self._remove(key)
                return key, node.page
            self._touch(key, is_minor=self.is_minor(key))
        return None

    def evict_tree(self, page: int) -> list[int]:
        """Removes a page and all its descendants; returns their pages."""
        order = [self._keys[page]]
        for key in order:
            order += self._nodes[key].children
        pages = [self._nodes[key].page for key in order]
        for key in reversed(order):
            self._remove(key)
        return pages

    def clear(self) -> list[int]:
        """Removes all pages and returns them."""
        pages = self.pages
        if self.listener is not None:
            for key in reversed(self._nodes):  # children before their parents
                self.listener.removed(key)
        self._nodes.clear()
        self._keys.clear()
        self._leaves.clear()
        return pages

    def _remove(self, key: bytes) -> None:
        node = self._nodes.pop(key)
        assert not node.children, "only leaves are removed"
        del self._keys[node.page]
        if self.listener is not None:
            self.listener.removed(key)
        if node.parent is None:
            return
        parent = self._nodes[node.parent]
        parent.children.discard(key)
        parent.used = max(parent.used, node.used)
        if not parent.children:
            heapq.heappush(self._leaves, (parent.used, node.parent))

    def check_integrity(self) -> None:
        """Raises AssertionError for a broken invariant."""
        children: dict[bytes, set[bytes]] = {}
        for key, node in self._nodes.items():
            assert self._keys[node.page] == key, f"page {node.page}"
            if node.parent is not None:
                assert node.parent in self._nodes, "an orphan"
                children.setdefault(node.parent, set()).add(key)
        assert len(self._keys) == len(self._nodes)
        entries = set(self._leaves)
        for key, node in self._nodes.items():
            assert node.children == children.get(key, set()), f"page {node.page}"
            assert node.children or (node.used, key) in entries, f"page {node.page}"
