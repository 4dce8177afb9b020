"""Several replicas of a model: what the hop is told, failures, and the rolling update."""

from __future__ import annotations

from typing import Any

import pytest

from serve.cluster.fleet import Fleet
from serve.cluster.scaling import ScalingLimits
from serve.errors import ConfigError, MergestepError


class FakeReplica:
    def __init__(self, number: int) -> None:
        self.number = number
        self.is_ready = False
        self.pid = 1
        self.error: Exception | None = None
        self.is_closed = False

    @property
    def http_url(self) -> str:
        return f"http://h{self.number}:{self.pid}" if self.is_ready else ""

    def pids(self) -> list[int]:
        return [self.pid]

    def step(self) -> None:
        if self.error is not None:
            raise self.error

    def restart(self) -> None:
        self.is_ready = False

    def close(self) -> None:
        self.is_closed = True


class Rig:
    def __init__(self, count: int, limits: ScalingLimits | None = None) -> None:
        self.now_s = self.queue_s = 0.0
        self.num_calls = 0
        self.has_no_room = False
        self.urls: list[str] = []
        self.said: list[str] = []
        self.replicas = [FakeReplica(number) for number in range(count)]
        make: Any = self.make
        self.fleet = Fleet(self.replicas, self, self.said.append, make, limits, lambda: self.now_s)

    def use(self, urls: list[str]) -> None:
        self.urls = urls

    def make(self, number: int) -> FakeReplica:
        if self.has_no_room:
            raise ConfigError("too little room")
        self.replicas[number:] = [FakeReplica(number)]
        return self.replicas[number]

    def start_all(self) -> None:
        for replica in self.replicas:
            replica.is_ready = True
        self.fleet.step()


def test_the_hop_knows_the_replicas_that_are_ready() -> None:
    rig = Rig(3)
    rig.fleet.step()
    assert rig.urls == [] and rig.fleet.num_ready == 0
    rig.replicas[1].is_ready = True
    rig.fleet.step()
    assert rig.urls == ["http://h1:1"]
    rig.start_all()
    assert len(rig.urls) == 3
    rig.replicas[0].is_ready = False
    rig.fleet.step()
    assert rig.urls == ["http://h1:1", "http://h2:1"]


def test_a_model_that_cannot_be_started_ends_the_command() -> None:
    rig = Rig(2)
    rig.replicas[1].error = MergestepError("no such file")
    with pytest.raises(MergestepError, match="no such file"):
        rig.fleet.step()


def test_a_replica_that_fails_beside_others_is_tried_again() -> None:
    rig = Rig(2)
    rig.start_all()
    failed = rig.replicas[1]
    failed.error = MergestepError("no memory")
    rig.fleet.step()
    assert failed.is_closed and rig.urls == ["http://h0:1"] and "no memory" in rig.said[-1]
    rig.now_s = 29.0
    rig.fleet.step()
    assert rig.replicas[1] is failed
    rig.now_s = 30.0
    rig.fleet.step()
    assert rig.replicas[1] is not failed
    rig.replicas[1].is_ready = True
    rig.fleet.step()
    assert len(rig.urls) == 2


def test_a_replica_without_room_is_tried_again_while_others_serve() -> None:
    rig = Rig(2)
    rig.start_all()
    rig.replicas[1].error = MergestepError("its node is gone")
    rig.fleet.step()
    rig.has_no_room = True
    for rig.now_s in (30.0, 45.0, 60.0):
        rig.fleet.step()
        assert rig.urls == ["http://h0:1"] and rig.fleet.replicas[1] is None
    assert sum("no room" in line for line in rig.said) == 2
    rig.has_no_room = False
    rig.now_s = 90.0
    rig.fleet.step()
    assert rig.fleet.replicas[1] is not None


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_update_replaces_one_after_the_other(count: int) -> None:
    rig = Rig(count)
    rig.start_all()
    rig.fleet.update()
    for number in range(count):
        rig.fleet.step()
        down = [replica.number for replica in rig.replicas if not replica.is_ready]
        assert down == [number] and rig.fleet.is_updating
        rig.fleet.step()  # nothing else happens until it is back
        assert [replica.number for replica in rig.replicas if not replica.is_ready] == [number]
        rig.replicas[number].pid += 1
        rig.replicas[number].is_ready = True
    rig.fleet.step()
    assert not rig.fleet.is_updating
    assert rig.urls == [f"http://h{number}:2" for number in range(count)]


