"""Ranges that become shorter: the accounting of pages, and what their tokens read afterwards."""

from __future__ import annotations

import random

import pytest

from memory.evicting_kv import EvictingKV
from tests.support.engine.fakes import check_mapping
from tests.support.memory.kv_model import KVModel, ModelSequence

LAYOUTS = [
    {"tokens_per_page": 4},
    {"tile_tokens": 4, "page_bytes": 64 * 6},
    {"tile_tokens": 4, "page_bytes": 64 * 3, "num_pages": 40},
    {"page_bytes": 96, "num_pages": 40, "in_background": True},
]


class EvictingModel(KVModel):
    """Sequences whose tokens are dropped. `places` of a sequence: the positions of its tokens, in
    the order of their places; the last ones are those computed since tokens were dropped."""

    kv: EvictingKV

    def __init__(self, **settings) -> None:
        super().__init__(manager=EvictingKV, **settings)
        self.places: dict[int, list[int]] = {}  # by range

    def open(self, tokens: list[int], salt: str) -> bool:
        is_open = super().open(tokens, salt)
        if is_open:
            sequence = self.running[-1]
            self.places[sequence.kv_range.index] = list(range(sequence.num_computed))
        return is_open

    def places_of(self, sequence: ModelSequence) -> list[int]:
        return self.places[sequence.kv_range.index]

    def advance(self, sequence: ModelSequence, num_tokens: int) -> bool:
        if sequence.num_computed == len(sequence.tokens):
            if len(sequence.tokens) == self.kv.max_model_len:
                return False
            sequence.tokens.append(len(sequence.tokens) % 3)
        end = min(len(sequence.tokens), sequence.num_computed + num_tokens)
        target, places = sequence.kv_range, self.places_of(sequence)
        if not self.kv.grow(target, end - target.dropped):
            return False
        self.kv.commit([target])
        self.check_reads(sequence)
        for position in range(sequence.num_computed, end):
            self.write(sequence, len(places), position)
            places.append(position)
        sequence.num_computed = end
        if not target.dropped:
            self.hasher.extend(sequence.keys, sequence.tokens, sequence.salt)
            self.kv.insert_prefix(target, sequence.keys, end)
        return True

    def write(self, sequence: ModelSequence, place: int, position: int) -> None:
        for page in self._pages(sequence, 0, place):
            page[place] = self._value(sequence, 0, position)

    def check_reads(self, sequence: ModelSequence) -> None:
        for place, position in enumerate(self.places_of(sequence)):
            for page in self._pages(sequence, 0, place):
                assert page.get(place) == self._value(sequence, 0, position), (place, position)

    def drop(self, sequence: ModelSequence, kept: list[int]) -> bool:
        """Keeps the tokens at these places; returns False if there are too few pages."""
        if not self.kv.can_shrink(sequence.kv_range, len(kept)):
            return False
        mover = _Mover(self, sequence, kept)
        num_dropped = sequence.num_computed - len(kept)
        self.kv.shrink(sequence.kv_range, len(kept), num_dropped, mover)
        assert sequence.kv_range.dropped == num_dropped
        return True


class _Mover:
    def __init__(self, model: EvictingModel, sequence: ModelSequence, kept: list[int]) -> None:
        self.model, self.sequence, self.kept = model, sequence, kept

    def take(self) -> object:
        places = self.model.places_of(self.sequence)
        read = [self.model._pages(self.sequence, 0, place)[0][place] for place in self.kept]
        expected = [self.model._value(self.sequence, 0, places[place]) for place in self.kept]
        assert read == expected
        return read

    def put(self, taken: object) -> None:
        places = self.model.places_of(self.sequence)
        for place, value in enumerate(taken):
            for page in self.model._pages(self.sequence, 0, place):
                page[place] = value
        places[:] = [places[place] for place in self.kept]

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


@pytest.mark.parametrize(
    "layout",
    [LAYOUTS[0], *[pytest.param(it, marks=pytest.mark.exhaustive) for it in LAYOUTS[1:]]],
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
            places = len(model.places_of(sequence))
            if what == "advance":
                counts[what] += model.advance(sequence, rng.choice((1, 1, 7)))
            elif what == "drop" and places > 1:
                kept = sorted(rng.sample(range(places), rng.randrange(1, places)))
                counts["drop" if model.drop(sequence, kept) else "short"] += 1
            elif what == "close":
                model.close(sequence)
                counts[what] += 1
        if number % 7 == 0:
            model.check()
            check_mapping(model.kv, model.memory)
    counts.pop("short")  # rare
    assert min(counts.values()) > 20, counts
    model.finish()
