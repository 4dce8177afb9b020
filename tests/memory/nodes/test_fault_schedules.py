"""Nodes fail in virtual time, and clients get the tokens of a fault-free run
(tests/support/nodes/sim_faults.py)."""

from __future__ import annotations

import pytest

from serve.engine.node_recovery import NODES_LOST
from serve.request import FinishReason
from tests.support.nodes import sim_world
from tests.support.nodes.sim_clients import Client
from tests.support.nodes.sim_faults import Run, run_schedule
from tests.support.nodes.sim_nodes import Recorder
from tests.support.profile import every_day

pytestmark = pytest.mark.usefixtures("one_thread")
_SEEDS_A_TEST = 10
_PARTITIONS = ("head", "request", "sequence")


@pytest.mark.parametrize("first", every_day((0,), range(0, 100, _SEEDS_A_TEST)))
def test_random_schedules(first):
    for seed in range(first, first + _SEEDS_A_TEST):
        run_schedule(seed)


@pytest.mark.parametrize("first", every_day((0,), range(0, 50, _SEEDS_A_TEST)))
def test_random_schedules_of_a_model_with_states(first):
    for seed in range(first, first + _SEEDS_A_TEST):
        run_schedule(seed, has_states=True)


@pytest.mark.parametrize("seed", [236, 20640, 70095])
def test_schedules_that_once_failed(seed):
    run_schedule(seed)


def test_a_seed_determines_its_schedule():
    def reported(seed):
        lines = []
        run = run_schedule(seed, lines.append)
        return lines, [client.times for client in run.clients]

    assert reported(3) == reported(3)
    assert reported(3) != reported(4)


def make(partition="head", num_nodes=2, local=0, node=3, num_tokens=60):
    """Returns a run whose one request is running."""
    run = Run(5, partition=partition, num_nodes=num_nodes, local_factor=local, node_factor=node)
    run.clients = [Client([run._token() for _ in range(80)], num_tokens)]
    run._begin(run.clients[0], 0)
    run.work(lambda: len(run.clients[0].got) >= 5)
    return run


def finish(run):
    """Runs to the end and returns the client's longest gap in seconds."""
    run.work(lambda: all(client.reason is not None for client in run.clients))
    run.end()
    return run.longest_gap_s


def run_for(run, seconds):
    end = run.world.now + seconds
    run.work(lambda: run.world.now >= end)


@pytest.mark.parametrize("partition", _PARTITIONS)
def test_a_killed_node_is_a_short_pause(partition):
    run = make(partition)
    run.nodes[0].kill()
    run.nodes[0].start()
    assert finish(run) < 0.5


@pytest.mark.covering(1)
@pytest.mark.parametrize("partition", _PARTITIONS)
@pytest.mark.parametrize("is_idle", [False, True])
def test_a_node_that_restarts_at_once_is_used_again_at_once(partition, is_idle):
    """With `request` it had its probation, because a probe found it before it was tried."""
    run = make(partition, num_tokens=79)
    if is_idle:
        run.work(lambda: run.clients[0].reason is not None)
    node = run.nodes[0]
    node.kill()
    node.start()
    began = run.world.now
    run.work(lambda: run.engine.nodes.num_lost and not run.engine.nodes.missing)
    assert node.bytes_leased and run.world.now - began < 1.0
    finish(run)


@pytest.mark.parametrize("partition", _PARTITIONS)
def test_a_stopped_node_is_abandoned_in_time(partition):
    run = make(partition)
    [sequence] = run.clients[0].state.sequences
    node = run.nodes[run.engine.kv.partition_of(sequence.kv_range) if partition == "request" else 0]
    node.stop()
    run.world.after(20.0, node.resume)
    assert 1.25 < finish(run) < 3.0


@pytest.mark.parametrize("directions", [(True, False), (False, True), (True, True)])
def test_a_short_partition_is_not_noticed(directions):
    run = make()
    run.nodes[1].cut(*directions)
    run.world.after(0.4, run.nodes[1].heal)
    assert finish(run) < 0.5
    assert run.engine.nodes.num_lost == 0


def test_own_memory_replaces_the_last_lost_node():
    run = make(local=1, num_nodes=1)
    run.nodes[0].kill()
    assert finish(run) < 0.5
    assert run.clients[0].reason is FinishReason.LENGTH


