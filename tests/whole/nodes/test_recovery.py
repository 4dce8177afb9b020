"""When nodes are asked to come back, and what becomes of sequences that what is left of the
memory is too small for. In time that a test sets; nodes are in the test's own thread."""

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


class SaysBack(NodeProber):
    """Believes that these nodes are back."""

    def __init__(self, *urls):
        self.urls = set(urls)
        self.num_forgotten = 0

    def is_back(self, url):
        return url in self.urls

    def invalidate(self):
        self.num_forgotten += 1

    def start(self):
        pass

    def stop(self):
        pass


class Recovering:
    """The recovery of an engine, driven as its loop does."""

    def __init__(self, *said_back, **settings):
        self.rig = RemoteRig(layers_of(), **settings)
        self.now = 1000.0
        self.ended = {}
        self.scheduler = make_scheduler(self.rig.kv)
        self.prober = SaysBack(*said_back)
        self.recovery = NodeRecovery(
            self.rig.set,
            self.rig.kvs,
            self.scheduler,
            self._end,
            lambda: self.now,
            self.prober,
        )

    def _end(self, sequence, reason, why):
        assert reason is FinishReason.ERROR
        assert sequence not in self.ended
        self.ended[sequence] = why, self.now
        self.scheduler.waiting.remove(sequence)

    def urls(self):
        return [link.url for link in self.rig.set.partitions[0].links]

    def attempts(self, until, node="a"):
        """When that node was attached to, from now on."""
        times, process = [], self.rig.nodes.nodes[node]
        known = process.stats().num_attached
        while self.now < until:
            self.now += 0.5
            assert self.recovery.is_ready()
            if (number := process.stats().num_attached) > known:
                times.append(self.now)
                known = number
        return times

    def close(self):
        self.recovery.close()
        self.rig.close()


def gaps(began, times):
    return [later - earlier for earlier, later in zip([began, *times], times, strict=False)]


# ---- nodes that say that they are back


def test_who_says_it_is_back_and_brings_nothing_is_asked_ever_more_rarely():
    """Every attempt gives up what is computed: it must not be one after the other."""
    run = Recovering("b")
    run.rig.nodes.kill("b")
    assert run.recovery.is_ready() and run.urls() == ["a"]
    began = run.now
    times = run.attempts(began + 1400.0)
    assert gaps(began, times) == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]
    assert run.urls() == ["a"] and not run.recovery.is_short
    run.close()


def test_after_success_it_is_soon_again():
    run = Recovering("b")
    run.rig.nodes.kill("b")
    assert run.recovery.is_ready()
    assert len(run.attempts(run.now + 100.0)) == 4  # the next one is 80 s after the last
    run.rig.nodes.gone.clear()
    again = run.attempts(run.now + 100.0, "b")
    assert len(again) == 1 and run.urls() == ["a", "b"]
    run.rig.nodes.kill("b")
    run.now += 1.0
    assert run.recovery.is_ready() and run.urls() == ["a"]
    began = run.now
    run.rig.nodes.gone.clear()
    assert gaps(began, run.attempts(began + 50.0, "b")) == [5.0]
    run.close()


def test_what_was_found_before_a_loss_is_forgotten():
    """A node that was back once may be the one that is lost now."""
    run = Recovering("b")
    run.rig.nodes.kill("b")
    assert run.recovery.is_ready()
    assert run.prober.num_forgotten == 1, "found out between steps"
    run.rig.nodes.kill("a")
    run.recovery.handle_loss(ConnectionError("a step failed"))
    assert run.prober.num_forgotten == 2
    run.close()


def test_who_does_not_say_it_is_back_is_not_asked():
    run = Recovering()
    run.rig.nodes.kill("b")
    assert run.recovery.is_ready()
    run.rig.nodes.gone.clear()
    assert run.attempts(run.now + 60.0) == []
    run.prober.urls.add("b")
    assert len(run.attempts(run.now + 1.0)) == 1
    assert run.urls() == ["a", "b"]
    run.close()


# ---- too little memory for some


def make_short() -> Recovering:
    """Two nodes had room for one sequence of full length and a little more; one is left."""
    run = Recovering(capacity_bytes=70 * (16 << 10))
    run.rig.set.min_pages = run.rig.kv.pages_for(run.rig.max_len)
    assert run.rig.kv.num_pages >= run.rig.set.min_pages
    run.rig.nodes.kill("b")
    assert run.recovery.is_ready() and run.recovery.is_short
    assert 0 < run.rig.kv.num_pages < run.rig.set.min_pages
    return run


def arrive(run, num_prompt, ago_s=0.0):
    sequence = make_seq(num_prompt, num_tokens=200)
    sequence.request = replace(sequence.request, arrival_s=run.now - ago_s)
    run.scheduler.add(sequence)
    return sequence


def step(run):
    """The sequences that got rows."""
    assert run.recovery.is_ready()
    plan = run.scheduler.schedule(run.now)
    if plan is None:
        return []
    run.rig.kv.commit()
    run.scheduler.update(plan, [7] * sum(plan.samples))
    return plan.sequences


def steps(run, seconds):
    """All of them, for so long."""
    found, end = set(), run.now + seconds
    while run.now < end:
        run.now += 0.25
        found.update(step(run))
    return found


