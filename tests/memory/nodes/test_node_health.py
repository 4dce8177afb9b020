"""The states of memory nodes in virtual time: what is lost, what is only late, and when a lost node
is used again."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import pytest

from memory.nodes.node_health import (
    FORGET_S,
    JITTER,
    LATE_FOR_S,
    MAX_STALLED_S,
    MAY_BECOME,
    MIN_PROBES,
    PROBATION_S,
    SLOW_FACTOR,
    SLOW_S,
    AnswerPace,
    NodeHealth,
    NodeState,
)
from memory.nodes.node_states import NodeStates, _text

HEALTHY, LATE, LOST, PROBATION = NodeState


class Clocked:
    """A node whose probes come once a second."""

    def __init__(self, jitter=lambda number: 0.0):
        self.now = 100.0
        self.health = NodeHealth(jitter)
        self.health.hold(self.now)

    def lose(self, was_silent=True):
        self.health.lose(self.now, was_silent=was_silent)

    def seconds_until_usable(self, most=1000.0):
        began = self.now
        while not self.health.may_be_used(self.now):
            self.now += 1.0
            self.health.probe(self.now, is_found=True)
            assert self.now < began + most
        return self.now - began


def test_a_late_node_is_not_lost_and_recovers():
    node = Clocked()
    node.health.be_late(node.now)
    assert node.health.state is LATE and node.health.may_be_used(node.now)
    node.health.update(node.now + LATE_FOR_S - 0.1)
    assert node.health.state is LATE
    node.health.be_late(node.now + 5.0)
    node.health.update(node.now + LATE_FOR_S)
    assert node.health.state is LATE, "it was late again"
    node.health.update(node.now + 5.0 + LATE_FOR_S)
    assert node.health.state is HEALTHY and node.health.num_losses == 0


def test_probations_become_longer_with_each_loss_until_losses_are_forgotten():
    node, waits = Clocked(), []
    for _ in range(6):
        node.lose()
        assert node.health.state is LOST
        waits.append(node.seconds_until_usable())
        node.health.hold(node.now)
        assert node.health.state is HEALTHY
        node.now += FORGET_S - 1.0
    assert waits == [*PROBATION_S, 60.0, 60.0]
    node.now += 1.0
    node.lose()
    assert node.health.num_losses == 1 and node.seconds_until_usable() == PROBATION_S[0]


def test_time_without_k_v_forgets_nothing():
    node = Clocked()
    node.lose()
    node.now += 10 * FORGET_S
    node.seconds_until_usable()
    node.health.hold(node.now)
    node.lose()
    assert node.health.num_losses == 2


def test_a_probe_that_fails_begins_the_probation_anew():
    node = Clocked()
    node.lose()
    node.now += PROBATION_S[0] - 0.5
    node.health.probe(node.now, is_found=True)
    assert node.health.state is PROBATION
    node.health.probe(node.now, is_found=False)
    assert node.health.state is LOST and node.health.num_losses == 1
    assert node.seconds_until_usable() == PROBATION_S[0]


def test_a_probation_takes_several_probes():
    node = Clocked()
    node.lose()
    node.now += 10 * PROBATION_S[0]
    for _ in range(MIN_PROBES):
        assert not node.health.may_be_used(node.now)
        node.health.probe(node.now, is_found=True)
    assert node.health.may_be_used(node.now)


def test_a_first_loss_is_tried_again_at_once_unless_the_node_was_silent():
    node = Clocked()
    node.lose(was_silent=False)
    assert node.health.may_be_used(node.now)
    node.health.probe(node.now, is_found=True)
    assert node.health.state is PROBATION and node.health.may_be_used(node.now), "found first"
    node.health.hold(node.now)
    node.lose(was_silent=False)
    assert not node.health.may_be_used(node.now), "not a second time"
    node.health.probe(node.now, is_found=True)
    assert not node.health.may_be_used(node.now)
    silent = Clocked()
    silent.lose()
    assert not silent.health.may_be_used(silent.now)
    refuses = Clocked()
    refuses.lose(was_silent=False)
    refuses.health.probe(refuses.now, is_found=False)
    assert not refuses.health.may_be_used(refuses.now)


def test_a_node_that_leaves_is_not_lost():
    node = Clocked()
    node.health.leave(node.now)
    assert node.health.state is LOST and node.health.num_losses == 0
    assert node.seconds_until_usable() == PROBATION_S[0]


def test_the_jitter_lengthens_a_probation():
    node = Clocked(lambda number: 1.0)
    node.lose()
    assert node.seconds_until_usable() == PROBATION_S[0] * (1 + JITTER)


@pytest.mark.parametrize(("share", "is_given_up"), [(0.05, False), (0.5, True)])
def test_a_node_that_stalls_too_often_is_given_up(share, is_given_up):
    node, seconds = Clocked(), 0.0
    while seconds < 300.0 and not node.health.stalls_too_often:
        seconds += 2.0
        node.health.stall(node.now + seconds, 2.0 * share)
        assert node.health.state is LATE
    assert node.health.stalls_too_often == is_given_up
    if is_given_up:
        assert seconds <= 2.5 * MAX_STALLED_S
        node.lose(was_silent=False)
        assert not node.health.may_be_used(node.now)


def test_a_wait_stalls_beyond_what_is_usual_for_its_work():
    pace = AnswerPace()
    assert pace.stalled_s(1e9, 1e9) == 0.0
    pace.learn(1e6, 0.1)
    assert pace.stalled_s(1.0, SLOW_S - 0.01) == 0.0
    assert pace.stalled_s(1.0, SLOW_S) == pytest.approx(SLOW_S, abs=1e-3)
    assert pace.stalled_s(1e7, SLOW_FACTOR - 0.1) == 0.0
    assert pace.stalled_s(1e7, SLOW_FACTOR + 2.0) == pytest.approx(2.0)
    for _ in range(1000):  # short work says little
        pace.learn(100.0, 0.001)
    assert pace.stalled_s(1e7, SLOW_FACTOR) == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_random_events_keep_the_rules(seed):
    """States change only as MAY_BECOME allows, and a node that is used only when it may be is lost
    a few times at most in any 80 s, whatever it does."""
    source = random.Random(seed)
    node = Clocked(lambda number: source.random())
    health, state, is_used, losses = node.health, HEALTHY, True, []
    good = source.choice([0.95, 0.99, 1.0])
    failure_s = source.choice([0.1, 1.0, 10.0, 100.0])
    for _ in range(4000):
        node.now += source.expovariate(2.0)
        if is_used and source.random() < 0.5 / failure_s:
            node.lose(was_silent=source.random() < 0.5)
            losses.append(node.now)
            is_used = False
        elif is_used and source.random() < 0.1:
            health.be_late(node.now)
        elif not is_used and health.may_be_used(node.now):
            health.hold(node.now)
            is_used = True
        elif not is_used:
            health.probe(node.now, is_found=source.random() < good)
        else:
            health.update(node.now)
        assert health.state is state or health.state in MAY_BECOME[state]
        assert not is_used or health.state in (HEALTHY, LATE)
        state = health.state
    assert losses
    for first in losses:
        assert sum(first <= at < first + 80.0 for at in losses) <= 4


def test_a_node_that_fails_whenever_it_is_used_is_used_rarely():
    node, losses = Clocked(), []
    while node.now < 100.0 + 3600.0:
        node.lose(was_silent=False)
        losses.append(node.now - 100.0)
        node.seconds_until_usable()
        node.health.hold(node.now)
    assert losses[:6] == [0.0, 0.0, 15.0, 60.0, 120.0, 180.0]
    assert losses[-1] - losses[-2] == 60.0


# ---- all nodes of an engine


def link_to(url, **fields):
    endpoint = SimpleNamespace(silence_s=0.0)
    link = SimpleNamespace(
        url=url, endpoint=endpoint, is_lost=False, is_leaving=False, was_late=False
    )
    link.stalled_s = link.unanswered_s = 0.0
    link.close = lambda: setattr(link, "is_lost", True)
    for name, value in fields.items():
        setattr(link, name, value)
    return link


def test_signs_of_a_link_become_states():
    now = [100.0]
    states = NodeStates(["a", "b", "c"], "engine", lambda: now[0])
    links = [link_to("a"), link_to("b", was_late=True), link_to("c")]
    links[2].endpoint.silence_s = 0.8
    states.look([*links, link_to("this machine", was_late=True)])
    assert states.by_url() == {"a": HEALTHY, "b": LATE, "c": LATE}
    assert states.late() == {"b", "c"}
    links[2].endpoint.silence_s = 0.0
    now[0] += LATE_FOR_S
    states.look(links)
    assert states.by_url() == {"a": HEALTHY, "b": HEALTHY, "c": HEALTHY}
    links[0].stalled_s = MAX_STALLED_S + 1.0
    states.look(links)
    assert [link.is_lost for link in links] == [True, False, False]
    states.end(links)
    states.end([link_to("b", is_lost=True), link_to("c", is_leaving=True)])
    assert states.by_url() == {"a": LOST, "b": LOST, "c": LOST}
    assert states.usable(["a", "b", "c"]) == ["b"], "its connection ended without silence"


def test_silence_before_a_loss_is_noticed():
    states = NodeStates(["a", "b"], "engine", lambda: 100.0)
    silent = link_to("a", is_lost=True)
    silent.endpoint.silence_s = 1.25
    states.end([silent, link_to("b", is_lost=True, unanswered_s=30.0)])
    assert states.usable(["a", "b"]) == []


def test_changes_are_logged_once_and_not_too_often(caplog):
    caplog.set_level(logging.INFO, "memory.nodes.node_states")
    now = [100.0]
    states = NodeStates(["a", "b"], "engine", lambda: now[0])
    for _ in range(600):  # a minute
        now[0] += 0.1
        states.look([link_to("a"), link_to("b")])
        states.end([link_to("a", is_lost=True)])
        states.probe(["a"], ["a"])
        states.hold([link_to("a")])
    texts = [record.getMessage() for record in caplog.records]
    assert texts and all(text.startswith("memory node a: ") for text in texts)
    assert len(texts) <= 7
    assert "it is used again when it has answered for" in texts[0]


def test_a_node_without_a_loss_is_not_called_lost() -> None:
    """The log of a node that was asked to leave had "lost (0 in a row)"."""
    node = NodeHealth()
    node.hold(1000.0)
    node.leave(1010.0)
    assert _text(node) == "not in use; it is used again when it has answered for 5 s"
    node.hold(1020.0)
    node.lose(1030.0, was_silent=True)
    assert _text(node).startswith("lost (1 in a row)")
