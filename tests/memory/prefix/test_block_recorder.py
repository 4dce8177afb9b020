"""What the recorder tells is enough to follow the index, with pages of any size."""

from __future__ import annotations

import random

import pytest

from memory.pages.layer_groups import LayerGroup, PageLayout
from memory.prefix.block_recorder import AllRemoved, BlockRecorder, RemovedPage
from memory.prefix.index import PrefixHasher, PrefixIndex


def make(token_bytes: int, tile_tokens: int = 1, **settings: int) -> tuple[PrefixIndex, ...]:
    layout = PageLayout([LayerGroup(token_bytes, tile_tokens)], 4096, 4096, 4096)
    recorder, index = BlockRecorder(layout, **settings), PrefixIndex()
    index.listener = recorder
    return layout, recorder, index


def insert(
    layout, recorder, index, token_ids: list[int], first_page: int, salt=None
) -> list[bytes]:
    """Inserts the pages of a sequence that the index lacks, as the cache does."""
    keys: list[bytes] = []
    PrefixHasher(layout.page_end, b"secret").extend(keys, token_ids, salt)
    recorder.begin(token_ids, keys, salt)
    for number, key in enumerate(keys):
        index.insert(key, keys[number - 1] if number else None, first_page + number)
    recorder.end()
    return keys


@pytest.mark.parametrize(
    ("token_bytes", "tile_tokens"), [(256, 1), (128, 16), (64, 1), (100, 1), (300, 4), (1024, 1)]
)
def test_the_blocks_of_a_chain_follow_one_another(token_bytes, tile_tokens):
    layout, recorder, index = make(token_bytes, tile_tokens)
    token_ids = random.Random(1).choices(range(1000), k=500)
    keys = insert(layout, recorder, index, token_ids, 0)
    events = recorder.take(1000)
    assert [event.key for event in events] == keys
    assert [event.parent for event in events] == [None, *keys[:-1]]
    told = [token for event in events for token in event.tokens]
    end = layout.page_end(len(keys) - 1)
    assert told == token_ids[: end // 16 * 16]
    covered = 0
    for number, event in enumerate(events):
        covered += len(event.tokens)
        assert layout.page_end(number) - 16 < covered <= layout.page_end(number)


def test_removals_come_children_first():
    layout, recorder, index = make(256)
    keys = insert(layout, recorder, index, list(range(64)), 0)
    recorder.take(100)
    assert index.evict_oldest(lambda page: True) == (keys[-1], 3)
    assert recorder.take(100) == [RemovedPage(keys[-1])]
    index.clear()
    assert recorder.take(100) == [RemovedPage(key) for key in reversed(keys[:-1])]


def test_what_another_sequence_inserts_is_not_taken_for_this_one():
    _, recorder, index = make(256)
    recorder.begin([1] * 16, [b"a"], None)
    index.insert(b"other", None, 0)
    recorder.end()
    index.insert(b"unannounced", None, 1)
    index.clear()
    assert recorder.take(100) == []


@pytest.mark.parametrize("with_salted", [False, True])
def test_salted_pages(with_salted):
    layout, recorder, index = make(256, with_salted=with_salted)
    insert(layout, recorder, index, list(range(32)), 0, salt="s")
    index.clear()
    events = recorder.take(100)
    assert len(events) == (4 if with_salted else 0)
    assert all(event.salt == "s" for event in events[:2])


def test_too_many_events_forget_everything_and_pages_come_back_with_their_ancestors():
    layout, recorder, index = make(256, max_events=4)
    token_ids = list(range(128))
    keys = insert(layout, recorder, index, token_ids[:96], 0)  # 6 pages
    assert recorder.num_overflows >= 1
    events = recorder.take(100)
    assert events[0] == AllRemoved() and len(events) <= 4
    known: set[bytes] = set()
    recorder._max_events = 100
    keys = insert(layout, recorder, index, token_ids[:112], 0)
    for event in [*events, *recorder.take(100)]:
        if isinstance(event, AllRemoved):
            known.clear()
        else:
            assert event.parent is None or event.parent in known, "an orphan"
            known.add(event.key)
    assert known == set(keys)


def test_it_wakes_once_until_it_is_taken_from():
    layout, recorder, index = make(256)
    calls: list[int] = []
    recorder.wake = lambda: calls.append(1)
    insert(layout, recorder, index, list(range(64)), 0)
    assert len(calls) == 1
    recorder.take(1)
    insert(layout, recorder, index, list(range(80)), 0)
    assert len(calls) == 2
