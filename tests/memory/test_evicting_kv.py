"""Ranges that become shorter: the accounting of pages, and what their tokens read afterwards."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from memory.evicting_kv import EvictingKV
from memory.pages.layer_groups import LayerGroup
from tests.support.engine.fakes import check_mapping
from tests.support.memory.kv_model import KVModel, ModelSequence

LAYOUTS = [
    {"tokens_per_page": 4},
    {"tile_tokens": 4, "page_bytes": 64 * 6},
    {"tile_tokens": 4, "page_bytes": 64 * 3, "num_pages": 40},
    {"page_bytes": 96, "num_pages": 40, "in_background": True},
    {"groups": (LayerGroup(16), LayerGroup(16), LayerGroup(32)), "page_bytes": 128},
    {"groups": (LayerGroup(16, 4), LayerGroup(24, 4)), "page_bytes": 80, "num_pages": 40},
]


class EvictingModel(KVModel):
    """Sequences whose tokens are dropped. `places` of a sequence: for each group the positions of
    its tokens, in the order of their places; the last ones are those computed since tokens were
    dropped."""

    kv: EvictingKV

    def __init__(self, **settings) -> None:
        super().__init__(manager=EvictingKV, **settings)
        self.places: dict[int, list[list[int]]] = {}  # by range

    def open(self, tokens: list[int], salt: str) -> bool:
        is_open = super().open(tokens, salt)
        if is_open:
            sequence = self.running[-1]
            whole = range(sequence.num_computed)
            self.places[sequence.kv_range.index] = [list(whole) for _ in self.kv.layout.groups]
        return is_open

    def places_of(self, sequence: ModelSequence) -> list[list[int]]:
        return self.places[sequence.kv_range.index]

    def advance(self, sequence: ModelSequence, num_tokens: int) -> bool:
        if sequence.num_computed == len(sequence.tokens):
            if len(sequence.tokens) == self.kv.max_model_len:
                return False
            sequence.tokens.append(len(sequence.tokens) % 3)
        end = min(len(sequence.tokens), sequence.num_computed + num_tokens)
        target = sequence.kv_range
        if not self.kv.grow(target, end - target.dropped):
            return False
        self.kv.commit([target])
        self.check_reads(sequence)
        for position in range(sequence.num_computed, end):
            for number, places in enumerate(self.places_of(sequence)):
                self.write(sequence, number, len(places), position)
                places.append(position)
        sequence.num_computed = end
        if not target.dropped:
            self.hasher.extend(sequence.keys, sequence.tokens, sequence.salt)
            self.kv.insert_prefix(target, sequence.keys, end)
        return True

    def write(self, sequence: ModelSequence, number: int, place: int, position: int) -> None:
        for page in self._pages(sequence, number, place):
            page[place] = self._value(sequence, number, position)

    def check_reads(self, sequence: ModelSequence) -> None:
        for number, places in enumerate(self.places_of(sequence)):
            for place, position in enumerate(places):
                for page in self._pages(sequence, number, place):
                    expected = self._value(sequence, number, position)
                    assert page.get(place) == expected, (number, place, position)

    def check(self) -> None:
        super().check()
        for sequence in self.running:
            held = list(map(len, self.places_of(sequence)))
            assert sequence.kv_range.capacity >= max(held)
            needed = self.kv.layout.pages_of(held)
            assert len(sequence.kv_range.pages) - needed in range(len(held) + 1)

    def drop(self, sequence: ModelSequence, *kept: list[int]) -> bool:
        """Keeps the tokens at these places of each group; returns False if there are too few
        pages."""
        counts = [len(places) for places in kept]
        if not self.kv.can_shrink(sequence.kv_range, counts):
            return False
        mover = _Mover(self, sequence, kept)
        num_dropped = sequence.num_computed - max(counts)
        self.kv.shrink(sequence.kv_range, counts, num_dropped, mover)
        assert sequence.kv_range.dropped == num_dropped
        assert len(sequence.kv_range.pages) == self.kv.layout.pages_of(counts)
        return True


class _Mover:
    def __init__(
        self, model: EvictingModel, sequence: ModelSequence, kept: Sequence[list[int]]
    ) -> None:
        self.model, self.sequence, self.kept = model, sequence, kept

    def take(self) -> object:
        model, sequence = self.model, self.sequence
        taken = []
        for number, places in enumerate(model.places_of(sequence)):
            kept = self.kept[number]
            read = [model._pages(sequence, number, place)[0][place] for place in kept]
            assert read == [model._value(sequence, number, places[place]) for place in kept]
            taken.append(read)
        return taken

    def put(self, taken: object) -> None:
        for number, places in enumerate(self.model.places_of(self.sequence)):
            for place, value in enumerate(taken[number]):
                for page in self.model._pages(self.sequence, number, place):
                    page[place] = value
            places[:] = [places[place] for place in self.kept[number]]

    def move(self) -> None:
        self.put(self.take())


def opened(num_tokens=24, **settings):
    model = EvictingModel(**settings)
    assert model.open([i % 5 for i in range(num_tokens)], "a")
    (sequence,) = model.running
    assert model.advance(sequence, num_tokens)
    return model, sequence


def test_pages_that_are_left_are_free_at_once():
    model, sequence = opened()
    free = model.kv.num_available
    assert model.drop(sequence, [0, 1, 20, 21, 22])
    assert len(sequence.kv_range.pages) == 2
    assert model.kv.num_available == free + 4
    assert model.kv.num_dropped_tokens == 19
    model.check()
    for _ in range(9):
        assert model.advance(sequence, 1)
    assert len(sequence.kv_range.pages) == 4
    model.finish()
    assert sequence.kv_range.dropped == 0


def test_cached_and_shared_pages_are_not_written():
    model, first = opened()
    assert model.open(first.tokens, "a"), "a second one with the same pages"
    second = model.running[1]
    assert second.num_computed == 23
    assert model.drop(first, [0, 7, 23])
    assert not set(first.kv_range.pages) & set(second.kv_range.pages)
    assert model.advance(second, 1), "it reads its own values"
    assert model.drop(second, [3, 4, 5, 6, 7, 8, 22])
    assert model.open(first.tokens, "a"), "a third one finds the whole prompt"
    assert model.running[2].num_computed == 23
    model.check()
    model.finish()


def test_too_few_pages_are_noticed_before_anything_changes():
    """All pages are held by two sequences that share them, so nothing can take their place."""
    model, first = opened(num_pages=7)
    assert model.open(first.tokens, "a")
    second = model.running[1]
    before = list(first.kv_range.pages)
    assert model.kv.num_available == 0
    assert not model.drop(first, [0, 1, 2, 3, 4])
    assert first.kv_range.pages == before
    model.close(second)
    assert model.drop(first, [0, 1, 2, 3, 4]), "alone it always can"
    model.check()
    model.finish()


def test_a_failed_mapping_loses_that_range_alone():
    model, first = opened()
    assert model.open([7] * 9, "b")
    second = model.running[1]
    assert model.advance(second, 9)
    model.memory.fail_next = "map"
    with pytest.raises(OSError, match="no memory"):
        model.drop(first, [0, 9, 23])
    model.close(first)
    model.check()
    model.finish()


GROUPS = {"groups": (LayerGroup(16), LayerGroup(16), LayerGroup(32)), "page_bytes": 64}


def test_groups_that_hold_less_free_more():
    """Pages of 4, 4 and 2 tokens, of 6, 6 and 12 pages."""
    model, sequence = opened(num_pages=24, **GROUPS)
    assert model.kv.num_available == 0
    assert model.drop(sequence, [0, 1, *range(14, 24)], [3, 4, 5, 6, 22, 23], [9, 23])
    assert [len(part.pages) for part in sequence.kv_range.parts] == [3, 2, 1]
    assert sequence.kv_range.dropped == 12 and sequence.kv_range.capacity == 12
    assert model.kv.num_available == 18
    model.check()
    for grown in ([4, 2, 2], [4, 2, 2], [4, 3, 3], [4, 3, 3], [5, 3, 4]):
        assert model.advance(sequence, 1)
        assert [len(part.pages) for part in sequence.kv_range.parts] == grown
        model.check()
    model.close(sequence)
    assert model.open([5] * 24, "b"), "a new sequence of the range holds as many in all groups"
    assert model.advance(model.running[0], 24)
    assert [len(part.pages) for part in model.running[0].kv_range.parts] == [6, 6, 12]
    model.check()
    model.finish()


def test_groups_whose_pages_are_shared_are_copied():
    model, first = opened(num_pages=60, **GROUPS)
    assert model.open(first.tokens, "a"), "a second one with the same pages"
    second = model.running[1]
    assert second.num_computed == 23
    assert model.drop(first, [0, 7, 8, 9, 23], [1, 2, 23], [23])
    assert not set(first.kv_range.pages) & set(second.kv_range.pages)
    assert model.advance(second, 1), "it reads its own values"
    assert model.drop(second, [*range(20)], [*range(9)], [0, 23])
    assert model.open(first.tokens, "a"), "a third one finds the whole prompt"
    assert model.running[2].num_computed == 23
    model.check()
    model.finish()


def test_a_shared_page_of_any_group_is_not_written():
    model, first = opened(3, **GROUPS)
    index = model.kv.prefixes.index
    shared = [[page in index for page in part.pages] for part in first.kv_range.parts]
    assert shared == [[False], [False], [True, False]]
    assert model.drop(first, [0], [0], [0, 2])
    assert not any(page in index for page in first.kv_range.pages)
    model.check()
    model.finish()


@pytest.mark.parametrize(
    "layout",
    [
        it if number == 0 else pytest.param(it, marks=pytest.mark.exhaustive)
        for number, it in enumerate(LAYOUTS)
    ],
)
def test_20_000_random_operations(layout):
    rng = random.Random(3)
    model = EvictingModel(**layout)
    prompts = [[(i * i * k) % 3 for i in range(40)] for k in (1, 2)]
    counts = dict.fromkeys(("open", "advance", "drop", "short", "close", "trim"), 0)
    for number in range(20_000):
        what = rng.choices(("open", "advance", "drop", "close", "trim"), (3, 12, 3, 1, 0.3))[0]
        running = model.running
        if what == "open" and len(running) < len(model.kv.ranges):
            tokens = rng.choice(prompts)[: rng.randrange(1, 38)]
            counts[what] += model.open(tokens, rng.choice("ab"))
        elif what == "trim":
            model.kv.trim()
            counts[what] += 1
        elif running:
            sequence = rng.choice(running)
            places = list(map(len, model.places_of(sequence)))
            if what == "advance":
                counts[what] += model.advance(sequence, rng.choice((1, 1, 7)))
            elif what == "drop" and min(places) > 1:
                kept = [sorted(rng.sample(range(n), rng.randrange(1, n))) for n in places]
                counts["drop" if model.drop(sequence, *kept) else "short"] += 1
            elif what == "close":
                model.close(sequence)
                counts[what] += 1
        if number % 7 == 0:
            model.check()
            check_mapping(model.kv, model.memory)
    counts.pop("short")  # rare
    assert min(counts.values()) > 20, counts
    model.finish()
