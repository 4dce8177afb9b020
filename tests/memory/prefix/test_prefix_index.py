"""What is forgotten first, and what that takes along."""

from __future__ import annotations

from memory.prefix.index import PrefixHasher, PrefixIndex


def chain(index: PrefixIndex, name: str, pages: list[int]) -> list[bytes]:
    keys = [f"{name}{i}".encode() for i in range(len(pages))]
    for i, page in enumerate(pages):
        assert index.insert(keys[i], keys[i - 1] if i else None, page)
    return keys


def forgotten(index: PrefixIndex, keep: tuple[int, ...] = ()) -> list[int]:
    pages = []
    while (found := index.evict_oldest(lambda page: page not in keep)) is not None:
        pages.append(found[1])
        index.check_integrity()
    return pages


def test_the_end_of_the_oldest_chain_goes_first():
    index = PrefixIndex()
    a, _ = chain(index, "a", [1, 2, 3]), chain(index, "b", [4, 5])
    assert index.match([*a, b"x"]) == [1, 2, 3]
    index.touch(a[2])
    assert forgotten(index) == [5, 4, 3, 2, 1]


def test_a_shared_beginning_stays_as_long_as_it_is_used():
    """Its use is remembered although it is no leaf at that time."""
    index = PrefixIndex()
    system = chain(index, "s", [1, 2])
    index.insert(b"turn", system[1], 3)
    cold = chain(index, "c", [4, 5])
    index.touch(system[1])  # a hit that ends there
    assert index.match(cold) == [4, 5]
    assert forgotten(index) == [3, 5, 4, 2, 1]


def test_what_is_in_use_is_left_and_counts_as_used():
    index = PrefixIndex()
    chain(index, "a", [1])
    chain(index, "b", [2])
    assert forgotten(index, keep=(1,)) == [2]
    assert forgotten(index) == [1]
    assert len(index) == 0


def test_a_tree_goes_as_a_whole():
    index = PrefixIndex()
    a = chain(index, "a", [1, 2])
    index.insert(b"x", a[0], 3)
    index.insert(b"y", b"x", 4)
    assert sorted(index.evict_tree(3)) == [3, 4]
    index.check_integrity()
    assert index.match([*a]) == [1, 2]
    assert sorted(index.clear()) == [1, 2]
    index.check_integrity()


def test_touching_for_ever_takes_no_memory():
    index = PrefixIndex()
    (key,) = chain(index, "a", [1])
    for _ in range(1000):
        index.touch(key)
    index.check_integrity()
    assert len(index._leaves) < 100


def test_keys_depend_on_every_token_the_salt_and_the_secret():
    def keys(tokens: list[int], salt: str | None = None, secret: bytes = b"s") -> list[bytes]:
        found: list[bytes] = []
        hasher = PrefixHasher(lambda page: 4 * (page + 1), secret)
        hasher.extend(found, tokens[:5], salt)
        hasher.extend(found, tokens, salt)
        return found

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
