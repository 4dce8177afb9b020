"""Which experts are in memory: those that are used most, and guesses while they come true."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.streaming.expert_traces import Access, heat_hits, lru_hits, oracle_hits
from ops.backend import Routing
from serve.loading.streaming import experts as module
from serve.loading.streaming.experts import ExpertSlots
from serve.loading.streaming.reader import Fetch, ReadStats
from serve.loading.streaming.units import Unit

EXPERTS, MIXTURES, TOP_K = 8, 3, 2


class InstantReader:
    """A reader that has everything at once, and notes what was read."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.stats = ReadStats()

    def fetch(self, unit: Unit, address: int) -> Fetch:
        self.read.append(unit.name)
        return Fetch(unit.name, 0)

    def wait(self, fetch: Fetch) -> None:
        assert fetch.is_done


class SlotsOp:
    """Experts that give their number, as the owner of their slot tells it."""

    def __init__(self) -> None:
        self.slots: ExpertSlots | None = None
        self.mixture = 0

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        assert self.slots is not None
        owners = np.array(self.slots._owner)[routing.experts.numpy()]
        assert (owners[..., 0] == self.mixture).all(), "an expert of another mixture"
        parts = torch.from_numpy(owners[..., 1:].astype(np.float32)) * x[:, None, :]
        total = (parts * routing.weights[..., None]).sum(1)
        return total if residual is None else residual + total


def make(num_slots: int) -> tuple[ExpertSlots, InstantReader, SlotsOp]:
    units = [[Unit(f"{m}.{e}", (), 0) for e in range(EXPERTS)] for m in range(MIXTURES)]
    op, reader = SlotsOp(), InstantReader()
    slots = ExpertSlots(units, list(range(num_slots)), op, num_out=4, scales_input=False)
    slots.reader = reader  # type: ignore[assignment]
    op.slots = slots
    for slot, (mixture, expert) in enumerate(slots.first_content()):
        slots.fill(slot, mixture, expert)
    return slots, reader, op


def routing(chosen: list[list[int]]) -> Routing:
    return Routing(torch.tensor(chosen, dtype=torch.int32), torch.rand(len(chosen), TOP_K))


def compute(slots: ExpertSlots, op: SlotsOp, mixture: int, chosen: list[list[int]]) -> None:
    """Compares the result with what the experts give."""
    op.mixture = mixture
    x, route = torch.randn(len(chosen), 4), routing(chosen)
    want = (route.experts.float()[..., None] * x[:, None, :] * route.weights[..., None]).sum(1)
    assert torch.allclose(slots.compute(mixture, x, route, None), want, atol=1e-5)
    residual = torch.randn(len(chosen), 4)
    made = slots.compute(mixture, x, route, residual.clone())
    assert torch.allclose(made, residual + want, atol=1e-5)


def drawn(draw: random.Random, rows: int, weights: list[int]) -> list[list[int]]:
    """Returns different experts for each row, some of them more often."""
    found = []
    for _ in range(rows):
        first = draw.choices(range(EXPERTS), weights)[0]
        other = draw.choices([e for e in range(EXPERTS) if e != first])[0]
        found.append([first, other])
    return found


@pytest.mark.parametrize("num_slots", [4, 5, 8, 12, 23, 24])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_every_result_is_that_of_the_right_experts(num_slots: int, rows: int) -> None:
    """Also where a step uses more experts than there are slots."""
    slots, reader, op = make(num_slots)
    draw = random.Random(num_slots)
    for _ in range(20):
        for mixture in range(MIXTURES):
            compute(slots, op, mixture, drawn(draw, rows, [1, 2, 4, 8, 16, 8, 4, 2]))
    assert (len(reader.read) == 0) == (num_slots == 24)
    kept = slots.content()
    assert len(set(kept)) == len(kept) <= num_slots
    for mixture, expert in kept:
        assert slots._owner[slots._slot_of[mixture, expert]].tolist() == [mixture, expert]