def test_what_is_too_small_for_the_long_serves_the_short():
    run = make_short()
    longs = [arrive(run, 800, ago_s=100.0), arrive(run, 900)]
    shorts = [arrive(run, 300), arrive(run, 40)]  # nor do they wait for those before them
    patient = arrive(run, 300)  # it fits when the others have ended
    steps(run, 3.0)
    assert run.scheduler.running == shorts and list(run.scheduler.waiting) == [*longs, patient]
    assert steps(run, 1.5) == {*shorts}
    assert run.ended == {}, "a node could still come back"
    assert steps(run, 1.0) == {*shorts}
    for long in longs:  # however long the first one has been here
        why, when = run.ended[long]
        assert why == TOO_LITTLE_LEFT and 5.0 <= when - 1000.0 <= 5.5
    late = arrive(run, 800)  # it waits as long as they did
    assert steps(run, 4.5) == {*shorts} and late not in run.ended
    steps(run, 1.0)
    assert run.ended[late][0] == TOO_LITTLE_LEFT
    assert run.scheduler.running == shorts and list(run.scheduler.waiting) == [patient]
    assert shorts[1].num_output_tokens > 30
    run.close()


def test_a_node_that_is_back_in_time_serves_the_long():
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


def test_nobody_is_given_up_before_memory_was_asked_for_again():
    """A reset during the shortage: what there is is as old as that."""
    run = make_short()
    long = arrive(run, 800)
    assert steps(run, 3.0) == set()
    run.rig.nodes.ends["a"].close()
    assert steps(run, 1.0) == set()
    run.rig.nodes.gone.clear()  # but b has not said so
    assert steps(run, 5.0) == {long} and run.ended == {}
    assert run.urls() == ["a", "b"]
    run.close()


def test_what_is_short_is_not_so_for_ever():
    """Another engine has most of the only node. When nothing runs, more is asked for: ever more
    rarely while nothing comes of it."""
    run = Recovering(names=("a",), num_pages=70)
    run.rig.set.min_pages = 65
    node = run.rig.nodes.nodes["a"]
    run.rig.nodes.ends["a"].close()
    pages = node.stats().capacity_bytes // page_bytes()
    rival = RawEngine.beside(node, replace(REQUEST, engine="rival", num_pages=pages - 100))
    assert rival.attach() == pages - 100
    assert run.recovery.is_ready() and run.recovery.is_short
    left = run.rig.kv.num_pages
    assert 0 < left < 65
    assert gaps(1000.0, run.attempts(1080.0)) == [5.0, 10.0, 20.0, 40.0]
    assert run.recovery.is_short and run.rig.kv.num_pages == left
    rival.close()
    assert len(run.attempts(1200.0)) == 1
    assert not run.recovery.is_short and run.rig.kv.num_pages == 70
    assert run.recovery._settled_s == SETTLED_S, "it was worth it"
    [partition] = run.rig.set.partitions
    assert run.rig.kv.space.max_mappings == min(MAX_MAPPINGS, partition.max_mappings)
    assert 70 < partition.max_mappings < MAX_MAPPINGS
    run.close()


# ---- the thread that asks


class Missing:
    """A set of nodes of which some are missing; those that answer have memory."""

    def __init__(self, *missing):
        self.missing = list(missing)
        self.num_asked = 0

    def find_returned(self, is_over):
        assert not is_over()
        self.num_asked += 1
        return list(self.missing)


def test_without_a_thread_nodes_are_asked_later(monkeypatch, caplog):
    monkeypatch.setattr(recovery, "_PROBE_S", 0.01)
    nodes = Missing("b")
    prober, other = NodeProber(nodes), NodeProber(nodes)

    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        prober.start()
        other.start()
    other.stop()  # there is nothing to wait for
    assert nodes.num_asked == 0 and not prober.is_back("b")
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2 and "can't start new thread" in warnings[0]
    prober.start()
    wait_until(lambda: prober.is_back("b"))
    prober.stop()


def test_what_was_found_in_an_earlier_search_is_forgotten(monkeypatch):
    """b was back, and has gone again since: placing the K/V on it would fail."""
    monkeypatch.setattr(recovery, "_PROBE_S", 0.01)
    nodes = Missing("b")
    prober = NodeProber(nodes)
    prober.start()
    wait_until(lambda: prober.is_back("b"))
    first = prober._thread
    nodes.missing = []
    wait_until(lambda: prober._thread is None)  # no node is missing, so it has ended
    first.join()
    monkeypatch.setattr(recovery, "_PROBE_S", 60.0)
    nodes.missing = ["b"]
    prober.start()
    assert not prober.is_back("b")
    began = time.monotonic()
    prober.stop()
    assert time.monotonic() - began < 10


def test_what_is_being_found_when_somebody_is_lost_is_forgotten(monkeypatch):
    monkeypatch.setattr(recovery, "_PROBE_S", 0.01)
    nodes = Missing("b")
    prober = NodeProber(nodes)
    found = nodes.find_returned

    def lost_meanwhile(is_over):
        if nodes.num_asked < 3:
            assert not prober.is_back("b")
            prober.invalidate()
        return found(is_over)

    nodes.find_returned = lost_meanwhile
    prober.start()
    wait_until(lambda: prober.is_back("b"))
    assert nodes.num_asked >= 4
    prober.stop()
