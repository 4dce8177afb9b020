"""Random walks over real pages: prefixes, forks, preemptions, failed steps, evictions and stores
of sequences with states. Every state and all K/V that a row reads are compared with a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import memory.range_mapper
from memory.pages.layer_groups import LayerGroup
from memory.tiers.disk_tier import DiskTier
from ops.cpu import native_library
from tests.support.memory.page_bytes import PageBytesStore
from tests.support.memory.page_store import Clock
from tests.support.memory.states_beside_model import StatesBesideModel
from tests.support.memory.states_model import PAGE, Running, StatesModel, Text

# 4 tokens a page; K/V pages of two records; tiles across pages; windows, blocks; a record per page
FULL = LayerGroup(1024)
LAYOUTS = {
    "pages": {"groups": (FULL,), "interval": 8},
    "wide pages": {"groups": (LayerGroup(256),), "interval": 8, "num_pages": 34},
    "tiles": {
        "groups": (LayerGroup(768, 4),),
        "interval": 16,
        "record_pages": 2,
        "in_background": True,
    },
    "windows": {
        "groups": (FULL, LayerGroup(512, window=12, read_block=4)),
        "interval": 16,
        "record_pages": 3,
        "num_pages": 160,
    },
    "blocks": {
        "groups": (FULL, LayerGroup(1024, window=16, read_block=8, by_block=True)),
        "interval": 8,
        "num_pages": 80,
    },
}
STORE_PAGES = 200


class Walk:
    """Draws operations on a model and counts what they met."""

    def __init__(
        self, rng: random.Random, model: StatesModel, store: PageBytesStore | DiskTier | None
    ) -> None:
        self.rng, self.model, self.store = rng, model, store
        self.prefixes, self.clock = model.kv.prefixes, Clock()
        if store is not None:
            memory = model.memory
            self.prefixes.use_store(store, memory.page_address, memory.keep_pages, self.clock)
        self.trunks = [[rng.randrange(200) for _ in range(150)] for _ in range(4)]
        self.waiting: list[Text] = []  # preempted
        self.ended: list[Text] = []  # turns of conversations
        self.counts = dict.fromkeys(("hits", "shared", "preempted", "failed", "refused"), 0)
        self.num_hit_tokens = 0

    # ---- texts

    def draw_text(self) -> Text:
        """Returns a prompt: a preempted one, the next turn of one that ended, or a new one."""
        rng, longest = self.rng, self.model.kv.max_model_len
        if self.waiting and rng.random() < 0.5:
            return self.waiting.pop(rng.randrange(len(self.waiting)))
        if self.ended and rng.random() < 0.4:
            text = rng.choice(self.ended).copy()
        else:
            trunk = rng.choice(self.trunks)
            text = Text(trunk[: rng.randint(1, 140)], rng.choice("aaab"))
        tail = [rng.randrange(200) for _ in range(rng.choice([0, 1, 3, 20]))]
        text.tokens += tail[: longest - len(text.tokens)]
        return text

    # ---- operations

    def open(self) -> None:
        self.open_text(self.draw_text())

    def open_text(self, text: Text) -> Running | None:
        if self.store is not None:
            self.fetch(self.model.keys_of(text))
        found = self.model.open(text, use_hit=self.rng.random() < 0.95)
        if found is None:
            self.counts["refused"] += 1
            self.waiting = [*self.waiting[-20:], text]
            return None
        self.counts["hits"] += found.num_computed > 0
        self.num_hit_tokens += found.num_computed
        pages = found.kv_range.parts[-1].pages
        references = self.model.record_pages.num_references
        self.counts["shared"] += bool(found.num_computed) and references(pages[-1]) > 2
        return found

    def fetch(self, keys: list[bytes]) -> None:
        for _ in range(self.rng.choice([1, 5])):
            if not self.model.kv.fetch(keys):
                break
            if isinstance(self.store, PageBytesStore):
                self.store.release()
            else:
                self.prefixes.wait(1.0)
            self.prefixes.poll()

    def fork(self) -> None:
        """Opens sequences that continue what another one has computed."""
        if not self.model.running:
            return self.open()
        parent = self.rng.choice(self.model.running)
        known = parent.text.copy()
        known.tokens = known.tokens[: max(2, parent.num_computed)]
        known.hashes = known.hashes[:1]
        for _ in range(self.rng.randint(1, 3)):
            self.open_text(known.copy())
        return None

    def step(self, *, fails: bool = False) -> None:
        """Computes rows of some sequences; for those that lack memory others are preempted."""
        rng, model = self.rng, self.model
        chosen = rng.sample(model.running, min(len(model.running), rng.randint(1, 4)))
        plan: list[tuple[Running, int]] = []
        for sequence in chosen:
            if sequence not in model.running:  # preempted for another one
                continue
            rows = self.rows_of(sequence)
            while rows and not model.grow(sequence, rows):
                kept = [sequence, *(other for other, _ in plan)]
                others = [other for other in model.running if other not in kept]
                if not others:
                    rows = 0
                    break
                self.preempt(others[-1])
            if rows:
                plan.append((sequence, rows))
        if plan:
            model.run(plan, fails=fails)
        if fails:
            self.counts["failed"] += bool(plan)
            for sequence, _ in plan:
                self.preempt(sequence)

    def rows_of(self, sequence: Running) -> int:
        tokens, longest = sequence.text.tokens, self.model.kv.max_model_len
        if sequence.num_computed == len(tokens):
            if len(tokens) == longest:
                self.end(sequence)
                return 0
            tokens.append(self.rng.randrange(200))
        most = min(self.rng.choice([1, 2, 5, 24, 24]), self.model.max_rows)
        return min(most, len(tokens) - sequence.num_computed)

    def fail(self) -> None:
        self.step(fails=True)

    def preempt(self, sequence: Running | None = None) -> None:
        if sequence is None:
            if not self.model.running:
                return
            sequence = self.rng.choice(self.model.running)
        self.model.close(sequence)
        self.counts["preempted"] += 1
        self.waiting = [*self.waiting[-20:], sequence.text]

    def end(self, sequence: Running | None = None) -> None:
        """Ends a sequence, often before its prompt is computed: it was aborted."""
        if sequence is None:
            if not self.model.running:
                return
            sequence = self.rng.choice(self.model.running)
        self.model.close(sequence)
        text = sequence.text.copy()
        text.tokens = text.tokens[: max(1, sequence.num_computed)]
        text.hashes = text.hashes[:1]
        self.ended = [*self.ended[-8:], text]

    def evict(self) -> None:
        self.model.evict(self.rng.randint(1, 12))

    def trim(self) -> None:
        self.model.kv.trim()

    def map_ahead(self) -> None:
        needs = [(each.kv_range, each.num_computed + 9) for each in self.model.running]
        self.model.kv.map_ahead(needs)

    def change_store(self) -> None:
        if isinstance(self.store, PageBytesStore):
            self.store.mode = self.rng.choice(["at once", "at once", "at once", "held", "failing"])
            self.store.release(self.rng.randint(0, 9))
        self.clock.now_s += self.rng.choice([0.1, 1.0, 12.0])
        if self.store is not None:
            self.prefixes.write_unwritten()

    # ---- the walk

    def operations(self) -> Iterator[Callable[[], None]]:
        weights: list[tuple[Callable[[], None], int]] = [
            (self.step, 100),
            (self.open, 24),
            (self.fork, 5),
            (self.end, 8),
            (self.preempt, 3),
            (self.fail, 3),
            (self.evict, 3),
            (self.change_store, 4),
            (self.map_ahead, 3),
            (self.trim, 1),
        ]
        chosen = [operation for operation, weight in weights for _ in range(weight)]
        while True:
            yield self.rng.choice(chosen)

    def run(self, num_operations: int) -> None:
        for number, operation in zip(range(num_operations), self.operations(), strict=False):
            operation()
            if self.store is not None:
                self.prefixes.poll()
            if number % 20 == 0:
                self.model.check()

    def finish(self) -> None:
        if isinstance(self.store, PageBytesStore):
            self.store.mode = "at once"
        while self.prefixes.is_transferring:
            if isinstance(self.store, PageBytesStore):
                self.store.release()
            self.prefixes.wait(1.0)
            self.prefixes.poll()
        self.model.finish()


def walk(layout: str, store: str, num_operations: int, folder: Path) -> Walk:
    model = StatesModel(**LAYOUTS[layout])
    stores: dict[str, Callable[[], PageBytesStore | DiskTier | None]] = {
        "none": lambda: None,
        "bytes": lambda: PageBytesStore(PAGE, STORE_PAGES),
        "disk": lambda: DiskTier(folder / "kv", PAGE, STORE_PAGES * PAGE, b"model", io="threads"),
    }
    made = Walk(random.Random(f"{layout} {store}"), model, stores[store]())
    made.run(num_operations)
    made.model.check()
    made.finish()
    check_counts(made, num_operations / 1000)
    stats, share = made.prefixes.stats, num_operations / 1000
    if store != "none":
        assert stats.num_stored > 50 * share and stats.num_loaded > 5 * share, stats
    return made


def check_counts(made: Walk, share: float) -> None:
    """Checks that the walk met everything, in a share of 1,000 operations."""
    counts = made.counts
    assert counts["hits"] > 20 * share and made.num_hit_tokens > 500 * share, counts
    assert counts["shared"] > share and counts["preempted"] > 15 * share, counts
    assert counts["failed"] > 10 * share and counts["refused"] > share, counts
    assert made.model.num_evicted > 300 * share, made.model.num_evicted


@pytest.fixture(autouse=True)
def unmap_early(monkeypatch):
    """Unmaps pages behind windows soon, so that a late read there ends the process."""
    monkeypatch.setattr(memory.range_mapper, "_UNMAP_SLOTS", 3)


EVERY_DAY = [
    ("pages", "bytes"),
    ("wide pages", "none"),
    ("tiles", "bytes"),
    ("windows", "bytes"),
    ("blocks", "none"),
]


@pytest.mark.parametrize(("layout", "store"), EVERY_DAY)
def test_2_000_operations(layout, store, tmp_path):
    walk(layout, store, 2_000, tmp_path)


@pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built")
def test_operations_over_a_disk(tmp_path):
    walk("pages", "disk", 1_500, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_100_000_operations(layout, tmp_path):
    """20,000 of each layout."""
    walk(layout, "bytes", 20_000, tmp_path)


# ---- K/V in other memories than the records


class WalkBeside(Walk):
    """Loses the K/V of a partition at times."""

    def change_store(self) -> None:
        if self.rng.random() < 0.3:
            lost = self.model.lose()
            self.waiting = [*self.waiting[-20:], *(sequence.text for sequence in lost)]
            self.counts["lost"] = self.counts.get("lost", 0) + len(lost)


BESIDE = {
    "pages": {"groups": (FULL,), "interval": 8},
    "wide pages": {"groups": (LayerGroup(256),), "interval": 8, "num_pages": 14},
    "one partition": {"groups": (FULL,), "interval": 16, "num_partitions": 1, "num_pages": 80},
    "windows": {
        "groups": (FULL, LayerGroup(512, window=12, read_block=4)),
        "interval": 16,
        "num_pages": 80,
        "num_records": 17,
    },
}


def walk_beside(layout: str, num_operations: int) -> None:
    made = WalkBeside(random.Random(layout), StatesBesideModel(**BESIDE[layout]), None)
    made.run(num_operations)
    made.model.check()
    made.finish()
    check_counts(made, num_operations / 1000)
    assert made.counts["lost"] > 3 * num_operations / 1000, made.counts


@pytest.mark.parametrize("layout", BESIDE)
def test_1_500_operations_beside_other_memories(layout):
    walk_beside(layout, 1_500)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", BESIDE)
def test_10_000_operations_beside_other_memories(layout):
    walk_beside(layout, 10_000)