def test_what_is_used_often_stays() -> None:
    slots, reader, op = make(9)
    for step in range(60):
        for mixture in range(MIXTURES):
            compute(slots, op, mixture, [[6, 7] if step % 4 else [step // 4 % 6, 7]])
    reader.read.clear()
    for mixture in range(MIXTURES):
        compute(slots, op, mixture, [[6, 7]])
    assert not reader.read
    assert slots.stats.hits > slots.stats.misses


def test_the_policy_is_the_simulated_one_and_between_lru_and_the_oracle() -> None:
    slots, _, op = make(12)
    trace: list[Access] = []
    start = slots.content()
    draw = random.Random(1)
    for _ in range(200):
        for mixture in range(MIXTURES):
            chosen = drawn(draw, 2, [1, 1, 1, 2, 4, 16, 32, 8])
            used = sorted({expert for row in chosen for expert in row})
            trace.append((mixture, used))
            op.mixture = mixture
            slots.compute(mixture, torch.randn(2, 4), routing(chosen), None)
    found = slots.stats.hits / (slots.stats.hits + slots.stats.misses)
    simulated = heat_hits(trace, 12, start)
    assert found == pytest.approx(simulated, abs=0.02)
    assert lru_hits(trace, 12, start) < simulated < oracle_hits(trace, 12, start)


def test_the_oracle_is_the_best_of_all_policies() -> None:
    """Against a search over all choices, for short traces. What is used must be in memory then."""

    def best(trace: list[str], kept: frozenset[str], size: int) -> int:
        if not trace:
            return 0
        name, rest = trace[0], trace[1:]
        if name in kept:
            return 1 + best(rest, kept, size)
        full = kept | {name}
        if len(full) <= size:
            return best(rest, full, size)
        return max(best(rest, full - {out}, size) for out in kept)

    for seed in range(20):
        draw = random.Random(seed)
        trace = [(0, [draw.randrange(5)]) for _ in range(9)]
        want = best([str(experts[0]) for _, experts in trace], frozenset(), 2)
        assert oracle_hits(trace, 2) * len(trace) == pytest.approx(want)
        assert lru_hits(trace, 2) <= oracle_hits(trace, 2)
        assert heat_hits(trace, 2) <= oracle_hits(trace, 2)


def test_an_expert_whose_read_does_not_begin_has_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, reader, op = make(4)
    absent = [e for e in range(EXPERTS) if (0, e) not in slots.content()][:TOP_K]

    def fail(*_: object) -> Fetch:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(reader, "fetch", fail)
        with pytest.raises(MemoryError):
            compute(slots, op, 0, [absent])
    assert not {(0, expert) for expert in absent} & set(slots.content())
    compute(slots, op, 0, [absent])
    assert reader.read == [f"0.{expert}" for expert in absent]


def test_guesses_for_which_there_is_no_room_are_not_counted() -> None:
    slots, reader, op = make(4)
    reader.read.clear()
    for mixture, chosen in enumerate(([[0, 1], [2, 3]], [[4, 5], [6, 7]])):
        op.mixture = mixture
        guess = None if mixture else (lambda: torch.tensor([4, 5, 6, 7]))
        slots.compute(mixture, torch.randn(2, 4), routing(chosen), None, guess)
    assert slots.stats.guesses == slots.stats.used_guesses == 0


def test_a_guess_is_judged_once() -> None:
    """Steps of many rows make no guesses after it."""
    slots, _, op = make(12)
    slots.compute(0, torch.randn(1, 4), routing([[0, 1]]), None, lambda: torch.tensor([6, 7]))
    for _ in range(3):
        compute(slots, op, 1, [[6, 7]])
    assert slots.stats.guesses == slots.stats.used_guesses == 2


def test_guesses_that_come_true_are_read_ahead_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LEARNING", 0.1)
    slots, _, op = make(12)

    def step(chosen: list[list[int]], guesses: list[int]) -> None:
        for mixture in range(MIXTURES):
            op.mixture = mixture
            guess = None if mixture + 1 == MIXTURES else (lambda: torch.tensor(guesses))
            slots.compute(mixture, torch.randn(len(chosen), 4), routing(chosen), None, guess)

    draw = random.Random(0)
    for _ in range(40):
        chosen = draw.sample(range(EXPERTS), TOP_K)
        step([chosen], chosen)
    assert slots.stats.guesses == slots.stats.used_guesses > 20
    before = slots.stats.guesses
    for _ in range(60):
        chosen = draw.sample(range(EXPERTS), TOP_K)
        step([chosen], [expert for expert in range(EXPERTS) if expert not in chosen][:TOP_K])
    wrong = slots.stats.guesses - before
    assert 0 < wrong < 30, "they end when most are wrong"
    before = slots.stats.guesses
    for _ in range(60):
        chosen = draw.sample(range(EXPERTS), TOP_K)
        step([chosen], chosen)
    assert slots.stats.guesses > before, "and begin again when they come true"
