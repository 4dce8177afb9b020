"""Recovery of lost nodes: when they are asked to come back, and which sequences end because the
remaining memory is too small. The test sets the time; nodes run in its own thread."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from memory.kv_manager import MAX_MAPPINGS
from serve.engine import node_recovery as recovery
from serve.engine.node_recovery import SETTLED_S, TOO_LITTLE_LEFT, NodeProber, NodeRecovery
from serve.request import FinishReason
from tests.support.engine.fakes import make_scheduler, make_seq
from tests.support.engine.raw_engine import REQUEST, RawEngine, page_bytes
from tests.support.nodes.remote_rig import RemoteRig, layers_of
from tests.support.transport.transport_rig import wait_until


class FakeProber(NodeProber):
    """A prober that reports given nodes as back."""

    def __init__(self, *urls):
        self.urls = set(urls)
        self.num_invalidated = 0

    def is_back(self, url):
        return url in self.urls

    def take(self):
        return frozenset(self.urls)

    def invalidate(self):
        self.num_invalidated += 1

    def start(self):
        pass

    def stop(self):
        pass


class RecoveryRun:
    """Drives the recovery of an engine as its loop does."""

    def __init__(self, *back, **settings):
        self.rig = RemoteRig(layers_of(), **settings)
        self.now = 1000.0
        self.ended = {}
        self.scheduler = make_scheduler(self.rig.kv)
        self.prober = FakeProber(*back)
        self.recovery = NodeRecovery(
            self.rig.set,
            self.rig.kvs,
            self.scheduler,
            self._end,
            lambda: self.now,
            self.prober,
        )
        self.rig.set.states._clock = lambda: self.now

    def _end(self, sequence, reason, why):
        assert reason is FinishReason.ERROR
        assert sequence not in self.ended
        self.ended[sequence] = why, self.now
        self.scheduler.waiting.remove(sequence)

    def urls(self):
        return [link.url for link in self.rig.set.partitions[0].links]

    def attempts(self, until, node="a"):
        """Returns the times at which the engine attaches to a node until then."""
        times, process = [], self.rig.nodes.nodes[node]
        num_attached = process.stats().num_attached
        while self.now < until:
            self.now += 0.5
            assert self.recovery.update_nodes()
            if (number := process.stats().num_attached) > num_attached:
                times.append(self.now)
                num_attached = number
        return times

    def close(self):
        self.recovery.close()
        self.rig.close()


def gaps(began, times):
    return [later - earlier for earlier, later in zip([began, *times], times, strict=False)]


# ---- nodes that report to be back


def test_failing_attempts_to_attach_back_off():
    """Every attempt discards computed K/V, so attempts must not follow each other closely."""
    run = RecoveryRun("b")
    run.rig.nodes.kill("b")
    assert run.recovery.update_nodes() and run.urls() == ["a"]
    began = run.now
    times = run.attempts(began + 1400.0)
    first, *later = gaps(began, times)
    assert 5.0 <= first <= 6.5, "its probation has a jitter"
    assert later == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]
    assert run.urls() == ["a"] and not run.recovery.is_short
    run.close()


def test_a_success_resets_the_back_off():
    """That is the one between attempts; probations become longer with each loss."""
    run = RecoveryRun("b")
    run.rig.nodes.kill("b")
    assert run.recovery.update_nodes()
    assert len(run.attempts(run.now + 100.0)) == 4  # the next attempt is 80 s after the last
    run.rig.nodes.gone.clear()
    again = run.attempts(run.now + 100.0, "b")
    assert len(again) == 1 and run.urls() == ["a", "b"]
    run.rig.nodes.kill("b")
    run.now += 1.0
    assert run.recovery.update_nodes() and run.urls() == ["a"]
    began = run.now
    run.rig.nodes.gone.clear()
    assert run.recovery._settled_s == SETTLED_S
    [gap] = gaps(began, run.attempts(began + 50.0, "b"))
    assert 15.0 <= gap <= 18.5
    run.close()


def test_a_loss_invalidates_earlier_probes():
    """A node that was back may be the one that is lost now."""
    run = RecoveryRun("b")
    run.rig.nodes.kill("b")
    assert run.recovery.update_nodes()
    assert run.prober.num_invalidated == 1, "the loss is noticed between steps"
    run.rig.nodes.kill("a")
    run.recovery.handle_loss(ConnectionError("a step failed"))
    assert run.prober.num_invalidated == 2
    run.close()


def test_a_node_that_is_not_back_is_not_attached():
    run = RecoveryRun()
    run.rig.nodes.kill("b")
    assert run.recovery.update_nodes()
    run.rig.nodes.gone.clear()
    assert run.attempts(run.now + 60.0) == []
    run.prober.urls.add("b")
    assert run.attempts(run.now + 4.5) == []
    assert len(run.attempts(run.now + 2.0)) == 1
    assert run.urls() == ["a", "b"]
    run.close()


def test_a_sequence_that_lost_its_kv_twice_is_not_moved_again():
    """It would be computed again for a node that may be lost again."""
    run = RecoveryRun("b")
    run.rig.nodes.kill("b")
    assert run.recovery.update_nodes() and run.urls() == ["a"]
    sequence = arrive(run, 40)
    run.prober.urls.clear()
    steps(run, 5.0)
    sequence.num_lost = 2
    run.rig.nodes.gone.clear()
    run.prober.urls.add("b")
    steps(run, 20.0)
    assert sequence.is_finished is False and run.urls() == ["a"]
    run.scheduler.finish(sequence, FinishReason.ABORT)
    sequence = arrive(run, 40)
    steps(run, 1.0)
    assert run.urls() == ["a", "b"]
    run.rig.nodes.kill("a")
    steps(run, 1.0)
    assert sequence.num_lost == 1
    run.close()


# ---- too little memory for long sequences


def make_short() -> RecoveryRun:
    """Loses one of two nodes that together had little more room than a full-length sequence."""
    run = RecoveryRun(capacity_bytes=70 * (16 << 10))
    run.rig.set.min_pages = run.rig.kv.pages_for(run.rig.max_len)
    assert run.rig.kv.num_pages >= run.rig.set.min_pages
    run.rig.nodes.kill("b")
    assert run.recovery.update_nodes() and run.recovery.is_short
    assert 0 < run.rig.kv.num_pages < run.rig.set.min_pages
    return run


def arrive(run, num_prompt, ago_s=0.0):
    sequence = make_seq(num_prompt, num_tokens=200)
    sequence.request = replace(sequence.request, arrival_s=run.now - ago_s)
    run.scheduler.add(sequence)
    return sequence


def step(run):
    """Runs a step; returns the sequences that got rows."""
    assert run.recovery.update_nodes()
    plan = run.scheduler.schedule(run.now)
    if plan is None:
        return []
    run.rig.kv.commit()
    run.scheduler.update(plan, [7] * sum(plan.samples))
    return plan.sequences


def steps(run, seconds):
    """Runs steps for that time; returns all sequences that got rows."""
    sequences, end = set(), run.now + seconds
    while run.now < end:
        run.now += 0.25
        sequences.update(step(run))
    return sequences


def test_memory_too_small_for_long_sequences_serves_short_ones():
    run = make_short()
    longs = [arrive(run, 800, ago_s=100.0), arrive(run, 900)]
    shorts = [arrive(run, 300), arrive(run, 40)]  # they do not wait for the long ones
    waiting = arrive(run, 300)  # it fits once the others have ended
    steps(run, 3.0)
    assert run.scheduler.running == shorts and list(run.scheduler.waiting) == [*longs, waiting]
    assert steps(run, 1.5) == {*shorts}
    assert run.ended == {}, "a node could still come back"
    assert steps(run, 1.0) == {*shorts}
    for long in longs:  # independent of the arrival
        why, when = run.ended[long]
        assert why == TOO_LITTLE_LEFT and 5.0 <= when - 1000.0 <= 5.5
    late = arrive(run, 800)  # it waits as long as the first two did
    assert steps(run, 4.5) == {*shorts} and late not in run.ended
    steps(run, 1.0)
    assert run.ended[late][0] == TOO_LITTLE_LEFT
    assert run.scheduler.running == shorts and list(run.scheduler.waiting) == [waiting]
    assert shorts[1].num_output_tokens > 30
    run.close()


def test_a_node_that_is_back_in_time_serves_long_sequences():
    run = make_short()
    long = arrive(run, 800)
    assert steps(run, 4.0) == set()
    run.rig.nodes.gone.clear()
    run.prober.urls.add("b")
    run.now = 1005.0  # a node is asked to come back 5 s after the last change
    assert step(run) == [long]
    assert not run.recovery.is_short and run.urls() == ["a", "b"]
    assert steps(run, 20.0) == {long} and run.ended == {}
    run.close()


def test_no_sequence_ends_before_memory_was_requested_again():
    """The time to wait starts anew with a reset during the shortage."""
    run = make_short()
    long = arrive(run, 800)
    assert steps(run, 3.0) == set()
    run.rig.nodes.ends["a"].close()
    assert steps(run, 1.0) == set()
    run.rig.nodes.gone.clear()  # b has not reported to be back
    assert steps(run, 5.0) == {long} and run.ended == {}
    assert run.urls() == ["a", "b"]
    run.close()


def test_a_shortage_ends_when_a_node_has_memory_again():
    """Another engine has most of the only node. While nothing runs, more memory is requested, with
    back-off while there is none."""
    run = RecoveryRun(names=("a",), num_pages=70)
    run.rig.set.min_pages = 65
    node = run.rig.nodes.nodes["a"]
    run.rig.nodes.ends["a"].close()
    pages = node.stats().capacity_bytes // page_bytes()
    rival = RawEngine.beside(node, replace(REQUEST, engine="rival", num_pages=pages - 100))
    assert rival.attach() == pages - 100
    assert run.recovery.update_nodes() and run.recovery.is_short
    left = run.rig.kv.num_pages
    assert 0 < left < 65
    assert gaps(1000.0, run.attempts(1080.0)) == [5.0, 10.0, 20.0, 40.0]
    assert run.recovery.is_short and run.rig.kv.num_pages == left
    rival.close()
    assert len(run.attempts(1200.0)) == 1
    assert not run.recovery.is_short and run.rig.kv.num_pages == 70
    assert run.recovery._settled_s == SETTLED_S, "the back-off is reset"
    [partition] = run.rig.set.partitions
    assert run.rig.kv.space.max_mappings == min(MAX_MAPPINGS, partition.max_mappings)
    assert 70 < partition.max_mappings < MAX_MAPPINGS
    run.close()


# ---- the probing thread


class NodeSetStub:
    """A set of nodes; the missing ones have returned with memory."""

    def __init__(self, *missing):
        self.missing = list(missing)
        self.num_probes = 0

    def find_returned(self, is_over):
        assert not is_over()
        self.num_probes += 1
        return list(self.missing)


def test_nodes_are_probed_later_if_no_thread_can_start(monkeypatch, caplog):
    monkeypatch.setattr(recovery, "_PROBE_S", 0.01)
    nodes = NodeSetStub("b")
    prober, other = NodeProber(nodes), NodeProber(nodes)

    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        prober.start()
        other.start()
    other.stop()  # there is nothing to wait for
    assert nodes.num_probes == 0 and not prober.is_back("b")
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2 and "can't start new thread" in warnings[0]
    prober.start()
    wait_until(lambda: prober.is_back("b"))
    prober.stop()


def test_results_of_an_earlier_search_are_dropped(monkeypatch):
    """Node b was back and is lost again, so K/V cannot be placed on it."""
    monkeypatch.setattr(recovery, "_PROBE_S", 0.01)
    nodes = NodeSetStub("b")
    prober = NodeProber(nodes)
    prober.start()
    wait_until(lambda: prober.is_back("b"))
    first = prober._thread
    nodes.missing = []
    wait_until(lambda: prober._thread is None)  # it has ended, since no node is missing
    first.join()
    monkeypatch.setattr(recovery, "_PROBE_S", 60.0)
    nodes.missing = ["b"]
    prober.start()
    assert not prober.is_back("b")
    began = time.monotonic()
    prober.stop()
    assert time.monotonic() - began < 10


def test_a_probe_during_a_loss_is_dropped(monkeypatch):
    monkeypatch.setattr(recovery, "_PROBE_S", 0.01)
    nodes = NodeSetStub("b")
    prober = NodeProber(nodes)
    find_returned = nodes.find_returned

    def lost_meanwhile(is_over):
        if nodes.num_probes < 3:
            assert not prober.is_back("b")
            prober.invalidate()
        return find_returned(is_over)

    nodes.find_returned = lost_meanwhile
    prober.start()
    wait_until(lambda: prober.is_back("b"))
    assert nodes.num_probes >= 4
    prober.stop()