def test_without_memory_requests_end_within_bounds():
    run = make(num_nodes=2)
    began = run.world.now
    for node in run.nodes:
        node.kill()
    finish(run)
    assert run.clients[0].reason is FinishReason.ERROR
    assert run.clients[0].error == NODES_LOST
    assert 5.0 <= run.world.now - began - 65.0 < 6.0  # `end` runs for 65 s of virtual time


def test_the_accounting_has_no_pages_without_nodes():
    run = make(num_nodes=2)
    core = run.engine.core
    assert core.kv.num_pages
    for node in run.nodes:
        node.kill()
    run_for(run, 0.5)
    assert not core.kv.num_pages
    run.nodes[1].start()
    run_for(run, 1.0)
    assert core.kv.num_pages
    finish(run)


def test_without_memory_for_a_moment_requests_wait():
    run = make(num_nodes=2)
    for node in run.nodes:
        node.kill()
    run.world.after(3.0, run.nodes[1].start)
    assert 3.0 < finish(run) < 4.0


def test_a_draining_node_is_left_at_once_and_used_again_later():
    run = make(num_tokens=79)
    run.nodes[0].drain()
    run_for(run, 0.2)
    assert run.nodes[0].bytes_leased == 0
    run.nodes[0].kill()
    run.nodes[0].start()
    run.work(lambda: run.clients[0].reason is not None)
    run_for(run, 8.0)
    assert all(node.bytes_leased for node in run.nodes)
    assert finish(run) < 0.3


def test_an_idle_engine_leaves_a_draining_node():
    run = make()
    run.work(lambda: run.clients[0].reason is not None)
    run.nodes[1].drain()
    run_for(run, 0.5)
    assert run.nodes[1].bytes_leased == 0
    finish(run)


def test_a_full_node_is_not_waited_for():
    run = make(num_tokens=79)
    run.nodes[0].kill()
    run.nodes[0].start()
    run.nodes[0].fill(run.engine.template, 4096)
    run_for(run, 30.0)
    assert run.engine.nodes.num_lost == 1
    assert run.nodes[0].process.stats().num_refused > 3  # it was asked beside the work
    run.nodes[0].empty()
    run_for(run, 8.0)  # its probation
    assert run.nodes[0].bytes_leased
    finish(run)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["truncated", "twice", "older_epoch", "garbage"])
@pytest.mark.parametrize("from_node", [False, True])
def test_malformed_messages_are_refused(kind, from_node):
    run = make()
    end = run.nodes[0].newest()[from_node]
    end.mutate = getattr(Recorder(run.random), kind)
    assert finish(run) < 0.5
    if not from_node:
        assert run.nodes[0].offences == 1


def test_late_messages_of_an_older_connection_change_nothing():
    run = make(num_nodes=1)
    old = run.nodes[0].hold()
    run.work(lambda: run.engine.nodes.num_lost == 1 and len(run.clients[0].got) > 20)
    run.nodes[0].unhold(old)
    assert finish(run) < 0.5
    assert old[1].is_closed


def test_undetected_bit_flips_give_wrong_tokens(monkeypatch):
    """Without checksums, a flipped bit gives wrong tokens, so the simulation can fail."""
    monkeypatch.setattr(sim_world.zlib, "crc32", lambda message: 0)
    num_wrong = 0
    for _ in range(4):
        run = make(num_tokens=79)
        for number in range(40):
            end = run.nodes[number % 2].newest()[1]
            run.world.after(0.01 * number, lambda e=end: setattr(e, "flip", True))
        try:
            finish(run)
        except AssertionError as error:
            num_wrong += "wrong tokens" in str(error)
    assert num_wrong


def test_memory_too_small_for_a_request_ends_that_request():
    run = make(num_nodes=2, node=0.7, num_tokens=79)
    short = Client([run._token() for _ in range(8)], 20)
    run.nodes[0].kill()
    run_for(run, 0.2)
    run.clients.append(short)
    run._begin(short, 1)
    run.work(lambda: run.clients[0].reason is not None)
    assert run.clients[0].reason is FinishReason.ERROR
    assert "too small" in run.clients[0].error
    finish(run)
    assert short.reason is FinishReason.LENGTH


def test_a_node_that_returns_in_time_saves_a_long_request():
    run = make(num_nodes=2, node=0.7, num_tokens=79)
    run.nodes[0].kill()
    run.world.after(2.0, run.nodes[0].start)
    finish(run)
    assert run.clients[0].reason is FinishReason.LENGTH


