"""A sequence waits until its store has found out which pages it has, and no longer."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from tests.serve.scheduler.test_hit_costs import PROMPT, Rig


class AskedRig(Rig):
    """A store that knows of its pages once the questions about them are answered."""

    def __init__(self) -> None:
        super().__init__(with_store=True)
        self.questions: list[tuple[list[bytes], Future[bool]]] = []
        self.known: set[bytes] = set()
        self.kv.prefixes.question.ask_store = self.ask
        self.store.plan = lambda kind, key: None
        self.asked: set[bytes] = set()

    def ask(self, keys):
        if keys[-1] in self.asked:
            return None
        self.asked.add(keys[-1])
        self.questions.append((list(keys), Future()))
        return self.questions[-1][1]


@pytest.fixture
def rig():
    made = AskedRig()
    made.add("first", num_tokens=2)
    made.step()
    made.questions[0][1].set_result(True)  # nothing is there yet
    made.run()
    made.evict_all()
    made.asked.clear()
    made.questions.clear()
    return made


def test_it_waits_for_the_answer_and_then_loads(rig):
    second = rig.add("second", num_tokens=2)
    assert rig.step() is None
    assert rig.kv.prefixes.is_asking and rig.kv.prefixes.is_transferring
    (asked, answer) = rig.questions[0]
    assert len(asked) == (len(PROMPT)) // 4
    assert rig.step() is None, "it still waits"
    answer.set_result(True)
    rig.run()
    assert second.num_cached_tokens >= len(PROMPT) - 4
    assert len(rig.questions) == 1
    assert not rig.kv.prefixes.is_transferring


def test_running_sequences_go_on_meanwhile(rig):
    other = rig.add("other", prompt=[77] * 3, num_tokens=50)
    while rig.scheduler.waiting:
        rig.step()
    rig.add("second", num_tokens=2)
    before = other.num_tokens
    for _ in range(5):
        assert rig.step() is not None
    assert other.num_tokens == before + 5
    assert rig.kv.prefixes.is_asking


def test_it_does_not_wait_for_ever(rig):
    second = rig.add("second", num_tokens=2)
    assert rig.scheduler.schedule(0.0) is None
    assert rig.scheduler.schedule(1.0) is None
    plan = rig.scheduler.schedule(2.5)
    assert plan is not None and second.num_cached_tokens == 0
    rig.kv.commit()
    rig.scheduler.update(plan, [9] * sum(plan.samples))


def test_waiting_ends_with_the_answer(rig):
    rig.add("second", num_tokens=2)
    rig.step()
    rig.kv.prefixes.wait(0.01)
    rig.questions[0][1].set_result(True)
    rig.kv.prefixes.wait(10.0)
    rig.kv.prefixes.poll()
    assert not rig.kv.prefixes.is_asking


def test_pages_in_memory_are_not_asked_about(rig):
    keys = rig.add("second", num_tokens=2)
    rig.step()
    rig.questions[0][1].set_result(True)
    rig.run()
    assert keys.is_finished
    rig.questions.clear()
    rig.asked.clear()
    rig.add("third", prompt=[*PROMPT, *range(40, 60)], num_tokens=2)
    rig.step()
    assert len(rig.questions[0][0]) <= 6
