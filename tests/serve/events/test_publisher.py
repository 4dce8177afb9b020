"""The sockets of the publisher: hostile questions, slow followers, servers that connect."""

from __future__ import annotations

import time
from array import array

import pytest
import zmq

from memory.pages.layer_groups import LayerGroup, PageLayout
from memory.prefix.block_recorder import BlockRecorder, StoredPage
from serve.errors import ConfigError
from serve.events import publisher
from serve.events.publisher import EventPublisher, is_bound, next_port
from tests.support.events.follower import Follower
from tests.support.profile import every_day


@pytest.fixture(autouse=True)
def _quick_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subscriber need not wait for a second after the last one."""
    monkeypatch.setattr(publisher, "_SNAPSHOT_S", 0.1)


class Rig:
    """A publisher, and a recorder into which the test puts events itself."""

    def __init__(self, endpoint: str = "tcp://*:0", replay: str | None = None) -> None:
        self.recorder = BlockRecorder(PageLayout([LayerGroup(256)], 4096, 4096, 4096))
        self.publisher = EventPublisher(self.recorder, endpoint, "kv@here@model", replay)
        self.publisher.start()
        self.context = zmq.Context()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *error: object) -> None:
        self.publisher.close()
        self.context.destroy(linger=0)

    def store(self, number: int, parent: int | None = None) -> None:
        name = number.to_bytes(16, "big")
        above = None if parent is None else parent.to_bytes(16, "big")
        self.recorder._add(StoredPage(name, above, array("i", [number] * 16), None))

    def ask(self, *frames: bytes) -> list[list[bytes]]:
        """Sends a question from a socket that reads every answer."""
        with self.context.socket(zmq.DEALER) as dealer:
            address = self.publisher.endpoints[1]
            dealer.connect(address.replace("0.0.0.0", "127.0.0.1"))
            dealer.send_multipart([*frames])
            answers = []
            while dealer.poll(400):
                answers.append(dealer.recv_multipart())
                if answers[-1][-1] == b"":
                    break
            return answers

    def follower(self) -> Follower:
        return Follower(*self.publisher.endpoints)


def test_an_answer_has_vllms_frames_and_its_end():
    with Rig() as rig, rig.follower() as follow:
        rig.store(1)
        follow.follow(500)
        delimiter, number, payload = rig.ask(b"", bytes(8))[0]
        assert delimiter == b"" and int.from_bytes(number, "big") == follow.last
        assert payload
        assert rig.ask(b"", bytes(8))[-1] == [b"", b"\xff" * 8, b""]


@pytest.mark.parametrize(
    "frames",
    every_day(
        [1], [[b""], [b"", b"x"], [bytes(8)], [b"x", bytes(8)], [b"", bytes(8), b""], [b"", b""]]
    ),
)
def test_a_malformed_question_has_no_answer_and_harms_nobody(frames):
    with Rig() as rig, rig.follower() as follow:
        assert rig.ask(*frames) == []
        assert rig.ask(b"", b"x" * 100_000) == []
        rig.store(1)
        assert len(follow.follow().blocks) == 1
        assert len(rig.ask(b"", bytes(8))) == 2


def test_an_idle_publisher_publishes_at_once():
    with Rig() as rig, rig.follower() as follow:
        follow.follow(500)
        rig.store(1)
        began = time.monotonic()
        assert follow.sub.poll(1000)
        assert time.monotonic() - began < 0.3


def test_pages_of_a_chain_share_an_event():
    with Rig() as rig, rig.follower() as follow:
        follow.follow(500)
        before = follow.num_messages
        for number in range(1, 40):
            rig.store(number, number - 1 if number > 1 else None)
        follow.follow()
        assert follow.num_messages - before <= 2
        assert len(follow.chains()) == 39


@pytest.mark.exhaustive
def test_many_subscribers_at_once_get_few_snapshots(monkeypatch):
    monkeypatch.setattr(publisher, "_SNAPSHOT_S", 1.0)
    with Rig() as rig, rig.follower() as first:
        rig.store(1)
        first.follow(500)
        before = first.num_messages
        others = [rig.follower() for _ in range(20)]
        first.follow(1500)
        assert 1 <= first.num_messages - before <= 3
        for other in others:
            assert len(other.follow(100).blocks) == 1
            other.context.destroy(linger=0)


@pytest.mark.exhaustive
def test_after_a_restart_at_the_same_address_nothing_stale_is_left():
    """The first publisher ends as in a crash: it removes no block."""
    with Rig() as first, first.follower() as follow:
        address = first.publisher.endpoints[0].replace("0.0.0.0", "*")
        first.store(1)
        assert len(follow.follow(500).blocks) == 1
        before = follow.last
        first.publisher.close()
        first.context.destroy(linger=0)
        with Rig(address) as second:
            assert follow.sub.poll(3000)
            follow.last = -1
            follow.follow(500)
            assert not follow.blocks
            assert follow.last > before + 1e5, "whoever counts sees a gap"
            second.store(2)
            assert set(follow.follow(500).blocks) == {2}


def test_a_subscriber_of_another_topic_costs_nothing():
    with Rig() as rig, rig.follower() as first:
        first.follow(500)
        before = first.num_messages
        with Follower(rig.publisher.endpoints[0], topic="metrics"):
            assert first.follow(500).num_messages == before


def test_it_connects_to_a_router_that_listens():
    context = zmq.Context()
    router = context.socket(zmq.SUB)
    router.subscribe("kv@")
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with Rig(f"tcp://localhost:{port}") as rig:
        assert rig.publisher.endpoints[1] is None
        assert router.poll(3000)
        assert router.recv_multipart()[0] == b"kv@here@model"
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("endpoint", "replay"),
    [
        ("tcp://*:5557", "tcp://*:5558"),
        ("tcp://[::]:5557", "tcp://[::]:5558"),
        ("tcp://0.0.0.0:5557", "tcp://0.0.0.0:5558"),
        ("ipc:///tmp/a:b", "ipc:///tmp/a:b-replay"),
        ("tcp://*:0", "tcp://*:0"),
        ("tcp://router:5557", None),
    ],
)
def test_the_replay_socket_is_next_to_one_that_listens(endpoint, replay):
    assert next_port(endpoint) == replay
    assert is_bound(endpoint) == (replay is not None)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "msgpack", None)
    with pytest.raises(ConfigError, match=r"msgpack is missing.*mergestep\[events\]"):
        Rig()


def test_what_is_kept_is_counted():
    with Rig() as rig, rig.follower() as follow:
        rig.store(1)
        rig.store(2, 1)
        follow.follow(500)
        assert rig.publisher.kept().entries == 2
        assert rig.publisher.kept().num_bytes > 1000
