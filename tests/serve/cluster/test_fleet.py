"""Several replicas of a model: what the hop is told, failures, and the rolling update."""

from __future__ import annotations

from typing import Any

import pytest

from serve.cluster.fleet import Fleet
from serve.errors import MergestepError


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
    def __init__(self, count: int) -> None:
        self.now_s = 0.0
        self.urls: list[str] = []
        self.said: list[str] = []
        self.replicas = [FakeReplica(number) for number in range(count)]
        make: Any = self.make
        self.fleet = Fleet(self.replicas, self, self.said.append, make, lambda: self.now_s)

    def use(self, urls: list[str]) -> None:
        self.urls = urls

    def make(self, number: int) -> FakeReplica:
        self.replicas[number] = FakeReplica(number)
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
