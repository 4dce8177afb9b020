"""Sequences whose prompts a peer computes: how often the page store is asked, and that two engines
do not wait for each other."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from memory.prefix.sequence_names import SequenceNames
from serve.request import FinishReason
from serve.scheduler import prefix_lookup
from tests.serve.scheduler.test_hit_costs import Rig


class AwaitingRig(Rig):
    """A store like that of peers: an answer is used once, by who repeats the question. The test
    says which pages the peer has and which it computes."""

    def __init__(self) -> None:
        super().__init__(num_pages=256, with_store=True)
        prefixes = self.kv.prefixes
        prefixes.question.ask_store = self.ask
        prefixes.question.is_coming = lambda key: key in self.coming
        self.questions: list[Future[bool]] = []
        self.coming: set[bytes] = set()
        self.last: bytes | None = None
        self.is_silent = False
        self.lookup = self.scheduler.prefixes
        self.lookup.names = SequenceNames(self.kv.page_end)

    def ask(self, keys):
        if keys[-1] == self.last:
            self.last = None
            return None
        self.last = keys[-1]
        self.questions.append(Future())
        if not self.is_silent:
            self.questions[-1].set_result(True)
        return self.questions[-1]

    def wait_for(self, first: int, num_pages: int = 20):
        """Adds a sequence that waits for a peer, which computes the prompt."""
        prompt = range(first, first + 4 * num_pages + 1)
        sequence = self.add(f"of {first}", prompt=prompt, num_tokens=2, awaits_prefill=True)
        keys = self.lookup.page_keys(sequence.request)
        self.coming |= set(keys)
        return sequence, keys

    def come(self, keys) -> None:
        """The peer has these pages."""
        self.coming -= set(keys)
        self.store.pages |= {key: {0: 0} for key in keys}

    def is_awaited(self, sequence, now_s: float) -> bool:
        self.kv.prefixes.poll()
        return self.lookup.is_awaited(sequence, now_s)

    def num_here(self, keys) -> int:
        return sum(map(self.kv.prefixes.is_cached, keys))


@pytest.fixture
def rig():
    return AwaitingRig()


def turns(rig, sequences, begin_s: float, end_s: float) -> list[bool]:
    """Takes the turns of this time; returns who still waits after it."""
    now_s, waits = begin_s, [True] * len(sequences)
    while now_s < end_s:
        for number, sequence in enumerate(sequences):
            waits[number] = rig.is_awaited(sequence, now_s)
        now_s += 0.005
    return waits


def test_pages_are_loaded_as_they_come_and_the_store_is_asked_every_hundredth_second(rig):
    sequence, keys = rig.wait_for(100)
    for num_there in (0, 4, 5, 19, 20):
        rig.come(keys[:num_there])
        begin_s = num_there / 10
        waits = turns(rig, [sequence], begin_s, begin_s + 0.1)
        assert rig.num_here(keys) == num_there
        assert waits == [num_there < 20]
    assert 4 * 6 < len(rig.questions) < 5 * 12 + 5
    rig.kv.check_integrity()


def test_the_whole_prompt_is_looked_at_only_when_pages_come(rig, monkeypatch):
    sequence, keys = rig.wait_for(100)
    turns(rig, [sequence], 0.0, 0.05)
    rig.come(keys[:10])
    turns(rig, [sequence], 0.05, 0.1)
    assert rig.num_here(keys) == 10
    counted: list[int] = []
    for name in ("num_cached_tokens", "fetch"):
        real = getattr(rig.kv, name)
        monkeypatch.setattr(
            rig.kv, name, lambda keys, *rest, real=real: counted.append(1) or real(keys, *rest)
        )
    before = len(rig.questions)
    turns(rig, [sequence], 0.1, 0.5)
    assert len(rig.questions) > before + 20 and not counted
    rig.come(keys[:12])
    turns(rig, [sequence], 0.5, 0.6)
    assert rig.num_here(keys) == 12 and 2 <= len(counted) <= 6


def test_pages_that_are_evicted_while_it_waits_are_loaded_again(rig):
    sequence, keys = rig.wait_for(100)
    rig.come(keys[:10])
    turns(rig, [sequence], 0.0, 0.1)
    assert rig.num_here(keys) == 10
    while rig.num_here(keys) > 3:
        rig.kv.prefixes.evict()
    turns(rig, [sequence], 0.1, 0.2)
    assert rig.num_here(keys) == 10
    rig.come(keys)
    assert turns(rig, [sequence], 0.2, 0.3) == [False]
    assert rig.num_here(keys) == 20


@pytest.mark.parametrize("is_answered", [True, False])
def test_others_go_on_if_the_one_that_asked_is_aborted(rig, is_answered):
    asker, _ = rig.wait_for(100)
    other, keys = rig.wait_for(300)
    rig.is_silent = True
    assert rig.is_awaited(asker, 0.0)
    assert rig.is_awaited(other, 0.0)
    rig.is_silent = False
    if is_answered:
        rig.questions[-1].set_result(True)
    rig.scheduler.finish(asker, FinishReason.ABORT)
    rig.come(keys[:5])
    if not is_answered:
        turns(rig, [other], 0.0, 0.25)
        rig.questions[0].set_result(True)
    turns(rig, [other], 0.25, 0.3)
    assert rig.num_here(keys) == 5


def test_it_waits_no_longer_than_its_time_for_another_ones_answer(rig, monkeypatch):
    monkeypatch.setattr(prefix_lookup, "_STALLED_UNKNOWN_S", 0.5)
    asker, _ = rig.wait_for(100)
    other, _ = rig.wait_for(300)
    rig.is_silent = True
    assert rig.is_awaited(asker, 0.0)
    rig.questions[-1].set_result(True)
    rig.kv.prefixes.poll()
    assert rig.lookup.is_awaited(other, 0.1) and rig.lookup.is_awaited(other, 0.55)
    assert not rig.lookup.is_awaited(other, 0.7)


def test_a_prompt_is_announced_to_peers_once_the_wait_for_a_peer_has_ended(rig):
    sequence, keys = rig.wait_for(100)
    rig.coming.clear()  # nobody computes it
    assert turns(rig, [sequence], 0.0, 0.2) == [True]
    assert not any(map(rig.lookup.names.is_expected, keys))
    assert turns(rig, [sequence], 0.2, prefix_lookup._UNKNOWN_S + 0.02) == [False]
    assert all(map(rig.lookup.names.is_expected, keys))
    rig.run()
    assert sequence.is_finished
    assert not any(map(rig.lookup.names.is_expected, keys))


def test_a_sequence_that_ends_while_it_waits_leaves_no_names(rig):
    sequence, _ = rig.wait_for(100)
    turns(rig, [sequence], 0.0, 0.1)
    rig.scheduler.finish(sequence, FinishReason.ABORT)
    assert not rig.lookup.names._expected and not rig.lookup.names._sequences


def test_what_a_peer_computes_is_not_predicted_to_delay_others(rig):
    model = rig.scheduler.chunks.model
    rig.learn_row_time(0.01)
    sequence, keys = rig.wait_for(100)
    arriving = sequence.request

    def wait_s() -> float:
        return rig.scheduler.waiting.seconds_before(arriving, 1)

    assert 0.0 < wait_s() < 0.1 * model.prefill_seconds(sequence.num_tokens, 0)
    rig.come(keys[:10])
    assert turns(rig, [sequence], 0.0, 0.1) == [True]
    rig.coming.clear()  # the peer is gone
    assert turns(rig, [sequence], 0.1, 0.2) == [False]
    rest_s = model.prefill_seconds(sequence.num_tokens, 40)
    assert rest_s > 0.2 and wait_s() == pytest.approx(rest_s)
