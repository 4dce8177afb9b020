"""Partitioned K/V memory keeps each sequence whole in one partition and sums the partitions'
counts."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from memory.pages.layer_groups import LayerGroup
from memory.partitioned_kv import PartitionHit
from memory.prefix.index import PrefixHasher
from tests.support.engine.fakes import check_mapping, make_partitioned_kv
from tests.support.memory.kv_model import KVModel, ModelSequence
from tests.support.profile import examples

PROMPTS = [[(i * i * k) % 3 for i in range(40)] for k in (1, 2)]
LAYOUTS = [
    {"tokens_per_page": 4},
    {"groups": (LayerGroup(64), LayerGroup(32, window=6, read_block=2)), "max_rows": 8},
]
NUM_PAGES, NUM_RANGES = 20, 3


class PartitionedModel(KVModel):
    """Knows what every page must hold, in the memory of each sequence's partition."""

    def __init__(self, num_partitions: int, **layout) -> None:
        self.kv, self.memories = make_partitioned_kv(
            num_partitions, NUM_PAGES, NUM_RANGES, 40, **layout
        )
        self.hasher = PrefixHasher(self.kv.page_end, b"secret")
        self.running: list[ModelSequence] = []
        self.num_hit_tokens = 0
        self.max_rows = layout.get("max_rows") or self.kv.max_model_len

    def open(self, tokens, salt) -> bool:
        keys: list[bytes] = []
        self.hasher.extend(keys, tokens, salt)
        hit = self.kv.match(keys, len(tokens) - 1)
        found = [
            found.num_tokens
            for partition in self.kv.partitions
            if (found := partition.match(keys, len(tokens) - 1)) is not None
            and partition.can_fit(len(tokens), 0, found)
        ]
        has_opened = super().open(tokens, salt)
        if has_opened and hit is not None:
            assert hit.num_tokens == max(found)
            assert isinstance(hit, PartitionHit)
            assert self.kv.partition_of(self.running[-1].kv_range) == hit.partition
        return has_opened

    @property
    def memory(self):
        """Returns the memory of the sequence that is being checked."""
        return self.memories[self._partition]

    def _pages(self, sequence, number, position):
        self._partition = self.kv.partition_of(sequence.kv_range)
        return super()._pages(sequence, number, position)

    def check(self) -> None:
        super().check()
        kv, partitions = self.kv, self.kv.partitions
        for name in ("num_pages", "num_available", "num_cached", "num_in_use", "num_mapped"):
            total = sum(getattr(partition, name) for partition in partitions)
            assert getattr(kv, name) == total, name
        assert kv.num_in_use + kv.num_available == kv.num_pages
        for sequence in self.running:
            partition = partitions[kv.partition_of(sequence.kv_range)]
            assert any(sequence.kv_range is item for item in partition.ranges)
            for other in self.running:
                is_one = kv.partition_of(other.kv_range) == kv.partition_of(sequence.kv_range)
                assert kv.shares_memory(sequence.kv_range, other.kv_range) == is_one
        num_live = sum(partition.num_pages > 0 for partition in partitions)
        for spare in (0, 3):
            fits = [m.can_fit(20, -(-spare // max(1, num_live))) for m in partitions]
            assert kv.can_fit(20, spare) == any(fits)

    def lose(self, number: int, num_pages: int) -> None:
        """Resets a partition: it gets another number of pages and loses all that it held."""
        for sequence in [s for s in self.running if self.kv.partition_of(s.kv_range) == number]:
            self.close(sequence)
        self.kv.partitions[number].reset(num_pages)
        self.memories[number].mapped.clear()
        self.memories[number].content.clear()
        assert self.kv.max_sequence_pages == max(
            partition.num_pages for partition in self.kv.partitions
        )

    def finish(self) -> None:
        for sequence in list(self.running):
            self.close(sequence)
        self.check()
        assert self.kv.num_in_use == 0
        self.kv.close_all()
        for partition, memory in zip(self.kv.partitions, self.memories, strict=True):
            check_mapping(partition, memory)
            assert not memory.mapped
        assert self.kv.num_mapped == 0


def test_ranges_of_the_partitions_are_consecutive():
    kv, _ = make_partitioned_kv(3, NUM_PAGES, NUM_RANGES, 40)
    starts = [item.start for item in kv.ranges]
    assert starts == [i * kv.range_tokens for i in range(9)]
    assert [kv.partition_of(item) for item in kv.ranges] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_sequence_opens_in_the_partition_with_the_most_free_pages():
    kv, _ = make_partitioned_kv(2, NUM_PAGES, NUM_RANGES, 40)
    chosen = []
    for _ in range(6):
        assert kv.can_fit(8)
        item = kv.open(8)
        assert kv.grow(item, 8)
        chosen.append(kv.partition_of(item))
    assert sorted(chosen) == [0, 0, 0, 1, 1, 1] and chosen[0] != chosen[1]
    assert not kv.can_fit(8), "no range is idle"


def test_a_sequence_never_spans_two_partitions():
    """Both partitions together would have room."""
    kv, _ = make_partitioned_kv(2, 6, NUM_RANGES, 40, tokens_per_page=4)
    for _ in range(2):
        assert kv.grow(kv.open(12), 12)
    assert kv.num_available == 6
    assert kv.can_fit(12) and not kv.can_fit(16)


def open_computed(kv, tokens):
    """Returns a sequence whose tokens are computed and in the prefix cache, and its page keys."""
    keys: list[bytes] = []
    PrefixHasher(kv.page_end, b"secret").extend(keys, tokens, "")
    item = kv.open(len(tokens), kv.match(keys, len(tokens) - 1))
    assert kv.grow(item, len(tokens))
    kv.commit([item])
    kv.insert_prefix(item, keys, len(tokens))
    return item, keys


def test_a_full_partition_with_a_prefix_hit_does_not_block_the_other():
    kv, _ = make_partitioned_kv(2, 12, NUM_RANGES, 40, tokens_per_page=4)
    tokens = list(range(16))
    first, keys = open_computed(kv, tokens)
    number = kv.partition_of(first)
    hit = kv.match(keys, 15)
    assert isinstance(hit, PartitionHit) and hit.partition == number
    while kv.partitions[number].can_fit(16, 0, kv.partitions[number].match(keys, 15)):
        kv.partitions[number].open(40)
    assert kv.match(keys, 15) is None and kv.can_fit(16), "there is room elsewhere"
    assert kv.partition_of(kv.open(16, None)) != number
    while kv.can_fit(1):
        kv.open(1)
    assert kv.match(keys, 15) is not None, "it waits for the partition with the prefix"


def test_only_ranges_of_one_partition_make_room():
    kv, _ = make_partitioned_kv(2, 6, NUM_RANGES, 40, tokens_per_page=4)
    ranges = []
    for num_tokens in (8, 8, 12, 12):  # two partitions of 6 pages, of which 5 are in use in each
        ranges.append(kv.open(num_tokens))
        assert kv.grow(ranges[-1], num_tokens)
    by_partition = [
        [item for item in ranges if kv.partition_of(item) == number] for number in (0, 1)
    ]
    assert [sum(len(item.pages) for item in items) for items in by_partition] == [5, 5]
    assert kv.ranges_to_close(24, [by_partition[0][0], by_partition[1][0]]) is None, (
        "no partition has 6 pages"
    )
    assert kv.ranges_to_close(24, [*by_partition[1], *by_partition[0]]) == by_partition[0], (
        "the last one is in this partition"
    )
    assert kv.ranges_to_close(24, [*by_partition[1], by_partition[0][0]]) == by_partition[1]
    assert kv.ranges_to_close(4, []) == []


def test_promised_pages_make_no_room():
    kv, _ = make_partitioned_kv(2, 20, NUM_RANGES, 80, tokens_per_page=4)
    assert kv.open(72).promised_pages == 18
    running, *leaving = ranges = [kv.partitions[1].open(num_tokens) for num_tokens in (48, 8, 8)]
    for item, num_tokens in zip(ranges, (48, 8, 8), strict=True):
        assert kv.partition_of(item) == 1 and kv.grow(item, num_tokens)
    assert kv.ranges_to_close(60, leaving) is None
    assert kv.ranges_to_close(60, [running, *leaving]) == [running, *leaving]
    assert kv.ranges_to_close(32, leaving) == leaving


def test_only_partitions_with_pages_share_the_spare_pages():
    kv, _ = make_partitioned_kv(2, 6, NUM_RANGES, 40, tokens_per_page=4)
    assert kv.can_fit(16, 4)
    kv.partitions[0].reset(0)
    assert kv.can_fit(16, 2) and not kv.can_fit(16, 4)


class PartitionedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model: PartitionedModel | None = None

    @initialize(num_partitions=st.integers(1, 3), layout=st.sampled_from(LAYOUTS))
    def start(self, num_partitions, layout) -> None:
        self.model = PartitionedModel(num_partitions, **layout)

    @rule(prompt=st.sampled_from(PROMPTS), length=st.integers(1, 40), salt=st.sampled_from("ab"))
    def open(self, prompt, length, salt) -> None:
        self.model.open(prompt[:length], salt)

    @precondition(lambda self: self.model and self.model.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 40))
    def advance(self, data, num_tokens) -> None:
        self.model.advance(data.draw(st.sampled_from(self.model.running)), num_tokens)

    @precondition(lambda self: self.model and self.model.running)
    @rule(data=st.data())
    def close(self, data) -> None:
        self.model.close(data.draw(st.sampled_from(self.model.running)))

    @rule(data=st.data(), num_pages=st.sampled_from([0, 12, NUM_PAGES]))
    def lose(self, data, num_pages) -> None:
        number = data.draw(st.integers(0, len(self.model.kv.partitions) - 1))
        self.model.lose(number, num_pages)

    @rule()
    def trim(self) -> None:
        self.model.kv.trim()

    @invariant()
    def consistent(self) -> None:
        if self.model:
            self.model.check()

    def teardown(self) -> None:
        if self.model:
            self.model.finish()


TestPartitionedMachine = PartitionedMachine.TestCase
TestPartitionedMachine.settings = examples(60, steps=40)


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_partitions", [2, 3])
def test_3_000_random_operations(layout, num_partitions):
    rng = random.Random(7)
    model = PartitionedModel(num_partitions, **layout)
    for number in range(3000):
        operation = rng.random()
        if operation < 0.2:
            prompt = rng.choice(PROMPTS)[: rng.randint(1, 40)]
            model.open([*prompt[:-1], rng.randrange(2)], "a")
        elif operation < 0.8 and model.running:
            model.advance(rng.choice(model.running), rng.choice([1, 1, 2, 8, 40]))
        elif operation < 0.92 and model.running:
            model.close(rng.choice(model.running))
        elif operation < 0.925:
            model.lose(rng.randrange(num_partitions), rng.choice([0, 12, NUM_PAGES, NUM_PAGES]))
        elif operation < 0.93:
            model.kv.trim()
        if number % 10 == 0:
            model.check()
    assert model.num_hit_tokens > 100
    assert model.kv.prefixes.stats.num_evicted > 10
    model.finish()


def test_an_avoided_partition_gets_new_sequences_only_if_no_other_has_room():
    kv, _ = make_partitioned_kv(2, NUM_PAGES, NUM_RANGES, 40, tokens_per_page=4)
    keys: list[bytes] = []
    PrefixHasher(kv.page_end, b"secret").extend(keys, PROMPTS[0], b"")
    first = kv.open(40)
    assert kv.partition_of(first) == 0 and kv.grow(first, 40)
    kv.commit()
    kv.insert_prefix(first, keys, 40)
    hit = kv.match(keys, 39)
    assert isinstance(hit, PartitionHit) and hit.partition == 0
    kv.avoided = frozenset([0])
    assert kv.match(keys, 39) is None, "the prefix is computed again elsewhere"
    others = [kv.open(4) for _ in range(NUM_RANGES)]
    assert [kv.partition_of(item) for item in others] == [1] * NUM_RANGES
    assert kv.can_fit(4) and kv.match(keys, 39) is not None
    others.append(kv.open(4))
    assert kv.partition_of(others[-1]) == 0, "the other one has no range left"
    for item in [first, *others]:
        kv.close(item)
    kv.close_all()
