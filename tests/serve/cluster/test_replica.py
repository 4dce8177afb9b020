"""Supervision of ranks on a cluster that is scripted here, on a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve.cluster.placement import Node, Shape
from serve.cluster.rank_actor import RankState
from serve.cluster.rank_process import RankSpec
from serve.cluster.ray_cluster import Lost
from serve.cluster.replica import Content, Replica
from serve.errors import ConfigError, MergestepError

NODES = [Node("a", "10.0.0.1", 4.0), Node("b", "10.0.0.2", 4.0)]


class FakeSeat:
    """Runs what it is told. A test sets `status`, `lost` and `node`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.node = NODES[rank % 2]
        self.generation = 0
        self.url = ""
        self.status: int | None = None
        self.lost: Lost | None = None
        self.lines: tuple[str, ...] = ()
        self.signals: list[int] = []
        self.specs: list[RankSpec] = []
        self.is_closed = False

    def restart_actor(self) -> None:
        self.lost, self.generation, self.url = None, 0, ""

    def poll(self, spec: RankSpec | None) -> RankState | Lost | None:
        if self.lost is not None:
            return self.lost
        if spec is not None and spec.generation != self.generation:
            self.specs.append(spec)
            self.generation, self.status = spec.generation, None
            self.url = spec.url
            if self.rank == 0 and self.node.address not in spec.url:
                self.url = f"tcp://{self.node.address}:{7000 + len(self.specs)}"
        if not self.generation:
            return RankState(self.node.id, 0)
        lines, self.lines = self.lines, ()
        http = "http://0.0.0.0:8000" if self.rank == 0 and self.status is None else ""
        pid = 100 * self.rank + self.generation
        return RankState(self.node.id, self.generation, pid, self.status, self.url, http, lines)

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def close(self, wait_s: float) -> None:
        self.is_closed = True


class FakeCluster:
    """A Cluster and its Room."""

    def __init__(self, *, has_room: bool = True) -> None:
        self.has_room = has_room
        self.seats: list[FakeSeat] = []
        self.now_s = 0.0
        self.is_closed = False

    def nodes(self) -> list[Node]:
        return NODES if self.has_room else [NODES[0]._replace(cpus=1.0)]

    def reserve(self, shape: Shape) -> FakeCluster:
        return self

    def is_there(self, wait_s: float) -> bool:
        self.now_s += wait_s
        return self.has_room

    def seat(self, rank: int) -> FakeSeat:
        made = FakeSeat(rank)
        self.seats.append(made)
        return made

    def close(self) -> None:
        self.is_closed = True


class Rig:
    def __init__(self, *, has_room: bool = True) -> None:
        self.cluster = FakeCluster(has_room=has_room)
        self.said: list[str] = []
        content = Content("dtype = 'int8'\n", "k" * 16, {"MERGESTEP_API_KEYS": "hidden"})
        clock = lambda: self.cluster.now_s  # noqa: E731
        self.replica = Replica(self.cluster, Shape(1, 2, 2), content, self.said.append, clock)

    def run(self, seconds: float = 1.0) -> None:
        for _ in range(int(seconds * 10)):
            self.cluster.now_s += 0.1
            self.replica.step()


@pytest.fixture
def rig() -> Rig:
    made = Rig()
    made.replica.place(5.0)
    made.run()
    return made


def test_ranks_learn_where_rank_0_listens(rig):
    first, second = rig.cluster.seats
    assert [spec.url for spec in first.specs] == [""]
    assert [(spec.rank, spec.size, spec.url) for spec in second.specs] == [(1, 2, first.url)]
    assert rig.replica.is_ready and rig.replica.http_url == "http://10.0.0.1:8000"
    assert [node.id for node in rig.replica.places()] == ["a", "b"]
    assert rig.replica.pids() == [1, 102]


def test_no_room_is_an_error_after_a_while():
    rig = Rig(has_room=False)
    with pytest.raises(ConfigError, match=r"free: 1 on 10\.0\.0\.1"):
        rig.replica.place(5.0)
    assert 5.0 <= rig.cluster.now_s <= 6.0
    assert "waiting up to 5 s" in rig.said[0]
    rig.replica.close()
    assert rig.cluster.is_closed


