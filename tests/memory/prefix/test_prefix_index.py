"""The prefix index evicts the least recently used leaf first, and a tree as a whole."""

from __future__ import annotations

from memory.prefix.index import PrefixHasher, PrefixIndex


def chain(index: PrefixIndex, name: str, pages: list[int]) -> list[bytes]:
    keys = [f"{name}{i}".encode() for i in range(len(pages))]
    for i, page in enumerate(pages):
        assert index.insert(keys[i], keys[i - 1] if i else None, page)
    return keys


def evicted(index: PrefixIndex, keep: tuple[int, ...] = ()) -> list[int]:
    pages = []
    while (keys_out := index.evict_oldest(lambda page: page not in keep)) is not None:
        pages.append(keys_out[1])
        index.check_integrity()
    return pages


def test_the_end_of_the_oldest_chain_is_evicted_first():
    index = PrefixIndex()
    a, _ = chain(index, "a", [1, 2, 3]), chain(index, "b", [4, 5])
    assert index.match([*a, b"x"]) == [1, 2, 3]
    index.touch(a[2])
    assert evicted(index) == [5, 4, 3, 2, 1]


def test_a_shared_prefix_stays_while_it_is_used():
    """A node's use counts even when it is no leaf at that time."""
    index = PrefixIndex()
    system = chain(index, "s", [1, 2])
    index.insert(b"turn", system[1], 3)
    cold = chain(index, "c", [4, 5])
    index.touch(system[1])  # a prefix hit that ends there
    assert index.match(cold) == [4, 5]
    assert evicted(index) == [3, 5, 4, 2, 1]


def test_a_page_in_use_is_skipped_and_counts_as_recent():
    index = PrefixIndex()
    chain(index, "a", [1])
    chain(index, "b", [2])
    assert evicted(index, keep=(1,)) == [2]
    assert evicted(index) == [1]
    assert len(index) == 0


def test_a_tree_is_evicted_as_a_whole():
    index = PrefixIndex()
    a = chain(index, "a", [1, 2])
    index.insert(b"x", a[0], 3)
    index.insert(b"y", b"x", 4)
    assert sorted(index.evict_tree(3)) == [3, 4]
    index.check_integrity()
    assert index.match([*a]) == [1, 2]
    assert sorted(index.clear()) == [1, 2]
    index.check_integrity()


def test_touching_many_times_takes_no_memory():
    index = PrefixIndex()
    (key,) = chain(index, "a", [1])
    for _ in range(1000):
        index.touch(key)
    index.check_integrity()
    assert len(index._leaves) < 100


def test_keys_depend_on_every_token_the_salt_and_the_secret():
    def keys(tokens: list[int], salt: str | None = None, secret: bytes = b"s") -> list[bytes]:
        keys_out: list[bytes] = []
        hasher = PrefixHasher(lambda page: 4 * (page + 1), secret)
        hasher.extend(keys_out, tokens[:5], salt)
        hasher.extend(keys_out, tokens, salt)
        return keys_out

    base = keys(list(range(13)))
    assert len(base) == 3
    assert len({*base}) == 3
    assert keys([0, 1, 2, 3, 99, *range(5, 13)])[0] == base[0]
    for other in (
        keys([9, *range(1, 13)]),
        keys(list(range(13)), "salt"),
        keys(list(range(13)), secret=b"t"),
    ):
        assert not {*other} & {*base}