def test_an_update_waits_while_a_single_replica_serves() -> None:
    rig = Rig(2)
    rig.start_all()
    rig.replicas[1].is_ready = False
    rig.fleet.update()
    rig.fleet.step()
    assert rig.replicas[0].is_ready  # its streams would have nowhere to go
    rig.replicas[1].is_ready = True
    rig.fleet.step()
    assert not rig.replicas[0].is_ready


def test_replicas_are_added_while_calls_wait_and_leave_when_they_are_too_many() -> None:
    rig = Rig(1, ScalingLimits(1, 3))
    rig.start_all()
    rig.queue_s = 2.0
    rig.fleet.step()
    rig.now_s = 4.0
    rig.fleet.step()
    assert len(rig.fleet.replicas) == 1
    rig.now_s = 5.0
    rig.fleet.step()
    assert len(rig.fleet.replicas) == 2
    rig.now_s = 60.0
    rig.fleet.step()
    assert len(rig.fleet.replicas) == 2  # the new one is not ready yet
    rig.start_all()
    for rig.now_s in (61.0, 67.0):
        rig.fleet.step()
    rig.start_all()
    assert len(rig.fleet.replicas) == 3
    for rig.now_s in (80.0, 90.0):
        rig.fleet.step()
    assert len(rig.fleet.replicas) == 3

    rig.queue_s = 0.0
    last = rig.replicas[2]
    for rig.now_s in (100.0, 159.0):
        rig.fleet.step()
    assert len(rig.urls) == 3
    rig.now_s = 160.0
    rig.fleet.step()
    assert rig.urls == ["http://h0:1", "http://h1:1"]
    assert not last.is_ready and not last.is_closed  # it hands its streams over
    rig.now_s = 165.0
    rig.fleet.step()
    assert last.is_closed


def test_a_short_wait_starts_nothing() -> None:
    rig = Rig(1, ScalingLimits(1, 3))
    rig.start_all()
    for rig.now_s in range(40):
        rig.queue_s = 2.0 if rig.now_s % 4 else 0.5
        rig.fleet.step()
    assert len(rig.fleet.replicas) == 1


def test_none_runs_while_there_is_no_call() -> None:
    rig = Rig(1, ScalingLimits(0, 2))
    rig.start_all()
    rig.num_calls = 1
    for rig.now_s in (1.0, 100.0):
        rig.fleet.step()
    assert len(rig.urls) == 1
    rig.num_calls = 0
    for rig.now_s in (101.0, 162.0):
        rig.fleet.step()
    assert rig.urls == [] and rig.fleet.replicas == []
    rig.num_calls = 1
    rig.fleet.step()
    assert len(rig.fleet.replicas) == 1


def test_no_room_is_said_and_tried_again() -> None:
    rig = Rig(1, ScalingLimits(1, 2))
    rig.start_all()
    rig.has_no_room, rig.queue_s = True, 9.0
    for rig.now_s in (1.0, 7.0, 13.0, 20.0):
        rig.fleet.step()
    assert len(rig.fleet.replicas) == 1 and "too little room" in rig.said[-1]
    rig.has_no_room = False
    for rig.now_s in (40.0, 46.0):
        rig.fleet.step()
    assert len(rig.fleet.replicas) == 2


def test_limits_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="min_replicas"):
        ScalingLimits(3, 2)