def test_a_node_without_sequences_can_leave_during_the_work():
    run = make("request", num_nodes=2, num_tokens=79)
    [sequence] = run.clients[0].state.sequences
    other = run.nodes[1 - run.engine.kv.partition_of(sequence.kv_range)]
    other.drain()
    run_for(run, 0.3)
    assert other.bytes_leased == 0
    assert run.clients[0].reason is None
    assert finish(run) < 0.3


# ---- nodes that are slow, or lost again and again


def starve(run, node, seconds, stopped_s, running_s):
    """Stops and continues a node for so long."""
    end = run.world.now + seconds

    def stop():
        if run.world.now < end:
            node.stop()
            run.world.after(stopped_s, resume)

    def resume():
        node.resume()
        run.world.after(running_s, stop)

    stop()


def requests_for(run, seconds):
    """Sends requests one after the other for so long, with pauses, in which the simulation is
    quick; returns how long each took."""
    end, taken = run.world.now + seconds, []
    while run.world.now < end:
        client = Client([run._token() for _ in range(80)], 30)
        run.clients.append(client)
        began = run.world.now
        run._begin(client, len(run.clients))
        run.work(lambda c=client: c.reason is not None)
        assert client.reason is FinishReason.LENGTH
        taken.append(run.world.now - began)
        run_for(run, 3.0)
    return taken


@pytest.mark.parametrize("partition", every_day((1,), ["head", "request"]))
def test_a_node_that_stops_again_and_again_is_lost_rarely(partition):
    """It was lost and taken back every ten seconds."""
    run = make(partition)
    starve(run, run.nodes[0], 80.0, 1.7, 6.5)
    taken = requests_for(run, 80.0)
    assert 1 <= run.engine.nodes.num_lost <= 3
    assert max(taken) < 8.0
    run_for(run, 30.0)
    assert all(node.bytes_leased for node in run.nodes), "it is used again when it is well"
    finish(run)


def test_a_node_that_answers_a_tenth_of_the_time_is_given_up():
    """It is never silent for as long as a lost node, but every layer waits for it."""
    run = make()
    starve(run, run.nodes[0], 80.0, 0.95, 0.05)
    taken = requests_for(run, 80.0)
    assert run.engine.nodes.num_lost == 1
    assert max(taken) < 30.0
    run_for(run, 10.0)
    finish(run)


@pytest.mark.parametrize("partition", _PARTITIONS)
def test_a_node_that_computes_too_slowly_is_given_up(partition):
    """Its heartbeats came, so that each layer might take half a minute."""
    run = make(partition, num_tokens=79)
    [sequence] = run.clients[0].state.sequences
    node = run.nodes[run.engine.kv.partition_of(sequence.kv_range) if partition == "request" else 0]
    node.service_s = 2.0
    began = run.world.now
    run.work(lambda: run.clients[0].reason is not None)
    assert run.world.now - began < 20.0
    assert run.engine.nodes.num_lost == 1
    assert run.engine.nodes.missing == [node.url], "it was not tried again at once"
    finish(run)


@pytest.mark.parametrize("partition", _PARTITIONS)
def test_a_node_that_is_busy_once_is_kept(partition):
    run = make(partition, num_tokens=79)
    for node in run.nodes:
        node.hang()
        run.world.after(6.0, node.recover)
    assert 5.0 < finish(run) < 7.0
    assert run.engine.nodes.num_lost == 0


def test_new_sequences_avoid_a_late_node():
    run = make("request", num_nodes=2, num_tokens=79)
    [sequence] = run.clients[0].state.sequences
    kv = run.engine.kv
    number = kv.partition_of(sequence.kv_range)
    run.nodes[number].stop()
    run.world.after(1.1, run.nodes[number].resume)
    run_for(run, 1.5)
    assert run.engine.nodes.num_lost == 0
    states = run.engine.nodes.states
    assert states.late() == {run.nodes[number].url}
    assert kv.avoided == {number}
    seen = []
    for _ in range(2):
        client = Client([run._token() for _ in range(8)], 20)
        run.clients.append(client)
        run._begin(client, len(run.clients))
        run.work(lambda c=client: c.got)
        seen.append(kv.partition_of(client.state.sequences[0].kv_range))
    assert seen == [1 - number] * 2, "although the other one would have had more room"
    run_for(run, 11.0)
    assert not states.late() and not kv.avoided
    finish(run)
