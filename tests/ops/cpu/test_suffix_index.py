"""The suffix automaton against a search of the whole text."""

from __future__ import annotations

import random

import pytest

from ops.cpu import native_library

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)
SEPARATOR = -1


def ends_of(text: list[int], part: list[int]) -> list[int]:
    """Returns where the part occurs in the text: the places after its occurrences."""
    size = len(part)
    return [i + size for i in range(len(text) - size + 1) if text[i : i + size] == part]


def longest_end(text: list[int]) -> tuple[int, list[int]]:
    """Returns the length of the longest end that occurs before, and the places after it."""
    for length in range(len(text) - 1, 0, -1):
        end = text[-length:]
        before = ends_of(text[:-1], end)
        if before and SEPARATOR not in end:
            return length, before
    return 0, []


def continued(text: list[int], place: int, most: int) -> list[int]:
    """Returns what follows a place, where a text that ends goes on with that."""
    out: list[int] = []
    for at in range(place, place + most):
        token = text[at] if at < len(text) else out[at - len(text)]
        if token == SEPARATOR:
            break
        out.append(token)
    return out


@pytest.mark.parametrize("has_separators", [False, True])
@pytest.mark.parametrize("vocab", [2, 3, 6, 40])
def test_the_longest_match_and_what_followed_it(vocab, has_separators):
    rng = random.Random(vocab)
    for _ in range(40):
        index, text = native_library.library().SuffixIndex(), []
        while len(text) < 50:
            some = [rng.randrange(vocab) for _ in range(rng.randint(1, 3))]
            some += [SEPARATOR] * (has_separators and rng.random() < 0.1)
            text += some
            index.extend(some)
            length, places = longest_end(text)
            found = [index.follow(1, 5) for _ in range(2)]
            assert found[0] == found[1], "asking changes nothing"
            assert found[0][0] == length
            expected = [continued(text, place, 5) for place in places] or [[]]
            assert found[0][1] in expected
            assert index.follow(length + 1, 5) == (0, [])
        assert index.size == len(text)


def test_a_recent_continuation_is_preferred():
    index = native_library.library().SuffixIndex()
    index.extend([1, 2, 3, 9, 1, 2, 4, 9, 1, 2])
    assert index.follow(2, 1) == (3, [4])


def test_a_text_that_repeats_itself_goes_on_for_ever():
    index = native_library.library().SuffixIndex()
    index.extend([7, 1, 2, 3, 1, 2, 3])
    assert index.follow(2, 8) == (3, [1, 2, 3, 1, 2, 3, 1, 2])


@pytest.mark.parametrize("vocab", [2, 3, 6])
def test_a_cursor_follows_a_text_that_is_not_in_the_index(vocab):
    """What the index learns later may lengthen a match at its next token, not at once."""
    rng = random.Random(vocab)
    for _ in range(100):
        index, text, own = native_library.library().SuffixIndex(), [], []
        cursor = native_library.library().SuffixCursor(index)
        for _ in range(50):
            if rng.random() < 0.4:
                some = [rng.randrange(vocab) for _ in range(4)] + [SEPARATOR]
                text += some
                index.extend(some)
            own.append(rng.randrange(vocab))
            cursor.advance(own[-1:])
            length, tokens = cursor.follow(1, 4)
            best = max(n for n in range(len(own) + 1) if n == 0 or ends_of(text, own[-n:]))
            assert length <= best
            if length:
                places = ends_of(text, own[-length:])
                assert tokens in [continued([*text, SEPARATOR], p, 4) for p in places]


def test_a_cursor_finds_all_of_an_index_that_is_complete():
    rng = random.Random(1)
    index, text, own = native_library.library().SuffixIndex(), [], []
    text = [rng.randrange(4) for _ in range(300)]
    index.extend(text)
    cursor = native_library.library().SuffixCursor(index)
    for _ in range(300):
        own.append(rng.randrange(4))
        cursor.advance(own[-1:])
        sizes = range(min(12, len(own) + 1))
        best = max(n for n in sizes if n == 0 or ends_of(text, own[-n:]))
        assert cursor.follow(1, 3)[0] == best


def test_memory_is_linear():
    rng = random.Random(2)
    index = native_library.library().SuffixIndex()
    index.extend([rng.randrange(5000) for _ in range(20000)])
    assert index.bytes < 150 * index.size