def test_a_rank_that_ends_is_started_again(rig):
    """At once the first time, then after longer and longer pauses."""
    seat = rig.cluster.seats[1]
    rig.run(30.0)
    seat.status = -9
    rig.run(0.3)
    assert len(seat.specs) == 2 and seat.status is None
    assert "rank 1 ended with signal 9; it is started again after 0 s" in rig.said
    seat.status = 1
    rig.run(1.5)
    assert len(seat.specs) == 2 and not rig.replica.is_ready
    rig.run(1.0)
    assert len(seat.specs) == 3 and rig.replica.is_ready
    assert len(rig.cluster.seats[0].specs) == 1


def test_an_actor_that_ray_restarts_starts_its_process_again(rig):
    seat = rig.cluster.seats[1]
    seat.lost = Lost("the node died", is_final=False)
    rig.run()
    assert not rig.replica.is_ready
    seat.restart_actor()
    seat.node = NODES[0]
    rig.run()
    assert rig.replica.is_ready and [node.id for node in rig.replica.places()] == ["a", "a"]
    assert rig.said.count("rank 1: its actor is lost, Ray starts it again") == 1


def test_an_actor_that_ray_gives_up_is_made_again(rig):
    rig.cluster.seats[1].lost = Lost("gone", is_final=True)
    rig.run(6.0)
    assert [seat.rank for seat in rig.cluster.seats] == [0, 1, 1]
    rig.run()
    assert rig.replica.is_ready


def test_other_ranks_follow_rank_0_to_another_node(rig):
    first, second = rig.cluster.seats
    first.restart_actor()
    rig.run()  # on the same node, at the same address
    assert len(second.specs) == 1 and first.url == second.url
    first.restart_actor()
    first.node = NODES[1]
    rig.run()
    assert second.url == first.url and "10.0.0.2" in first.url and len(second.specs) == 2
    assert rig.replica.http_url == "http://10.0.0.2:8000"


def test_rank_0_takes_another_port_after_an_error(rig):
    first, second = rig.cluster.seats
    rig.run(30.0)
    before = first.url
    first.status = 2
    rig.run()
    assert first.url == second.url != before and rig.replica.is_ready


@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_that_cannot_be_loaded_ends_the_command(rank):
    rig = Rig()
    rig.replica.place(5.0)
    rig.cluster.seats[1 - rank].lost = Lost("slow", is_final=False)  # not ready yet
    if rank:  # which starts when rank 0 listens
        rig.cluster.seats[0].lost = None
    poll = rig.cluster.seats[rank].poll

    def fail(spec: RankSpec | None) -> RankState | Lost | None:
        answer = poll(spec)
        if isinstance(answer, RankState) and answer.generation:
            lines = ("error: no such model", "and a last line")
            return replace(answer, status=1, http_url="", lines=lines)
        return answer

    rig.cluster.seats[rank].poll = fail  # type: ignore[method-assign]
    where = f"{NODES[rank].address} ({NODES[rank].id})"
    with pytest.raises(MergestepError) as caught:
        rig.run(5.0)
    assert str(caught.value) == f"rank {rank} on {where} ended with status 1: no such model"


def test_a_rank_that_is_killed_again_and_again_before_it_serves_is_an_error():
    rig = Rig()
    rig.replica.place(5.0)
    rig.cluster.seats[1].lost = Lost("slow", is_final=False)

    def kill_always() -> None:
        for _ in range(300):
            rig.cluster.seats[0].status = -9
            rig.run(0.1)

    with pytest.raises(MergestepError, match=r"rank 0 on .* ended with signal 9"):
        kill_always()
    assert len(rig.cluster.seats[0].specs) == 3


def test_the_end(rig):
    """Rank 0 gets the signal and ends the other; a second one is handed on."""
    first, second = rig.cluster.seats
    counts = iter([1, 1, 1, 1, 2, 2])

    def num_signals() -> int:
        count = next(counts, 2)
        if count == 2 and len(first.signals) == 2:
            first.status = second.status = 0
        return count

    rig.replica.drain(30.0, num_signals)
    assert first.signals == [15, 15] and second.signals == []
    rig.replica.close()
    assert first.is_closed and second.is_closed and rig.cluster.is_closed


def test_secrets_are_not_shown(rig):
    content = rig.replica._content
    text = repr(content) + repr(rig.cluster.seats[0].specs) + "".join(rig.said)
    assert content.key not in text and "hidden" not in text
